"""Options: the same from arguments, environment and YAML; bounds, near names, and the bind guard."""

from __future__ import annotations

import ipaddress
import pickle

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from app.settings import ConfigError, ServingConfig, check_bind, is_loopback


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_SERVING_MODEL", "from-env")
    monkeypatch.setenv("LLM_SERVING_MAX_BATCH_SIZE", "3")
    monkeypatch.setenv("LLM_SERVING_MODEL_ALIASES", '["a", "b"]')
    assert ServingConfig.from_options({}).model == "from-env"
    config = ServingConfig.from_options({"model": "given"})
    assert (config.model, config.max_batch_size, config.model_aliases) == ("given", 3, ["a", "b"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model: required .as an option or as LLM_SERVING_MODEL."),
        ({"model": "x", "max_bach_size": 4}, "unknown option max_bach_size: did you mean max_batch_size?"),
        ({"model": "x", "zzzzz": 4}, "unknown option zzzzz$"),
        ({"model": " "}, "model: is empty"),
        ({"model": "x", "port": 0}, "port: .*greater than or equal to 1"),
        ({"model": "x", "port": 65536}, "port: .*less than or equal to 65535"),
        ({"model": "x", "max_batch_size": 0}, "max_batch_size: "),
        ({"model": "x", "max_batch_size": "many"}, "max_batch_size: "),
        ({"model": "x", "request_timeout": 0}, "request_timeout: "),
        ({"model": "x", "depth": 2}, "depth: .*less than or equal to 1"),
        ({"model": "x", "dtype": "int3"}, "dtype: .*'auto', 'float32'"),
        ({"model": "x", "device": "gpu"}, "device: "),
        ({"model": "x", "quantization": "int3"}, "quantization: .*'int8' or 'int4'"),
        ({"model": "x", "quantization": "int8", "device": "cuda"}, "quantization is for CPUs"),
        ({"model": "x", "quantization": "int4", "tensor_parallel_size": 2}, "quantization is for CPUs"),
        ({"model": "x", "use_paged_attention": False, "page_size": 16}, "page_size needs use_paged_attention"),
        ({"model": "x", "speculation": "draft"}, "speculation draft needs a draft_model"),
        ({"model": "x", "speculation": "ngram", "draft_model": "y"}, "draft_model needs speculation auto or draft"),
        ({"model": "x", "num_drafts": 2}, "num_drafts needs a draft_model"),
        (
            {"model": "x", "draft_model": "y", "draft_placement": "replica", "draft_num_gpus": 1},
            "draft_num_gpus needs draft_placement actor",
        ),
        ({"model": "x", "gamma": 3}, "gamma needs speculation"),
        ({"model": "x", "num_replicas": 3, "max_replicas": 2}, "max_replicas 2 is below num_replicas 3"),
        ({"model": "x", "generation_backend": "eager", "max_batch_size": 4}, "max_batch_size above 1 needs"),
        ({"model": "x", "tensor_size": 2}, "unknown option tensor_size"),
    ],
)
def test_bad_options_are_one_line_that_names_them(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        ServingConfig.from_options(options)
    assert "\n" not in str(refused.value)


def test_a_misspelt_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_SERVING_MAX_BACH_SIZE", "3")
    with pytest.raises(ConfigError, match="LLM_SERVING_MAX_BACH_SIZE: did you mean LLM_SERVING_MAX_BATCH_SIZE?"):
        ServingConfig.from_options({"model": "x"})


def test_off_as_yaml_reads_it() -> None:
    assert ServingConfig.from_options(yaml.safe_load("{model: x, speculation: off}")).speculation == "off"


@pytest.mark.parametrize("option", ("ADAPTERS", "MODEL_ALIASES", "API_KEYS"))
def test_lists_and_maps_are_json_in_the_environment(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"LLM_SERVING_{option}", "a=/b")
    with pytest.raises(ConfigError, match=f"LLM_SERVING_{option}: lists and maps are JSON in the environment"):
        ServingConfig.from_options({"model": "x"})


def test_further_keys_and_their_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_SERVING_API_KEYS", '{"batch-key": 10}')
    config = ServingConfig.from_options({"model": "x", "api_key": "main"})
    assert config.keys() == {"main": None, "batch-key": 10}
    assert "batch-key" not in repr(config) + str(config) + config.model_dump_json()
    with pytest.raises(ConfigError, match="api_keys needs api_key"):
        ServingConfig.from_options({"model": "x"})
    with pytest.raises(ConfigError) as caught:
        ServingConfig.from_options({"model": "x", "api_key": "main", "api_keys": {"sk-secret": "high"}})
    assert "api_keys: Input should be" in str(caught.value) and "sk-secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="api_keys: a key is empty"):
        ServingConfig.from_options({"model": "x", "api_key": "main", "api_keys": {" ": 1}})
    written = ServingConfig.from_options({"model": "x", "api_key": "main\n", "api_keys": {"guest\n": 1}})
    assert {"main": None, "guest": 1}.items() <= written.keys().items(), "a secret made of a file ends in a newline"
    with pytest.raises(ConfigError, match="api_keys: a priority lies in -1000..1000"):
        ServingConfig.from_options({"model": "x", "api_key": "main", "api_keys": {"a": 1001}})


def test_the_key_is_never_shown_and_an_empty_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServingConfig.from_options({"model": "x", "api_key": "hush-hush"})
    assert "hush-hush" not in repr(config) + str(config) + config.model_dump_json()
    assert config.api_key is not None and config.api_key.get_secret_value() == "hush-hush"
    for empty in ("", "  "):
        assert ServingConfig.from_options({"model": "x", "api_key": empty}).api_key is None
    monkeypatch.setenv("LLM_SERVING_API_KEY", "")
    assert ServingConfig.from_options({"model": "x"}).api_key is None


def test_it_survives_a_trip_to_a_replica() -> None:
    config = ServingConfig.from_options({"model": "x", "api_key": "k", "max_batch_size": 2})
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"model": "models/SmolLM2/"}, ["SmolLM2"]),
        ({"model": "/a/b/c.Q4_1.gguf"}, ["c.Q4_1"]),
        ({"model": "owner/name", "model_aliases": ["gpt-4", "name"]}, ["name", "gpt-4"]),
        ({"model": "owner/name", "served_model_name": "mine"}, ["mine"]),
    ],
)
def test_model_names(options: dict[str, object], names: list[str]) -> None:
    assert ServingConfig.from_options(options).model_names() == names


