"""Adapters by the request's `model`, loaded and dropped through HTTP, with real engines and no Ray."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.ingress import build_asgi_app
from app.replica import build_engine
from app.router import Router
from app.settings import ConfigError, ServingConfig
from engine.batch_engine import ContinuousBatchingEngine
from tests.app.dummy import write_adapter
from tests.app.fakes import TOKENIZER, LocalEngines


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of the dummy model, strong enough to change what it says."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("pirate", "poet", "judge")}
    for seed, folder in enumerate(folders.values()):
        write_adapter(folder, seed)
    return folders


class Server:
    """Two replicas with a static adapter, a Router, and a client with the operator's key."""

    def __init__(self, config: ServingConfig) -> None:
        self.config = config

    async def start(self) -> None:
        self.engines = LocalEngines(self.config)
        for name in ("r1", "r2"):
            await self.add(name)
        self.router = Router(self.config, self.engines, TOKENIZER)
        self.engines.routers.append(self.router)
        self.client = self.client_of(self.router)

    def client_of(self, router: Router) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(build_asgi_app(router))
        headers = {"Authorization": "Bearer operator"}
        return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers, timeout=60)

    async def add(self, name: str) -> None:
        engine, description = await asyncio.to_thread(build_engine, self.config)
        self.engines.add(name, engine, description)  # type: ignore[arg-type]

    def engine(self, name: str) -> ContinuousBatchingEngine:
        return self.engines.replicas[name].engine

    async def text(self, model: str | None, **options: Any) -> str:
        body = {"prompt": "tell me", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "model": model} | options
        answer = await self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    async def change(self, path: str, body: dict[str, Any], **options: Any) -> tuple[int, str]:
        answer = await self.client.post(f"/v1/{path}_lora_adapter", json=body, **options)
        return answer.status_code, answer.text


@pytest.fixture
async def server(adapters: dict[str, Path]) -> AsyncIterator[Server]:
    config = ServingConfig(
        model="dummy",
        dtype="float32",
        adapters=[f"pirate={adapters['pirate']}"],
        max_adapters=2,
        api_key="operator",  # type: ignore[arg-type]
        api_keys={"guest": 0},
        max_model_len=256,
    )
    server = Server(config)
    await server.start()
    yield server
    await server.client.aclose()
    await server.router.close()
    server.engines.close()


