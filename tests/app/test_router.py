"""The Router and EngineReplica with engines of a few lines, in one process and without Ray."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from app.ingress import build_asgi_app
from app.metrics import render
from app.placement import ReplicaGone
from app.replica import EngineReplica, load_model
from app.router import GenerationError, Overloaded, Router, TextGeneration, Unavailable
from app.settings import ServingConfig
from engine.batch_engine import ContinuousBatchingEngine
from engine.schemas import FinishReason, GenerationRequest
from tests.app.fakes import TOKENIZER, FakeEngine, LocalEngines, expected_tokens


@pytest.fixture(autouse=True)
def fast_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineReplica, "heartbeat_interval", 0.05)


@pytest.fixture
async def engines() -> AsyncIterator[LocalEngines]:
    config = ServingConfig(model="dummy", heartbeat_timeout=0.5, max_batch_size=64, max_queued_requests=8)
    engines = LocalEngines(config)
    yield engines
    for gate in engines.frozen.values():
        gate.set()
    for replica in engines.replicas.values():
        replica.engine.gate.set()  # type: ignore[attr-defined]
    engines.close()


@pytest.fixture
async def router(engines: LocalEngines) -> AsyncIterator[Router]:
    router = Router(engines.config, engines, TOKENIZER)
    yield router
    await router.close()


def request(prompt: str = "hello", **fields: object) -> GenerationRequest:
    fields = {"max_new_tokens": 20, "seed": 5, **fields}
    return GenerationRequest(prompt_ids=TOKENIZER.encode(prompt), **fields)  # type: ignore[arg-type]


async def read(generation: TextGeneration) -> str:
    return "".join([chunk.text async for chunk in generation])


def failovers(router: Router) -> float:
    samples = [sample for family in router.metrics.families() for sample in family.samples]
    return next(sample.value for sample in samples if sample.name == "llm_failovers_total")


async def wait_until(condition: object) -> None:
    async with asyncio.timeout(60):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_a_stream_is_the_tokens_of_the_engine(router: Router, engines: LocalEngines) -> None:
    engines.add("a")
    asked = request()
    generation = await router.open(asked)
    tokens, text = [], ""
    async for chunk in generation:
        tokens += chunk.token_ids
        text += chunk.text
    assert tokens == expected_tokens(asked) == generation.result.token_ids
    assert text == TOKENIZER.decode(expected_tokens(asked)) == generation.result.text
    assert generation.result.finish_reason is FinishReason.LENGTH
    assert (generation.result.prompt_tokens, generation.result.cached_tokens) == (5, 4)
    assert generation.result.request_id == asked.request_id


async def test_chunks_merge_for_a_slow_reader(router: Router, engines: LocalEngines) -> None:
    engines.add("a")
    asked = request(max_new_tokens=100)
    generation = await router.open(asked)
    await wait_until(lambda: generation._outcome is not None)
    chunks = [chunk async for chunk in generation]
    assert len(chunks) == 1
    assert chunks[0].token_ids == expected_tokens(asked)


async def test_collect_equals_reading(router: Router, engines: LocalEngines) -> None:
    engines.add("a")
    for stop in ([], ["!never there!"]):
        result = await (await router.open(request(stop=stop))).collect()
        assert result.token_ids == expected_tokens(request())


async def test_a_stop_string_cuts_and_aborts(router: Router, engines: LocalEngines) -> None:
    engine = engines.add("a", FakeEngine(step_time=0.005))
    asked = request(max_new_tokens=200)
    whole = TOKENIZER.decode(expected_tokens(asked))
    stop = whole[30:33]
    cut = whole.index(stop)
    generation = await router.open(asked.model_copy(update={"stop": [stop]}))
    assert await read(generation) == whole[:cut]
    result = generation.result
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, stop)
    assert result.token_ids == expected_tokens(asked)[: cut + 3]
    assert result.cached_tokens == 4  # from the reply of the aborted call
    await wait_until(lambda: not engine.rows)
    assert engine.aborts == 1


async def test_what_can_never_fit_is_a_value_error(router: Router, engines: LocalEngines) -> None:
    engines.add("a")
    with pytest.raises(ValueError, match="prompt of 5 tokens and max_new_tokens 300 .* context of 256"):
        await router.open(request(max_new_tokens=300))
    with pytest.raises(ValueError, match="bad_words"):
        await router.open(request(bad_words=["x"]))
    assert not router._live


async def test_full_queues_say_when_to_come_back(router: Router, engines: LocalEngines) -> None:
    engines.add("a", FakeEngine(limit=3, step_time=0.01))
    engines.add("b", FakeEngine(limit=3, step_time=0.01))
    await wait_until(lambda: len([link for link in router._links.values() if link.is_usable]) == 2)
    first = [await router.open(request(max_new_tokens=200)) for _ in range(6)]
    with pytest.raises(Overloaded) as refused:
        await router.open(request())
    assert refused.value.retry_after >= 1
    for generation in first:
        await generation.aclose()


async def test_the_router_bounds_what_it_holds(router: Router, engines: LocalEngines) -> None:
    engine = engines.add("a")
    await wait_until(lambda: router.ready)
    engine.gate.clear()
    opens = [asyncio.create_task(router.open(request())) for _ in range(72)]
    await asyncio.sleep(0.1)
    with pytest.raises(Overloaded):
        await router.open(request())
    for task in opens:
        task.cancel()
    engine.gate.set()
    await asyncio.wait(opens)
    await wait_until(lambda: not router._live and not engine.rows)


async def test_no_replica_is_unavailable(router: Router) -> None:
    with pytest.raises(Unavailable):
        await router.open(request())
    assert (await router.alive())[0] is False


async def test_a_request_waits_while_there_is_a_replica(router: Router, engines: LocalEngines) -> None:
    """One that takes longer to connect than heartbeat_timeout, as on a busy machine; not one that went."""
    engines.add("a")
    await wait_until(lambda: router.ready)
    engines.frozen["a"].clear()
    await wait_until(lambda: not router.ready)
    waiting = asyncio.create_task(router.open(request()))
    await asyncio.sleep(3 * engines.config.heartbeat_timeout)
    assert not waiting.done()
    engines.frozen["a"].set()
    assert len((await (await waiting).collect()).token_ids) == 20
    engines.kill("a")
    with pytest.raises(Unavailable):
        await router.open(request())


async def test_before_the_first_replica_http_says_503(router: Router) -> None:
    transport = httpx.ASGITransport(build_asgi_app(router))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        for path, body in [
            ("/v1/completions", {"prompt": "a", "max_tokens": 3}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/generate", {"prompt": "a"}),
        ]:
            assert (await client.post(path, json=body)).status_code == 503
        assert (await client.get("/ready")).status_code == 503


async def test_closing_aborts_in_the_engine(router: Router, engines: LocalEngines) -> None:
    engine = engines.add("a", FakeEngine(step_time=0.01))
    generation = await router.open(request(max_new_tokens=200))
    await anext(generation)
    await generation.aclose()
    await generation.aclose()
    await wait_until(lambda: not engine.rows)
    assert engine.aborts == 1
    assert not router._live
    with pytest.raises(StopAsyncIteration):
        await anext(generation)


async def test_cancelling_open_aborts_in_the_engine(router: Router, engines: LocalEngines) -> None:
    engine = engines.add("a")
    await wait_until(lambda: router.ready)
    engine.gate.clear()
    opening = asyncio.create_task(router.open(request()))
    await wait_until(lambda: engine.rows)
    opening.cancel()
    engine.gate.set()
    await wait_until(lambda: not engine.rows and not router._live)


async def test_a_deadline_ends_a_request_and_frees_the_engine(router: Router, engines: LocalEngines) -> None:
    engine = engines.add("a", FakeEngine(step_time=0.05))
    with pytest.raises(GenerationError) as ended:
        await read(await router.open(request(max_new_tokens=200, timeout=0.3)))
    assert ended.value.status == 408
    await wait_until(lambda: not engine.rows)


async def test_a_deadline_in_the_queue() -> None:
    """Who waits in vain is told in time, even by an engine that stands still, and takes neither a place nor a step."""
    config = ServingConfig(
        model="dummy", dtype="float32", max_model_len=256, max_batch_size=1, max_queued_requests=1, heartbeat_timeout=30
    )
    engine = ContinuousBatchingEngine.from_serving_config(config, load_model(config, TOKENIZER), TOKENIZER)
    engines = LocalEngines(config)
    moves, step = threading.Event(), engine.step

    def gated() -> object:
        if engine.stats().running:
            moves.wait()
        return step()

    engine.step = gated  # type: ignore[method-assign]
    engines.add("a", engine)  # type: ignore[arg-type]
    router = Router(config, engines, TOKENIZER)
    body = {"prompt": "first", "max_tokens": 200, "ignore_eos": True}
    transport = httpx.ASGITransport(build_asgi_app(router))  # type: ignore[arg-type]
    try:
        await wait_until(lambda: router.ready)
        async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60) as client:
            first = asyncio.create_task(client.post("/v1/completions", json=body))
            await wait_until(lambda: engine.stats().running)
            late = await client.post("/v1/completions", json=body, headers={"x-request-timeout-seconds": "0.2"})
            assert late.status_code == 408
            assert late.json()["error"]["message"] == "the request wasn't finished after 0.2 s"
            moves.set()
            await wait_until(lambda: not engine.stats().waiting)
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert (await first).json()["usage"]["completion_tokens"] == 200
        stats = engine.stats()
        assert (stats.aborted_requests, stats.generated_tokens) == (1, 400)
    finally:
        moves.set()
        await router.close()
        engines.close()


async def test_a_killed_replica_costs_nothing_but_time(router: Router, engines: LocalEngines) -> None:
    engines.add("a", FakeEngine(step_time=0.005))
    engines.add("b", FakeEngine(step_time=0.005))
    await wait_until(lambda: len([link for link in router._links.values() if link.is_usable]) == 2)
    asked = [request(f"prompt {i}", max_new_tokens=240, seed=i) for i in range(16)]
    generations = [await router.open(each) for each in asked]
    assert {link.load for link in router._links.values()} == {8}
    reads = [asyncio.create_task(read(generation)) for generation in generations]
    await asyncio.sleep(0.1)
    engines.kill("a")
    texts = await asyncio.gather(*reads)
    for each, text, generation in zip(asked, texts, generations, strict=True):
        assert text == TOKENIZER.decode(expected_tokens(each))
        assert generation.result.token_ids == expected_tokens(each)
        assert generation.result.prompt_tokens == len(each.prompt_ids or [])
    assert failovers(router) == 8
    resumed = [each for each in engines.engine("b").added if each.attempt == 1]
    assert len(resumed) == 8
    assert all(each.output_ids for each in resumed)


async def test_the_last_replica_dies_and_comes_back(router: Router, engines: LocalEngines) -> None:
    engines.add("a", FakeEngine(step_time=0.005))
    asked = request(max_new_tokens=100)
    generation = await router.open(asked)
    await anext(generation)
    engines.kill("a")
    await asyncio.sleep(0.2)
    engines.add("c")
    assert (await generation.collect()).token_ids == expected_tokens(asked)


async def test_a_frozen_replica_loses_its_requests_and_is_not_believed(router: Router, engines: LocalEngines) -> None:
    engines.add("a", FakeEngine(step_time=0.01))
    asked = request(max_new_tokens=150)
    generation = await router.open(asked)
    engines.frozen["a"].clear()
    engines.add("b")
    assert (await generation.collect()).token_ids == expected_tokens(asked)
    assert failovers(router) == 1
    engines.frozen["a"].set()  # it wakes, and has tokens of the old attempt in its pump
    await wait_until(lambda: all(link.is_usable for link in router._links.values()))
    assert (await (await router.open(asked)).collect()).token_ids == expected_tokens(asked)


async def test_a_lone_silent_replica_keeps_its_requests(router: Router, engines: LocalEngines) -> None:
    engines.add("a", FakeEngine(step_time=0.01))
    asked = request(max_new_tokens=50)
    generation = await router.open(asked)
    engines.frozen["a"].clear()
    await asyncio.sleep(1.0)
    engines.frozen["a"].set()
    assert (await generation.collect()).token_ids == expected_tokens(asked)
    assert failovers(router) == 0


async def test_a_leaving_replica_ends_its_streams_and_then_loses_its_pump(
    router: Router, engines: LocalEngines
) -> None:
    engines.add("a", FakeEngine(step_time=0.01))
    asked = request(max_new_tokens=200)
    generation = await router.open(asked)
    engines.add("b")
    await wait_until(lambda: "b" in router._links and router._links["b"].is_usable)
    engines.leave("a")
    await wait_until(lambda: "a" not in router._links)
    assert (await (await router.open(request())).collect()).token_ids == expected_tokens(request())
    assert len(engines.engine("b").added) == 1
    assert engines.replicas["a"]._pumps
    assert (await generation.collect()).token_ids == expected_tokens(asked)
    await wait_until(lambda: not engines.replicas["a"]._pumps)
    assert failovers(router) == 0


async def test_an_idle_leaving_replica_loses_its_pump_at_once(router: Router, engines: LocalEngines) -> None:
    engines.add("a")
    engines.add("b")
    await wait_until(lambda: len([link for link in router._links.values() if link.is_usable]) == 2)
    engines.leave("a")
    await wait_until(lambda: not engines.replicas["a"]._pumps)


async def test_an_attempt_is_taken_once(engines: LocalEngines) -> None:
    """Serve may send a unary call a second time when a connection breaks."""
    engines.add("a")
    replica = engines.replicas["a"]
    pump = replica.pump(3)
    await anext(pump)
    tag = 3 << 40 | 1
    asked = request()
    first = await replica.generate(asked, tag)
    assert first.token_ids == expected_tokens(asked)  # type: ignore[union-attr]
    second = await replica.generate(asked, tag)
    assert (second.status, second.message) == (0, "this attempt was here before")  # type: ignore[union-attr]
    assert (await replica.generate(asked, 4 << 40)).message == "no pump is open for this tag"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="taken"):
        await anext(replica.pump(3))
    await pump.aclose()  # type: ignore[attr-defined]
    assert not replica._pumps


async def test_two_routers_share_a_replica(router: Router, engines: LocalEngines) -> None:
    engines.add("a", FakeEngine(step_time=0.005))
    other = Router(engines.config, engines, TOKENIZER)
    try:
        await wait_until(lambda: other.ready)
        asked = [request(f"{i}", max_new_tokens=50, seed=i) for i in range(6)]
        opened = [await (router, other)[i % 2].open(each) for i, each in enumerate(asked)]
        for each, generation in zip(asked, opened, strict=True):
            assert (await generation.collect()).token_ids == expected_tokens(each)
    finally:
        await other.close()


async def test_a_dead_engine_thread_is_unhealthy_and_its_requests_move(router: Router, engines: LocalEngines) -> None:
    broken = engines.add("a", FakeEngine(step_time=0.01))
    asked = request(max_new_tokens=100)
    generation = await router.open(asked)
    engines.replicas["a"].check_health()
    broken.step = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    engines.add("b")
    assert (await generation.collect()).token_ids == expected_tokens(asked)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        engines.replicas["a"].check_health()


async def test_a_seed_follows_from_the_request_id(router: Router, engines: LocalEngines) -> None:
    engine = engines.add("a")
    for request_id in ("one", "two", "one"):
        await (await router.open(request(seed=None, request_id=request_id))).collect()
    first, second, retry = [each.seed for each in engine.added]
    assert None not in (first, second) and first != second and first == retry


async def test_an_engine_without_a_step_loses_its_requests(router: Router, engines: LocalEngines) -> None:
    router.config = engines.config.model_copy(update={"step_timeout": 0.3})
    stuck = engines.add("a", FakeEngine(step_time=0.01))
    asked = request(max_new_tokens=100)
    generation = await router.open(asked)
    stuck.gate.clear()  # its process lives and its pump beats
    engines.add("b")
    assert (await generation.collect()).token_ids == expected_tokens(asked)
    assert failovers(router) == 1
    assert not router._links["a"].is_usable
    for _ in range(3):
        await (await router.open(request())).collect()
    assert len(engines.engine("b").added) == 4
    stuck.gate.set()
    await wait_until(lambda: router._links["a"].is_usable and not stuck.rows)


async def test_a_request_that_kills_replicas_ends_with_one_error(router: Router, engines: LocalEngines) -> None:
    transport = httpx.ASGITransport(build_asgi_app(router))
    engines.add("0", FakeEngine(step_time=0.01))
    await wait_until(lambda: router.ready)
    killed = 0

    async def killer() -> None:
        nonlocal killed
        while True:
            await wait_until(lambda: any(engines.engine(name).rows for name in engines.replicas))
            await asyncio.sleep(0.05)
            [name] = engines.replicas
            engines.kill(name)
            killed += 1
            engines.add(str(killed), FakeEngine(step_time=0.01))

    task = asyncio.create_task(killer())
    async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60) as client:
        body = {"prompt": "deadly", "max_tokens": 200, "ignore_eos": True, "stream": True}
        answer = await client.post("/v1/completions", json=body)
    task.cancel()
    events = [line for line in answer.text.splitlines() if line]
    assert killed == 5
    assert [line for line in events if '"error"' in line] == events[-1:]
    assert "5 attempts were lost with their replicas" in events[-1]


async def test_losses_far_apart_are_not_in_a_row(
    router: Router, engines: LocalEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.router.PROGRESS", 20)
    engines.add("0", FakeEngine(step_time=0.01))
    wanted = request(max_new_tokens=240)
    generation = await router.open(wanted)
    for i in range(1, 7):
        had = len(generation._received)
        await wait_until(lambda: len(generation._received) >= had + 22)  # noqa: B023
        engines.add(str(i), FakeEngine(step_time=0.01))
        await wait_until(lambda: str(i) in router._links and router._links[str(i)].is_usable)  # noqa: B023
        engines.kill(str(i - 1))
    assert (await generation.collect()).token_ids == expected_tokens(wanted)
    assert failovers(router) == 6


async def test_streams_that_move_wait_for_room(router: Router, engines: LocalEngines) -> None:
    """What was let in is not sent away later, however full the others are."""
    for name in ("a", "b"):
        engines.add(name, FakeEngine(step_time=0.01, limit=6))
    await wait_until(lambda: sum(link.is_usable for link in router._links.values()) == 2)
    wanted = [request(max_new_tokens=60, seed=i) for i in range(10)]
    generations = [await router.open(each) for each in wanted]
    assert {generation._at[0] for generation in generations if generation._at} == {"a", "b"}
    engines.kill("b")
    results = await asyncio.gather(*(generation.collect() for generation in generations))
    assert [result.token_ids for result in results] == [expected_tokens(each) for each in wanted]


@pytest.mark.parametrize("leaves", (True, False))
async def test_a_stop_string_where_nobody_can_be_asked(
    leaves: bool, router: Router, engines: LocalEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica is on its way out, where Serve reaches it no more, or has died with the stop among unread tokens."""
    engine = engines.add("a", FakeEngine(step_time=0.005))
    wanted = request(max_new_tokens=240)
    whole = TOKENIZER.decode(expected_tokens(wanted))
    call = engines.call

    async def pinned(replica_id: str, method: str, *args: Any) -> Any:
        if leaves and method == "abort":
            raise ReplicaGone(replica_id)
        return await call(replica_id, method, *args)

    monkeypatch.setattr(engines, "call", pinned)
    generation = await router.open(wanted.model_copy(update={"stop": [whole[30:34]]}))
    if not leaves:
        await wait_until(lambda: len(generation._received) > 60)
        engines.kill("a")
        await asyncio.sleep(0.1)
    assert await read(generation) == whole[: whole.index(whole[30:34])]
    assert generation.result.finish_reason is FinishReason.STOP
    if leaves:
        await wait_until(lambda: not engine.rows)
        assert len(generation._received) < 200


