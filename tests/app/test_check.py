"""`llm-serve --check`: misspellings at every level are found, what is right passes."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from app import check
from app.check import check_file
from app.cli import main
from app.main import build
from app.settings import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config() -> dict[str, Any]:
    return {
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [
            {
                "name": "pilotfish",
                "route_prefix": "/",
                "import_path": "app.main:build",
                "args": {"model": "dummy", "max_batch_size": 4},
                "deployments": [
                    {"name": "Router", "num_replicas": 2},
                    {
                        "name": "EngineReplica",
                        "autoscaling_config": {"min_replicas": 1, "max_replicas": 4},
                        "ray_actor_options": {"num_cpus": 2, "resources": {"anything": 1}},
                    },
                ],
            }
        ],
    }


def problems(tmp_path: Path, *documents: Any) -> list[str]:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return check_file(str(path))


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The config with the value at a dotted path, in which numbers are places of lists."""
    config = copy.deepcopy(config)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = config
    for part in parents:
        place = place[part]
    place[last] = value
    return config


ROUTER, ENGINE = "applications.0.deployments.0", "applications.0.deployments.1"


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("proxy_locaton", "EveryNode", "unknown option proxy_locaton: did you mean proxy_location?"),
        ("http_options.prot", 1, "http_options: unknown option prot: did you mean port?"),
        ("applications.0.route_prefx", "/", "applications[0]: unknown option route_prefx: did you mean route_prefix?"),
        (f"{ROUTER}.num_replica", 2, "deployments[0]: unknown option num_replica: did you mean num_replicas?"),
        (f"{ENGINE}.ray_actor_options.num_gpu", 1, "ray_actor_options: unknown option num_gpu: did you mean num_gpus?"),
        (f"{ENGINE}.autoscaling_config.max_replica", 1, "autoscaling_config: unknown option max_replica: did you mean"),
        (f"{ENGINE}.autoscaling_config.policy", {"policy_functon": "a:b"}, "policy: unknown option policy_functon"),
        (f"{ENGINE}.autoscaling_config.max_replicas", 0, "autoscaling_config.max_replicas: Input should be greater"),
        (f"{ENGINE}.name", "EngineReplika", "[1].name: unknown deployment EngineReplika: did you mean EngineReplica?"),
        (f"{ENGINE}.num_replicas", "two", "deployments[1]: Value error, `num_replicas` must be"),
        ("applications.0.args.max_bach_size", 4, "args: unknown option max_bach_size: did you mean max_batch_size?"),
        ("applications.0.args.max_batch_size", 0, "args: max_batch_size: Input should be greater than or equal to 1"),
        ("applications.0.args.model", "", "applications[0].args: model: is empty"),
        ("applications.0.args", {1: 2}, "args: unknown option 1"),
        ("applications.0.args.port", 9999, "args: port has no effect here, it is one of http_options"),
        ("applications.0.import_path", "app.main:biuld", "app.main:biuld is unknown, did you mean app.main:build?"),
        ("applications.0.deployments", [None], "not a Serve config: "),
        ("http_options.host", "0.0.0.0", "host 0.0.0.0 is reachable from other machines and no api_key is set"),
        ("http_options.port", "many", "http_options.port: Input should be a valid integer"),
        ("http_options", {}, "host 0.0.0.0 is reachable"),
    ],
)
def test_one_mistake_is_one_problem(
    config: dict[str, Any], tmp_path: Path, path: str, value: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLM_SERVING_API_KEY", raising=False)
    assert problems(tmp_path, config) == []
    (found,) = problems(tmp_path, changed(config, path, value))
    assert problem in found


def test_other_applications_are_rays_business(config: dict[str, Any], tmp_path: Path) -> None:
    other = {
        "name": "other",
        "route_prefix": "/x",
        "import_path": "a:b",
        "deployments": [{"name": "X"}],
        "args": {"x": 1},
    }
    config["applications"].append(other)
    assert problems(tmp_path, config) == []
    del other["import_path"]
    assert problems(tmp_path, config) == ["applications[1].import_path: Field required"]


def test_a_ray_service(config: dict[str, Any], tmp_path: Path) -> None:
    def service(text: str, *environments: dict[str, str]) -> dict[str, Any]:
        groups = [
            {"template": {"spec": {"containers": [{"env": [{"name": k, "value": v} for k, v in e.items()]}]}}}
            for e in environments
        ]
        cluster = {"rayVersion": ray.__version__, "headGroupSpec": groups[0], "workerGroupSpecs": groups[1:]}
        return {"kind": "RayService", "spec": {"serveConfigV2": text, "rayClusterConfig": cluster}}

    other = {"kind": "Secret"}
    config["http_options"]["host"] = "0.0.0.0"
    del config["applications"][0]["args"]["model"]
    text = yaml.safe_dump(config)
    key, model = {"LLM_SERVING_API_KEY": "k"}, {"LLM_SERVING_MODEL": "dummy"}
    assert problems(tmp_path, other, service(text, key | model, key | model)) == []
    one_open = problems(tmp_path, other, service(text, key | model, model))
    assert one_open[0] == "env: LLM_SERVING_API_KEY is not set on every node"
    assert "no api_key is set" in one_open[1]
    misspelt = {"LLM_SERVING_PAGESIZE": "16"}
    (problem,) = problems(tmp_path, service(text, key | model | misspelt))
    assert "unknown option LLM_SERVING_PAGESIZE: did you mean LLM_SERVING_PAGE_SIZE?" in problem
    old = service(text, key | model)
    old["spec"]["rayClusterConfig"]["rayVersion"] = "2.9.0"
    assert problems(tmp_path, old) == [f"rayVersion is 2.9.0, but this is Ray {ray.__version__}"]
    assert problems(tmp_path, {"kind": "RayService", "spec": {}}) == ["RayService: has no 'serveConfigV2'"]
    assert problems(tmp_path, service("a: b: c", key))[0].startswith("serveConfigV2: mapping values are not allowed")
    assert problems(tmp_path, service(text, key | model), {"no": "kind"}) == []
    for wrong in (config, None):
        (problem,) = problems(tmp_path, service(wrong, key | model))
        assert problem == "serveConfigV2: is not text, the YAML of a Serve config"
    for environment in ([{"value": "x"}], {"A": "x"}):
        broken = service(text, key | model)
        broken["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"] = environment
        assert problems(tmp_path, broken) == ["RayService: a container's env is not a list of names and values"]
    bare = service(yaml.safe_dump(config | {"http_options": {}}), model)
    bare["spec"]["rayClusterConfig"]["workerGroupSpecs"] = None
    bare["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"] = None
    assert "model" in problems(tmp_path, bare)[0]


def test_the_nodes_environment_is_what_counts(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config["http_options"]["host"] = "0.0.0.0"
    secret = {"name": "LLM_SERVING_API_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}

    def found(*environment: dict[str, Any]) -> list[str]:
        container = {"template": {"spec": {"containers": [{"env": list(environment)}]}}}
        cluster = {"rayVersion": ray.__version__, "headGroupSpec": container}
        text = yaml.safe_dump(config)
        return problems(tmp_path, {"kind": "RayService", "spec": {"serveConfigV2": text, "rayClusterConfig": cluster}})

    monkeypatch.setenv("LLM_SERVING_API_KEY", "of this shell")
    monkeypatch.setenv("LLM_SERVING_DTYPE", "fp8")
    assert "no api_key is set" in found()[0]
    assert found(secret) == []
    for name, value in (("API_KEYS", '{"a": 3}'), ("MODEL_ALIASES", '["a", "b"]'), ("GAMMA", "")):
        assert found(secret, {"name": f"LLM_SERVING_{name}", "value": value}) == []
    assert found(secret, secret | {"name": "LLM_SERVING_GAMMA"}) == []
    assert "unknown option" in found(secret, secret | {"name": "LLM_SERVING_GAMA"})[0]
    (problem,) = found(secret, {"name": "LLM_SERVING_API_KEYS", "value": "a=3"})
    assert problem == "applications[0].args: LLM_SERVING_API_KEYS: lists and maps are JSON in the environment"
    assert found(secret, {"name": "LLM_SERVING_GAMMA", "value": 3}) == ["env: LLM_SERVING_GAMMA is not text: quote it"]
    assert os.environ["LLM_SERVING_DTYPE"] == "fp8"


def test_what_scaling_and_ranks_make_of_deployments(config: dict[str, Any], tmp_path: Path) -> None:
    application = config["applications"][0]
    application["args"] |= {"max_replicas": 8, "speculation": "draft", "draft_model": "dummy", "draft_num_gpus": 1}
    application["deployments"].append({"name": "DraftModel", "num_replicas": 1})
    (problem,) = problems(tmp_path, config)
    assert problem == "applications[0].deployments[2].num_replicas: has no effect beside max_replicas"
    application["args"] = {"model": "org/model", "tensor_parallel_size": 2}
    application["deployments"] = [{"name": "EngineReplica", "ray_actor_options": {"num_cpus": 4, "num_gpus": 1}}]
    (problem,) = problems(tmp_path, config)
    assert problem.startswith("applications[0].deployments[0].ray_actor_options: a rank of tensor_parallel_size has")
    application["deployments"][0]["ray_actor_options"] = {"num_cpus": 1, "num_gpus": 1}
    assert problems(tmp_path, config) == []


def test_the_same_on_every_node(config: dict[str, Any], tmp_path: Path) -> None:
    groups = [
        {"template": {"spec": {"containers": [{"env": [{"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": value}]}]}}}
        for value in "01"
    ]
    cluster = {"rayVersion": ray.__version__, "headGroupSpec": groups[0], "workerGroupSpecs": groups[1:]}
    spec = {"serveConfigV2": yaml.safe_dump(config), "rayClusterConfig": cluster}
    (problem,) = problems(tmp_path, {"kind": "RayService", "spec": spec})
    assert problem == "env: RAY_SERVE_ENABLE_HA_PROXY is not the same on every node"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("a: b: c", "mapping values are not allowed"),
        ("- 1", "neither a Serve config nor a RayService"),
        ("", "neither a Serve config nor a RayService"),
        ("kind: Secret", "no RayService in it"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        check_file(str(path))


def test_the_command(tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(ROOT / "serve_config.yaml"), "--model", "x"]) == 2
    assert "--check takes the file alone, without --model" in capsys.readouterr().err
    assert main(["--check", str(ROOT / "serve_config.yaml")]) == 0
    assert capsys.readouterr().out.endswith("serve_config.yaml: no problems\n")
    path = tmp_path / "config.yaml"
    config["http_option"] = {}
    path.write_text(yaml.safe_dump(config))
    assert main(["--check", str(path)]) == 2
    out, err = capsys.readouterr()
    assert err == f"{path}: unknown option http_option: did you mean http_options?\n"
    assert out == f"{path}: 1 problem\n"
    assert main(["--check", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_deployments_are_those_that_are_built() -> None:
    names = set()
    bound = [build({"model": "dummy", "draft_model": "dummy"})]
    while bound:
        deployment = bound.pop()._bound_deployment
        names.add(deployment.name)
        bound += [argument for argument in deployment.init_args if hasattr(argument, "_bound_deployment")]
    assert names == set(check.DEPLOYMENTS)
