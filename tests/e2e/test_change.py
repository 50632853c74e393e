"""What changes while requests run: placement by what is cached, new versions, the number of replicas."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.models.publisher import save_pretrained
from tests.app.dummy import write_adapter
from tests.e2e.conftest import Deployed, wait_until
from tests.engine.made_tokenizers import byte_level_tokenizer
from tests.engine.oracle import tiny_model

TURNS, TALKS, NEW, OUT = 5, 6, 64, 16


def clients() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None))


async def test_conversations_are_computed_once(deploy: Callable[..., Deployed]) -> None:
    """Each turn brings all the turns before it. Wherever a conversation goes, what was said is cached there."""
    app = deploy(num_replicas=2, num_routers=2, max_model_len=2048, max_batch_size=8, page_size=16)

    async def talk(number: int) -> None:
        rng = random.Random(number)
        history = ""
        for _ in range(TURNS):
            history += "".join(rng.choices("abcdefgh ", k=NEW))
            body = {"prompt": history, "max_tokens": OUT, "ignore_eos": True, "seed": number}
            answer = await client.post(f"{app.url}/v1/completions", json=body)
            history += answer.json()["choices"][0]["text"]
            await asyncio.sleep(2.5)  # a Router that had no part in it hears of it with a heartbeat

    async with clients() as client:
        await asyncio.gather(*map(talk, range(TALKS)))
    engines = [snapshot["engine"] for snapshot in app.snapshots()]
    computed = sum(engine["prompt_tokens"] - engine["cached_tokens"] for engine in engines)
    assert computed <= TALKS * TURNS * (NEW + 2 * 16)  # what is new, and what shares a page with it
    assert sum(engine["prompt_tokens"] for engine in engines) > 2.5 * computed
    assert all(engine["prompt_tokens"] for engine in engines)


class Load:
    """Clients that ask one after the other, streamed or not, and count how it ended."""

    def __init__(self, url: str, count: int, tokens: int) -> None:
        self.ends: Counter[str] = Counter()
        self.texts: dict[int, set[str]] = {}
        self._url = url
        self._tokens = tokens
        self._over = False
        self._tasks = [asyncio.create_task(self._client(i)) for i in range(count)]

    async def _client(self, number: int) -> None:
        # HAProxy closes idle connections when it is told of new replicas, whatever is on its way on them
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            while not self._over:
                try:
                    end, text = await self._ask(client, number)
                except httpx.HTTPError as error:
                    end, text = repr(error), ""
                self.ends[end] += 1
                self.texts.setdefault(number, set()).add(text)

    async def _ask(self, client: httpx.AsyncClient, number: int) -> tuple[str, str]:
        body: dict[str, Any] = {"prompt": f"client {number}", "max_tokens": self._tokens, "ignore_eos": True}
        body |= {"seed": number, "stream": number % 2 == 0}
        answer = await client.post(f"{self._url}/v1/completions", json=body)
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text[:200]}", ""
        if not body["stream"]:
            return "well", answer.json()["choices"][0]["text"]
        *events, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events if "choices" in event)
        return ("well" if done == "[DONE]" else f"cut off: {done}"), text

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)


async def test_a_new_version_and_fewer_replicas_fail_no_request(deploy: Callable[..., Deployed]) -> None:
    app = deploy(num_replicas=2, max_model_len=1024, max_batch_size=8)
    before = set(app.pids())
    load = Load(app.url, 8, 300)
    await asyncio.sleep(1)
    app.options["max_queued_requests"] = 200
    await asyncio.to_thread(app.cluster.call, "deploy", options=app.options, wait=True)
    await asyncio.to_thread(wait_until, lambda: not before & set(app.pids()))
    assert len(app.pids()) == 2
    await asyncio.sleep(1)
    await asyncio.to_thread(app.scale, 1)
    await asyncio.to_thread(wait_until, lambda: len(app.replicas()) == 1)
    await asyncio.sleep(1)
    await load.end()
    assert set(load.ends) == {"well"}, load.ends
    assert all(len(texts) == 1 for texts in load.texts.values())


@pytest.mark.timeout(600)
async def test_replicas_follow_the_queue_and_go_again(deploy: Callable[..., Deployed]) -> None:
    """And so do the drafts, one for each."""
    options = {"max_replicas": 2, "upscale_delay": 1, "downscale_delay": 2, "max_batch_size": 2, "max_model_len": 1024}
    app = deploy(**options, draft_model="dummy")

    def drafts() -> dict[int, int]:
        """Process ids of the engines that a draft is connected to, and of the drafts."""
        try:
            engines = app.snapshots()
        except RuntimeError:  # one was lost, and not all have heard of it
            return {}
        return {engine["pid"]: engine["draft"]["pid"] for engine in engines if engine["speculation"]["draft_up"]}

    first: dict[int, int] = {}
    wait_until(lambda: first.update(drafts()) or first)
    [engine] = first
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: drafts().keys() - first)  # its draft is free for the next one
    load = Load(app.url, 6, 200)
    await asyncio.to_thread(wait_until, lambda: len(app.replicas()) == 2)
    await asyncio.to_thread(wait_until, lambda: len(set(drafts().values())) == 2)
    await load.end()
    await asyncio.to_thread(wait_until, lambda: len(app.replicas()) == 1)
    await asyncio.to_thread(wait_until, lambda: len(app.cluster.processes("ServeReplica:test:DraftModel")) == 1)
    await asyncio.to_thread(wait_until, lambda: len(drafts()) == 1)
    assert set(load.ends) == {"well"}, load.ends


async def test_a_router_that_starts_later_knows_the_adapters(deploy: Callable[..., Deployed], tmp_path: Path) -> None:
    app = deploy(num_routers=2, max_adapters=1, api_key="operator")
    names = ("pirate", "poet")  # there is room for one
    options: dict[str, Any] = {"headers": {"Authorization": "Bearer operator"}, "timeout": 60}
    for seed, name in enumerate(names):
        (tmp_path / name).mkdir()
        write_adapter(tmp_path / name, seed)
        body = {"lora_name": name, "lora_path": str(tmp_path / name)}
        httpx.post(f"{app.url}/v1/load_lora_adapter", json=body, **options).raise_for_status()

    def routers() -> set[str]:
        """Those that have answered something."""
        try:
            page = httpx.get(f"{app.url}/metrics", **options).text
        except httpx.TransportError:  # it went to the one that was killed
            return set()
        return set(re.findall(r'llm_http_requests_total\{replica="(Router[^"]*)"', page))

    before: set[str] = set()
    wait_until(lambda: before.update(routers()) or len(before) == 2)
    os.kill(app.cluster.processes("ServeReplica:test:Router")[0].pid, signal.SIGKILL)
    wait_until(lambda: routers() - before)
    for name in names * 10:
        answer = httpx.post(
            f"{app.url}/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 2}, **options
        )
        assert answer.status_code == 200, answer.text


@pytest.mark.timeout(600)
async def test_models_are_not_mixed_while_one_takes_the_place_of_another(
    deploy: Callable[..., Deployed], tmp_path: Path
) -> None:
    """A Router's token ids are its own model's: the other's replicas would read something else."""
    for seed, name in enumerate(("old", "new")):
        save_pretrained(tiny_model(seed, vocab_size=402, max_seq_len=128), tmp_path / name, byte_level_tokenizer())
    app = deploy(num_replicas=2, model=str(tmp_path / "old"))
    said: Counter[tuple[str, str]] = Counter()
    over = asyncio.Event()

    async def ask(client: httpx.AsyncClient) -> tuple[str, str]:
        body = {"prompt": "hello", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        answer = await client.post(f"{app.url}/v1/completions", json=body, headers={"Connection": "close"})
        if answer.status_code != 200:
            return str(answer.status_code), answer.text
        return answer.json()["model"], answer.json()["choices"][0]["text"]

    async def ask_on(client: httpx.AsyncClient) -> None:
        while not over.is_set():
            said[await ask(client)] += 1

    async with clients() as client:
        old = await ask(client)
        asking = [asyncio.create_task(ask_on(client)) for _ in range(4)]
        before = set(app.pids())
        app.options["model"] = str(tmp_path / "new")
        await asyncio.to_thread(app.cluster.call, "deploy", options=app.options, wait=True)
        await asyncio.to_thread(wait_until, lambda: not before & set(app.pids()))
        over.set()
        await asyncio.gather(*asking)
        new = await ask(client)
    assert (old[0], new[0]) == ("old", "new") and old[1] != new[1]
    refused = {each for each in said if each[0] == "503"}  # who came too late for the old ones, and too early
    assert said.keys() - refused <= {old, new} and sum(said[each] for each in refused) <= 8, said