def test_missing_files(tmp_path: object) -> None:
    for options, message in [
        ({"model": f"{tmp_path}/none"}, "model: no such file or folder"),
        ({"model": "none.gguf"}, "model: no such file or folder: none.gguf"),
        ({"model": "dummy", "tokenizer": "./none"}, "tokenizer: no such file or folder: ./none"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ServingConfig.from_options(options).check_files()
    for options in ({"model": str(tmp_path)}, {"model": "owner/name"}, {"model": "dummy"}):
        ServingConfig.from_options(options).check_files()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.10", "localhost", "LOCALHOST", "::1", "[::1]", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1"]
)
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    check_bind(host, None)


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "::",
        "",
        "*",
        "10.0.0.1",
        "127.evil.com",
        "127.0.0.1.evil.com",
        "localhost.evil.com",
        "127.1",
        "2130706433",
    ],
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)
    check_bind(host, "key")
    for empty in (None, "", " "):
        with pytest.raises(ConfigError, match="no api_key is set"):
            check_bind(host, empty)


@given(st.ip_addresses())
def test_loopback_is_what_ipaddress_says(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    mapped = getattr(address, "ipv4_mapped", None)
    assert is_loopback(str(address)) == is_loopback(address.exploded) == (mapped or address).is_loopback


def test_who_proposes() -> None:
    def proposer(**options: object) -> tuple[str, bool]:
        config = ServingConfig.from_options({"model": "x", **options})
        return config.proposer, config.has_draft_actors

    assert proposer() == ("off", False)
    assert proposer(draft_model="y") == proposer(draft_model="y", speculation="draft") == ("draft", True)
    assert proposer(draft_model="y", draft_placement="replica") == ("draft", False)
    assert proposer(speculation="ngram") == ("ngram", False)


def test_drafts_follow_engines_in_proportion() -> None:
    def counts(**options: int) -> tuple[int, int]:
        config = ServingConfig.from_options({"model": "dummy", "draft_model": "dummy", **options})
        return config.engines_per_draft, config.max_drafts

    assert counts() == (1, 1)
    assert counts(num_drafts=3) == (1, 3)
    assert counts(max_replicas=8) == (1, 8)
    assert counts(num_replicas=4, max_replicas=10) == (4, 3)
    assert counts(num_replicas=4, num_drafts=2, max_replicas=9) == (2, 5)
