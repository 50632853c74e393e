"""Which replica takes a request, and which replicas there are.

Serve's alpha `RequestRouter` interface is used for two things only: a call whose `session_id` is a replica's id goes to
that replica and to no other, and the process's Router learns of every change in the replica set. The choice itself is
`choose`, made by the Router, which knows the load.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from app.replica import PumpMessage, Refusal
from engine.schemas import GenerationRequest, GenerationResult

ROUTER_CLASS = "app.placement:PinningRequestRouter"

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


class PinningRequestRouter(RequestRouter):
    """Routes a call with a session id to the replica of that id, any other call to any replica."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._members: Membership | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        if pending_request.args and isinstance(pending_request.args[0], Membership):
            self._members = pending_request.args[0]
            self._publish()
        wanted = pending_request.metadata.session_id
        if not wanted:
            return [candidate_replicas]
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == wanted:
                return [[replica]]
        if not pending_request.future.done():
            self._remove_pending_request_from_indices(pending_request)
            pending_request.future.set_exception(ReplicaGone(wanted))
        return [candidate_replicas]  # looked at only after the check that the future is done

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        if self._members is not None:
            self._members.publish(frozenset(replica_id.unique_id for replica_id in self.curr_replicas))


class EngineClient:
    """The calls a Router makes to engine replicas, over a Serve handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle.options(request_serialization="pickle", response_serialization="pickle")

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
