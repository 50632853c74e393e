"""The manifests of k8s/: what KubeRay, Kubernetes, the Prometheus operator, Ray and our settings say to them, and
that ports, environment, drain times and references agree."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from cloudcoil.models.kubernetes.core import v1 as core
from cloudcoil.models.kubernetes.networking import v1 as networking
from cloudcoil.models.prometheus_operator import v1 as monitoring
from pydantic import BaseModel
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from app.auth import PUBLIC_PATHS
from app.check import check_file
from app.cli import local_environment
from app.settings import ConfigError, ServingConfig, check_bind

ROOT = Path(__file__).parents[1]
K8S = ROOT / "k8s"
CRD = ROOT.parent / "shared" / "crd" / "ray.io_rayservices.yaml"
SERVICES = sorted(path.name for path in K8S.glob("rayservice-*.yaml"))
MODELS: dict[str, type[BaseModel]] = {
    "NetworkPolicy": networking.NetworkPolicy,
    "PersistentVolumeClaim": core.PersistentVolumeClaim,
    "PodMonitor": monitoring.PodMonitor,
    "PrometheusRule": monitoring.PrometheusRule,
    "Secret": core.Secret,
}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((K8S / name).read_text()))


def service(name: str) -> dict[str, Any]:
    (found,) = [document for document in documents(name) if document["kind"] == "RayService"]
    return found


def groups(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The head's group and the workers'."""
    cluster = manifest["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [container for group in groups(manifest) for container in group["template"]["spec"]["containers"]]


def application(manifest: dict[str, Any]) -> ServeApplicationSchema:
    (found,) = ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"])).applications
    return found


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in container["env"]}


def strict(schema: Any) -> Any:
    """The schema with unknown fields refused wherever it lists the known ones."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def ray_services() -> Any:
    """What validates a RayService."""
    if not CRD.exists():
        pytest.skip("KubeRay's CRD is not beside this checkout")
    versions = {
        version["name"]: version for version in yaml.load(CRD.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    }
    schema = strict(versions["v1"]["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(schema)


@pytest.fixture(scope="module")
def crd() -> Any:
    return ray_services()


@pytest.mark.parametrize("name", SERVICES)
def test_ray_services_fit_the_crd(name: str, crd: Any) -> None:
    manifest = service(name)
    assert manifest["apiVersion"] == "ray.io/v1"
    assert [error.message for error in crd.iter_errors(manifest)] == []
    for path in ("spec", "spec.rayClusterConfig", "spec.rayClusterConfig.headGroupSpec.template.spec.containers.0"):
        wrong = copy.deepcopy(manifest)
        place: Any = wrong
        for part in path.split("."):
            place = place[int(part) if part.isdigit() else part]
        place["misspelt"] = {}
        (error,) = crd.iter_errors(wrong)
        assert "'misspelt' was unexpected" in error.message


def test_gcs_fault_tolerance_fits_over_each(crd: Any) -> None:
    (patch,) = documents("gcs-fault-tolerance.yaml")
    options = patch["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    for name in SERVICES:
        manifest = service(name)
        manifest["spec"]["rayClusterConfig"] |= patch["spec"]["rayClusterConfig"]
        assert [error.message for error in crd.iter_errors(manifest)] == []
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"] = {**options, "redisAdress": "x"}
    assert list(crd.iter_errors(wrong))


def unlike(document: dict[str, Any]) -> bool:
    """Whether the kind's model has no place for something of the document."""
    model = MODELS[document["kind"]].model_validate(document)
    return model.model_dump(mode="json", by_alias=True, exclude_unset=True) != document


OTHERS = [
    (name, document)
    for name in sorted(path.name for path in K8S.glob("*.yaml"))
    for document in documents(name)
    if document.get("kind") in MODELS
]


@pytest.mark.parametrize(("name", "document"), OTHERS, ids=lambda x: x if isinstance(x, str) else x["kind"])
def test_the_rest_fits_its_schemas(name: str, document: dict[str, Any]) -> None:
    group = {"PodMonitor": "monitoring.coreos.com/v1", "PrometheusRule": "monitoring.coreos.com/v1"}
    group |= {"NetworkPolicy": "networking.k8s.io/v1", "PersistentVolumeClaim": "v1", "Secret": "v1"}
    assert document["apiVersion"] == group[document["kind"]]
    assert not unlike(document)
    wrong = copy.deepcopy(document)
    places = [wrong.get("spec", wrong)]
    while places:
        place = places.pop()
        place["misspelt"] = "x"
        assert unlike(wrong), place
        del place["misspelt"]
        for key, inner in place.items():
            if key not in ("labels", "annotations", "matchLabels", "requests", "stringData"):
                inner = inner if isinstance(inner, list) else [inner]
                places += [each for each in inner if isinstance(each, dict) and each]


def test_every_manifest_is_tested() -> None:
    kinds = {document.get("kind") for path in K8S.glob("*.yaml") for document in documents(path.name)}
    assert kinds == {*MODELS, "RayService", None}, "the one without a kind is the patch"
    assert len(SERVICES) == 3


