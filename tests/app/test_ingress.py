"""Routes, streams, errors and disconnects, through the real application and the official client."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from app import ingress
from app.ingress import build_asgi_app
from app.logs import access_log, configure_access_log, emit_server_config
from app.router import GenerationError, Overloaded, Unavailable
from engine.schemas import GenerationRequest
from tests.app.edge import ANSWER, ScriptedRouter, events, http, openai_client

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def samples(page: str, name: str) -> dict[tuple[str, ...], float]:
    """Label values (replica aside, in the order of label names) -> value, of one metric."""
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and sample.labels["replica"] == "router-1":
                labels = sorted((k, v) for k, v in sample.labels.items() if k != "replica")
                found[tuple(v for _, v in labels)] = sample.value
    return found


# --- the official client


async def test_chat() -> None:
    router = ScriptedRouter()
    async with openai_client(router) as api:
        answer = await api.chat.completions.create(model="Tiny", messages=CHAT, temperature=0, max_tokens=31)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == "Tiny"
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    prompt = router.tokenizer.encode_chat(CHAT)
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 31)
    assert usage.total_tokens == len(prompt) + 31
    assert usage.prompt_tokens_details.cached_tokens == len(prompt) // 2
    assert router.requests[0].prompt_ids == prompt


async def test_chat_stream_with_usage() -> None:
    router = ScriptedRouter()
    async with openai_client(router) as api:
        stream = await api.chat.completions.create(
            model="Tiny", messages=CHAT, stream=True, stream_options={"include_usage": True}, max_tokens=20
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == ANSWER[:20]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 20
    finishes = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert finishes == [None] * (len(chunks) - 2) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_wire_format_of_a_stream() -> None:
    async with http(ScriptedRouter()) as client:
        body = {"messages": CHAT, "stream": True, "max_tokens": 3}
        response = await client.post("/v1/chat/completions", json=body)
        with_usage = await client.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [data for _, data in events(response.text)]
    assert data[-1] == "[DONE]" and data.count("[DONE]") == 1
    assert all("usage" not in json.loads(chunk) for chunk in data[:-1])
    data = [data for _, data in events(with_usage.text)]
    assert data[-1] == "[DONE]" and data.count("[DONE]") == 1
    parsed = [json.loads(chunk) for chunk in data[:-1]]
    assert [chunk["usage"] for chunk in parsed[:-1]] == [None] * (len(parsed) - 1)
    assert parsed[-1]["choices"] == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_in_every_event(path: str) -> None:
    """vLLM's extension, which guidellm asks for."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"stream": True, "n": 2, "max_tokens": 20, "stream_options": options}
    body |= {"messages": CHAT} if "chat" in path else {"prompt": "Once"}
    async with http(ScriptedRouter()) as client:
        response = await client.post(path, json=body)
        alone = await client.post(path, json={**body, "stream_options": {"continuous_usage_stats": True}})
    parsed = [json.loads(data) for _, data in events(response.text)[:-1]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in parsed]
    assert counts == sorted(counts) and counts[0] in (0, 1) and counts[-1] == counts[-2] == 40 and len(set(counts)) > 20
    last = parsed[-1]["usage"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in parsed} == {last["prompt_tokens"]}
    assert all(
        chunk["usage"]["total_tokens"] == last["prompt_tokens"] + n for chunk, n in zip(parsed, counts, strict=True)
    )
    assert alone.status_code == 400 and "needs include_usage" in alone.json()["error"]["message"]


async def test_n_choices_have_seeds_of_their_own() -> None:
    router = ScriptedRouter(lambda request: f"seed {request.seed}")
    async with openai_client(router) as api:
        both = await api.chat.completions.create(model="Tiny", messages=CHAT, n=2, seed=7)
        again = await api.chat.completions.create(model="Tiny", messages=CHAT, n=3, seed=7)
        stream = await api.chat.completions.create(model="Tiny", messages=CHAT, n=2, seed=7, stream=True)
        streamed = ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
    texts = [choice.message.content for choice in both.choices]
    assert texts[0] == "seed 7" and texts[1] != texts[0]
    assert [choice.message.content for choice in again.choices][:2] == texts == streamed
    assert both.usage is not None
    assert both.usage.prompt_tokens == len(router.tokenizer.encode_chat(CHAT)), "the prompt counts once"
    assert both.usage.completion_tokens == sum(len(text or "") for text in texts)


