"""An hour of traffic in fast motion, through the real application, Router and engines, without Ray: what the metrics
say afterwards is what the clients counted themselves, aborts, errors, refusals and failovers included."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp, Message

from app import metrics as metrics_module
from app.ingress import build_asgi_app
from app.replica import EngineReplica, build_engine
from app.router import Router
from app.settings import ServingConfig
from engine.models.decoder import DecoderModel
from tests.app.edge import events
from tests.app.fakes import TOKENIZER, LocalEngines
from tests.app.test_router import wait_until

KEY = "a key"
LONG = 1900  # tokens that nobody waits for
NAMES = {
    "/generate": "generate",
    "/batch_generate": "batch_generate",
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
}


class Clients:
    """HTTP clients that count what comes of their requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.http: Counter[tuple[str, int]] = Counter()
        self.generating: Counter[tuple[str, int]] = Counter()
        self.tokens: Counter[str] = Counter()

    async def call(
        self, method: str, path: str, body: Any = None, key: str = KEY, leave_after: int | None = None
    ) -> tuple[int, str]:
        """Status and text. A client that leaves after so many parts of the body counts 499, as the server does."""
        leave, sent = asyncio.Event(), False
        status, parts = 0, []

        async def receive() -> Message:
            nonlocal sent
            if sent:
                await leave.wait()
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message["body"])
                if len(parts) == leave_after:
                    leave.set()

        headers = [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
        await self._app(scope, receive, send)
        assert status, "every request is answered"
        status = 499 if leave_after else status
        self.http[path, status] += 1
        if method == "POST" and path in NAMES:
            self.generating[NAMES[path], status] += 1
        return status, b"".join(parts).decode()

    async def chat(self, tokens: int) -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": tokens, "ignore_eos": True}
        status, text = await self.call("POST", "/v1/chat/completions", body)
        if status == 200:
            assert json.loads(text)["usage"]["completion_tokens"] == tokens
            self.tokens["chat_completions"] += tokens

    async def completions(self, tokens: int) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        body = {"prompt": "Once upon a time", "n": 2, "max_tokens": tokens, **options}
        status, text = await self.call("POST", "/v1/completions", body)
        assert status == 200
        assert json.loads(events(text)[-2][1])["usage"]["completion_tokens"] == 2 * tokens
        self.tokens["completions"] += 2 * tokens

    async def batch(self, tokens: int) -> None:
        body = {"prompts": ["a", "b", "c"], "max_new_tokens": tokens, "ignore_eos": True}
        status, text = await self.call("POST", "/batch_generate", body)
        assert status == 200, text
        self.tokens["batch_generate"] += 3 * tokens

    async def leaver(self) -> None:
        body = {"prompt": "Hi", "max_new_tokens": LONG, "ignore_eos": True, "stream": True}
        await self.call("POST", "/generate", body, leave_after=2)

    async def hasty(self) -> None:
        body = {"prompt": "Hi", "max_new_tokens": LONG, "ignore_eos": True, "timeout": 0.05}
        assert (await self.call("POST", "/generate", body))[0] == 408

    async def wrong(self) -> None:
        assert (await self.call("POST", "/generate", {"prompt": ""}))[0] == 422
        assert (await self.call("POST", "/v1/completions", {"prompt": "x", "model": "another"}))[0] == 404
        assert (await self.call("POST", "/v1/chat/completions", {}, key="wrong"))[0] == 403
        assert (await self.call("GET", "/v1/completions"))[0] == 405

    async def page(self) -> Page:
        status, text = await self.call("GET", "/metrics")
        assert status == 200
        return Page(text)


class Page:
    """What /metrics says."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def sums(self, family: str, sample: str, *labels: str) -> dict[Any, float]:
        """The values of a sample, added up for each combination of the labels, without the zeros."""
        found: Counter[Any] = Counter()
        for name, values, value, *_ in self.families[family].samples:
            if name == sample and value:
                found[tuple(values[label] for label in labels)] += value
        return dict(found)

    @property
    def gauges(self) -> dict[str, float]:
        """Every gauge that isn't 0."""
        return {
            f"{name}{labels}": value
            for family in self.families.values()
            if family.type == "gauge"
            for name, labels, value, *_ in family.samples
            if value
        }


@pytest.fixture
async def engines(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalEngines]:
    monkeypatch.setattr(EngineReplica, "heartbeat_interval", 0.05)
    monkeypatch.setattr(metrics_module, "HIT_RATIO_WINDOW", 0.1)
    options = {
        "max_batch_size": 8,
        "max_queued_requests": 12,
        "max_model_len": 2048,
        "num_threads": 1,
        "dtype": "float32",
        "api_key": KEY,
    }
    engines = LocalEngines(ServingConfig.from_options({"model": "dummy", **options}))
    yield engines
    engines.close()


async def test_an_hour(engines: LocalEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(range(100))

    async def start_replica() -> None:
        engine, _ = await asyncio.to_thread(build_engine, engines.config)
        name = f"EngineReplica:{next(names)}"
        engines.add(name, engine)  # type: ignore[arg-type]
        await wait_until(lambda: name in router._links and router._links[name].is_usable)

    router = Router(engines.config, engines, TOKENIZER, "Router:1")
    clients = Clients(build_asgi_app(router))
    aborted: dict[str, float] = {}
    lost = left = 0

    async def quiet() -> Page:
        """The page when nothing runs any more."""
        async with asyncio.timeout(30):
            while (page := await clients.page()).gauges:
                await asyncio.sleep(0.05)
        for (replica,), count in page.sums(
            "llm_engine_aborted_requests", "llm_engine_aborted_requests_total", "replica"
        ).items():
            aborted[replica] = count
        return page

    async def kill_one_in_the_middle() -> None:
        nonlocal lost
        await quiet()
        asked = [asyncio.create_task(clients.chat(60)) for _ in range(5)]
        victim = next(iter(engines.replicas))
        await wait_until(lambda: router._links[victim].attempts)
        done = [call for call in engines.calls[victim] if call.done()]  # their answers are on their way
        replies = sum(getattr(call.get_coro(), "__name__", "") == "generate" for call in done)
        lost += sum(not call.done() for _, call in router._links[victim].attempts.values()) - replies
        engines.kill(victim)
        await asyncio.gather(*asked)
        await start_replica()

    async def break_every_forward() -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("scripted")

        await quiet()
        with monkeypatch.context() as patch:
            patch.setattr(DecoderModel, "hidden_states", fail)
            await asyncio.gather(*(clients.chat(5) for _ in range(4)))

    try:
        await start_replica()
        await start_replica()
        for minute in range(60):
            tokens = 1 + minute % 7
            doing = [clients.chat(tokens), clients.chat(tokens), clients.completions(tokens)]
            if minute % 4 == 0:
                doing.append(clients.leaver())
                left += 1
            if minute % 10 == 1:
                doing.append(clients.batch(tokens))
            if minute % 6 == 5:
                doing.append(clients.wrong())
            if minute % 12 == 7:
                doing.append(clients.hasty())
                left += 1
            await asyncio.gather(*doing, clients.call("GET", "/health", key=""))
            if minute in (20, 40):
                await asyncio.gather(*(clients.chat(8) for _ in range(80)))
            if minute in (15, 30, 45):
                await kill_one_in_the_middle()
            if minute == 50:
                await break_every_forward()
        await quiet()
        page = await clients.page()
    finally:
        await router.close()

    assert lost >= 3 and clients.generating["chat_completions", 429]
    clients.http["/metrics", 200] -= 1  # a page doesn't count itself
    routes = Counter({pair: count for pair, count in clients.http.items() if count})
    counted = page.sums("llm_http_requests", "llm_http_requests_total", "route", "status")
    assert counted == {(path, str(status)): count for (path, status), count in routes.items()}
    timed = page.sums("llm_http_request_duration_seconds", "llm_http_request_duration_seconds_count", "route")
    assert sum(timed.values()) == routes.total()
    ended = page.sums("llm_request_duration_seconds", "llm_request_duration_seconds_count", "endpoint", "status")
    assert ended == {(name, str(status)): count for (name, status), count in clients.generating.items()}
    generated = page.sums("llm_tokens_generated", "llm_tokens_generated_total", "endpoint")
    assert {name: count for (name,), count in generated.items() if name != "generate"} == clients.tokens
    assert generated["generate",] < left * LONG
    assert page.sums("llm_failovers", "llm_failovers_total") == {(): lost}
    assert sum(aborted.values()) == left
    for (replica,), count in page.sums("llm_queue_wait_seconds", "llm_queue_wait_seconds_count", "replica").items():
        finished = page.sums("llm_engine_finished_requests", "llm_engine_finished_requests_total", "replica")
        assert finished[replica,] == count + 1, "the warm-up is the one that nobody asked for"
    assert clients.generating["chat_completions", 500] == 4
    assert page.sums("llm_engine_failed_requests", "llm_engine_failed_requests_total") == {(): 4}
