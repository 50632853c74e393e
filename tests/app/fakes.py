"""An engine of a few lines with the interface that EngineReplica uses, and replicas without Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.placement import Membership, ReplicaGone
from app.replica import EngineReplica, PumpMessage
from app.settings import ServingConfig
from engine.schemas import FinishReason, GenerationRequest, GenerationResult, QueueFull, StepTokens
from engine.speculation import SpeculationStats
from engine.tokenization import SimpleCharacterTokenizer

TOKENIZER = SimpleCharacterTokenizer()


def expected_tokens(request: GenerationRequest, count: int | None = None) -> list[int]:
    """What FakeEngine generates: a function of prompt, seed and position, as with a real engine."""
    base = sum(request.prompt_ids or []) + 31 * (request.seed or 0)
    return [3 + (base + 7 * i * i + i) % 90 for i in range(count or request.max_new_tokens)]


@dataclass
class Stats:
    running: int = 0
    waiting: int = 0
    held_pages: int = 0
    total_pages: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_requests: int = 0


@dataclass
class _Row:
    request: GenerationRequest
    tag: int
    output: list[int]
    aborted: bool = False


class FakeEngine:
    """One token for every request and step; a step takes `step_time` seconds. `gate` stops it when cleared."""

    def __init__(self, step_time: float = 0.001, limit: int = 1000) -> None:
        self.step_time = step_time
        self.limit = limit
        self.gate = threading.Event()
        self.gate.set()
        self.rows: dict[str, _Row] = {}
        self.aborts = 0
        self.finished = 0
        self.added: list[GenerationRequest] = []
        self._sink: Callable[[StepTokens], None] = lambda step: None
        self._lock = threading.Condition()

    def set_token_sink(self, sink: Callable[[StepTokens], None]) -> None:
        self._sink = sink

    def set_step_observer(self, observer: object) -> None:
        pass

    def add_request(self, request: GenerationRequest, *, tag: int) -> str:
        assert not request.stop
        with self._lock:
            if len(self.rows) >= self.limit:
                raise QueueFull("the queue is full")
            if request.bad_words:
                raise ValueError("bad_words can't be served")
            self.rows[request.request_id] = _Row(request, tag, list(request.output_ids))
            self.added.append(request)
            self._lock.notify_all()
        return request.request_id

    def abort(self, request_id: str) -> bool:
        with self._lock:
            row = self.rows.get(request_id)
            if row is not None:
                row.aborted = True
                self.aborts += 1
            return row is not None

    def wait_for_work(self, timeout: float) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: bool(self.rows), timeout)

    def step(self) -> None:
        time.sleep(self.step_time)
        self.gate.wait()
        tags, tokens, finished = [], [], []
        with self._lock:
            for request_id, row in list(self.rows.items()):
                reason = FinishReason.ABORT
                if not row.aborted:
                    row.output.append(expected_tokens(row.request)[len(row.output)])
                    tags.append(row.tag)
                    tokens.append(row.output[-1])
                    reason = FinishReason.LENGTH
                if row.aborted or len(row.output) == row.request.max_new_tokens:
                    del self.rows[request_id]
                    self.finished += 1
                    prompt = len(row.request.prompt_ids or [])
                    result = GenerationResult(request_id, "", row.output, reason, prompt, cached_tokens=prompt - 1)
                    finished.append((row.tag, result))
        self._sink(
            StepTokens(
                np.array(tags, np.int64), np.ones(len(tags), np.int32), np.array(tokens, np.int32), finished=finished
            )
        )

    def adapters(self) -> dict[str, Any]:
        return {}

    def backlog(self) -> tuple[int, int]:
        return 0, 1000

    def speculation_stats(self) -> SpeculationStats:
        return SpeculationStats(0, 0, [])

    def stats(self) -> Stats:
        return Stats(len(self.rows), aborted_requests=self.aborts)


@dataclass
class LocalEngines:
    """Replicas in this process. `kill` and `freeze` do to them what the signals do to a process."""

    config: ServingConfig
    replicas: dict[str, EngineReplica] = field(default_factory=dict)
    memberships: list[Membership] = field(default_factory=list)  # one of each Router
    frozen: dict[str, asyncio.Event] = field(default_factory=dict)
    calls: dict[str, set[asyncio.Task[Any]]] = field(default_factory=dict)
    routers: list[Any] = field(default_factory=list)

    def add(self, name: str, engine: FakeEngine | None = None, description: dict[str, Any] | None = None) -> FakeEngine:
        engine = engine or FakeEngine()
        description = description or {"max_model_len": self.config.max_model_len or 256, "page_size": 16}
        replica = EngineReplica(engine, self.config, description, name)  # type: ignore[arg-type]
        self.replicas[name] = replica
        self.calls[name] = set()
        self.frozen[name] = asyncio.Event()
        self.frozen[name].set()
        self._publish()
        return engine

    def engine(self, name: str) -> FakeEngine:
        return self.replicas[name].engine  # type: ignore[return-value]

    def leave(self, name: str) -> None:
        """As at a scale-down: out of the set, but still running what it has."""
        for membership in self.memberships:
            membership.publish(dict.fromkeys(self.replicas.keys() - {name}, True))

    def kill(self, name: str) -> None:
        replica = self.replicas.pop(name)
        for call in self.calls[name]:
            call.cancel()
        replica.close()
        self._publish()

    def _publish(self) -> None:
        for membership in self.memberships:
            membership.publish(dict.fromkeys(self.replicas, True))

    async def attach(self, membership: Membership) -> None:
        self.memberships.append(membership)
        while not self.replicas:
            await asyncio.sleep(0.01)
        self._publish()

    async def _remote(self, name: str, call: Any) -> Any:
        task = asyncio.ensure_future(call)
        self.calls[name].add(task)
        try:
            await asyncio.wait([task])
        finally:
            self.calls[name].discard(task)
            task.cancel()
            await asyncio.wait([task])
        if task.cancelled():
            raise ConnectionError("the replica died")
        return task.result()

    def _replica(self, name: str) -> EngineReplica:
        if name not in self.replicas:
            raise ReplicaGone(name)
        return self.replicas[name]

    async def call(self, replica_id: str, method: str, *args: Any) -> Any:
        reply = await self._remote(replica_id, getattr(self._replica(replica_id), method)(*args))
        if method == "generate":
            await self.frozen[replica_id].wait()
        return reply

    async def broadcast(self, method: str, *args: Any, timeout: float = 10) -> list[Any]:
        if method == "own_metrics":
            raise TimeoutError
        return [await getattr(router, method)(*args) for router in self.routers]

    async def pump(self, replica_id: str, key: int) -> AsyncIterator[PumpMessage]:
        messages = self._replica(replica_id).pump(key)
        try:
            while True:
                message = await self._remote(replica_id, anext(messages))
                await self.frozen[replica_id].wait()
                yield message
        finally:
            await messages.aclose()  # type: ignore[attr-defined]

    def close(self) -> None:
        for replica in self.replicas.values():
            replica.close()