async def test_a_client_that_stalls_gets_every_end() -> None:
    router, messages = ScriptedRouter("ab"), []
    body = json.dumps({"prompt": "x", "n": 2, "stream": True, "max_tokens": 2}).encode()
    requests = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        return next(requests, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        messages.append(message)
        if len(messages) == 2:
            await asyncio.sleep(0.2)  # in which both come to their ends

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await build_asgi_app(router)({**scope, "http_version": "1.1"}, receive, send)  # type: ignore[arg-type]
    *events, last = b"".join(message.get("body", b"") for message in messages).decode().strip().split("\n\n")
    reasons = [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]
    assert last == "data: [DONE]"
    assert sorted(c["index"] for c in reasons if c["finish_reason"] is not None) == [0, 1]


async def test_stop() -> None:
    async with openai_client(ScriptedRouter()) as api:
        answer = await api.chat.completions.create(model="Tiny", messages=CHAT, stop=[" Paris", "Seine"])
        stream = await api.completions.create(model="Tiny", prompt="x", stop=" Paris", max_tokens=50, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert answer.choices[0].message.content == text == "The capital of France is"
    assert answer.choices[0].finish_reason == "stop"


async def test_the_makers_sampling_defaults_are_used_where_the_client_is_silent() -> None:
    router = ScriptedRouter()
    router.sampling_defaults = {"temperature": 0.6, "top_k": 20}
    async with openai_client(router) as api:
        await api.completions.create(model="Tiny", prompt="ab", temperature=0.1)
        await api.chat.completions.create(model="Tiny", messages=[{"role": "user", "content": "a"}])
    assert [(request.temperature, request.top_k) for request in router.requests] == [(0.1, 20), (0.6, 20)]


async def test_completions_prompts() -> None:
    router = ScriptedRouter(lambda request: f"[{len(request.prompt_ids or [])}]")
    ids = router.tokenizer.encode("abcd")
    async with openai_client(router) as api:
        one = await api.completions.create(model="Tiny", prompt="ab")
        many = await api.completions.create(model="Tiny", prompt=["a", "abc"], n=2, seed=1)
        tokens = await api.completions.create(model="Tiny", prompt=ids)
        lists = await api.completions.create(model="Tiny", prompt=[ids, ids[:1]])
    assert [choice.text for choice in one.choices] == ["[2]"]
    assert [(choice.index, choice.text) for choice in many.choices] == [(0, "[1]"), (1, "[1]"), (2, "[3]"), (3, "[3]")]
    assert many.usage is not None and many.usage.prompt_tokens == 4
    assert [choice.text for choice in tokens.choices] == ["[4]"]
    assert [choice.text for choice in lists.choices] == ["[4]", "[1]"]
    seeds = [request.seed for request in router.requests[1:5]]
    assert seeds[:2] == seeds[2:], "a prompt's result doesn't depend on its place in the list"
    assert len({request.request_id for request in router.requests}) == len(router.requests)


async def test_echo() -> None:
    router = ScriptedRouter("def")
    ids = router.tokenizer.encode("abc")
    async with openai_client(router) as api:
        text = await api.completions.create(model="Tiny", prompt="abc", echo=True, n=2)
        tokens = await api.completions.create(model="Tiny", prompt=ids, echo=True)
        stream = await api.completions.create(model="Tiny", prompt=["abc", "x"], echo=True, stream=True)
        streamed = ["", ""]
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        scored = await api.completions.create(model="Tiny", prompt="abc", echo=True, max_tokens=0, logprobs=1)
    assert [choice.text for choice in text.choices] == ["abcdef", "abcdef"]
    assert tokens.choices[0].text == "abcdef"
    assert streamed == ["abcdef", "xdef"]
    assert scored.choices[0].text == "abc"
    assert scored.choices[0].logprobs is not None and scored.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert scored.usage is not None and scored.usage.completion_tokens == 0


async def test_default_limits() -> None:
    router = ScriptedRouter("x" * 300)
    async with http(router) as client:
        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        await client.post("/v1/completions", json={"prompt": "hi"})
        await client.post("/generate", json={"prompt": "hi"})
        await client.post("/batch_generate", json={"prompts": ["hi"]})
        await client.post("/v1/completions", json={"prompt": "p" * 250})
    chat = len(router.tokenizer.encode_chat([{"role": "user", "content": "hi"}]))
    assert [request.max_new_tokens for request in router.requests] == [256 - chat, 16, 50, 50, 6]


async def test_models() -> None:
    async with openai_client(ScriptedRouter()) as api:
        names = [model.id async for model in api.models.list()]
        one = await api.models.retrieve("org/tiny")
        with pytest.raises(openai.NotFoundError) as missing:
            await api.models.retrieve("org/none")
        with pytest.raises(openai.NotFoundError):
            await api.chat.completions.create(model="gpt-4", messages=CHAT)
        answer = await api.chat.completions.create(model="org/tiny", messages=CHAT)
    assert names == ["Tiny", "org/tiny"] and one.id == "org/tiny" and answer.model == "org/tiny"
    assert missing.value.code == "model_not_found"


async def test_sync_client_over_a_socket() -> None:
    with served(ScriptedRouter()) as url, openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0) as api:

        def use() -> tuple[str | None, str]:
            whole = api.chat.completions.create(model="Tiny", messages=CHAT, max_tokens=10)
            stream = api.chat.completions.create(model="Tiny", messages=CHAT, max_tokens=10, stream=True)
            return whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in stream)

        whole, streamed = await asyncio.to_thread(use)
    assert whole == streamed == ANSWER[:10]


