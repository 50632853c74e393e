"""Everything fails, in an order that a seed decides, and no client notices more than a pause; where the Router that it
talks to is what fails, it asks again by its request id, and gets the same text.

With other tests beside it: each kind of fault once, 12 clients, and the Routers live. All of it, longer and otherwise:
CHAOS_SECONDS=3600 CHAOS_SEED=7 CHAOS_CLIENTS=20 pytest -s tests/chaos
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
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from app.replica import load_model, load_tokenizer
from app.settings import ServingConfig
from engine.batch_engine import ContinuousBatchingEngine
from engine.schemas import GenerationRequest
from tests.e2e.conftest import Cluster, Deployed, wait_until
from tests.e2e.test_failover import disturbed, failovers

SECONDS = float(os.environ.get("CHAOS_SECONDS", "0"))
"""Of faults, at least one of each kind."""

long = pytest.mark.skipif(not SECONDS, reason="more of Ray than a machine with other tests can carry: CHAOS_SECONDS=60")
SEED = int(os.environ.get("CHAOS_SEED", "0"))
CLIENTS = int(os.environ.get("CHAOS_CLIENTS", "100" if SECONDS else "12"))
PROMPTS = 24
OPTIONS: dict[str, Any] = {
    "model": "dummy",
    "draft_model": "dummy",
    "dtype": "float32",
    "max_model_len": 1024,
    "max_batch_size": 16,
    "num_replicas": 3,
    "num_threads": 1,
    "heartbeat_timeout": 2,
    "max_queued_requests": 128,
}
REFUSALS = {429, 503}
"""What may be answered instead: no room, or no replica. A lost attempt is no reason for either, but five in a row."""

RETRIES = 60
"""Seconds apart: as long as a Router may need to be replaced on a busy machine."""


def body(number: int) -> dict[str, Any]:
    tokens = random.Random(number).randrange(20, 100)
    asked: dict[str, Any] = {"prompt": f"prompt {number} " * (1 + number % 4), "max_tokens": tokens}
    asked |= {"ignore_eos": True, "temperature": 0.0 if number % 3 == 0 else 1.0}
    if number % 4 == 1:
        asked |= {"n": 2}
    if number % 8 == 2:
        asked |= {"logprobs": 1}
    return asked


def reference() -> list[list[str]]:
    """The texts of every prompt with its number as the seed, by one engine in this process that nothing happens to."""
    from app.schemas import choice_seed

    config = ServingConfig(**{**OPTIONS, "num_replicas": 1, "draft_model": None})
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


class Broken(Exception):
    """An answer that says nothing, or not all."""


class Clients:
    """Ask, read, leave now and then; each request's end is counted, and a wrong one is kept."""

    def __init__(self, url: str, texts: list[list[str]], retry: bool = False) -> None:
        """retry: requests are known by their ids and not by a seed, and one that breaks is asked again."""
        self.ends: Counter[str] = Counter()
        self.retried = 0
        self.wrong: list[str] = []
        self._url = f"{url}/v1/completions"
        self._texts = texts
        self._retry = retry
        self._over = False
        # HAProxy closes idle connections when it is told of new replicas, whatever is on its way on them
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=300, limits=limits)
        self._tasks = [asyncio.create_task(self._client(i)) for i in range(CLIENTS)]

    async def end(self) -> None:
        self._over = True
        async with asyncio.timeout(300):
            await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{SEED} {number}")
        while not self._over:
            asked = rng.randrange(PROMPTS)
            end = await self._ask_until(asked, rng.random() < 0.6, rng.random() < 0.1)
            self.ends[end] += 1
            if end not in ("well", "left", *map(str, REFUSALS)):
                self.wrong.append(f"request {asked}: {end}")
            if end in ("429", "503"):
                await asyncio.sleep(1)

    async def _ask_until(self, number: int, stream: bool, leaves: bool) -> str:
        for _ in range(RETRIES):
            try:
                return await self._ask(number, stream, leaves)
            except (httpx.HTTPError, Broken) as error:
                end = f"{type(error).__name__}: {error}"
                if not self._retry:
                    break
                self.retried += 1
                await asyncio.sleep(1)
        return end

    async def _ask(self, number: int, stream: bool, leaves: bool) -> str:
        request: dict[str, Any] = {"json": {**body(number), "stream": stream}}
        if self._retry:
            request["headers"] = {"x-request-id": f"chaos-{number}"}
        else:
            request["json"] |= {"seed": number}
        if leaves and not stream:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await self._http.post(self._url, **request)
            return "left"
        if not stream:
            answer = await self._http.post(self._url, **request)
            if answer.status_code != 200:
                return self._refusal(answer, answer.content)
            choices = answer.json()["choices"]
            return self._compare(number, {c["index"]: c["text"] for c in choices}, [c["index"] for c in choices])
        lines: list[str] = []
        async with self._http.stream("POST", self._url, **request) as answer:
            if answer.status_code != 200:
                return self._refusal(answer, await answer.aread())
            async for line in answer.aiter_lines():
                lines += [line.removeprefix("data: ")] if line else []
                if leaves and len(lines) > 3:
                    return "left"
        *events, last = lines or [""]
        if last != "[DONE]" or "[DONE]" in events:
            raise Broken(f"a stream that ends with {last[:300]!r}")
        texts: dict[int, str] = {}
        ended: list[int] = []
        for event in map(json.loads, events):
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                ended += [choice["index"]] if choice["finish_reason"] else []
        return self._compare(number, texts, ended)

    def _refusal(self, answer: httpx.Response, content: bytes) -> str:
        try:
            message = json.loads(content)["error"]["message"]
        except ValueError:
            raise Broken(f"{answer.status_code} that isn't ours: {content[:200]!r}") from None
        if answer.status_code == 429 and int(answer.headers["retry-after"]) < 1:
            return f"429 with {answer.headers}"
        return str(answer.status_code) if answer.status_code in REFUSALS else f"{answer.status_code} {message}"

    def _compare(self, number: int, texts: dict[int, str], ended: list[int]) -> str:
        expected = dict(enumerate(self._texts[number]))
        if texts != expected:
            return f"another text: {texts} instead of {expected}"
        return "well" if sorted(ended) == list(expected) else f"these have ended: {ended}"


