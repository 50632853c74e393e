"""Which replica takes a request, and which replicas there are.

`choose` decides, called by the Router, which knows the load. `app.pinning` carries it out.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from app.replica import PumpMessage, Refusal
from engine.schemas import GenerationRequest, GenerationResult

T = TypeVar("T")


class ReplicaGone(Exception):
    """The replica that a call is pinned to isn't in the replica set."""


class Candidate(Protocol):
    """A replica that could take a request."""

    @property
    def load(self) -> int:
        """Requests running or waiting there, as far as this process knows."""


C = TypeVar("C", bound=Candidate)


def choose(candidates: Sequence[C], request: GenerationRequest) -> C:
    """The replica for a request: the least loaded, a random one of equals."""
    least = min(candidate.load for candidate in candidates)
    return random.choice([candidate for candidate in candidates if candidate.load == least])


class Membership:
    """Carries the replica set from Serve's request router to the loop it was made on.

    Serve builds a request router inside every process that calls a deployment and gives it no other way to meet that
    process's objects than the arguments of a call. So a Membership is passed as one; at the replica it arrives as None.
    """

    def __init__(self, on_change: Callable[[frozenset[str]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_change = on_change

    def publish(self, replica_ids: frozenset[str]) -> None:
        """Thread-safe: Serve may run the request router on a loop of its own."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_change, replica_ids)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return type(None), ()


class EngineClient:
    """The calls a Router makes to engine replicas, and to all Routers, over Serve handles."""

    def __init__(self, engines: DeploymentHandle[Any], routers: DeploymentHandle[Any] | None = None) -> None:
        self._handle = engines.options(request_serialization="pickle", response_serialization="pickle")
        self._routers = routers

    async def attach(self, membership: Membership) -> dict[str, Any]:
        """Waits for a first replica; returns its description. `membership` hears of every change from here on."""
        return await _detached(self._await(self._handle.options(method_name="describe"), membership))

    async def generate(self, replica_id: str, request: GenerationRequest, tag: int) -> GenerationResult | Refusal:
        """Runs a request on one replica; cancelling this aborts it there. Any exception means that it was lost."""
        reply: GenerationResult | Refusal = await self._call(replica_id, "generate", request, tag)
        return reply

    async def abort(self, replica_id: str, tag: int) -> None:
        """Ends a request early; its `generate` returns what there is."""
        await self._call(replica_id, "abort", tag)

    async def snapshot(self, replica_id: str) -> dict[str, Any]:
        """What a replica says of itself."""
        answer: dict[str, Any] = await self._call(replica_id, "snapshot")
        return answer

    async def pump(self, replica_id: str, key: int) -> AsyncIterator[PumpMessage]:
        """The tokens of all this Router's requests on one replica, until the consumer closes the iterator."""
        method = self._handle.options(method_name="pump", session_id=replica_id, stream=True)
        messages = contextvars.Context().run(method.remote, key)
        assert isinstance(messages, DeploymentResponseGenerator)
        try:
            async for message in messages:
                yield message
        finally:
            messages.cancel()

    async def router_metrics(self, timeout: float) -> list[bytes]:
        """The metrics of every Router. Raises if one doesn't answer in time."""
        assert self._routers is not None
        response = self._routers.broadcast("own_metrics")
        answers: list[bytes] = await _detached(response.results_async(timeout_s=timeout))
        return answers

    async def _call(self, replica_id: str, method: str, *args: Any) -> Any:
        return await _detached(self._await(self._handle.options(method_name=method, session_id=replica_id), *args))

    async def _await(self, method: DeploymentHandle[Any], *args: Any) -> Any:
        response: Any = method.remote(*args)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise


async def _detached(call: Coroutine[Any, Any, T]) -> T:
    """Awaits a call outside of the HTTP request's Serve context.

    Serve ties calls made inside a request to it, by an id they all share: the calls of n choices or of a second attempt
    would be taken for one, and would outlive nothing but that request.
    """
    return await asyncio.get_running_loop().create_task(call, context=contextvars.Context())
