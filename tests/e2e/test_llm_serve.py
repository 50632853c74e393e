"""`llm-serve` as a process: what it says, what it listens on, and how it ends."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from app.cli import free_ports
from app.settings import is_loopback
from engine.models.publisher import save_pretrained
from tests.e2e.conftest import LLM_SERVE, Server, listening, llm_serve, wait_until
from tests.engine.made_tokenizers import byte_level_tokenizer
from tests.engine.oracle import tiny_model


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as servers:
        yield lambda *flags, **environment: servers.enter_context(llm_serve(*flags, **environment))


def stream_of(url: str, tokens: int) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": tokens, "seed": 1, "ignore_eos": True, "stream": True}


def folders_of(processes: list[psutil.Process]) -> list[Path]:
    """Where a server's Ray keeps its files."""
    words: list[str] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray ends idle workers; a zombie is such a one
            words += process.cmdline()
    return [Path(folder) for folder in set(re.findall(r"/tmp/pilotfish-\w+", " ".join(words)))]


def test_start_guard_and_drain(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve("--max-model-len", "4096", HOME=str(tmp_path))
    configs = [line for line in server.lines if '"event": "server_config"' in line]
    assert len(configs) == 1
    config = json.loads(configs[0])
    assert (config["model_class"], config["dtype"], config["max_seq_len"]) == ("DecoderModel", "float32", 4096)
    assert config["api_key_set"] is False and config["param_count_total"] > 0
    assert f"llm-serve: ready: dummy at {server.url}/v1" in server.lines
    assert not (tmp_path / ".ray").exists()  # where another Ray of this user looks for its token

    # What isn't on loopback is Ray's own gRPC, and refuses whoever has no token.
    processes = server.tree()
    folders = folders_of(processes)
    open_ports = [(process, port) for process, ip, port in listening(processes) if not is_loopback(ip)]
    for process, port in open_ports:
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/", timeout=2)
        assert _refuses_grpc(port), f"{process.name()} answers on port {port}"

    # A running stream ends first.
    lines: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=stream_of(server.url, 1500), timeout=60) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 10:
                server.process.send_signal(signal.SIGTERM)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(120) == 0
    assert "llm-serve: draining; interrupt again to stop at once" in server.lines
    _, left = psutil.wait_procs(processes, timeout=120)
    assert not left
    assert folders and not any(folder.exists() for folder in folders)


def _refuses_grpc(port: int) -> bool:
    """Whether Serve's replica service and Ray's own answer a stranger with UNAUTHENTICATED, or not at all."""
    from ray.serve.generated.serve_pb2 import ASGIRequest
    from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            ASGIServiceStub(channel).HandleRequest(ASGIRequest(), timeout=60)
        except grpc.RpcError as error:
            return error.code() in (
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.UNIMPLEMENTED,
                grpc.StatusCode.UNAVAILABLE,
            )
    return False


def test_a_second_signal_ends_at_once(serve: Callable[..., Server]) -> None:
    server = serve("--max-model-len", "100000", "--max-batch-size", "1")
    processes = server.tree()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=stream_of(server.url, 90000), timeout=60) as answer:
        assert next(answer.iter_lines())
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: any("draining" in line for line in server.lines))
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(120) == 130
    _, left = psutil.wait_procs(processes, timeout=120)
    assert not left


def named(processes: list[psutil.Process], name: str) -> psutil.Process:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == name:
                return process
    raise AssertionError(f"no {name}")


def gone(processes: list[psutil.Process], folders: list[Path]) -> bool:
    _, left = psutil.wait_procs(processes, timeout=120)
    return not left and bool(folders) and not any(folder.exists() for folder in folders)


def test_a_signal_to_all_of_its_processes(serve: Callable[..., Server]) -> None:
    """As systemd sends it: Ray is gone before it can be asked to drain."""
    server = serve()
    processes = server.tree()
    folders = folders_of(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    assert server.process.wait(120) == 130
    assert gone(processes, folders)


def test_ray_dies(serve: Callable[..., Server]) -> None:
    server = serve()
    processes = server.tree()
    folders = folders_of(processes)
    for name in ("gcs_server", "raylet"):
        named(processes, name).kill()
    assert server.process.wait(120) == 1
    assert gone(processes, folders)


def test_it_is_killed(serve: Callable[..., Server]) -> None:
    """What it has started drains by itself."""
    server = serve()
    processes = server.tree()
    server.process.kill()
    _, left = psutil.wait_procs(processes, timeout=120)
    assert not left


@pytest.mark.parametrize("line", ["starting Ray", "EngineReplica updating"])
def test_a_signal_during_the_start(line: str) -> None:
    [port] = free_ports(1)
    server = Server(port)
    wait_until(lambda: any(line in each for each in server.lines))
    time.sleep(1)
    processes = server.tree()
    folders = folders_of(processes) or [Path("/tmp/pilotfish-none")]  # Ray may not have begun
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(120) == 130
    assert gone(processes, folders)
    assert not any("error" in line.lower() or "Traceback" in line for line in server.lines), server.lines


def test_a_draft_that_does_not_fit_is_told_of(serve: Callable[..., Server], tmp_path: Path) -> None:
    """And is done without. Serve's own log would keep the line to itself."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    save_pretrained(tiny_model(vocab_size=402), target, byte_level_tokenizer())
    save_pretrained(tiny_model(vocab_size=402, target_hidden_size=48), draft, byte_level_tokenizer())
    server = serve("--model", str(target), "--speculation", "draft", "--draft-model", str(draft))
    wait_until(lambda: any("no draft, so plain decoding" in line for line in server.lines))
    (line, *_) = [line for line in server.lines if "no draft, so plain decoding" in line]
    assert "hidden states of 48, not the target's of 32" in line
    body = {"prompt": "hello", "max_tokens": 8}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    [port] = free_ports(1)
    done = subprocess.run(
        [str(LLM_SERVE), "--model", str(tmp_path / "model"), "--port", str(port)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert f"no tokenizer can be loaded from '{tmp_path}/model'" in done.stderr
    assert "Traceback" not in done.stderr