class Faults:
    """One after the other, each counted by its name in `done`."""

    def __init__(self, app: Deployed, routers: str) -> None:
        self.done: Counter[str] = Counter()
        self._app = app
        self._routers = routers
        self._rng = random.Random(SEED)
        self._version = 0

    async def run(self, kinds: list[Callable[[], None]], seconds: float) -> None:
        """Each kind once, then whatever comes."""
        self._rng.shuffle(kinds)
        end = time.monotonic() + seconds
        i = 0
        while i < len(kinds) or time.monotonic() < end:
            fault = kinds[i] if i < len(kinds) else self._rng.choice(kinds)
            await asyncio.to_thread(fault)
            self.done[fault.__name__] += 1
            await asyncio.sleep(self._rng.uniform(1, 4))
            i += 1

    def _kill(self, deployment: str) -> None:
        if (process := self._any(deployment)) is not None:
            process.send_signal(signal.SIGKILL)

    def _stop(self, deployment: str) -> None:
        if (process := self._any(deployment)) is not None:
            try:
                process.send_signal(signal.SIGSTOP)
                time.sleep(self._rng.uniform(0.5, 5))
            finally:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

    def _any(self, deployment: str) -> psutil.Process | None:
        processes = self._app.cluster.processes(f"ServeReplica:test:{deployment}")
        return self._rng.choice(sorted(processes, key=lambda process: process.pid)) if processes else None

    def kill(self) -> None:
        self._kill("EngineReplica")

    def kill_draft(self) -> None:
        self._kill("DraftModel")

    def kill_router(self) -> None:
        self._kill("Router")

    def stop(self) -> None:
        self._stop("EngineReplica")

    def stop_router(self) -> None:
        self._stop("Router")

    def lose_a_node(self) -> None:
        call = self._app.cluster.call
        call("lose_node", node=self._rng.choice(call("nodes")))
        call("add_node")

    def drain_a_node(self) -> None:
        """The notice is too short for what runs there."""
        call, notice = self._app.cluster.call, self._rng.uniform(1, 8)
        node = self._rng.choice(call("nodes"))
        call("add_node")
        call("drain_node", node=node, notice=notice)
        time.sleep(notice)
        call("lose_node", node=node)

    def redeploy(self) -> None:
        self._version += 1
        options = {**self._app.options, "max_queued_requests": 128 + self._version}
        self._app.cluster.call("deploy", options=options, wait=False, routers=self._routers)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    cluster = Cluster(nodes=2)
    yield cluster
    cluster.close()


def replicas(app: Deployed) -> dict[str, Any]:
    try:
        found: dict[str, Any] = httpx.get(f"{app.url}/health", timeout=10).json()["replicas"]
    except (httpx.HTTPError, ValueError, KeyError):
        return {}
    return found


def wait_for_whole_pools(app: Deployed) -> None:
    """Three engines, all at rest, every page back, and one pump to each Router: nothing of the old days is left."""
    engines: list[dict[str, Any]] = []

    def whole() -> bool:
        if len(replicas(app)) != 3 or any(replica["load"] for replica in replicas(app).values()):
            return False
        engines[:] = app.snapshots()
        return len(engines) == 3 and all(
            each["engine"]["running"] == each["engine"]["waiting"] == each["engine"]["held_pages"] == each["calls"] == 0
            and each["engine"]["free_pages"] + each["engine"]["cached_pages"] == each["engine"]["total_pages"]
            and each["pumps"] == app.options.get("num_routers", 1)
            for each in engines
        )

    wait_until(whole, 180, lambda: f"{engines} {replicas(app)}")


