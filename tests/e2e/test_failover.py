"""Streams outlive the replica that feeds them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable

import httpx
import pytest

from engine.batch_engine import ContinuousBatchingEngine
from engine.schemas import GenerationRequest
from tests.e2e.conftest import Deployed, wait_until

TOKENS = 1200
CONTEXT = 2048
STREAMS = 32


def body(seed: int, tokens: int = TOKENS) -> dict[str, object]:
    return {"prompt": f"stream {seed}", "max_tokens": tokens, "seed": seed, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def reference() -> list[str]:
    """The texts of seeds 0 to 31, by one engine in this process."""
    from app.replica import load_model, load_tokenizer
    from app.settings import ServingConfig

    config = ServingConfig(model="dummy", dtype="float32", max_batch_size=STREAMS, max_model_len=CONTEXT)
    tokenizer = load_tokenizer(config)
    engine = ContinuousBatchingEngine.from_serving_config(config, load_model(config, tokenizer), tokenizer)
    for seed in range(STREAMS):
        prompt = f"stream {seed}"
        engine.add_request(
            GenerationRequest(prompt=prompt, max_new_tokens=TOKENS, seed=seed, ignore_eos=True, request_id=str(seed))
        )
    while engine.scheduler.has_pending_work:
        engine.step()
    results = [engine.result(str(seed)) for seed in range(STREAMS)]
    return [result.text for result in results if result is not None]


async def read(client: httpx.AsyncClient, url: str, seed: int, started: asyncio.Semaphore) -> tuple[str, dict]:
    """The text of a stream and its usage. What arrives is taken apart at the end: a slow reader would be too late to
    disturb anything."""
    received = bytearray()
    request = {**body(seed), "stream_options": {"include_usage": True}}
    async with client.stream("POST", f"{url}/v1/completions", json=request) as response:
        assert response.status_code == 200
        async for part in response.aiter_raw():
            if not received:
                started.release()
            received += part
    *events, done = [line.removeprefix("data: ") for line in received.decode().splitlines() if line]
    assert done == "[DONE]"
    text, usage = "", {}
    for event in map(json.loads, events):
        assert "error" not in event, event
        text += "".join(choice["text"] for choice in event["choices"])
        usage = event["usage"] or usage
    return text, usage


async def disturbed(
    app: Deployed, streams: int, disturb: Callable[[], None], begun: int | None = None
) -> list[tuple[str, dict]]:
    """All streams, with `disturb` called when so many, or all, have begun."""
    started = asyncio.Semaphore(0)
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        tasks = [asyncio.create_task(read(client, app.url, seed, started)) for seed in range(streams)]
        for _ in range(begun or streams):
            await started.acquire()
        await asyncio.to_thread(disturb)
        return await asyncio.gather(*tasks)


def check(results: list[tuple[str, dict]], reference: list[str]) -> None:
    for seed, (text, usage) in enumerate(results):
        assert text == reference[seed], seed
        assert usage["completion_tokens"] == TOKENS
        assert usage["prompt_tokens"] == len(f"stream {seed}")


def failovers(app: Deployed) -> float:
    lines = httpx.get(f"{app.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("llm_failovers_total{"))


async def test_kill_9(deploy: Callable[..., Deployed], reference: list[str]) -> None:
    app = deploy(num_replicas=2, max_batch_size=16, max_model_len=CONTEXT)
    killed, other = app.pids()
    check(await disturbed(app, STREAMS, lambda: os.kill(killed, signal.SIGKILL), STREAMS // 4), reference)
    assert failovers(app) > 0
    assert other in app.pids()


async def test_stopped_and_continued(deploy: Callable[..., Deployed], reference: list[str]) -> None:
    app = deploy(num_replicas=2, max_batch_size=16, max_model_len=CONTEXT, heartbeat_timeout=2)
    stopped = app.pids()[0]
    try:
        check(await disturbed(app, STREAMS, lambda: os.kill(stopped, signal.SIGSTOP), STREAMS // 4), reference)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert failovers(app) > 0
    wait_until(lambda: len(app.replicas()) == 2)
    check(await disturbed(app, STREAMS, lambda: None), reference)
    wait_until(lambda: all(each["engine"]["running"] == 0 and each["calls"] == 0 for each in app.snapshots()))


async def test_the_only_replica_is_killed(deploy: Callable[..., Deployed], reference: list[str]) -> None:
    app = deploy(num_replicas=1, max_model_len=CONTEXT)
    [pid] = app.pids()
    check(await disturbed(app, 4, lambda: os.kill(pid, signal.SIGKILL)), reference)


async def test_scale_down_idle_is_quick(deploy: Callable[..., Deployed]) -> None:
    app = deploy(num_replicas=2, max_model_len=CONTEXT)
    before = app.pids()
    app.scale(1)
    wait_until(lambda: len(app.replicas()) == 1)
    begin = time.monotonic()
    wait_until(lambda: sum(map(_exists, before)) == 1)
    assert time.monotonic() - begin < 60  # a pump that held the drain would hold it for request_timeout
    assert set(app.pids()) < set(before)


async def test_scale_down_waits_for_streams(deploy: Callable[..., Deployed], reference: list[str]) -> None:
    app = deploy(num_replicas=2, max_model_len=CONTEXT)
    before = app.pids()
    check(await disturbed(app, 8, lambda: app.scale(1)), reference)
    assert failovers(app) == 0
    wait_until(lambda: sum(map(_exists, before)) == 1)
    assert set(app.pids()) < set(before)  # the other one is what it was


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