# --- errors


@pytest.mark.parametrize(
    ("failure", "kind", "status"),
    [
        (ValueError("bad_words can't be served"), openai.BadRequestError, 400),
        (Overloaded("every queue is full", 3), openai.RateLimitError, 429),
        (Unavailable("no replica is ready"), openai.InternalServerError, 503),
        (GenerationError("not finished after 1 s", 408), openai.APIStatusError, 408),
        (GenerationError("not finished after 600 s", 504), openai.InternalServerError, 504),
        (RuntimeError("a bug"), openai.InternalServerError, 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_failures_before_the_first_token_have_a_status(
    failure: Exception, kind: type[openai.APIStatusError], status: int, stream: bool, n: int
) -> None:
    async with openai_client(ScriptedRouter(lambda request: failure)) as api:
        with pytest.raises(kind) as caught:
            await api.chat.completions.create(model="Tiny", messages=CHAT, stream=stream, n=n)
    assert caught.value.status_code == status
    assert caught.value.body is not None and set(caught.value.body) == {"message", "type", "param", "code"}
    if status == 429:
        assert caught.value.response.headers["retry-after"] == "3"
    if status == 500:
        assert "a bug" not in caught.value.response.text


@pytest.mark.parametrize("n", [1, 2])
async def test_a_failure_in_mid_stream_is_an_event_and_the_end(n: int) -> None:
    router = ScriptedRouter()
    router.fail_after = 5
    async with openai_client(router) as api:
        stream = await api.chat.completions.create(model="Tiny", messages=CHAT, stream=True, n=n)
        text = ""
        with pytest.raises(openai.APIError, match="the replicas are gone"):
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
    assert ANSWER[:4] in text or n == 2
    async with http(router) as client:
        response = await client.post("/generate", json={"prompt": "x", "stream": True})
        page = (await client.get("/metrics")).text
    assert events(response.text)[-1][0] == "error"
    assert json.loads(events(response.text)[-1][1])["error"]["message"] == "the replicas are gone"
    assert "[DONE]" not in response.text and "done" not in [name for name, _ in events(response.text)]
    assert samples(page, "llm_request_duration_seconds_count")["generate", "503"] == 1


async def test_one_failed_choice_closes_the_others() -> None:
    def script(request: GenerationRequest) -> str | Exception:
        return GenerationError("lost", 503) if request.request_id.endswith("-1") else ANSWER

    router = ScriptedRouter(script)
    router.gate = asyncio.Event()
    for stream in (False, True):
        async with http(router) as client:
            response = await client.post("/v1/completions", json={"prompt": "x", "n": 3, "stream": stream})
        assert response.status_code == 503
    assert router.aborted == len(router.opened) == 4


ENVELOPES = [
    ("POST", "/v1/chat/completions", {}, 400),
    ("POST", "/v1/completions", {"prompt": []}, 400),
    ("POST", "/generate", {"prompt": ""}, 422),
    ("POST", "/generate", {"prompt": "x", "temperature": -1}, 422),
    ("POST", "/generate", {"prompt": "x", "max_new_tokens": 300}, 400),
    ("POST", "/generate", {"prompt": "x", "max_new_tokens": 4097}, 422),
    ("POST", "/generate", {"prompt": "x", "stop": ["a"] * 5}, 422),
    ("POST", "/generate", {"prompt": "x", "stop": "a" * 513}, 422),
    ("POST", "/generate", {"prompt": "x", "top_k": 0}, 422),
    ("POST", "/generate", {"prompt": "x", "top_p": 0}, 422),
    ("POST", "/generate", {"prompt": "x", "repetition_penalty": 0.5}, 422),
    ("POST", "/generate", {"prompt": "x", "presence_penalty": 2.5}, 422),
    ("POST", "/batch_generate", {"prompts": ["x"] * 33}, 422),
    ("POST", "/batch_generate", {"prompts": []}, 422),
    ("POST", "/tokenize", {}, 422),
    ("POST", "/detokenize", {"tokens": [10**6]}, 422),
    ("GET", "/generate", None, 405),
    ("DELETE", "/v1/models", None, 405),
    ("GET", "/nothing", None, 404),
    ("GET", "/v1/nothing", None, 404),
    ("GET", "/v1/models/none", None, 404),
    ("POST", "/generate", {"prompt": "x" * 5000}, 413),
    ("POST", "/v1/completions", {"prompt": "x" * 5000}, 413),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), ENVELOPES)
async def test_every_error_has_its_routes_envelope(method: str, path: str, body: Any, status: int) -> None:
    async with http(ScriptedRouter(max_body_bytes=4096)) as client:
        response = await client.request(method, path, json=body, headers={"X-Request-ID": "me"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    if path.startswith("/v1/"):
        assert set(error) == {"message", "type", "param", "code"}
    else:
        assert set(error) == {"code", "message", "details", "request_id"}
        assert error["request_id"] == "me"
    assert error["message"]
    if status == 405:
        assert response.headers["allow"]


async def test_health_and_readiness() -> None:
    router = ScriptedRouter()
    async with http(router) as client:
        assert [(await client.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]
        router.ready = False
        assert [(await client.get(path)).status_code for path in ("/health", "/ready")] == [503, 503]


async def test_deadlines() -> None:
    router = ScriptedRouter(request_timeout=60)
    async with http(router) as client:
        for body, header in (
            ({}, "5"),
            ({"timeout": 3}, "5"),
            ({"timeout": 8}, "5"),
            ({"timeout": 90}, None),
            ({}, None),
        ):
            headers = {"X-Request-Timeout-Seconds": header} if header else {}
            await client.post("/generate", json={"prompt": "x", **body}, headers=headers)
        assert [request.timeout for request in router.requests] == [5, 3, 5, None, None]
        for header in ("soon", "-1", "nan", "inf", "0"):
            response = await client.post(
                "/generate", json={"prompt": "x"}, headers={"X-Request-Timeout-Seconds": header}
            )
            assert response.status_code == 400, header


# --- native routes


async def test_generate() -> None:
    async with http(ScriptedRouter()) as client:
        response = await client.post("/generate", json={"prompt": "x", "max_new_tokens": 11, "request_id": "mine"})
        assert response.json() == {
            "request_id": "mine",
            "generated_text": ANSWER[:11],
            "token_count": 11,
            "prompt_tokens": 1,
            "finish_reason": "length",
            "stop_reason": None,
        }
        batch = await client.post("/batch_generate", json={"prompts": ["a", "bc"], "stop": " of", "seed": 3})
        results = batch.json()["results"]
        assert [result["generated_text"] for result in results] == ["The capital"] * 2
        assert [result["prompt_tokens"] for result in results] == [1, 2]


async def test_generate_stream() -> None:
    async with http(ScriptedRouter()) as client:
        response = await client.post("/generate", json={"prompt": "x", "max_new_tokens": 11, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    assert [name for name, _ in found] == ["message"] * 11 + ["done"]
    assert "".join(json.loads(data)["text"] for _, data in found[:-1]) == ANSWER[:11]
    assert json.loads(found[-1][1])["token_count"] == 11


async def test_tokenize_and_back() -> None:
    router = ScriptedRouter()
    async with http(router) as client:
        tokens = (await client.post("/tokenize", json={"prompt": "Hello"})).json()
        assert tokens == {"tokens": router.tokenizer.encode("Hello"), "count": 5, "max_model_len": 256}
        text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        assert text == {"prompt": "Hello"}
        chat = (await client.post("/tokenize", json={"messages": CHAT})).json()
        assert chat["tokens"] == router.tokenizer.encode_chat(CHAT)


async def test_long_texts_leave_the_loop() -> None:
    router = ScriptedRouter()
    router.max_model_len = 10**6
    loop_thread = threading.get_ident()
    used: dict[int, int] = {}
    encode = router.tokenizer.encode

    def spy(text: str, add_special_tokens: bool = True) -> list[int]:
        used[len(text)] = threading.get_ident()
        return encode(text, add_special_tokens)

    router.tokenizer.encode = spy
    async with http(router) as client:
        for size in (10, 100_000):
            response = await client.post("/generate", json={"prompt": "x" * size, "max_new_tokens": 1})
            assert response.status_code == 200
    assert used[10] == loop_thread and used[100_000] != loop_thread


# --- the client leaves


@pytest.mark.parametrize("server_cancels", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_disconnect_closes_every_generation(stream: bool, n: int, server_cancels: bool) -> None:
    router = ScriptedRouter()
    router.gate = asyncio.Event()
    router.free_tokens = 2 if stream else 0
    left = asyncio.Event()
    sent: list[dict[str, Any]] = []
    body = json.dumps({"prompt": "x", "n": n, "stream": stream}).encode()
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        if (part := next(parts, None)) is not None:
            return part
        await left.wait()
        if server_cancels:  # as Ray Serve does, which also says it
            asyncio.get_running_loop().call_later(0.003, call.cancel)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    app = build_asgi_app(router)  # type: ignore[arg-type]
    call = asyncio.create_task(app(scope("POST", "/v1/completions"), receive, send))
    while len(router.opened) < n or (stream and not sent):
        await asyncio.sleep(0.001)
    assert router.aborted == 0
    left.set()
    await asyncio.wait([call], timeout=5)
    assert call.cancelled() == server_cancels
    await asyncio.sleep(0.05)
    assert router.aborted == n
    assert not any(message["type"] == "http.response.body" and not message.get("more_body") for message in sent)
    async with http(router) as client:
        page = (await client.get("/metrics")).text
    assert samples(page, "llm_inflight_requests") == {(): 0}
    assert samples(page, "llm_request_duration_seconds_count") == {("completions", "499"): 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_cancellation_by_the_server_closes_it_too(stream: bool) -> None:
    router = ScriptedRouter()
    router.gate = asyncio.Event()
    async with http(router) as client:
        call = asyncio.create_task(client.post("/generate", json={"prompt": "x", "stream": stream}))
        while not router.opened:
            await asyncio.sleep(0.001)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert router.aborted == 1


async def test_disconnect_over_a_socket() -> None:
    router = ScriptedRouter()
    router.gate = asyncio.Event()
    router.free_tokens = 3
    with served(router) as url:
        async with httpx.AsyncClient() as client:
            body = {"prompt": "x", "stream": True}
            async with client.stream("POST", f"{url}/generate", json=body) as response:
                assert await anext(response.aiter_lines()) == 'data: {"text":"T"}'
        deadline = time.monotonic() + 30
        while not router.aborted and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert router.aborted == 1


# --- what operators see


async def test_metrics_agree_with_what_happened() -> None:
    router = ScriptedRouter()
    async with http(router) as client:
        await client.post("/generate", json={"prompt": "x", "max_new_tokens": 5})
        await client.post("/generate", json={"prompt": "x", "max_new_tokens": 7, "stream": True})
        await client.post("/batch_generate", json={"prompts": ["x", "y"], "max_new_tokens": 5})
        await client.post("/v1/completions", json={"prompt": "x", "n": 2, "max_tokens": 4, "stream": True})
        await client.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 3})
        await client.post("/v1/chat/completions", json={"messages": CHAT, "temperature": "hot"})
        router.fail_after = 2
        await client.post("/generate", json={"prompt": "x", "stream": True})
        await client.get("/v1/models/Tiny")
        await client.get("/v1/models/x/y/z")
        await client.get("/wp-login.php")
        page = (await client.get("/metrics")).text
    assert samples(page, "llm_tokens_generated_total") == {
        ("generate",): 5 + 7 + 2,
        ("batch_generate",): 10,
        ("completions",): 8,
        ("chat_completions",): 3,
    }
    assert samples(page, "llm_tokens_per_request_count")["generate",] == 3
    assert samples(page, "llm_tokens_per_request_sum")["generate",] == 14
    assert samples(page, "llm_request_duration_seconds_count") == {
        ("generate", "200"): 2,
        ("generate", "503"): 1,
        ("batch_generate", "200"): 1,
        ("completions", "200"): 1,
        ("chat_completions", "200"): 1,
        ("chat_completions", "400"): 1,
    }
    assert samples(page, "llm_inflight_requests") == {(): 0}
    assert samples(page, "llm_time_to_first_token_seconds_count")["generate",] == 2
    assert samples(page, "llm_inter_token_latency_seconds_count")["generate",] == 6 + 1
    routes = samples(page, "llm_http_requests_total")
    assert routes["/v1/models/{id}", "200"] == 1 and routes["/v1/models/{id}", "404"] == 1
    assert routes["other", "404"] == 1 and routes["/v1/chat/completions", "400"] == 1
    assert 'replica="engine-1"' in page


async def test_inflight_counts_while_it_runs() -> None:
    router = ScriptedRouter()
    router.gate = asyncio.Event()
    async with http(router) as client:
        call = asyncio.create_task(client.post("/generate", json={"prompt": "x"}))
        while not router.opened:
            await asyncio.sleep(0.001)
        assert samples((await client.get("/metrics")).text, "llm_inflight_requests") == {(): 1}
        router.gate.set()
        await call
        assert samples((await client.get("/metrics")).text, "llm_inflight_requests") == {(): 0}


async def test_access_log() -> None:
    stream = io.StringIO()
    before = access_log.handlers, access_log.level, access_log.propagate
    configure_access_log(stream)
    try:
        async with http(ScriptedRouter(), headers={"X-Request-ID": "me"}) as client:
            await client.post("/generate?key=secret", json={"prompt": "x", "max_new_tokens": 5})
            await client.get('/no"thing%0A{}')
    finally:
        access_log.handlers, level, access_log.propagate = before
        access_log.setLevel(level)
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first.pop("duration_ms") >= 0
    assert first == {
        "event": "request",
        "request_id": "me",
        "method": "POST",
        "path": "/generate",
        "status": 200,
        "tokens": 5,
    }
    assert (second["status"], second["path"], second["tokens"]) == (404, '/no"thing\n{}', None)
    assert logging.getLogger().handlers is not access_log.handlers


def test_server_config_line() -> None:
    stream = io.StringIO()
    emit_server_config({"model_class": "DecoderModel", "api_key_set": True}, stream)
    assert stream.getvalue() == '{"event": "server_config", "model_class": "DecoderModel", "api_key_set": true}\n'
    with pytest.raises(ValueError):
        emit_server_config({"api_key": "secret"}, stream)
    assert "secret" not in stream.getvalue()


async def test_slow_body_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "BODY_SECONDS", 0.05)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    app = build_asgi_app(ScriptedRouter())  # type: ignore[arg-type]
    await asyncio.wait_for(app(scope("POST", "/generate"), receive, send), 5)
    assert sent[0]["status"] == 408


def scope(method: str, path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [],
    }


@contextmanager
def served(router: ScriptedRouter) -> Iterator[str]:
    """The application on a real socket, in a thread."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = build_asgi_app(router)  # type: ignore[arg-type]
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield url
        finally:
            if router.gate is not None:
                router.gate.set()
            server.should_exit = True
            thread.join(10)
