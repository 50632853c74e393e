"""`llm-serve --check FILE`: what Ray and we would refuse in a Serve config, and what Ray passes over in silence.

Ray takes misspelt keys for nothing at all: here every key is looked up in the schema that it would be read with.
"""

from __future__ import annotations

import contextlib
import os
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from app.settings import ENV_PREFIX, ConfigError, ServingConfig, check_bind, unknown_option

BUILDER = "app.main:build"
DEPLOYMENTS = ("Router", "EngineReplica", "DraftModel")


def check_file(path: str) -> list[str]:
    """The problems, one a line, of a Serve config, or of every RayService in a file of Kubernetes manifests.

    ConfigError: there is no such file, or no YAML and no Serve config in it.
    """
    try:
        documents = [document for document in yaml.safe_load_all(Path(path).read_text()) if document]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not documents or not all(isinstance(document, dict) for document in documents):
        raise ConfigError(f"{path}: neither a Serve config nor a RayService")
    if "kind" not in documents[0]:
        return list(_config_problems(documents[0]))
    services = [document for document in documents if document.get("kind") == "RayService"]
    if not services:
        raise ConfigError(f"{path}: no RayService in it")
    return [problem for service in services for problem in _service_problems(service)]


def _service_problems(service: Mapping[str, Any]) -> Iterator[str]:
    try:
        text, cluster = service["spec"]["serveConfigV2"], service["spec"]["rayClusterConfig"]
        groups = [cluster["headGroupSpec"], *(cluster.get("workerGroupSpecs") or ())]
        containers = [group["template"]["spec"]["containers"][0] for group in groups]
    except (KeyError, TypeError, IndexError, AttributeError) as missing:
        yield f"RayService: has no {missing}"
        return
    try:
        environments = [{entry["name"]: entry for entry in container.get("env") or ()} for container in containers]
        common = {k: v for k, v in environments[0].items() if all(k in other for other in environments)}
        options = {k: v for k, v in common.items() if k.upper().startswith(ENV_PREFIX)}
        ours = {k: v.get("value", _SECRET.get(k.upper(), "")) for k, v in options.items()}
    except (KeyError, TypeError, AttributeError):
        yield "RayService: a container's env is not a list of names and values"
        return
    for name in sorted(set().union(*environments)):
        if name.startswith((ENV_PREFIX, "RAY_SERVE_")):
            if name not in common:
                yield f"env: {name} is not set on every node"
            elif any(other[name] != common[name] for other in environments):
                yield f"env: {name} is not the same on every node"
    if odd := [name for name, value in ours.items() if not isinstance(value, str)]:
        yield f"env: {odd[0]} is not text: quote it"
        return
    if cluster.get("rayVersion") != ray.__version__:
        yield f"rayVersion is {cluster.get('rayVersion')}, but this is Ray {ray.__version__}"
    if not isinstance(text, str):
        yield "serveConfigV2: is not text, the YAML of a Serve config"
        return
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        yield f"serveConfigV2: {' '.join(str(error).split())}"
        return
    with _environment(ours):
        yield from _config_problems(config)


_SECRET = {ENV_PREFIX + "API_KEY": "a secret", ENV_PREFIX + "MODEL": "a secret"}
"""What stands for a value that is elsewhere; any other option is then as if it weren't given."""


@contextlib.contextmanager
def _environment(ours: Mapping[str, str]) -> Iterator[None]:
    """Has no options in the environment but these: the nodes' are not this shell's."""
    kept = dict(os.environ)
    for name in [name for name in kept if name.upper().startswith(ENV_PREFIX)]:
        del os.environ[name]
    os.environ.update(ours)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _config_problems(config: Any) -> Iterator[str]:
    if not isinstance(config, dict):
        yield "a Serve config is a map, with `applications`"
        return
    yield from _key_problems(config, ServeDeploySchema, "")
    try:
        schema = ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        yield from _value_problems(error, "")
        return
    except (AttributeError, TypeError) as error:  # of Ray's own validators, on what isn't a map
        yield f"not a Serve config: {error}"
        return
    for i, application in enumerate(schema.applications):
        where = f"applications[{i}]"
        if application.import_path != BUILDER:
            if (application.import_path or "").startswith("app.main:"):
                yield f"{where}.import_path: {application.import_path} is unknown, did you mean {BUILDER}?"
            continue
        for j, deployment in enumerate(application.deployments):
            if deployment.name not in DEPLOYMENTS:
                problem = unknown_option(deployment.name, DEPLOYMENTS).replace("option", "deployment", 1)
                yield f"{where}.deployments[{j}].name: {problem}"
        for name in ("host", "port"):
            if name in application.args:
                yield f"{where}.args: {name} has no effect here, it is one of http_options"
        try:
            ours = ServingConfig.from_options(application.args)
            check_bind(schema.http_options.host, ours.api_key)
        except ConfigError as error:
            yield f"{where}.args: {error}"
            continue
        for j, deployment in enumerate(application.deployments):
            place, given = f"{where}.deployments[{j}]", deployment.model_dump(exclude_unset=True)
            if deployment.name in DEPLOYMENTS[1:] and ours.max_replicas is not None and "num_replicas" in given:
                yield f"{place}.num_replicas: has no effect beside max_replicas"
            options = given.get("ray_actor_options") or {}
            if deployment.name == "EngineReplica" and ours.tensor_parallel_size > 1:
                bundle = {"num_cpus": 1, "num_gpus": 1}
                if options.get("resources") or any(options.get(name, 0) > most for name, most in bundle.items()):
                    yield f"{place}.ray_actor_options: a rank of tensor_parallel_size has one core, one GPU and no more"


def _key_problems(value: Any, annotation: Any, where: str) -> Iterator[str]:
    """Keys of `value`, and of all that is in it, that the type doesn't have; and wrong values where Ray takes any dict
    until it deploys."""
    models = [each for each in _types(annotation) if isinstance(each, type) and issubclass(each, BaseModel)]
    if not models:
        return
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _key_problems(item, annotation, f"{where}[{i}]")
    elif isinstance(value, dict):
        fields = models[0].model_fields
        for key, item in value.items():
            if key not in fields:
                yield f"{where}: {unknown_option(str(key), fields)}".removeprefix(": ")
            else:
                yield from _key_problems(item, fields[key].annotation, f"{where}.{key}".removeprefix("."))
        if any(typing.get_origin(each) is dict for each in typing.get_args(annotation)):
            try:
                models[0].model_validate(value)
            except ValidationError as error:
                yield from _value_problems(error, where)


def _types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in typing.get_args(annotation):
        yield from _types(argument)


def _value_problems(error: ValidationError, where: str) -> Iterator[str]:
    for problem in error.errors():
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])
        yield f"{where}{path}: {problem['msg']}".removeprefix(".").removeprefix(": ")
