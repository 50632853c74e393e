"""A server with a key, open to the network, and clients that mean no good: over real HTTP, through every hop."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from app.settings import is_loopback
from tests.app.test_hostile import BODIES, ODD_PATHS, ROUTES
from tests.e2e.conftest import Server, listening, llm_serve, wait_until

KEY = "k-5f1c"
AUTH = {"Authorization": f"Bearer {KEY}"}
PROMPT = {"prompt": "hello", "max_tokens": 4, "seed": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--host", "0.0.0.0", "--max-model-len", "8192", "--max-batch-size", "4")
    with llm_serve(*flags, LLM_SERVING_API_KEY=KEY) as server:
        before = actors(server)
        yield server
        assert actors(server) == before  # none had to be started again


def actors(server: Server) -> set[int]:
    found = set()
    for process in server.tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            if re.match("ray::(ServeReplica|ProxyActor)", process.name()):
                found.add(process.pid)
    return found


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=AUTH, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def serves_on(server: Server, client: httpx.Client) -> Iterator[None]:
    """After whatever was sent the server answers, and nothing is left in it."""
    yield
    assert client.post("/v1/completions", json=PROMPT).status_code == 200
    names = ("requests_running", "requests_waiting", "inflight_requests", "kv_cache_usage_ratio")
    wait_until(lambda: all(gauges(client, name) == {0.0} for name in names), 60, lambda: client.get("/metrics").text)
    assert 'status="5' not in client.get("/metrics").text
    assert not [line for line in server.lines if "Traceback" in line or '"status":5' in line]


def gauges(client: httpx.Client, name: str) -> set[float]:
    """The values of a gauge in all processes."""
    values = re.findall(rf"^llm_{name}\{{.*\}} (.*)$", client.get("/metrics").text, re.M)
    assert values
    return set(map(float, values))


def connect(server: Server, port: int | None = None) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port or int(server.url.rpartition(":")[2])), timeout=60)


def send(server: Server, data: bytes, method: str = "GET", port: int | None = None) -> tuple[int, bytes]:
    """The status, the headers and the body of the answer to these bytes."""
    with connect(server, port) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        response = http.client.HTTPResponse(connection, method=method)
        response.begin()
        return response.status, response.msg.as_bytes() + response.read()


def request(method: str, path: str, body: bytes = b"", *headers: str, key: bool = True) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}", *headers]
    if key:
        lines.append(f"X-API-Key: {KEY}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


# --- bodies


def test_bodies_that_are_no_request(client: httpx.Client) -> None:
    for path in ROUTES:
        for body in BODIES:
            answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert 400 <= answer.status_code < 500, (path, body[:80], answer.text)
            assert answer.json()["error"]["message"] and len(answer.content) < 1000, body[:80]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"prompt": 5}, "prompt"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": "4"}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 4.5}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "temperature": True}, "temperature"),
        ("/v1/completions", {"prompt": "x", "n": 10**9}, "n"),
        ("/v1/completions", {"prompt": "x", "stop": ["a"] * 10_000}, "stop"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias.x"),
        ("/v1/completions", {"prompt": "x", "seed": 2**80}, "seed"),
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "root", "content": "hi"}]}, "messages.0.role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ("/generate", {"prompt": "x", "stream": "yes"}, "stream"),
        ("/batch_generate", {"prompts": ["x"] * 33}, "prompts"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/detokenize", {"tokens": ["x"]}, "tokens.0"),
    ],
)
def test_wrong_values_are_named(client: httpx.Client, path: str, body: dict[str, Any], named: str) -> None:
    answer = client.post(path, content=json.dumps(body))
    assert answer.status_code in (400, 422)
    error = answer.json()["error"]
    assert (error["param"] if path.startswith("/v1") else error["details"]["param"]) == named, error


def test_prompts_beyond_the_context(client: httpx.Client) -> None:
    text = "lorem ipsum " * 8400  # 100,800 characters
    for path, body in (
        ("/generate", {"prompt": text}),
        ("/v1/completions", {"prompt": text, "stream": True}),
        ("/v1/completions", {"prompt": [5] * 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and "the context is 8192 tokens" in answer.text


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_of_5_mb(client: httpx.Client, chunked: bool) -> None:
    data = b'{"prompt": "' + b"x" * (5 << 20) + b'"}'
    for path in ROUTES:
        parts = (data[i : i + 65536] for i in range(0, len(data), 65536))
        answer = client.post(path, content=parts if chunked else data)
        assert answer.status_code == 413 and "larger than 4194304 bytes" in answer.json()["error"]["message"]
        parts = (data[i : i + 65536] for i in range(0, len(data), 65536))
        answer = client.post(path, content=parts if chunked else data, headers={"Authorization": "Bearer wrong"})
        assert answer.status_code == 403


# --- keys

PATHS = [
    *("/", "/metrics", "/docs", "/redoc", "/openapi.json", "/v1", "/v1/models", "/v1/models/dummy", "/generate"),
    *("/-/routes", "/-/routes/", "//-/routes", "/-/ROUTES", "/%2d/routes", "/-/healthz/x", "/-/", "/stats", "/haproxy"),
    *("/haproxy?stats", "/;csv", "/api/serve/applications/", "/api/version", "/logs", "/nodes", "/dashboard"),
    *("//metrics", "/metrics/", "/./metrics", "/health/../metrics", "/health/..%2fmetrics", "/health%2f..%2fmetrics"),
    *("/ready//../v1/models", "/%6detrics", "/METRICS", "/metrics;x", "/metrics?x=/health", "/health/", "/Ready"),
    *("http://x/metrics", "http://x/health/../metrics", "/../../etc/passwd", "*", "/playground", "/static/index.html"),
]
NO_KEYS = [
    "X-Nothing: 1",
    "Authorization: Bearer",
    "Authorization: Bearer ",
    f"Authorization: Basic {KEY}",
    f"Authorization: {KEY}",
    "Authorization: Bearer wrong",
    f"Authorization: Bearer {KEY}x",
    f"Authorization: Bearer {KEY} {KEY}",
    "Authorization: Bearer kéy",
    "X-API-Key: \xff\xfe",
    "X-API-Key: ",
    "X-API-Key: null",
    "X-API-Key: " + "k" * 8000,
    f"Cookie: api_key={KEY}",
    "X-Original-URL: /health",
    "X-Forwarded-Prefix: /health",
]


def test_nothing_is_readable_without_the_key(server: Server) -> None:
    for method in ("GET", "POST", "HEAD", "OPTIONS"):
        for path in PATHS:
            status, rest = send(server, request(method, path, key=False), method)
            assert status in (401, 404) or status == 400 and b"Bad request" in rest, (method, path, status, rest)
            assert b"dummy" not in rest and b"llm_" not in rest and b"pilotfish" not in rest, (path, rest)
    for header in NO_KEYS:
        for path in ("/metrics", "/v1/models", f"/v1/models?api_key={KEY}"):
            status, rest = send(server, request("GET", path, b"", header, key=False))
            assert status in (401, 403), (header, path, status, rest)
            assert b'"message"' in rest
    for path in ("/health", "/ready", "/-/healthz"):  # the last is Serve's, for load balancers
        status, rest = send(server, request("GET", path, key=False))
        assert status == 200 and KEY.encode() not in rest
    assert httpx.get(server.url + "/-/healthz", timeout=60).text == "success"


def test_no_other_port_tells_a_stranger_more(server: Server) -> None:
    """Whatever of the server is reachable from other machines and speaks HTTP."""
    speaking = 0
    for _, ip, port in listening(server.tree()):
        if is_loopback(ip):
            continue
        with contextlib.suppress(httpx.HTTPError):  # gRPC is tested with llm-serve
            httpx.get(f"http://127.0.0.1:{port}/", timeout=10)
            speaking += 1
            for path in PATHS:
                status, rest = send(server, request("GET", path, key=False), port=port)
                assert status in (400, 401, 404), (port, path, rest)
                assert b"dummy" not in rest and b"pilotfish" not in rest, (port, path, rest)
    assert speaking >= 2  # HAProxy and what is behind it


# --- requests


def test_odd_paths(server: Server) -> None:
    for path in [*ODD_PATHS, "/-/routes", "/-/routes/", "//-/healthz", "*", "x", "http://x/x", "/ready/x"]:
        for method in ("GET", "POST"):
            status, rest = send(server, request(method, path), method)
            assert status in (400, 404, 405), (method, path, status)
            assert b'"message"' in rest or b"<h1>40" in rest or b"Path '" in rest, rest


def test_methods(server: Server) -> None:
    for method in ("BREW", "PUT", "DELETE", "TRACE", "CONNECT", "OPTIONS", "PATCH", "PROPFIND", "X" * 500, "g-t"):
        for path in ("/v1/models", "/generate", "/health"):
            status, rest = send(server, request(method, path), method)
            assert status in (400, 405), (method, path, status)
            assert b'"message"' in rest or b"<h1>400" in rest or b"Invalid HTTP" in rest, rest


def test_websockets_are_refused(server: Server) -> None:
    upgrade = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    for path in ("/", "/v1/chat/completions", "/health", "/-/routes", "/-/healthz", "/%2d/routes"):
        for key in (False, True):
            data = request("GET", path, b"", *upgrade, key=key).replace(b"Connection: close", b"Connection: Upgrade")
            status, _ = send(server, data)
            assert 400 <= status < 500 or (path, status) == ("/-/healthz", 200), (path, status)


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n\r\n\r\nx\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500 + b"\r\n\r\n",  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /generate HTTP/1.1\r\nHost: x\r\nBad Header: x\r\n\r\n",
        b"GET /generate HTTP/1.1\r\nHost: x\r\n: x\r\n\r\n",
        b"GET /generate HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n",
        b"GET /generate HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 2\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, gzip\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"A%d: x\r\n" % i for i in range(10_000)) + b"\r\n",
    ],
    ids=lambda data: repr(data[:60]),
)
def test_what_is_hardly_http(server: Server, data: bytes) -> None:
    status, rest = send(server, data)
    assert 400 <= status < 500 and rest, (status, rest)


def test_one_request_is_not_two(server: Server) -> None:
    """A body that two readers would end at different places can't hide a request with no key of its own."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    for framing in (
        "Content-Length: 4\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 4",
        "Transfer-Encoding : chunked",
        "Transfer-Encoding: \x0bchunked",
        "Transfer-Encoding: xchunked",
        "Content-Length: 4\r\nContent-Length: 0",
        "Content-Length: +4",
    ):
        head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\n{framing}\r\n\r\n".encode("latin-1")
        _, rest = send(server, head + b"0\r\n\r\n" + hidden)
        assert b'"dummy"' not in rest, framing


