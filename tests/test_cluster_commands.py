"""The documentation's commands for kubectl and docker, run as they stand by the programs themselves, against stand-ins:
for a cluster, which refuses what doesn't fit its schemas, and for docker's daemon, which looks into what it gets."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from cloudcoil.models.kubernetes.core import v1 as core

from tests.kubernetes import ApiServer
from tests.test_docs import DOCS
from tests.test_manifests import K8S, MODELS, ROOT, SERVICES, containers, ray_services, service, unlike

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
Run = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    crd = ray_services()
    monkeypatch.setitem(MODELS, "ConfigMap", core.ConfigMap)

    def validate(found: dict[str, Any]) -> list[str]:
        if found["kind"] == "RayService":
            return [error.message for error in crd.iter_errors(found)]
        return [f"unknown field in {found['kind']}"] if unlike(found) else []

    server = ApiServer(validate)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(cluster: ApiServer, tmp_path: Path) -> Run:
    user = {"clusters": [{"name": "c", "cluster": {"server": cluster.url}}], "current-context": "c"}
    user |= {"contexts": [{"name": "c", "context": {"cluster": "c"}}]}
    (tmp_path / "config").write_text(yaml.safe_dump(user))
    environment = os.environ | {"KUBECONFIG": str(tmp_path / "config"), "HOME": str(tmp_path)}

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
        )

    return run


def commands(program: str) -> list[str]:
    names = ("deploying.md", "operating.md")
    found = {page.name: re.findall(rf"^    ({program} .*)$", page.read_text(), re.M) for page in DOCS}
    assert {name for name, lines in found.items() if lines} <= set(names), "which are run in this order"
    return [line for name in names for line in found[name]]


def operate(cluster: ApiServer, name: str) -> None:
    """What KubeRay makes of a RayService that runs, as far as clients see it."""
    ports = [port for c in containers(cluster.of_kind("RayService")[name]) for port in c["ports"]]
    (number,) = {port["containerPort"] for port in ports if port["name"] == "serve"}
    labels = {"ray.io/serve": "true"}
    spec = {"selector": labels, "ports": [{"name": "serve", "port": number, "targetPort": number}]}
    cluster.put("v1", "Service", f"{name}-serve-svc", spec=spec)
    pod = {"containers": [{"name": "ray-worker", "ports": [{"name": "serve", "containerPort": number}]}]}
    cluster.put("v1", "Pod", "worker", metadata={"labels": labels}, spec=pod, status={"phase": "Running"})


@needs_kubectl
def test_the_guides_commands(cluster: ApiServer, run: Run) -> None:
    for command in commands("kubectl"):
        if "port-forward" in command:
            operate(cluster, "pilotfish")
        done = run(command)
        if "port-forward" in command:  # the stand-in has no tunnels: it is asked for the right one
            assert "this far and no further" in done.stderr
            assert cluster.asked[-1] == "POST /api/v1/namespaces/default/pods/worker/portforward"
        else:
            assert done.returncode == 0, f"{command}: {done.stderr}"
        if command.startswith("kubectl get"):
            assert "pilotfish" in done.stdout
    secrets = cluster.of_kind("Secret")
    made = cluster.of_kind("RayService")["pilotfish"]
    wanted = [json.loads(each) for each in re.findall(r'"secretKeyRef": ({.*?})', json.dumps(made))]
    assert {each["name"] for each in wanted} == {"pilotfish", "pilotfish-redis"}
    assert all(each["key"] in secrets[each["name"]]["data"] for each in wanted)
    assert re.fullmatch(rb"[0-9a-f]{64}", base64.b64decode(secrets["pilotfish"]["data"]["api-key"]))
    dashboard = cluster.of_kind("ConfigMap")["pilotfish-dashboard"]
    assert dashboard["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert json.loads(dashboard["data"]["dashboard.json"]) == json.loads((K8S / "dashboard.json").read_text())
    assert {"NetworkPolicy", "PodMonitor", "PrometheusRule"} <= {o["kind"] for o in cluster.objects.values()}


@needs_kubectl
@pytest.mark.parametrize("name", [*SERVICES, "secret.yaml"])
def test_manifests_are_applied(name: str, cluster: ApiServer, run: Run) -> None:
    done = run(f"kubectl apply -f k8s/{name}")
    assert done.returncode == 0 and "created" in done.stdout, done.stderr


@needs_kubectl
def test_a_misspelt_field_is_refused(cluster: ApiServer, run: Run, tmp_path: Path) -> None:
    manifest = service(SERVICES[0])
    manifest["spec"]["upgradeStrategie"] = {}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(manifest))
    done = run(f"kubectl apply -f {tmp_path}/x.yaml")
    assert done.returncode != 0 and "upgradeStrategie" in done.stderr
    assert not cluster.objects


class Daemon(BaseHTTPRequestHandler):
    """Of docker: notes what is to be built and pushed."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({"ApiVersion": "1.41", "Version": "20.10.0", "Os": "linux", "Arch": "amd64"})

    def do_HEAD(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length")
        if size is not None:
            body = self.rfile.read(int(size))
        else:
            body = b""
            while count := int(self.rfile.readline(), 16):
                body += self.rfile.read(count)
                self.rfile.readline()
            self.rfile.readline()
        self.server.got.append((self.path, body))  # type: ignore[attr-defined]
        self._answer({"stream": "Successfully built 0123456789ab\n"})

    def _answer(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Api-Version", "1.41")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed")
def test_what_is_built_and_pushed(tmp_path: Path) -> None:
    daemon = ThreadingHTTPServer(("127.0.0.1", 0), Daemon)
    daemon.got = []  # type: ignore[attr-defined]
    threading.Thread(target=daemon.serve_forever, daemon=True).start()
    environment = os.environ | {"DOCKER_HOST": f"tcp://127.0.0.1:{daemon.server_port}", "DOCKER_BUILDKIT": "0"}
    environment |= {"HOME": str(tmp_path), "DOCKER_API_VERSION": "1.41"}
    try:
        for command in commands("docker"):
            done = subprocess.run(
                command.split(), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, f"{command}: {done.stderr}"
    finally:
        daemon.shutdown()
        daemon.server_close()
    builds, pushes = daemon.got[::2], daemon.got[1::2]  # type: ignore[attr-defined]
    assert len(builds) == 2
    for (build, _), (push, _) in zip(builds, pushes, strict=True):
        assert "dockerfile=k8s%2FDockerfile" in build
        (tag,) = re.findall(r"[?&]t=([^&]*)", build)
        name, _, label = tag.replace("%2F", "/").partition("%3A")
        assert push.startswith(f"/v1.41/images/{name}/push") and f"tag={label}" in push
        assert ("cu130" in build) == label.endswith("-gpu")
    context = builds[0][1]
    with tarfile.open(fileobj=io.BytesIO(context)) as tar:
        names = set(tar.getnames())
        recipe = tar.extractfile("k8s/Dockerfile")
        assert recipe is not None
        copied = re.findall(r"^COPY --\S+ (.*) \S+$", recipe.read().decode(), re.M)
    assert {source for line in copied for source in line.split()} <= names
    assert "engine/batch_engine.py" in names and "app/playground/chat.html" in names
    assert len(context) < 20 << 20, "weights, environments and results stay at home"
