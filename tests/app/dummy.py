"""The whole application in this process, without Ray: Router, replica and engine of the dummy model, on a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from safetensors.torch import save_file

from app.ingress import build_asgi_app
from app.replica import EngineReplica, build_engine, load_tokenizer
from app.router import Router
from app.settings import ServingConfig
from tests.app.fakes import LocalEngines


class Service:
    """A running server. `url` is where it listens."""

    def __init__(self, config: ServingConfig) -> None:
        self.config = config
        self.engine, self.description = build_engine(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(30)

    async def _serve(self) -> None:
        engines = LocalEngines(self.config)
        name = "one"
        engines.replicas[name] = EngineReplica(self.engine, self.config, self.description, f"EngineReplica:{name}")
        engines.calls[name] = set()
        engines.frozen[name] = asyncio.Event()
        engines.frozen[name].set()
        router = Router(self.config, engines, load_tokenizer(self.config))
        app = build_asgi_app(router)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        serving = asyncio.create_task(self._server.serve([self._listener]))
        while not (router.ready and self._server.started):
            await asyncio.sleep(0.01)
        self._started.set()
        await serving
        await router.close()
        engines.close()

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(30)


@contextmanager
def dummy_service(**options: Any) -> Iterator[Service]:
    options = {"model": "dummy", "dtype": "float32", "num_threads": 1, "max_model_len": 64, **options}
    service = Service(ServingConfig.from_options(options))
    try:
        yield service
    finally:
        service.close()


def write_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter of the dummy model, strong enough to change what it says."""
    generator = torch.Generator().manual_seed(seed)
    where = "base_model.model.model.layers.{}.mlp.up_proj.lora_{}.weight"
    tensors = {where.format(i, "A"): torch.randn(4, 64, generator=generator) for i in range(2)}
    tensors |= {where.format(i, "B"): torch.randn(192, 4, generator=generator) for i in range(2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))