@pytest.mark.parametrize("name", SERVICES)
def test_serve_configs_pass_our_own_check(name: str, tmp_path: Path) -> None:
    assert check_file(str(K8S / name)) == []
    text = (K8S / name).read_text()
    for right, wrong in (
        ("num_cpus", "num_cpu"),
        ("request_timeout:", "request_timeot:"),
        ("name: Router", "name: Rooter"),
    ):
        (tmp_path / "x.yaml").write_text(text.replace(right, wrong, 1))
        (problem,) = check_file(str(tmp_path / "x.yaml"))
        assert "did you mean" in problem


@pytest.mark.parametrize("name", SERVICES)
def test_ports_agree(name: str) -> None:
    manifest = service(name)
    http = yaml.safe_load(manifest["spec"]["serveConfigV2"])["http_options"]
    head, *workers = containers(manifest)
    for container in (head, *workers):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert (ports["serve"], ports["metrics"]) == (http["port"], 8080)
        assert not {"livenessProbe", "readinessProbe", "startupProbe"} & container.keys(), "KubeRay's would be lost"
    assert {"gcs", "dashboard"} <= {port["name"] for port in head["ports"]}
    for monitor in (document for document in documents("monitoring.yaml") if document["kind"] == "PodMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"].items() - {("ray.io/node-type", "head")}
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["honorLabels"], "our `endpoint` is not the operator's, which is the port's name"
        for group, container in zip(groups(manifest), (head, *workers), strict=True):
            assert labels <= group["template"]["metadata"]["labels"].items()
            assert endpoint["port"] in {port["name"] for port in container["ports"]}
    assert {"/health", "/ready"} == PUBLIC_PATHS, "as docs/deploying.md says to load balancers"
    policy = documents("network-policy.yaml")[0]["spec"]
    assert all(
        policy["podSelector"]["matchLabels"].items() <= g["template"]["metadata"]["labels"].items()
        for g in groups(manifest)
    )
    opened = {port["port"] for rule in policy["ingress"] for port in rule.get("ports", ())}
    assert opened == {http["port"], 8080, 8265}
    assert [rule for rule in policy["ingress"] if "ports" not in rule] == [
        {"from": [{"podSelector": policy["podSelector"]}]}
    ], "on every port only each other"


