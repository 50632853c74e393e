"""/openapi.json: it describes what is there, and whatever a stranger makes of it gets an answer that it describes."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from app.ingress import build_asgi_app
from app.openapi import document
from app.router import Unavailable
from tests.app.dummy import dummy_service
from tests.app.edge import ScriptedRouter, http

ROOT = Path(__file__).parents[2]

# Schemathesis's checks that are on.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",  # every status is documented
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",  # what breaks the document is refused
    "missing_required_header",
    "unsupported_method",  # 405
    "allow_header_conformance",
    "ignored_auth",  # without the key, or with another one, nothing
)
# And those that are not.
OFF = {
    "positive_data_acceptance": "what a schema can't say is refused too: fields that exclude each other, the context",
    "use_after_free": "nothing here is made or deleted by a request",
    "ensure_resource_availability": "the same",
    "object_level_authorization": "there is one key, and nothing belongs to anybody",
}


def test_the_document_is_openapi_and_has_every_route() -> None:
    shown = document(True)
    OpenAPIV31SpecValidator(shown).validate()
    app = build_asgi_app(ScriptedRouter())  # type: ignore[arg-type]
    routes = {
        (route.path.replace(":path}", "}"), method.lower())  # type: ignore[attr-defined]
        for route in app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    assert {(path, method) for path, methods in shown["paths"].items() for method in methods} == routes


@pytest.mark.parametrize("key", [None, "k"])
async def test_it_is_served_and_says_where_a_key_is_wanted(key: str | None) -> None:
    async with http(ScriptedRouter(api_key=key), headers={"X-API-Key": key or "none"}) as client:
        shown = (await client.get("/openapi.json")).json()
    assert shown == document(key is not None)
    locked = {
        path
        for path, methods in shown["paths"].items()
        for operation in methods.values()
        if operation["security"] != []
    }
    assert locked == (set() if key is None else shown["paths"].keys() - {"/health", "/ready"})


async def test_what_waits_for_a_replica_is_said() -> None:
    class Undescribed(ScriptedRouter):
        async def described(self) -> None:
            raise Unavailable("no replica is ready")

    async with http(Undescribed()) as client:
        for path, methods in document(False)["paths"].items():
            for method, operation in methods.items():
                body = {"content": "{}"} if method == "post" else {}
                response = await client.request(method, path, **body)
                waits = "503" in operation["responses"] and path not in ("/health", "/ready")
                assert (response.status_code == 503) == waits, path


def test_bodies_have_the_bounds_that_the_engine_has() -> None:
    schemas = document(True)["components"]["schemas"]
    for name in ("ChatCompletionRequest", "CompletionRequest", "GenerateBody", "BatchGenerateBody"):
        top_p = schemas[name]["properties"]["top_p"]["anyOf"][0]
        assert (top_p["exclusiveMinimum"], top_p["maximum"]) == (0, 1)
        assert schemas[name]["additionalProperties"] is False
    assert "user" in schemas["ChatCompletionRequest"]["properties"]


# Coverage tries every field of a body with every kind of wrong value; these have the fields that a chat has.
CONFIG = """
[[operations]]
include-path-regex = "/(generate|batch_generate|v1/completions)$"
phases.coverage.enabled = false
"""


@pytest.mark.timeout(900)
def test_schemathesis(tmp_path: Path) -> None:
    """Against the application with a real engine of the dummy model."""
    tool = Path(sysconfig.get_path("scripts")) / "schemathesis"
    listed = subprocess.run([tool, "run", "--help"], capture_output=True, text=True, check=True).stdout
    known = "".join(listed.partition("--exclude-checks")[0].rpartition("possible values:")[2].partition("]")[0].split())
    assert {*CHECKS, *OFF, "all"} == set(known.split(",")), "a check that nobody has decided on"
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    with dummy_service(api_key="k", max_model_len=48) as service:
        command = [tool, "run", f"{service.url}/openapi.json", "--header", "Authorization: Bearer k"]
        command += ["--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--max-examples", "12"]
        command += ["--seed", "1", "--generation-database", "none", "--output-sanitize", "false", "--no-color"]
        command += ["--request-timeout", "120"]
        environment = {**os.environ, "COLUMNS": "200"}
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr
        assert service.engine.stats().finished_requests > 50, "hardly anything got as far as the engine"
