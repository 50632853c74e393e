"""Keys, what is public, and request ids."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import SecretStr
from starlette.types import Message, Receive, Scope, Send

from app.auth import INNER_DEADLINE_HEADER, INNER_SESSION_HEADER, HeadersMiddleware, serve_middlewares
from app.ingress import build_asgi_app
from tests.app.edge import ScriptedRouter, http, openai_client

KEY = "s3cret-ключ"

ACCEPTED = [
    {"Authorization": f"Bearer {KEY}".encode()},
    {"Authorization": f"bearer {KEY}".encode()},
    {"Authorization": f"BEARER   {KEY} ".encode()},
    {"X-API-Key": KEY.encode()},
    {"x-api-key": KEY.encode(), "Authorization": b"Basic abc"},
    {"x-api-key": KEY.encode(), "Authorization": b"Bearer wrong"},
]
MISSING = [
    {},
    {"Authorization": b"Bearer"},
    {"Authorization": b"Bearer "},
    {"Authorization": f"Basic {KEY}".encode()},
    {"Authorization": KEY.encode()},
    {"X-API-Key": b""},
]
WRONG = [
    {"Authorization": b"Bearer wrong"},
    {"Authorization": "Bearer ключ".encode()},
    {"Authorization": b"Bearer \xff\xfe\x80"},
    {"Authorization": f"Bearer {KEY}x".encode()},
    {"Authorization": f"Bearer {KEY[:-1]}".encode()},
    {"Authorization": f"Bearer Bearer {KEY}".encode()},
    {"X-API-Key": "é".encode("latin-1")},
    {"X-API-Key": b"x" * 5000},
]
PATHS = [
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("GET", "/nothing"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/Health"),
    ("GET", "/health/../metrics"),
    ("GET", "/health%2f..%2fmetrics"),
    ("GET", "/health;x"),
    ("POST", "/generate"),
    ("OPTIONS", "/v1/chat/completions"),
    ("HEAD", "/v1/models"),
]


def router() -> ScriptedRouter:
    return ScriptedRouter(api_key=KEY)


@pytest.mark.parametrize("headers", ACCEPTED)
async def test_good_keys(headers: dict[str, bytes]) -> None:
    async with http(router()) as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(("headers", "status"), [(h, 401) for h in MISSING] + [(h, 403) for h in WRONG])
async def test_bad_keys(headers: dict[str, bytes], status: int) -> None:
    async with http(router()) as client:
        response = await client.get("/v1/models", headers=headers)
        native = await client.get("/metrics", headers=headers)
    assert response.status_code == native.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert set(native.json()["error"]) == {"code", "message", "details", "request_id"}
    assert ("www-authenticate" in response.headers) == (status == 401)
    assert KEY not in response.text


async def test_an_empty_offer_is_no_key() -> None:
    guarded = ScriptedRouter(api_key=KEY, api_keys={"guest": 0})
    guarded.config.api_keys[SecretStr("")] = 0  # which the settings don't take
    async with http(guarded) as client:
        for headers, status in (({}, 401), ({"X-API-Key": "wrong"}, 403), ({"X-API-Key": " "}, 401)):
            answer = await client.get("/v1/models", headers={"Authorization": "Bearer ", **headers})
            assert answer.status_code == status


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_everything_is_denied_by_default(method: str, path: str) -> None:
    async with http(router()) as client:
        assert (await client.request(method, path)).status_code == 401
        assert (await client.request(method, path, headers={"X-API-Key": "wrong"})).status_code == 403


async def test_health_and_ready_are_public() -> None:
    async with http(router()) as client:
        for path in ("/health", "/ready", "/%68ealth"):
            assert (await client.get(path)).status_code == 200
            assert (await client.get(path, headers={"X-API-Key": b"\xff"})).status_code == 200


async def test_the_official_client() -> None:
    async with openai_client(router(), key="ascii-key") as api:
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await api.models.list()
    assert caught.value.code == "invalid_api_key"
    async with openai_client(ScriptedRouter(api_key="ascii-key"), key="ascii-key") as api:
        assert [model.id async for model in api.models.list()] == ["Tiny", "org/tiny"]


@pytest.mark.parametrize("key", [None, "", "  "])
async def test_no_key_is_no_check(key: str | None) -> None:
    async with http(ScriptedRouter(api_key=key)) as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_denied_requests_are_counted_but_cost_nothing() -> None:
    guarded = router()
    async with http(guarded) as client:
        await client.post("/generate", content=b"{" * 100)
        page = (await client.get("/metrics", headers={"X-API-Key": KEY.encode()})).text
    assert not guarded.opened
    assert 'llm_http_requests_total{replica="router-1",route="/generate",status="401"} 1.0' in page


async def test_websockets_are_closed() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/health", "headers": [], "query_string": b"", "root_path": ""}
    await build_asgi_app(ScriptedRouter())(scope, receive, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["websocket.close"]


# --- request ids and headers


@pytest.mark.parametrize("path", ["/v1/models", "/nothing", "/v1/nothing"])
@pytest.mark.parametrize("given", ["abc", "A-1_2.3:4 5", "x" * 128])
async def test_a_good_request_id_is_echoed_once(path: str, given: str) -> None:
    async with http(ScriptedRouter()) as client:
        response = await client.get(path, headers={"X-Request-ID": given})
    assert response.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize("given", [None, b"", b"x" * 129, b"\xff\xfe", "é".encode(), b"a\tb", b"a\x7f"])
async def test_another_request_id_is_replaced(given: bytes | None) -> None:
    headers = {} if given is None else {"X-Request-ID": given}
    async with http(ScriptedRouter()) as client:
        first = (await client.get("/health", headers=headers)).headers.get_list("x-request-id")
        second = (await client.get("/health", headers=headers)).headers.get_list("x-request-id")
    assert len(first) == len(second) == 1 and first != second
    assert len(first[0]) == 32 and first[0].isalnum()


async def test_streams_have_a_request_id() -> None:
    async with http(ScriptedRouter()) as client:
        response = await client.post("/generate", json={"prompt": "x", "stream": True}, headers={"X-Request-ID": "me"})
    assert response.headers.get_list("x-request-id") == ["me"]


async def test_oversized_headers_and_paths() -> None:
    async with http(ScriptedRouter()) as client:
        big = await client.get("/v1/models", headers={"X-Big": "x" * 40_000})
        many = await client.get("/v1/models", headers={f"x-{i}": "y" * 100 for i in range(400)})
        long = await client.get("/v1/models/" + "x" * 10_000)
        query = await client.get("/v1/models?" + "x" * 10_000)
    assert [r.status_code for r in (big, many, long, query)] == [431, 431, 414, 414]
    assert all(r.json()["error"]["message"] and len(r.headers.get_list("x-request-id")) == 1 for r in (big, many, long))


async def test_outside_serve_it_keeps_one_id_and_serves_headers_out() -> None:
    """Twice, with Serve's own X-Request-ID middleware in between, as in a Serve process."""
    from ray.serve._private.http_util import RequestIdMiddleware

    seen: list[dict[bytes, bytes]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    (outer,) = serve_middlewares()
    stack: Any = outer.cls(RequestIdMiddleware(HeadersMiddleware(app)), *outer.args, **outer.kwargs)
    for given in (b"me", b"\xff" * 200, None):
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b""}

        async def send(message: Message, sent: list[Message] = sent) -> None:
            sent.append(message)

        headers = [
            (b"X-Request-Disconnect-Disabled", b"?1"),
            (b"serve_multiplexed_model_id", b"\xff"),
            (b"x-session-id", b"\xff"),
            (b"x-request-timeout-seconds", b"5"),
        ]
        headers += [(b"x-request-id", given)] if given else []
        await stack({"type": "http", "path": "/", "query_string": b"", "headers": headers}, receive, send)
        ids = [value for name, value in sent[0]["headers"] if name.lower() == b"x-request-id"]
        assert len(ids) == 1 and seen[-1][b"x-request-id"] == ids[0]
        assert (ids[0] == given) == (given == b"me")
        assert set(seen[-1]) == {b"x-request-id", INNER_DEADLINE_HEADER, INNER_SESSION_HEADER}