def memory(cluster: Cluster) -> dict[str, float]:
    """MB of the largest process of each kind."""
    kinds = (
        "EngineReplica",
        "DraftModel",
        "test:Router",
        "ServeController",
        "HAProxyManager",
        "raylet/raylet",
        "gcs_s",
    )
    sizes = {}
    for kind in kinds:
        for process in cluster.processes(kind):
            with contextlib.suppress(psutil.Error):
                sizes[kind] = max(sizes.get(kind, 0.0), process.memory_info().rss / 2**20)
    return sizes


async def survive(app: Deployed, faults: Faults, kinds: list[Callable[[], None]], clients: Clients) -> None:
    await asyncio.to_thread(wait_until, lambda: clients.ends["well"] >= CLIENTS // 4, 180)
    before = memory(app.cluster)
    await faults.run(kinds, SECONDS)
    await clients.end()
    after = memory(app.cluster)
    grown = {kind: f"{before[kind]:.0f} to {size:.0f} MB" for kind, size in after.items()}
    print(f"\nseed {SEED}: {faults.done.total()} faults {dict(faults.done)}, {dict(clients.ends)}")
    print(f"asked again {clients.retried} times; {grown}")
    assert not clients.wrong, clients.wrong[:5]
    assert clients.ends["well"] >= CLIENTS
    assert all(size < 1.3 * before[kind] + 64 for kind, size in after.items()), grown
    await asyncio.to_thread(wait_for_whole_pools, app)


@pytest.mark.timeout(SECONDS + 900)
async def test_every_request_ends_once_and_right(nodes: Cluster) -> None:
    texts = reference()
    app = Deployed(nodes, OPTIONS)
    nodes.call("deploy", options=app.options, wait=True)
    wait_until(lambda: len(replicas(app)) == 3)
    faults = Faults(app, "head")
    kinds = [faults.kill, faults.stop, faults.kill_draft, faults.lose_a_node, faults.drain_a_node, faults.redeploy]
    await survive(app, faults, kinds, Clients(app.url, texts))
    again = Clients(app.url, texts)
    await again.end()
    assert set(again.ends) <= {"well", "left"}, again.wrong[:5]


@long
async def test_a_drained_node_ends_its_streams(nodes: Cluster) -> None:
    """With notice enough, not one has to move, and the only engine has a successor before it goes."""
    app = Deployed(nodes, {"model": "dummy", "dtype": "float32", "num_replicas": 1, "max_model_len": 2048})
    nodes.call("deploy", options=app.options, wait=True)
    wait_until(lambda: len(replicas(app)) == 1)
    [pid] = app.pids()
    node = nodes.call("node_of", pid=pid)
    refused: list[httpx.Response] = []

    def ask() -> None:
        answer = httpx.post(f"{app.url}/v1/completions", json={"prompt": "meanwhile", "max_tokens": 5}, timeout=60)
        refused.extend([answer] if answer.status_code != 200 else [])

    def drain() -> None:
        nodes.call("add_node")
        nodes.call("drain_node", node=node, notice=3600)
        while psutil.pid_exists(pid):
            ask()

    calm, drained = await disturbed(app, 4, lambda: None), await disturbed(app, 4, drain)
    assert [text for text, _ in drained] == [text for text, _ in calm]
    nodes.call("lose_node", node=node)
    ask()
    assert not refused
    assert failovers(app) == 0


@long
@pytest.mark.timeout(SECONDS + 900)
async def test_a_retry_by_request_id_gets_the_same_text(nodes: Cluster) -> None:
    """Routers die too, and their nodes: what they were at breaks, and is asked again."""
    app = Deployed(nodes, {**OPTIONS, "num_routers": 2})
    nodes.call("deploy", options=app.options, wait=True, routers="other")
    wait_until(lambda: len(replicas(app)) == 3)
    async with httpx.AsyncClient(timeout=300) as client:
        ids = [{"x-request-id": f"chaos-{number}"} for number in range(PROMPTS)]
        asked = [client.post(f"{app.url}/v1/completions", json=body(i), headers=ids[i]) for i in range(PROMPTS)]
        answers = [answer.json()["choices"] for answer in await asyncio.gather(*asked)]
    texts = [[choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])] for choices in answers]
    faults = Faults(app, "other")
    kinds = [faults.kill_router, faults.stop_router, faults.lose_a_node, faults.kill]
    if SECONDS:
        kinds += [faults.stop, faults.kill_draft, faults.drain_a_node, faults.redeploy]
    clients = Clients(app.url, texts, retry=True)
    await survive(app, faults, kinds, clients)
    assert clients.retried
