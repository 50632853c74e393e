"""The whole path over real HTTP: many clients, clients that leave, several Routers, Serve's own commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Cluster, Deployed, wait_until


def body(seed: int, tokens: int) -> dict[str, Any]:
    return {"prompt": f"client {seed}", "max_tokens": tokens, "seed": seed, "ignore_eos": True, "stream": True}


async def read(client: httpx.AsyncClient, url: str, seed: int, tokens: int, events: int | None = None) -> list[str]:
    """The data lines of a stream; the connection is closed after `events` of them."""
    lines: list[str] = []
    async with client.stream("POST", f"{url}/v1/completions", json=body(seed, tokens)) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                lines.append(line.removeprefix("data: "))
            if events is not None and len(lines) == events:
                break
    return lines


def text(lines: list[str]) -> str:
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines if line != "[DONE]")


def clients() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))


def wait_for_whole_engines(app: Deployed) -> None:
    """Until no sequence is left and every page is back."""
    engines: list[dict[str, Any]] = []

    def whole() -> bool:
        engines[:] = [snapshot["engine"] for snapshot in app.snapshots()]
        return all(
            engine["running"] == engine["waiting"] == engine["held_pages"] == 0
            and engine["free_pages"] + engine["cached_pages"] == engine["total_pages"]
            for engine in engines
        )

    wait_until(whole, describe=lambda: f"{engines} {httpx.get(app.url + '/metrics', timeout=60).text}")


async def test_two_hundred_streams_half_of_them_closed(deploy: Callable[..., Deployed]) -> None:
    app = deploy(max_batch_size=64)
    async with clients() as client:
        reads = [read(client, app.url, seed, 40, events=3 if seed % 2 else None) for seed in range(200)]
        results = await asyncio.gather(*reads)
        for seed, lines in enumerate(results):
            if seed % 2:
                assert len(lines) == 3
            else:
                assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1
                assert text(lines) and '"finish_reason":"length"' in lines[-2]
        wait_for_whole_engines(app)
        alone = await read(client, app.url, 4, 40)
        assert text(alone) == text(results[4])
    page = httpx.get(f"{app.url}/metrics", timeout=60).text
    assert not [
        line for line in page.splitlines() if line.startswith("llm_http_requests_total") and 'status="5' in line
    ]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_sequence(deploy: Callable[..., Deployed], stream: bool) -> None:
    app = deploy(max_batch_size=8, max_model_len=8192)
    before = app.snapshots()[0]["engine"]
    async with clients() as client:
        request = {**body(1, 8000), "stream": stream}
        posts = [asyncio.create_task(client.post(f"{app.url}/v1/completions", json=request)) for _ in range(4)]
        await asyncio.to_thread(wait_until, lambda: app.snapshots()[0]["engine"]["running"] == 4)
        for post in posts:
            post.cancel()
        await asyncio.wait(posts)
        await asyncio.to_thread(wait_for_whole_engines, app)
    after = app.snapshots()[0]["engine"]
    assert after["aborted_requests"] - before["aborted_requests"] == 4
    assert after["generated_tokens"] - before["generated_tokens"] < 4 * 8000


def test_a_reader_that_stops_holds_nobody_back_and_is_cut_off(deploy: Callable[..., Deployed]) -> None:
    """After app.ingress.WRITE_SECONDS, once what the sockets and HAProxy hold is full."""
    app = deploy(max_batch_size=16, max_model_len=8192)

    def ask() -> str:
        answer = httpx.post(f"{app.url}/v1/completions", json={**body(1, 20), "stream": False}, timeout=60)
        return str(answer.json()["choices"][0]["text"])

    expected = ask()
    request = {"messages": [{"role": "user", "content": "much"}], "max_tokens": 5000, "n": 8, "ignore_eos": True}
    # some 90 MB, of which sockets may hold 40
    data = json.dumps({**request, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", httpx.URL(app.url).port))
        reader.sendall(head.encode() + data)
        received = reader.recv(1000)
        assert received.startswith(b"HTTP/1.1 200 ")

        def is_cut_off() -> bool:
            assert ask() == expected
            page = httpx.get(f"{app.url}/metrics", timeout=60).text.splitlines()
            cut = 'route="/v1/chat/completions",status="499"'
            return any(line.startswith("llm_http_requests_total") and cut in line for line in page)

        wait_until(is_cut_off, describe=lambda: httpx.get(f"{app.url}/metrics", timeout=60).text)
        reader.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            while part := reader.recv(1 << 20):
                received = received[-20:] + part
    assert b"[DONE]" not in received
    wait_for_whole_engines(app)
    page = httpx.get(f"{app.url}/metrics", timeout=60).text.splitlines()
    assert sum(float(line.split()[-1]) for line in page if line.startswith("llm_inflight_requests{")) == 0


async def test_several_routers_share_the_engines(deploy: Callable[..., Deployed]) -> None:
    app = deploy(num_routers=2, num_replicas=2, max_batch_size=16)

    def both() -> bool:  # each look may be either's
        page = httpx.get(f"{app.url}/metrics", timeout=60).text
        routers = set(re.findall(r'llm_http_requests_total\{replica="(Router[^"]*)"', page))
        return len(routers) == 2 and all(snapshot["pumps"] == 2 for snapshot in app.snapshots())

    await asyncio.to_thread(wait_until, both)
    async with clients() as client:
        results = await asyncio.gather(*[read(client, app.url, seed % 8, 30) for seed in range(64)])
    for seed, lines in enumerate(results):
        assert text(lines) == text(results[seed % 8])
    page = httpx.get(f"{app.url}/metrics", timeout=60).text.splitlines()
    served = [line for line in page if line.startswith('llm_http_requests_total{replica="Router')]
    assert len({line.split('replica="')[1].split('"')[0] for line in served}) == 2
    assert all(snapshot["pumps"] == 2 for snapshot in app.snapshots())
    assert all(replica["is_local"] for replica in app.replicas().values())
    same_series_in_rays_exporter(app)


def same_series_in_rays_exporter(app: Deployed) -> None:
    """As Prometheus reads both; Ray's a few seconds later."""

    def read(url: str, prefix: str) -> dict[tuple[Any, ...], float]:
        chosen = ("llm_tokens_generated_total", "llm_request_duration_seconds_bucket", "llm_engine_prompt_tokens_total")
        ours = {"endpoint", "status", "replica", "le"}
        found = {}
        for family in text_string_to_metric_families(httpx.get(url, timeout=60).text):
            for name, labels, value, *_ in family.samples:
                if name.startswith(prefix) and name.removeprefix(prefix) in chosen and value:
                    found[name.removeprefix(prefix), *((k, v) for k, v in sorted(labels.items()) if k in ours)] = value
        return found

    wanted = read(f"{app.url}/metrics", "")
    assert len(wanted) > 20
    exporter = f"http://{app.cluster.call('metrics_address')}/metrics"
    wait_until(
        lambda: wanted.items() <= read(exporter, "ray_").items(),
        60,
        lambda: httpx.get(exporter, timeout=60).text[:20000],
    )
    time.sleep(30)  # Ray drops gauges that nobody sets for 20
    assert wanted.items() <= read(exporter, "ray_").items()


def test_an_open_proxy_without_a_key_is_refused_by_the_builder(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match="unknown option max_bach_size: did you mean max_batch_size"):
        cluster.call("deploy", options={"model": "dummy", "max_bach_size": 4}, wait=False)
