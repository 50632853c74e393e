"""`serve deploy` and `serve run` of the shipped configuration, on a Ray as `ray start` makes it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from app.cli import free_ports, local_environment
from tests.e2e.conftest import ROOT, is_ready, wait_until

SCRIPTS = Path(sysconfig.get_path("scripts"))


@dataclass
class Head:
    """A head node with a dashboard."""

    folder: Path
    environment: dict[str, str]
    address: str
    dashboard: str

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(SCRIPTS / arguments[0]), *arguments[1:]]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=150, check=False
        )

    def status(self) -> dict[str, Any]:
        token = (self.folder / "token").read_text()
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.get(f"{self.dashboard}/api/serve/applications/", headers=headers, timeout=30)
        application: dict[str, Any] = answer.json()["applications"].get("pilotfish", {})
        return application

    def says(self, status: str) -> bool:
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):  # the controller starts
            return bool(self.status().get("status") == status)
        return False

    def config(self, port: int, host: str = "127.0.0.1") -> str:
        """The shipped file with another port and no real model."""
        config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
        config["http_options"] = {"host": host, "port": port}
        config["applications"][0]["args"]["model"] = "dummy"
        path = self.folder / f"config-{port}.yaml"
        path.write_text(yaml.safe_dump(config))
        return str(path)


@pytest.fixture
def head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="pilotfish-", dir="/tmp"))
    port, dashboard, client = free_ports(3)
    environment = {**os.environ, **local_environment(folder, {}), "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS")
    environment.pop("LLM_SERVING_API_KEY", None)
    process = subprocess.Popen(
        [
            *(str(SCRIPTS / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=4"),
            *(f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"),
            *(f"--temp-dir={folder / 'ray'}", "--node-ip-address=127.0.0.1"),
        ],
        env=environment,
        stdout=(folder / "ray.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    head = Head(folder, environment, f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}")
    try:
        wait_until(lambda: _answers(head), 90, lambda: (folder / "ray.log").read_text())
        yield head
    finally:
        processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in reversed(processes):
            each.kill()
        psutil.wait_procs(processes, timeout=120)
        process.wait(120)
        shutil.rmtree(folder, ignore_errors=True)


def _answers(head: Head) -> bool:
    try:
        return head.status() is not None
    except (httpx.HTTPError, ValueError, KeyError):
        return False


def complete(port: int) -> str:
    wait_until(lambda: is_ready(f"http://127.0.0.1:{port}"))
    body = {"prompt": "hello", "max_tokens": 5, "seed": 3, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_deploy_and_run(head: Head) -> None:
    [port] = free_ports(1)
    open_config = head.config(port, host="0.0.0.0")
    done = head.command("serve", "deploy", open_config, "-a", head.dashboard)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: head.says("DEPLOY_FAILED"), describe=lambda: str(head.status()))
    assert "host 0.0.0.0 is reachable from other machines and no api_key is set" in head.status()["message"]
    assert head.command("serve", "shutdown", "-y", "-a", head.dashboard).returncode == 0

    # `serve run` builds before it starts Serve, which Ray has listen everywhere with HAProxy
    command = ("serve", "run", "--non-blocking", "--address", head.address, "--name", "pilotfish", "app.main:build")
    done = head.command(*command, "model=dummy")
    assert "Failed to update the deployments ['Router']" in done.stderr, done.stderr  # which would be open, keyless
    assert head.command("serve", "shutdown", "-y", "-a", head.dashboard).returncode == 0

    [port] = free_ports(1)
    config = head.config(port)
    done = head.command("serve", "deploy", config, "-a", head.dashboard)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: head.says("RUNNING"), describe=lambda: str(head.status()))
    deployed = complete(port)
    assert head.command("serve", "shutdown", "-y", "-a", head.dashboard).returncode == 0

    done = head.command("serve", "run", "--non-blocking", "--address", head.address, config)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: head.says("RUNNING"), describe=lambda: str(head.status()))
    assert complete(port) == deployed


def test_llm_serve_joins_and_leaves_the_rest_alone(head: Head) -> None:
    [port] = free_ports(1)
    command = [str(SCRIPTS / "llm-serve"), "--address", head.address, "--model", "dummy", "--port", str(port)]
    log = head.folder / "llm-serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=head.environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "llm-serve: ready" in log.read_text() or process.poll() is not None, 120, log.read_text)
        assert f"llm-serve: ready: dummy at http://127.0.0.1:{port}/v1" in log.read_text()
        assert complete(port)
        second = subprocess.run(command, env=head.environment, capture_output=True, text=True, timeout=300, check=False)
        assert second.returncode == 2, second.stderr
        assert "application pilotfish is in that cluster already" in second.stderr
        assert complete(port)
        process.terminate()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
    assert head.status() == {}
