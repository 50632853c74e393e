"""Routers and replicas of two versions side by side, as they are while an application is deployed anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from app.ingress import build_asgi_app
from app.replica import build_engine
from app.router import Router
from app.settings import ServingConfig
from tests.app.dummy import write_adapter
from tests.app.fakes import TOKENIZER, LocalEngines
from tests.app.test_router import wait_until


def config(**options: Any) -> ServingConfig:
    common = {"model": "dummy", "dtype": "float32", "max_model_len": 256, "num_threads": 1, "max_batch_size": 4}
    return ServingConfig.from_options({**common, "api_key": "operator", "heartbeat_timeout": 30, **options})


class Cluster:
    def __init__(self) -> None:
        self.engines = LocalEngines(config())

    def add_engine(self, name: str, version: ServingConfig, **described: Any) -> None:
        self.engines.config = version
        engine, description = build_engine(version)
        self.engines.add(name, engine, description | described)  # type: ignore[arg-type]

    @asynccontextmanager
    async def router(self, version: ServingConfig) -> AsyncIterator[Client]:
        router = Router(version, self.engines, TOKENIZER)
        self.engines.routers.append(router)
        transport = httpx.ASGITransport(build_asgi_app(router))
        headers = {"Authorization": "Bearer operator"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers, timeout=60) as http:
            yield Client(router, http)
        if router in self.engines.routers:
            self.engines.routers.remove(router)
        await router.close()


class Client:
    def __init__(self, router: Router, http: httpx.AsyncClient) -> None:
        self.router = router
        self.http = http

    async def text(self, model: str | None = None) -> str | int:
        """What the model says, or the status of its refusal."""
        body = {"model": model, "prompt": "tell me", "max_tokens": 10, "temperature": 0, "ignore_eos": True}
        answer = await self.http.post("/v1/completions", json=body)
        return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.status_code

    async def change(self, what: str, name: str, path: Path | None = None) -> None:
        body = {"lora_name": name} | ({} if path is None else {"lora_path": str(path)})
        (await self.http.post(f"/v1/{what}_lora_adapter", json=body)).raise_for_status()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.engines.close()


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("adapter") for _ in range(2)]
    for seed, folder in enumerate(folders):
        write_adapter(folder, seed)
    return folders


@pytest.mark.parametrize(("old", "new"), ((64, 256), (256, 128)))
async def test_a_router_believes_the_replicas_of_its_own_version(cluster: Cluster, old: int, new: int) -> None:
    versions = config(max_model_len=old), config(max_model_len=new)
    cluster.add_engine("old", versions[0], sampling_defaults={"temperature": 0.6})
    async with cluster.router(versions[1]) as client:
        await client.router.described()
        assert client.router.max_model_len == old  # nobody else is there
        cluster.add_engine("new", versions[1], sampling_defaults={"temperature": 0.2})
        await wait_until(lambda: client.router.max_model_len == new)
        cluster.engines.kill("old")
        assert client.router.sampling_defaults == {"temperature": 0.2}
        answer = await client.http.post("/v1/completions", json={"prompt": "x" * 100, "max_tokens": new - 100})
        assert answer.status_code == 200
        cluster.add_engine("late", versions[0])
        await wait_until(lambda: any(link.is_open for name, link in client.router._links.items() if name == "late"))
        assert client.router.max_model_len == new


async def test_a_router_leaves_replicas_of_another_model_alone(cluster: Cluster) -> None:
    """Its token ids would mean something else there."""
    versions = config(), config(revision="other")
    cluster.add_engine("old", versions[0])
    async with cluster.router(versions[0]) as before, cluster.router(versions[1]) as after:
        settled = asyncio.create_task(after.router.settled())
        asked = asyncio.create_task(after.text())
        assert isinstance(await before.text(), str)
        await wait_until(lambda: any(link.task.done() for link in after.router._links.values()))
        assert not asked.done() and not after.router.ready and not settled.done()
        read = cluster.engines.replicas["old"].engine.stats().prompt_tokens
        cluster.add_engine("new", versions[1])
        assert isinstance(await asked, str)
        await settled
        assert cluster.engines.replicas["old"].engine.stats().prompt_tokens == read
        cluster.engines.kill("old")
        await wait_until(lambda: not before.router.ready)
        assert isinstance(await after.text(), str)


async def test_configured_adapters_are_those_of_the_version(cluster: Cluster, adapters: list[Path]) -> None:
    versions = [config(adapters=[f"pirate={path}"], max_adapters=2) for path in adapters]
    cluster.add_engine("old", versions[0])
    async with cluster.router(versions[0]) as before:
        old = await before.text("pirate")
        async with cluster.router(versions[1]) as after, cluster.router(config()) as without:
            assert isinstance(await after.text("pirate"), str) and await without.text("pirate") == 404
            cluster.add_engine("new", versions[1])
            cluster.engines.kill("old")
            new = await after.text("pirate")
            assert isinstance(new, str) and new != old
            assert [each.path for each in cluster.engines.replicas["new"].engine.adapters().values()] == [
                str(adapters[1])
            ]


async def test_adapters_of_run_time_outlive_every_replica(cluster: Cluster, adapters: list[Path]) -> None:
    """With one engine a new version's Router is there before its engine, and the old Router goes before that."""
    versions = config(max_adapters=1), config(max_adapters=1, max_queued_requests=9)
    cluster.add_engine("old", versions[0])
    async with cluster.router(versions[0]) as before:
        await before.change("load", "poet", adapters[0])
        poet = await before.text("poet")
        cluster.engines.kill("old")
        router = cluster.router(versions[1])
        after = await router.__aenter__()
        await wait_until(lambda: "poet" in after.router.adapters)
    cluster.add_engine("new", versions[1])
    assert await after.text("poet") == poet
    await router.__aexit__(None, None, None)


