"""Whatever is sent, the answer is a 4xx with a message or a result; never a 500, and the server lives on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.schemas.native import BatchGenerateBody, DetokenizeBody, GenerateBody, TokenizeBody
from app.schemas.openai import ChatCompletionRequest, CompletionRequest
from tests.app.edge import ScriptedRouter, http
from tests.app.test_ingress import served

ROUTES = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "hi"}]}, ChatCompletionRequest),
    "/v1/completions": ({"prompt": "x"}, CompletionRequest),
    "/generate": ({"prompt": "x"}, GenerateBody),
    "/batch_generate": ({"prompts": ["x"]}, BatchGenerateBody),
    "/tokenize": ({"prompt": "x"}, TokenizeBody),
    "/detokenize": ({"tokens": [5]}, DetokenizeBody),
}

BODIES = [
    b"",
    b" ",
    b"null",
    b"5",
    b'"x"',
    b"[]",
    b"{",
    b"{}",
    b'{"prompt": ',
    b'{"prompt": "x",}',
    b"{'prompt': 'x'}",
    b'{"prompt": "x"} trailing',
    b'{"prompt": "\xff\xfe"}',
    b'\xef\xbb\xbf{"prompt": "x"}',
    '{"prompt": "x"}'.encode("utf-16"),
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00 x"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "temperature": -1e308}',
    b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
    b'{"prompt": "x", "seed": 18446744073709551615}',
    b'{"prompt": "x", "max_tokens": 9223372036854775807}',
    b'{"prompt": "x", "max_new_tokens": -9223372036854775808}',
    b'{"prompt": [99999999999999999999]}',
    b'{"prompt": "x", "logit_bias": {"99999999999999999999": 1}}',
    b'{"prompt": "x", "logit_bias": {"' + b"9" * 10_000 + b'": 1}}',
    b'{"prompt": "x", "priority": 1e30}',
    b'{"prompt": "x", "timeout": 1e308, "stop": [[]]}',
    b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    b'{"prompt": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
    b'{"messages": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    b'{"messages": [{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]}",
    b'{"metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b', "prompt": 5}',
    b'{"' + b"k" * 100_000 + b'": 1}',
    b"{" + b",".join(b'"k%d": 1' % i for i in range(10_000)) + b"}",
    b"\x00" * 1000,
    b"\x1f\x8b\x08\x00",
]


@pytest.mark.parametrize("path", ROUTES)
async def test_malformed_bodies(path: str) -> None:
    async with http(ScriptedRouter()) as client:
        for body in BODIES:
            response = await client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert 400 <= response.status_code < 500, (body[:80], response.text)
            error = response.json()["error"]
            assert error["message"] and len(response.content) < 1000, body[:80]
        for content_type in (
            "text/plain",
            "multipart/form-data; boundary=x",
            "application/json; charset=utf-16",
            "\xff",
        ):
            response = await client.post(path, content=b"x=1", headers={"Content-Type": content_type.encode("latin-1")})
            assert response.status_code == 400
        assert (await client.post(path, json=ROUTES[path][0])).status_code == 200


async def test_strange_text_is_only_text() -> None:
    async with http(ScriptedRouter()) as client:
        for text in ("\x00", "\u202e", "\ufffe", "🏳️‍🌈" * 20, "{{ 7 * 7 }}", "<|im_end|>", "a\u0300" * 50, "\U0010ffff"):
            for path, body in (
                ("/generate", {"prompt": text}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
                ("/v1/completions", {"prompt": text, "echo": True, "logprobs": 2}),
            ):
                response = await client.post(path, json=body)
                assert response.status_code == 200, (text, response.text)


@pytest.mark.parametrize("path", ROUTES)
async def test_big_bodies(path: str) -> None:
    """413 for what is announced or turns out to be over the limit, and no more than four times the limit is taken."""
    router = ScriptedRouter(max_body_bytes=1 << 20)
    async with http(router) as client:
        taken = 0

        async def chunks() -> Any:
            nonlocal taken
            for _ in range(320):
                taken += 1 << 16
                yield b" " * (1 << 16)

        streamed = await client.post(path, content=chunks())
        announced = await client.post(path, content=b"{}", headers={"Content-Length": str(5 << 20)})
        absurd = await client.post(path, content=b"{}", headers={"Content-Length": "9" * 5000})
        assert [r.status_code for r in (streamed, announced, absurd)] == [413, 413, 413]
        assert taken <= (4 << 20) + 2 * (1 << 16)
        assert all(r.headers["connection"] == "close" for r in (streamed, announced, absurd))
        assert (await client.post(path, json=ROUTES[path][0])).status_code == 200


async def test_long_prompts() -> None:
    text = "lorem ipsum " * 9000
    async with http(ScriptedRouter()) as client:
        for path, body in (
            ("/generate", {"prompt": text}),
            ("/v1/completions", {"prompt": text}),
            ("/v1/completions", {"prompt": [5] * 100_000}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):
            response = await client.post(path, json=body)
            assert response.status_code == 400
            assert "context" in response.json()["error"]["message"]
        too_long = await client.post("/generate", json={"prompt": "x" * 256_001})
        assert too_long.status_code == 422 and len(too_long.content) < 500


ODD_PATHS = [
    "//generate",
    "/generate/",
    "/Generate",
    "/GENERATE",
    "/generate%2f",
    "/%2fgenerate",
    "/./generate",
    "/x/../generate",
    "/generate;a=b",
    "/v1//models",
    "/v1/models/",
    "/v1",
    "/v1/",
    "/v1/chat/completions/",
    "/v1/models/%00",
    "/v1/models/..%2f..%2fetc%2fpasswd",
    "/v1/models/%ff%fe",
    "/%ff",
    "/%00",
    "/%",
    "/%zz",
    "/" + "a/" * 2000,
]


async def test_odd_paths() -> None:
    with served(ScriptedRouter()) as url:
        for path in ODD_PATHS:
            for method in ("GET", "POST", "PATCH"):
                status, body = await asyncio.to_thread(raw_request, url, method, path)
                assert status in (404, 405), (method, path, status)
                assert json.loads(body)["error"]["message"]


def raw_request(url: str, method: str, path: str) -> tuple[int, bytes]:
    """A request whose path nobody tidies up on the way."""
    import http.client

    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    connection.putrequest(method, path, skip_accept_encoding=True)
    connection.putheader("Content-Length", "0")
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body


async def test_many_hostile_requests_leave_the_server_serving() -> None:
    router = ScriptedRouter()
    with served(router) as url:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            calls = [client.post(path, content=body) for path in ROUTES for body in BODIES]
            statuses = {response.status_code for response in await asyncio.gather(*calls)}
            assert all(400 <= status < 500 for status in statuses)
            answer = await client.post("/generate", json={"prompt": "x"})
    assert answer.status_code == 200


async def test_a_silent_client_doesnt_hold_up_others() -> None:
    with served(ScriptedRouter()) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.post("/generate", json={"prompt": "x"})).status_code == 200
        writer.close()
        await writer.wait_closed()


# --- fuzz

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["user", "assistant", "text", "Tiny", "none", "auto"]),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=5) | st.sampled_from(["role", "content", "type", "text", "5"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@st.composite
def bodies(draw: Any) -> tuple[str, Any]:
    path = draw(st.sampled_from(sorted(ROUTES)))
    base, schema = ROUTES[path]
    names = sorted({*schema.model_fields, *schema.inert, "unknown"})
    fields = draw(st.dictionaries(st.sampled_from(names), values, max_size=4))
    return path, {**base, **fields} if draw(st.booleans()) else fields


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(bodies())
@example(("/v1/completions", {"prompt": "x", "n": 2, "stream": True, "echo": True}))
@example(("/v1/chat/completions", {"messages": [{"role": "assistant"}], "chat_template_kwargs": {"tools": 1}}))
def test_no_body_makes_a_500(case: tuple[str, Any]) -> None:
    path, body = case

    async def post() -> httpx.Response:
        async with http(ScriptedRouter()) as client:
            return await client.post(path, content=orjson.dumps(body) if encodable(body) else json.dumps(body))

    response = asyncio.run(post())
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


def encodable(body: Any) -> bool:
    try:
        orjson.dumps(body)
    except TypeError:  # an integer beyond 64 bits, or a lone surrogate
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(ROUTES)), st.binary(max_size=200))
def test_no_bytes_make_a_500(path: str, data: bytes) -> None:
    async def post() -> httpx.Response:
        async with http(ScriptedRouter()) as client:
            return await client.post(path, content=data)

    assert 400 <= asyncio.run(post()).status_code < 500


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(
        ["authorization", "x-api-key", "x-request-id", "x-request-timeout-seconds", "content-length", "host"]
    ),
    st.binary(max_size=200),
)
def test_no_header_makes_a_500(name: str, value: bytes) -> None:
    async def post() -> httpx.Response:
        async with http(ScriptedRouter(api_key="k")) as client:
            keys = {} if name == "authorization" else {"Authorization": b"Bearer k"}
            headers = {**keys, name: value}
            return await client.post("/generate", content=b'{"prompt": "x"}', headers=headers)

    response = asyncio.run(post())
    assert response.status_code == 200 or 400 <= response.status_code < 500
    assert len(response.headers.get_list("x-request-id")) == 1
