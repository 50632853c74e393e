"""Everything fails, in an order that a seed decides, and no client notices more than a pause.

Longer and otherwise: CHAOS_SECONDS=3600 CHAOS_SEED=7 CHAOS_CLIENTS=100 pytest tests/chaos
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from app.replica import load_model, load_tokenizer
from app.settings import ServingConfig
from engine.batch_engine import ContinuousBatchingEngine
from engine.schemas import GenerationRequest
from tests.e2e.conftest import Cluster, Deployed, wait_until

SECONDS = float(os.environ.get("CHAOS_SECONDS", "40"))
SEED = int(os.environ.get("CHAOS_SEED", "0"))
CLIENTS = int(os.environ.get("CHAOS_CLIENTS", "10"))
PROMPTS = 24
OPTIONS: dict[str, Any] = {
    "model": "dummy",
    "dtype": "float32",
    "max_model_len": 1024,
    "max_batch_size": 8,
    "num_replicas": 3,
    "num_threads": 1,
    "heartbeat_timeout": 2,
    "max_queued_requests": 64,
}
REFUSALS = {429, 503}
"""What may be answered instead: no room, or no replica. A lost attempt is no reason for either, but five in a row."""


def body(number: int) -> dict[str, Any]:
    tokens = random.Random(number).randrange(20, 400)
    asked: dict[str, Any] = {"prompt": f"prompt {number} " * (1 + number % 4), "max_tokens": tokens, "seed": number}
    asked |= {"ignore_eos": True, "temperature": 0.0 if number % 3 == 0 else 1.0}
    if number % 4 == 1:
        asked |= {"n": 2}
    if number % 8 == 2:
        asked |= {"logprobs": 1}
    return asked


def reference() -> list[list[str]]:
    """The texts of every prompt, by one engine in this process that nothing happens to."""
    from app.schemas import choice_seed

    config = ServingConfig(**{**OPTIONS, "num_replicas": 1})
    tokenizer = load_tokenizer(config)
    engine = ContinuousBatchingEngine.from_serving_config(config, load_model(config, tokenizer), tokenizer)
    engine.scheduler.max_queued = None
    for number in range(PROMPTS):
        fields = body(number)
        for i in range(fields.pop("n", 1)):
            fields |= {"seed": choice_seed(number, i), "request_id": f"{number}-{i}"}
            engine.add_request(GenerationRequest(**fields))
    while engine.scheduler.has_pending_work:
        engine.step()
    results = [[engine.result(f"{number}-{i}") for i in range(body(number).get("n", 1))] for number in range(PROMPTS)]
    return [[result.text for result in choices if result is not None] for choices in results]


class Clients:
    """Ask, read, leave now and then; each request's end is counted, and a wrong one is kept."""

    def __init__(self, url: str, texts: list[list[str]]) -> None:
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._url = f"{url}/v1/completions"
        self._texts = texts
        self._over = False
        self._tasks = [asyncio.create_task(self._client(i)) for i in range(CLIENTS)]

    async def end(self) -> None:
        self._over = True
        async with asyncio.timeout(120):
            await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{SEED} {number}")
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=90, limits=limits) as client:
            while not self._over:
                asked = rng.randrange(PROMPTS)
                try:
                    end = await self._ask(client, asked, rng.random() < 0.6, rng.random() < 0.1)
                except httpx.HTTPError as error:
                    end = f"{type(error).__name__}: {error}"
                self.ends[end] += 1
                if end not in ("well", "left", *map(str, REFUSALS)):
                    self.wrong.append(f"request {asked}: {end}")
                if end in ("429", "503"):
                    await asyncio.sleep(0.5)

    async def _ask(self, client: httpx.AsyncClient, number: int, stream: bool, leaves: bool) -> str:
        request = {**body(number), "stream": stream}
        if leaves and not stream:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.post(self._url, json=request)
            return "left"
        if not stream:
            answer = await client.post(self._url, json=request)
            if answer.status_code != 200:
                return self._refusal(answer.status_code, answer.content)
            return self._compare(number, {c["index"]: c["text"] for c in answer.json()["choices"]})
        async with client.stream("POST", self._url, json=request) as answer:
            if answer.status_code != 200:
                return self._refusal(answer.status_code, await answer.aread())
            lines: list[str] = []
            async for line in answer.aiter_lines():
                lines += [line.removeprefix("data: ")] if line else []
                if leaves and len(lines) > 3:
                    return "left"
        *events, last = lines or [""]
        if last != "[DONE]" or "[DONE]" in events:
            return f"a stream that ends with {last[:300]!r}"
        texts: dict[int, str] = {}
        for event in map(json.loads, events):
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        return self._compare(number, texts)

    def _refusal(self, status: int, content: bytes) -> str:
        try:
            message = json.loads(content)["error"]["message"]
        except ValueError:
            return f"{status} that isn't ours: {content[:200]!r}"
        return str(status) if status in REFUSALS else f"{status} {message}"

    def _compare(self, number: int, texts: dict[int, str]) -> str:
        expected = dict(enumerate(self._texts[number]))
        return "well" if texts == expected else f"another text: {texts} instead of {expected}"