async def test_a_router_asks_every_replica_for_adapters(cluster: Cluster, adapters: list[Path]) -> None:
    version = config(max_adapters=1)
    cluster.add_engine("a", version)
    async with cluster.router(version) as client:
        await client.change("load", "poet", adapters[0])
        poet = await client.text("poet")
    cluster.add_engine("b", version)
    cluster.engines.replicas = dict(reversed(cluster.engines.replicas.items()))
    async with cluster.router(version) as client:
        await wait_until(lambda: "poet" in client.router.adapters)
        assert await client.text("poet") == poet


async def test_of_two_changes_the_later_one_counts(
    cluster: Cluster, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = config(max_adapters=1)
    cluster.add_engine("a", version)
    async with cluster.router(version) as first, cluster.router(version) as other:
        await first.change("load", "poet", adapters[0])
        changes, *version = await first.router.adapter_changes()
        early = (dict(changes), *version)
        await first.change("unload", "poet")
        await other.router.set_adapters(*early)  # who was asked before the unload, and answered after it
        assert await first.text("poet") == await other.text("poet") == 404
        monkeypatch.setattr("app.router.time", SimpleNamespace(time=lambda: 0.0, monotonic=time.monotonic))
        await first.change("load", "poet", adapters[0])
        await other.change("unload", "poet")  # whose clock is behind
        assert await first.text("poet") == await other.text("poet") == 404


async def test_run_time_adapters_of_another_model_or_configuration_are_not_taken(
    cluster: Cluster, adapters: list[Path]
) -> None:
    one = config(adapters=[f"pirate={adapters[0]}"], max_adapters=2)
    cluster.add_engine("one", one)
    async with cluster.router(one) as client:
        await client.change("load", "poet", adapters[0])
        await client.change("unload", "pirate")
        versions = {
            ("pirate", "poet"): config(adapters=[f"pirate={adapters[1]}"], max_adapters=2),
            ("poet",): config(max_adapters=1),
            (): config(max_adapters=1, revision="other"),
            (None,): config(),
        }
        for expected, version in versions.items():
            async with cluster.router(version) as later:
                await asyncio.sleep(0.2)
                await client.change("load", "poet", adapters[0])
                assert sorted(later.router.adapters) == [name for name in expected if name]