async def test_sessions_stay_on_their_replica(router: Router, engines: LocalEngines) -> None:
    for name in "abc":
        engines.add(name)
    await wait_until(lambda: len([link for link in router._links.values() if link.is_usable]) == 3)
    transport = httpx.ASGITransport(build_asgi_app(router))
    async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60) as client:
        for i in range(40):
            headers = {"x-session-id": f"session {i % 10}"}
            body = {"prompt": f"{i % 10}", "max_new_tokens": 2, "request_id": f"{i}"}
            assert (await client.post("/generate", json=body, headers=headers)).status_code == 200
    homes = [{tuple(each.prompt_ids or []) for each in engines.engine(name).added} for name in "abc"]
    assert sum(map(len, homes)) == 10
    assert all(homes)


async def test_whoever_is_turned_away_is_told_of_another_place(
    router: Router, engines: LocalEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.add("a", FakeEngine(limit=4, step_time=0.01))
    await wait_until(lambda: router.ready)
    for _ in range(6):
        await (await router.open(request(max_new_tokens=20))).collect()
    opened = [await router.open(request(max_new_tokens=200)) for _ in range(4)]
    now = time.monotonic()
    assert len(router._ended) == 6
    router._ended.clear()
    router._ended.extend(now - 1.2 + 0.2 * i for i in range(6))
    monkeypatch.setattr("app.router.time", SimpleNamespace(monotonic=lambda: now))
    waits = []
    for _ in range(20):
        with pytest.raises(Overloaded) as refused:
            await router.open(request())
        waits.append(refused.value.retry_after)
    assert waits == sorted(waits) and waits[0] == 1 and waits[-1] == 4  # 0.2 s each
    for generation in opened:
        await generation.aclose()


async def test_a_slow_reader_holds_nobody_back_and_is_cut_off(
    router: Router, engines: LocalEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ingress.WRITE_SECONDS", 0.5)
    engine = engines.add("a", FakeEngine(step_time=0.005))
    await wait_until(lambda: router.ready)
    app = build_asgi_app(router)
    body = json.dumps({"prompt": "slow", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    taken: list[Any] = []
    gone = asyncio.Event()
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        if (part := next(parts, None)) is not None:
            return part
        await gone.wait()

    async def send(message: Any) -> None:
        taken.append(message)
        if len(taken) > 2:
            await gone.wait()  # a full socket

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    slow = asyncio.create_task(app(scope, receive, send))  # type: ignore[arg-type]
    await wait_until(lambda: len(taken) > 2)
    asked = request(max_new_tokens=50)
    assert (await (await router.open(asked)).collect()).token_ids == expected_tokens(asked)
    await asyncio.wait([slow], timeout=5)
    assert slow.done() and slow.exception() is None
    assert len(taken) == 3
    await wait_until(lambda: not router._live and not engine.rows)


async def test_metrics_of_all_processes_come_together(router: Router, engines: LocalEngines) -> None:
    engines.add("a")
    engines.add("b")
    await wait_until(lambda: len([link for link in router._links.values() if link.is_usable]) == 2)
    page = render(await router.snapshot()).decode()
    assert 'llm_failovers_total{replica="Router"} 0.0' in page
    for name in ("a", "b"):
        assert page.count(f'llm_requests_running{{replica="{name}"}} 0.0') == 1