class Faults:
    """One after the other, each announced by its name in `done`."""

    def __init__(self, app: Deployed) -> None:
        self.done: Counter[str] = Counter()
        self._app = app
        self._rng = random.Random(SEED)
        self._version = 0

    async def run(self, seconds: float) -> None:
        """Each kind at least once, then whatever comes."""
        kinds = [self.kill, self.stop, self.lose_a_node, self.redeploy]
        self._rng.shuffle(kinds)
        end = time.monotonic() + seconds
        i = 0
        while time.monotonic() < end or i < len(kinds):
            fault = kinds[i] if i < len(kinds) else self._rng.choice(kinds)
            await asyncio.to_thread(fault)
            self.done[fault.__name__] += 1
            await asyncio.sleep(self._rng.uniform(2, 6))
            i += 1

    def _engine(self) -> psutil.Process | None:
        engines = self._app.cluster.processes("ServeReplica:test:EngineReplica")
        return self._rng.choice(sorted(engines, key=lambda process: process.pid)) if engines else None

    def kill(self) -> None:
        if (engine := self._engine()) is not None:
            engine.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        if (engine := self._engine()) is not None:
            try:
                engine.send_signal(signal.SIGSTOP)
                time.sleep(self._rng.uniform(0.5, 5))
            finally:
                if engine.is_running():
                    engine.send_signal(signal.SIGCONT)

    def lose_a_node(self) -> None:
        self._app.cluster.call("lose_node", number=self._rng.randrange(2))

    def redeploy(self) -> None:
        self._version += 1
        options = {**OPTIONS, "max_queued_requests": 64 + self._version}
        self._app.cluster.call("deploy", options=options, wait=False)


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    cluster = Cluster(nodes=2)
    yield cluster
    cluster.close()


@pytest.mark.timeout(SECONDS * 2 + 400)
async def test_every_request_ends_once_and_right(nodes: Cluster) -> None:
    texts = reference()
    app = Deployed(nodes, OPTIONS)
    nodes.call("deploy", options=OPTIONS, wait=True)

    def replicas() -> dict[str, Any]:
        try:
            found: dict[str, Any] = httpx.get(f"{app.url}/health", timeout=10).json()["replicas"]
        except (httpx.HTTPError, ValueError, KeyError):
            return {}
        return found

    wait_until(lambda: len(replicas()) == 3, 120)
    clients, faults = Clients(app.url, texts), Faults(app)
    await faults.run(SECONDS)
    await clients.end()
    print(f"\nseed {SEED}: {dict(faults.done)} survived, {dict(clients.ends)}")
    assert not clients.wrong, clients.wrong[:5]
    assert clients.ends["well"] >= CLIENTS
    assert clients.ends["well"] > 20 * sum(clients.ends[str(status)] for status in REFUSALS)

    engines: list[dict[str, Any]] = []

    def whole() -> bool:
        """Three replicas, all at rest, every page back, and one pump to each: nothing of the old days is left."""
        if len(replicas()) != 3 or any(replica["load"] for replica in replicas().values()):
            return False
        engines[:] = app.snapshots()
        return len(engines) == 3 and all(
            each["engine"]["running"] == each["engine"]["waiting"] == each["engine"]["held_pages"] == each["calls"] == 0
            and each["engine"]["free_pages"] + each["engine"]["cached_pages"] == each["engine"]["total_pages"]
            and each["pumps"] == 1
            for each in engines
        )

    await asyncio.to_thread(wait_until, whole, 120, lambda: f"{engines} {replicas()}")
    again = Clients(app.url, texts)
    await asyncio.sleep(3)
    await again.end()
    assert set(again.ends) <= {"well", "left"}, again.wrong[:5]
