"""llm-serve's options and refusals; what it does with Ray is in tests/e2e/test_llm_serve.py."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import _check_gpus, _parse, local_environment, main
from app.haproxy import on_loopback, with_deadline, without_routes
from app.settings import ConfigError, ServingConfig


def test_gpus_that_are_not_there_are_not_waited_for() -> None:
    cuda = ServingConfig(model="dummy", device="cuda", num_replicas=2)
    _check_gpus(cuda, True, 2)
    _check_gpus(ServingConfig(model="dummy"), False, 0)
    with pytest.raises(ConfigError, match="device cuda: 2 GPUs are wanted, and this machine has 1"):
        _check_gpus(cuda, True, 1)
    draft = ServingConfig(model="dummy", speculation="draft", draft_model="dummy", draft_num_gpus=0.5)
    assert draft.has_draft_actors
    with pytest.raises(ConfigError, match="draft_num_gpus: 0.5 GPUs are wanted, and this machine has 0"):
        _check_gpus(draft, False, 0)
    with pytest.raises(ConfigError, match="device auto: 1.5 GPUs are wanted, and this machine has 1"):
        _check_gpus(draft, True, 1)


def test_every_option_is_a_flag() -> None:
    options = _parse(
        [
            "--model",
            "m",
            "--max-batch-size",
            "4",
            "--no-enable-prefix-cache",
            "--model-aliases",
            "a",
            "b",
            "--depth",
            "0",
        ]
    )
    config = ServingConfig.from_options({**options, "depth": 0})
    assert (config.model, config.max_batch_size, config.enable_prefix_cache) == ("m", 4, False)
    assert (config.model_aliases, config.depth) == (["a", "b"], 0)
    given: list[str] = []
    for name, field in ServingConfig.model_fields.items():
        given.append("--" + name.replace("_", "-"))
        if field.annotation is not bool:
            given.append("1")
    assert set(_parse(given)) == set(ServingConfig.model_fields)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "model: required"),
        (["--model", "dummy", "--host", "0.0.0.0"], "host 0.0.0.0 is reachable from other machines and no api_key"),
        (["--model", "dummy", "--host", "127.evil.com"], "no api_key is set"),
        (
            ["--model", "dummy", "--max-bach-size", "4"],
            "--max-bach-size: did you mean --max-batch-size?",
        ),
        (["--model", "dummy", "--max-batch-size=0"], "max_batch_size: "),
        (["--model", "dummy", "--depth", "3"], "depth: "),
        (["--model", "dummy", "--port"], "--port"),
        (["--model", "./nothing-here"], "model: no such file or folder: ./nothing-here"),
    ],
)
def test_refusals_are_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_SERVING_API_KEY", "")
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code  # type: ignore[assignment]
    shown = capsys.readouterr()
    assert status == 2
    assert shown.out == ""
    assert message in shown.err and shown.err.count("\n") == 1


def test_a_taken_port_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["--model", "dummy", "--port", str(taken.getsockname()[1])]) == 2
    assert "can't listen on 127.0.0.1 port" in capsys.readouterr().err


def test_the_guard_comes_before_ray() -> None:
    code = (
        "import sys; from app.cli import main; status = main(['--model', 'dummy', '--host', '::']);"
        "print(status, 'ray' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False False\n"


def test_two_instances_share_no_port_and_no_file(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    one, other = (local_environment(folder, {}) for folder in folders)
    equal = [name for name in one if name.endswith("PORT") and one[name] == other[name]]
    assert len(equal) < 2  # one may come twice, by chance: none is in use yet
    assert not [name for name, value in other.items() if str(folders[0]) in value]
    assert (folders[0] / "token").stat().st_mode & 0o777 == 0o600
    assert (folders[0] / "token").read_text() != (folders[1] / "token").read_text()


def test_an_operators_own_tuning_stays(tmp_path: Path) -> None:
    environment = local_environment(tmp_path, {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "0", "RAY_AUTH_MODE": "disabled"})
    assert "RAY_SERVE_THROUGHPUT_OPTIMIZED" not in environment
    assert environment["RAY_AUTH_MODE"] == "token"


def test_haproxys_statistics_are_kept_on_loopback() -> None:
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    template = HAPROXY_CONFIG_TEMPLATE.replace("{{ config.metrics_port }}", "9101")
    template = template.replace("{{ config.stats_port }}", "8404")
    safe = on_loopback(template)
    assert "bind 127.0.0.1:9101" in safe and "bind 127.0.0.1:8404" in safe
    assert "bind :9101" not in safe and "bind *:8404" not in safe
    assert safe.count("bind {{ config.frontend_host }}") == 1
    assert on_loopback(safe) == safe  # at a reload without a change
    with pytest.raises(SystemExit):
        on_loopback("frontend http\n    bind *:80\n")
    with pytest.raises(SystemExit):
        on_loopback(template + "\nlisten stats\n    bind *:8405\n")


def test_haproxy_tells_no_routes_and_waits_for_nobody() -> None:
    from jinja2 import Environment
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE as TEMPLATE

    message = {"status": 200, "routes_content_type": "application/json", "routes_message": '{\\"/\\":\\"secret\\"}'}
    environment = Environment()
    environment.filters["haproxy_fmt"] = str
    config = environment.from_string(TEMPLATE).render(
        config={"timeout_client_s": 3600, "timeout_http_request_s": None}, route_info=message
    )
    assert "secret" in config and "timeout http-request" not in config
    safe = with_deadline(without_routes(config))
    lines = [line.strip() for line in safe.splitlines()]
    assert "secret" not in safe
    assert "http-request deny deny_status 404 if routes" in lines
    assert lines.index("timeout http-request 10s") == lines.index("timeout client 3600s") + 1
    assert lines.index("defaults") < lines.index("timeout client 3600s") < lines.index("frontend http_frontend")
    assert with_deadline(without_routes(safe)) == safe  # at a reload without a change
    for change in (without_routes, with_deadline):
        with pytest.raises(SystemExit):
            change("frontend http\n    bind *:80\n")