def test_header_floods(server: Server) -> None:
    """More than HAProxy's buffer is its 400; below that, up to a hundred headers, is served."""
    for count, size, expected in ((90, 100, {200}), (101, 10, {200, 400}), (1000, 50, {400}), (1, 60_000, {400})):
        flood = [f"X-Flood-{i}: {'a' * size}" for i in range(count)]
        status, rest = send(server, request("GET", "/v1/models", b"", *flood))
        assert status in expected and rest, (count, size, status)


# --- time


def dripped(server: Server, head: bytes) -> int:
    """The status that a client gets who sends a byte a second."""
    begin = time.monotonic()
    with connect(server) as connection:
        connection.sendall(head)
        connection.settimeout(1)
        while time.monotonic() - begin < 120:
            try:
                answer = connection.recv(4096)
                assert answer.startswith(b"HTTP/1.1 "), answer
                return int(answer.split()[1])
            except TimeoutError:
                connection.sendall(b" ")
    pytest.fail("nothing came")


def test_slow_clients_are_sent_away_and_hold_up_nobody(server: Server, client: httpx.Client) -> None:
    """Silent ones, some that drip, and one that never reads its stream, whose sequences run to their ends."""
    headers = b"GET /health HTTP/1.1\r\nHost: x\r\nA: "
    body = request("POST", "/tokenize").replace(b"Content-Length: 0", b"Content-Length: 100000") + b"{"
    wanted = {"messages": [{"role": "user", "content": "x"}], "n": 4, "max_tokens": 1500, "ignore_eos": True}
    wanted |= {"stream": True, "logprobs": True, "top_logprobs": 20}  # more megabytes than the sockets' buffers hold
    with concurrent.futures.ThreadPoolExecutor(8) as pool, contextlib.ExitStack() as silent:
        slow = [pool.submit(dripped, server, head) for head in (headers, body) for _ in range(4)]
        for data in (b"", headers, body):
            for _ in range(100):
                silent.enter_context(connect(server)).sendall(data)
        reader = silent.enter_context(socket.socket())
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        reader.sendall(request("POST", "/v1/chat/completions", json.dumps(wanted).encode()))
        wait_until(lambda: max(gauges(client, "requests_running")) > 0)
        assert client.post("/v1/completions", json=PROMPT).status_code == 200
        wait_until(lambda: gauges(client, "requests_running") == {0.0})
        assert gauges(client, "inflight_requests") == {0.0, 1.0}  # the stream waits for its reader
        assert client.post("/v1/completions", json=PROMPT).status_code == 200
        assert {future.result() for future in slow} == {408}


def test_clients_that_leave_at_every_moment(server: Server) -> None:
    whole = request("POST", "/v1/completions", json.dumps({**PROMPT, "max_tokens": 500, "stream": True}).encode())
    for length in range(1, len(whole), 7):
        with connect(server) as connection:
            connection.sendall(whole[:length])
    for wait in (0.0, 0.01, 0.05, 0.2):
        for reset in (False, True):
            with connect(server) as connection:
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
                connection.sendall(whole)
                time.sleep(wait)