async def test_what_serve_would_tell_anybody_is_not_told() -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError(scope["path"])

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    for root in ("", "/mounted"):
        scope = {"type": "http", "path": f"{root}/-/routes", "root_path": root, "headers": []}
        await HeadersMiddleware(app)(scope, receive, send)
        assert sent[-2]["status"] == 404
    await HeadersMiddleware(app)({"type": "websocket", "path": "/-/routes", "headers": []}, receive, send)
    assert sent[-1]["type"] == "websocket.close"


async def test_a_key_says_how_early_its_requests_may_run() -> None:
    guarded = ScriptedRouter(api_key=KEY, api_keys={"batch": 10, "vip": -5})
    async with http(guarded) as client:
        for key, priority in [("batch", None), ("batch", -100), ("batch", 20), ("vip", None), (KEY, -100), (KEY, None)]:
            body = {"prompt": "x", **({} if priority is None else {"priority": priority})}
            for path in ("/v1/completions", "/generate"):
                answer = await client.post(path, json=body, headers={"x-api-key": key.encode()})
                assert answer.status_code == 200
        assert (await client.post("/generate", json=body, headers={"x-api-key": b"bat"})).status_code == 403
    assert [request.priority for request in guarded.requests[::2]] == [10, 10, 20, -5, -100, 0]
    assert [request.priority for request in guarded.requests[1::2]] == [10, 10, 20, -5, -100, 0]