async def test_chosen_by_model(server: Server) -> None:
    base, pirate = await server.text(None), await server.text("pirate")
    assert base != pirate
    assert await server.text("dummy") == base
    texts = await asyncio.gather(*(server.text(model) for model in ("pirate", "dummy") * 8))
    assert texts == [pirate, base] * 8
    listed = (await server.client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["dummy", "pirate"]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0, "model": "pirate"}
    answer = (await server.client.post("/v1/chat/completions", json=body)).json()
    assert answer["model"] == "pirate"
    answer = await server.client.post("/v1/completions", json={"model": "poet", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_loaded_and_dropped_under_traffic(server: Server, adapters: dict[str, Path]) -> None:
    pirate = await server.text("pirate")
    running = [asyncio.create_task(server.text("pirate", max_tokens=150)) for _ in range(4)]
    status, text = await server.change("load", {"lora_name": "poet", "lora_path": str(adapters["poet"])})
    assert (status, json.loads(text)["id"]) == (200, "poet")
    poet = await server.text("poet")
    assert len({poet, pirate, await server.text(None)}) == 3
    assert (await server.change("load", {"lora_name": "poet", "lora_path": str(adapters["poet"])}))[0] == 200
    # a third, of which memory holds two: who was pushed out comes back when it is asked for
    assert (await server.change("load", {"lora_name": "judge", "lora_path": str(adapters["judge"])}))[0] == 200
    judge = await server.text("judge")
    for _ in range(2):
        assert [await server.text(name) for name in ("pirate", "poet", "judge")] == [pirate, poet, judge]
    assert all(len(server.engine(name).adapters()) == 2 for name in ("r1", "r2"))
    assert all(text.startswith(pirate) for text in await asyncio.gather(*running))
    status, text = await server.change("unload", {"lora_name": "poet"})
    assert (status, json.loads(text)) == (200, {"id": "poet", "object": "model", "deleted": True})
    answer = await server.client.post("/v1/completions", json={"model": "poet", "prompt": "x"})
    assert answer.status_code == 404
    # the name with other weights
    assert (await server.change("load", {"lora_name": "poet", "lora_path": str(adapters["judge"])}))[0] == 200
    assert await server.text("poet") == judge


async def test_a_load_that_fails_leaves_what_is_served(server: Server, adapters: dict[str, Path]) -> None:
    body = {"lora_name": "poet", "lora_path": str(adapters["poet"])}
    await server.change("load", body)
    poet = await server.text("poet")
    server.engines.kill("r1")
    assert (await server.change("load", body))[0] == 503
    assert await server.text("poet") == poet


async def test_a_load_reads_the_folder_as_it_is(server: Server, adapters: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "live"
    shutil.copytree(adapters["poet"], folder)
    body = {"lora_name": "live", "lora_path": str(folder)}
    await server.change("load", body)
    poet = await server.text("live")
    new = (adapters["judge"] / "adapter_model.safetensors").read_bytes()
    with (folder / "adapter_model.safetensors").open("r+b") as file:  # over what may be mapped into memory
        file.write(new)
    assert {await server.text("live") for _ in range(8)} == {poet}
    await server.change("load", body)
    judge = await server.text("live")
    assert judge != poet and {await server.text("live") for _ in range(8)} == {judge}
    (folder / "adapter_model.safetensors").write_bytes(new[:100])
    assert (await server.change("load", body))[0] == 400
    assert await server.text("live") == judge


async def test_a_client_that_leaves_during_a_load_harms_nobody(server: Server, adapters: dict[str, Path]) -> None:
    engine, load = server.engine("r1"), server.engine("r1").load_adapter

    def slowly(*args: Any, **options: Any) -> str:
        time.sleep(0.3)
        return load(*args, **options)

    await server.change("load", {"lora_name": "poet", "lora_path": str(adapters["poet"])})
    poet = await server.text("poet")
    server.engines.kill("r2")
    engine.unload_adapter("poet")
    engine.load_adapter = slowly  # type: ignore[method-assign]
    leaver = asyncio.create_task(server.text("poet"))
    await asyncio.sleep(0.1)
    leaver.cancel()
    assert await server.text("poet") == poet


async def test_what_runs_with_an_adapter_outlives_its_name(server: Server, adapters: dict[str, Path]) -> None:
    await server.change("load", {"lora_name": "poet", "lora_path": str(adapters["poet"])})
    whole = await server.text("poet", max_tokens=200)
    running = [asyncio.create_task(server.text("poet", max_tokens=200)) for _ in range(4)]
    await asyncio.sleep(0.2)
    await server.change("unload", {"lora_name": "poet"})
    server.engines.kill("r1")
    assert await asyncio.gather(*running) == [whole] * 4


async def test_a_new_replica_reads_it_when_it_is_asked(server: Server, adapters: dict[str, Path]) -> None:
    await server.change("load", {"lora_name": "poet", "lora_path": str(adapters["poet"])})
    poet = await server.text("poet")
    await server.add("r3")
    server.engines.kill("r1")
    server.engines.kill("r2")
    assert "poet" not in server.engine("r3").adapters()
    assert await server.text("poet") == poet


async def test_a_new_router_knows_what_no_replica_holds(server: Server, adapters: dict[str, Path]) -> None:
    for name in ("poet", "judge"):  # the second takes the first one's place in memory
        await server.change("load", {"lora_name": name, "lora_path": str(adapters[name])})
    poet = await server.text("poet")
    await server.text("judge")
    for name in ("r1", "r2"):
        if "poet" in server.engine(name).adapters():
            server.engine(name).unload_adapter("poet")
    later = Router(server.config, server.engines, TOKENIZER)
    try:
        await server.client.aclose()
        server.client = server.client_of(later)
        assert await server.text("poet") == poet  # asked before it knows of any replica
        assert later.model_names == server.router.model_names
    finally:
        await later.close()


async def test_what_is_refused(server: Server, adapters: dict[str, Path], tmp_path: Path) -> None:
    path = str(adapters["poet"])
    for body, message in (
        ({"lora_name": "poet", "lora_path": str(tmp_path)}, "adapter_config.json does not exist"),
        ({"lora_name": "dummy", "lora_path": path}, "dummy is the name of another model"),
        ({"lora_name": "pirate", "lora_path": path}, "pirate is the name of another model"),
        ({"lora_name": "poet"}, "lora_path"),
    ):
        status, text = await server.change("load", body)
        assert status == 400 and message in text, text
    assert (await server.change("unload", {"lora_name": "poet"}))[0] == 404
    status, text = await server.change("unload", {"lora_name": "dummy"})
    assert (status, "dummy is not an adapter" in text) == (400, True)
    guest = {"Authorization": "Bearer guest"}
    status, text = await server.change("load", {"lora_name": "poet", "lora_path": path}, headers=guest)
    assert status == 403 and "operator" in text


def test_options(adapters: dict[str, Path], tmp_path: Path) -> None:
    pirate = f"pirate={adapters['pirate']}"
    for options, message in (
        ({"adapters": ["pirate"]}, "'pirate' is not name=folder"),
        ({"adapters": [pirate, pirate]}, "two are pirate"),
        ({"adapters": [f"dummy={tmp_path}"]}, "dummy is a name of the model"),
        ({"adapters": [pirate], "max_adapters": 0}, "max_adapters 0 is less than the 1"),
        ({"max_adapters": 2, "tensor_parallel_size": 2}, "tensor_parallel_size doesn't go with adapters"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size doesn't go with the dummy model"),
    ):
        with pytest.raises(ConfigError, match=message):
            ServingConfig.from_options({"model": "dummy", **options})
    with pytest.raises(ConfigError, match="adapters: no such file or folder"):
        ServingConfig.from_options({"model": "dummy", "adapters": ["a=/nowhere"]}).check_files()
