"""Every kind of answer through the death of the replica that is at it: real engines and HTTP, without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from app.ingress import build_asgi_app
from app.replica import load_model
from app.router import Router
from app.settings import ServingConfig
from engine.batch_engine import ContinuousBatchingEngine
from engine.tokenization import SimpleCharacterTokenizer
from tests.app.fakes import LocalEngines

CONFIG = ServingConfig(
    model="dummy",
    dtype="float32",
    max_model_len=512,
    max_batch_size=16,
    page_size=16,
    heartbeat_timeout=30,
    tool_call_parser="hermes",
)


class ToolTokenizer(SimpleCharacterTokenizer):
    """Characters, with a template for tool calls."""

    has_chat_template = True
    chat_template = "<tool_call></tool_call>"

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
        return "".join(message["content"] for message in messages)


TOKENIZER = ToolTokenizer()
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "minLength": 60, "maxLength": 80}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
MESSAGES = [{"role": "user", "content": "Tell me what the weather is like."}]
SCHEMA = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 8}},
    "required": ["words"],
    "additionalProperties": False,
}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/v1/completions", {"prompt": "plain", "max_tokens": 90, "ignore_eos": True}),
    "n": ("/v1/completions", {"prompt": ["first", "second"], "n": 3, "max_tokens": 60, "ignore_eos": True}),
    "logprobs": ("/v1/completions", {"prompt": "some", "logprobs": 3, "max_tokens": 90, "ignore_eos": True}),
    "prompt_logprobs": (
        "/v1/completions",
        {"prompt": "a prompt", "prompt_logprobs": 2, "max_tokens": 60, "ignore_eos": True},
    ),
    "penalties": (
        "/v1/completions",
        {"prompt": "more", "frequency_penalty": 1.5, "repetition_penalty": 1.3, "max_tokens": 90, "min_tokens": 80},
    ),
    "stop": ("/v1/completions", {"prompt": "until", "stop": ["zz", "qx"], "max_tokens": 300}),
    "grammar": ("/v1/completions", {"prompt": "json", "guided_json": SCHEMA, "max_tokens": 300}),
    "regex": ("/v1/completions", {"prompt": "digits", "guided_regex": "[0-9]{70,90}", "max_tokens": 200}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "n": 2, "logprobs": True, "max_tokens": 80}),
    "tool": ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}),
    "native": ("/generate", {"prompt": "native", "max_new_tokens": 80, "ignore_eos": True}),
    "batch": ("/batch_generate", {"prompts": ["a", "b", "c"], "max_new_tokens": 50, "ignore_eos": True}),
}


def real_engine() -> Any:
    return ContinuousBatchingEngine.from_serving_config(CONFIG, load_model(CONFIG, TOKENIZER), TOKENIZER)


@asynccontextmanager
async def service() -> AsyncIterator[tuple[LocalEngines, httpx.AsyncClient]]:
    engines = LocalEngines(CONFIG)
    engines.add("a", real_engine())
    router = Router(CONFIG, engines, TOKENIZER)
    try:
        while not router.ready:
            await asyncio.sleep(0.01)
        transport = httpx.ASGITransport(build_asgi_app(router))
        async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60) as client:
            yield engines, client
    finally:
        await router.close()
        engines.close()


async def answer(client: httpx.AsyncClient, path: str, body: dict[str, Any], request_id: str = "the-one") -> Any:
    """The answer, without what depends on the time; a stream's text by choice."""
    response = await client.post(path, json=body, headers={"x-request-id": request_id})
    assert response.status_code == 200, response.text
    if body.get("stream"):
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"], lines.count("[DONE]")
    result = response.json()
    for name in ("created", "usage"):
        result.pop(name, None)
    for choice in result.get("choices", []):
        for call in choice.get("message", {}).get("tool_calls") or []:
            call.pop("id")
    return result


def same(one: Any, other: Any) -> bool:
    """Equal, but for rounding in log-probabilities: batches differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-4
    return bool(one == other)


async def killed_on_the_way(engines: LocalEngines, tokens: int) -> None:
    """Kills the first replica when it has given out so many tokens, at which another one is there."""
    name, other = next(iter(engines.replicas)), f"{len(engines.calls)}"
    engine: Any = engines.engine(name)
    before = engine.stats().generated_tokens
    while engine.stats().generated_tokens < before + tokens:
        await asyncio.sleep(0.001)
    engines.add(other, real_engine())
    engines.kill(name)


@pytest.mark.parametrize("kind", REQUESTS)
async def test_the_same_answer(kind: str) -> None:
    """Of a request without a seed, too: it follows from the request id, so that a client's own retry is safe."""
    path, body = REQUESTS[kind]
    async with service() as (engines, client):
        expected = await answer(client, path, body)
        assert same(await answer(client, path, body), expected)
        if kind not in ("stop", "grammar", "tool"):
            assert not same(await answer(client, path, body, "another"), expected)
        kill = asyncio.create_task(killed_on_the_way(engines, 20))
        assert same(await answer(client, path, body), expected)
        await kill
        [survivor] = engines.replicas.values()
        assert survivor.engine.stats().finished_requests > 0


def _texts(events: list[dict[str, Any]], read: Callable[[dict[str, Any]], Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for event in events:
        assert "error" not in event
        for choice in event.get("choices", []):
            found.setdefault(choice["index"], []).append(read(choice))
    return found


async def test_the_same_streams() -> None:
    body = {**REQUESTS["n"][1], "logprobs": 2, "stream": True}

    def text(choice: dict[str, Any]) -> str:
        return str(choice["text"])

    def logprobs(choice: dict[str, Any]) -> list[float]:
        return list(choice["logprobs"]["token_logprobs"]) if choice["logprobs"] else []

    async with service() as (engines, client):
        expected, done = await answer(client, "/v1/completions", body)
        kill = asyncio.create_task(killed_on_the_way(engines, 100))
        got, done_again = await answer(client, "/v1/completions", body)
        await kill
    assert done == done_again == 1
    for index, parts in _texts(expected, text).items():
        assert "".join(parts) == "".join(_texts(got, text)[index])
        scores = sum(_texts(expected, logprobs)[index], [])
        assert len(scores) == 60
        assert sum(_texts(got, logprobs)[index], []) == pytest.approx(scores, abs=1e-4)


def _said(events: list[dict[str, Any]]) -> dict[Any, str]:
    """All that a stream's events say, by choice and by call."""
    found: dict[Any, str] = {}
    for event in events:
        assert "error" not in event
        for choice in event["choices"]:
            said = choice.get("delta", choice)
            parts = [("text", said.get("text") or said.get("content")), ("end", choice["finish_reason"])]
            for call in said.get("tool_calls") or []:
                function = call["function"]
                parts.append((call["index"], (function.get("name") or "") + (function.get("arguments") or "")))
            for where, part in parts:
                found[choice["index"], where] = found.get((choice["index"], where), "") + (part or "")
    return found


@pytest.mark.parametrize("kind", ["chat", "grammar", "regex", "tool", "stop"])
async def test_the_same_when_streamed(kind: str) -> None:
    path, body = REQUESTS[kind]
    async with service() as (engines, client):
        expected, done = await answer(client, path, {**body, "stream": True})
        kill = asyncio.create_task(killed_on_the_way(engines, 20))
        got, done_again = await answer(client, path, {**body, "stream": True})
        await kill
    assert done == done_again == 1
    assert _said(got) == _said(expected)
    assert _said(expected)[0, "end"]