@pytest.mark.parametrize("name", SERVICES)
def test_the_environment_is_the_one_that_llm_serve_sets(name: str, tmp_path: Path) -> None:
    environments = [environment(container) for container in containers(service(name))]
    assert all(each == environments[0] for each in environments), "every node needs the same"
    ours = local_environment(tmp_path, {})
    set_here = {key: value for key, value in environments[0].items() if key.startswith("RAY_")}
    needed = {
        *("RAY_SERVE_THROUGHPUT_OPTIMIZED", "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_HAPROXY_BINARY_PATH"),
        *("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "RAY_worker_niceness"),
    }
    assert set_here.keys() == needed
    for key in needed - {"RAY_SERVE_HAPROXY_BINARY_PATH"}:
        assert set_here[key] == ours[key]
    assert Path(set_here["RAY_SERVE_HAPROXY_BINARY_PATH"]).name == Path(ours["RAY_SERVE_HAPROXY_BINARY_PATH"]).name
    cluster = service(name)["spec"]["rayClusterConfig"]
    assert cluster["authOptions"]["mode"] == ours["RAY_AUTH_MODE"]


@pytest.mark.parametrize("name", SERVICES)
def test_the_key_is_a_secret_and_the_same_everywhere(name: str) -> None:
    (key,) = {json.dumps(environment(c)["LLM_SERVING_API_KEY"], sort_keys=True) for c in containers(service(name))}
    reference = json.loads(key)["secretKeyRef"]
    monitor = documents("monitoring.yaml")[0]
    assert monitor["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"] == reference
    assert "api_key" not in application(service(name)).args
    (secret,) = documents("secret.yaml")
    assert secret["metadata"]["name"] == reference["name"]
    host = yaml.safe_load(service(name)["spec"]["serveConfigV2"])["http_options"]["host"]
    with pytest.raises(ConfigError, match="no api_key is set"):  # applied as it is, it opens nothing
        check_bind(host, secret["stringData"][reference["key"]])
    command = f"kubectl create secret generic {reference['name']} --from-literal={reference['key']}=$(openssl rand"
    files = (K8S / name, K8S / "secret.yaml", ROOT / "docs" / "deploying.md")
    assert all(command in file.read_text() for file in files)


@pytest.mark.parametrize("name", SERVICES)
def test_whatever_drains_gets_its_time(name: str) -> None:
    spec, args = service(name)["spec"], application(service(name)).args
    config = ServingConfig.from_options({**args, "api_key": "x"})
    assert config.request_timeout == args["request_timeout"], "stated, because of what depends on it"
    assert spec["rayClusterDeletionDelaySeconds"] >= config.request_timeout + 60
    for deployment in application(service(name)).deployments:
        assert "graceful_shutdown_timeout_s" not in deployment.model_fields_set, "app.main derives it"
    for group in groups(service(name))[1:]:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= 30


@pytest.mark.parametrize("name", SERVICES)
def test_nobody_is_root_and_models_are_kept(name: str) -> None:
    image = (K8S / "Dockerfile").read_text()
    home = re.search(r"^ENV HF_HOME=(\S+)$", image, re.M)
    assert home is not None and f"VOLUME {home[1]}" in image
    for group, container in zip(groups(service(name)), containers(service(name)), strict=True):
        pod = group["template"]["spec"]
        assert pod["enableServiceLinks"] is False, "a Service llm-serving would set variables like options"
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        (mount,) = container["volumeMounts"]
        assert mount["mountPath"] == home[1] == environment(container)["HF_HOME"]
        (volume,) = pod["volumes"]
        assert volume["name"] == mount["name"]
        if claim := volume.get("persistentVolumeClaim"):
            names = [d["metadata"]["name"] for d in documents(name) if d["kind"] == "PersistentVolumeClaim"]
            assert names == [claim["claimName"]]


@pytest.mark.parametrize("name", SERVICES)
def test_every_actor_has_a_pod_it_fits_into(name: str) -> None:
    manifest = service(name)
    assert groups(manifest)[0]["rayStartParams"]["num-cpus"] == "0", "the head is kept free"
    config = ServingConfig.from_options({**application(manifest).args, "api_key": "x"})
    workers = []
    for group, container in zip(groups(manifest)[1:], containers(manifest)[1:], strict=True):
        requests = container["resources"]["requests"]
        own = json.loads(json.loads(group["rayStartParams"].get("resources", '"{}"')))
        workers.append(
            {"CPU": float(requests["cpu"]), "GPU": float(requests.get("nvidia.com/gpu", 0)), **own, "group": group}
        )
        assert container["resources"]["limits"]["memory"] == requests["memory"]
        assert container["resources"]["limits"].get("nvidia.com/gpu") == requests.get("nvidia.com/gpu")
    taken = set()
    for deployment in application(manifest).deployments:
        if deployment.name == "Router":
            continue
        options = deployment.ray_actor_options
        wanted = {"CPU": options.num_cpus, "GPU": options.num_gpus or 0, **(options.resources or {})}
        fitting = [w for w in workers if all(w.get(resource, 0) >= amount for resource, amount in wanted.items())]
        (worker,) = fitting
        group = worker["group"]
        most = deployment.num_replicas
        if config.max_replicas is not None:
            engines = deployment.name == "EngineReplica"
            most = config.max_replicas if engines else config.max_drafts
            assert "num_replicas" not in deployment.model_fields_set, "the scaling's; it would have no effect"
            assert group["minReplicas"] >= (config.num_replicas if engines else config.num_drafts)
            assert manifest["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] and most <= group["maxReplicas"]
        taken.add(group["groupName"])
    assert taken == {worker["group"]["groupName"] for worker in workers}


def test_many_gpus_scale_spread_and_have_a_draft() -> None:
    manifest = service("rayservice-many-gpus.yaml")
    engines, drafts = groups(manifest)[1:]
    (spread,) = engines["template"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= engines["template"]["metadata"]["labels"].items()
    assert not spread["labelSelector"]["matchLabels"].items() <= drafts["template"]["metadata"]["labels"].items()
    by_name = {deployment.name: deployment for deployment in application(manifest).deployments}
    assert by_name["Router"].max_replicas_per_node == 1 and by_name["Router"].num_replicas == 2
    config = ServingConfig.from_options({**application(manifest).args, "api_key": "x"})
    assert config.max_replicas is not None and config.max_replicas > config.num_replicas
    assert config.draft_model is not None and "DraftModel" in by_name


def test_hadolint_accepts_the_image() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    run = subprocess.run([hadolint, "--no-color", K8S / "Dockerfile"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_image_holds_what_the_manifests_count_on() -> None:
    image = (K8S / "Dockerfile").read_text()
    ray = re.search(r"^ARG RAY_VERSION=(\S+)$", image, re.M)
    assert ray is not None
    assert {service(name)["spec"]["rayClusterConfig"]["rayVersion"] for name in SERVICES} == {ray[1]}
    (*_, user) = re.findall(r"^USER (\S+)$", image, re.M)
    for name in SERVICES:
        for group in groups(service(name)):
            security = group["template"]["spec"]["securityContext"]
            assert user == f"{security['runAsUser']}:{security['runAsGroup']}"
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(rf'"ray\[serve\]~={re.escape(ray[1])}"', project)
    (torch,) = re.findall(r"'(torch~=[\d.]+)'", image)
    assert f'"{torch}"' in project
    copied = " ".join(re.findall(r"^COPY \S+ (.*) \S+$", image, re.M)).split()
    assert all((ROOT / path).exists() for path in copied) and {"app", "engine", "pyproject.toml"} <= set(copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*" and {f"!{path}" for path in copied} <= set(ignored)
