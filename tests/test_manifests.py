"""The KubeRay manifest against the operator's own schema, where it is at hand, and against Ray's and our settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from app.settings import ServingConfig

ROOT = Path(__file__).parents[1]
CRD = ROOT.parent / "shared" / "crd" / "ray.io_rayservices.yaml"


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "k8s" / "rayservice.yaml").read_text())


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


@pytest.mark.skipif(not CRD.exists(), reason="KubeRay's CRD is not beside this checkout")
def test_the_manifest_fits_the_crd(manifest: dict[str, Any]) -> None:
    import jsonschema

    versions = {version["name"]: version for version in yaml.safe_load(CRD.read_text())["spec"]["versions"]}
    schema = versions[manifest["apiVersion"].split("/")[1]]["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    validator = jsonschema.Draft7Validator(strict(schema))
    assert [error.message for error in validator.iter_errors(manifest)] == []
    manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParms"] = {}
    assert list(validator.iter_errors(manifest)), "a misspelt field is caught"
    del manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParms"]


def test_its_serve_config_is_one_that_ray_and_we_accept(manifest: dict[str, Any]) -> None:
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    application = ServeDeploySchema.model_validate(config).applications[0]
    assert application.import_path == "app.main:build"
    ServingConfig.from_options({**application.args, "api_key": "from the secret"})
    ports = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]
    assert {"containerPort": config["http_options"]["port"], "name": "serve"} in ports


def test_switches_are_set_on_every_node(manifest: dict[str, Any]) -> None:
    cluster = manifest["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    environments = [group["template"]["spec"]["containers"][0]["env"] for group in groups]
    assert all(environment == environments[0] for environment in environments)
    assert "RAY_SERVE_HAPROXY_BINARY_PATH" in {variable["name"] for variable in environments[0]}
