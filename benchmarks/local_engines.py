"""Replicas without Ray, for benchmarks of the Router: real engines in threads, whose model only sleeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import torch

from app.placement import Membership
from app.replica import EngineReplica, PumpMessage
from app.settings import ServingConfig
from engine.batch_engine import ContinuousBatchingEngine
from engine.models.decoder import DecoderModel
from engine.tokenization import SimpleCharacterTokenizer

TOKENIZER = SimpleCharacterTokenizer()
CONTEXT = 2048


class SleepingModel(DecoderModel):
    """A forward takes `step` seconds and `token` seconds for each token in it; the likeliest token is always "a"."""

    def __init__(self, step: float, token: float) -> None:
        super().__init__(vocab_size=TOKENIZER.vocab_size, hidden_size=8, num_layers=1, num_heads=1, max_seq_len=CONTEXT)
        self._step, self._token = step, token
        row = torch.zeros(TOKENIZER.vocab_size)
        row[TOKENIZER.encode("a", add_special_tokens=False)[-1]] = 1.0
        self.register_buffer("row", row)

    def hidden_states(self, input_ids: Any, batch: Any, pages: Any = None) -> Any:
        time.sleep(self._step + self._token * len(input_ids))
        return input_ids.new_zeros((len(input_ids), 1), dtype=torch.float32)

    def logits(self, hidden: Any) -> Any:
        return self.get_buffer("row").expand(len(hidden), -1).clone()


class LocalEngines:
    """`app.placement.Engines` over replicas in this process."""

    def __init__(self, config: ServingConfig, count: int, step: float, token: float) -> None:
        self.replicas: dict[str, EngineReplica] = {}
        for i in range(count):
            engine = ContinuousBatchingEngine.from_serving_config(config, SleepingModel(step, token), TOKENIZER)
            description = {"max_model_len": CONTEXT, "page_size": engine.pool.page_size}
            self.replicas[f"replica-{i}"] = EngineReplica(engine, config, description, f"replica-{i}")

    async def attach(self, membership: Membership) -> dict[str, Any]:
        membership.publish(dict.fromkeys(self.replicas, True))
        return await next(iter(self.replicas.values())).describe()

    async def call(self, replica_id: str, method: str, *args: Any) -> Any:
        return await getattr(self.replicas[replica_id], method)(*args)

    async def broadcast(self, method: str, *args: Any, timeout: float = 10) -> list[Any]:
        raise TimeoutError

    def pump(self, replica_id: str, key: int) -> AsyncIterator[PumpMessage]:
        return self.replicas[replica_id].pump(key)

    def stats(self, name: str) -> int:
        """One counter of EngineStats, summed over the replicas."""
        return sum(int(getattr(replica.engine.stats(), name)) for replica in self.replicas.values())

    async def close(self) -> None:
        for replica in self.replicas.values():
            await asyncio.to_thread(replica.close)
