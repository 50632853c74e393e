"""Which replica takes a request, and which replicas there are.

`Placement` decides, for one Router, by what the replicas tell it. `app.pinning` carries it out.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from app.replica import CacheChanges, PumpMessage
from engine.digests import extend_digests, root_digest, short_digests
from engine.schemas import GenerationRequest

if TYPE_CHECKING:
    from app.router import ReplicaLink

T = TypeVar("T")


class ReplicaGone(Exception):
    """The replica that a call is pinned to isn't in the replica set."""


NEIGHBOUR_TOKENS = 64
"""What a request that is there already costs the next one, in prompt tokens: benchmarks/placement.py compares."""

REMOTE_TOKENS = 32
"""What another node costs a replica: less than a neighbour, more than a page, so that it decides what nearly ties."""

EXPECTED_PAGES = 8192


class PrefixView:
    """What a replica's prefix cache holds, as far as this process has heard, and the last prompts it sent there."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._expected: dict[int, None] = {}

    def update(self, changes: CacheChanges) -> None:
        """Takes what the replica says."""
        if changes.whole:
            self._held.clear()
        came, left = changes.came.tolist(), changes.left.tolist()
        self._held.update(came)
        self._held.difference_update(left)
        for digest in (*came, *left):  # what is known need not be expected
            self._expected.pop(digest, None)

    def expect(self, digests: list[int]) -> None:
        """A prompt of these pages is on its way there."""
        self._expected |= dict.fromkeys(digests)
        for digest in list(self._expected)[: max(0, len(self._expected) - EXPECTED_PAGES)]:
            del self._expected[digest]

    def overlap(self, digests: list[int]) -> int:
        """How many of a prompt's leading pages are there."""
        for i, digest in enumerate(digests):
            if digest not in self._held and digest not in self._expected:
                return i
        return len(digests)


class Placement:
    """Chooses replicas for the requests of one Router; several Routers share nothing.

    A replica with room is preferred to one where the request would wait. Of several, a session's own: rendezvous
    hashing (Thaler and Ravishankar 1998), on which all Routers agree. Without a session, the one where the request has
    the fewest tokens before it: those of its prompt that aren't cached there, those that wait, NEIGHBOUR_TOKENS for
    each request that is there, and REMOTE_TOKENS if it is on another node than the Router.
    """

    def __init__(self, page_size: int, batch_size: int, adapters: Mapping[str, tuple[str, str]] | None = None) -> None:
        """adapters: folder and key by name; as it is at any time."""
        self._page_size = page_size
        self._batch_size = batch_size
        self._adapters = {} if adapters is None else adapters

    def choose(
        self, candidates: Sequence[ReplicaLink], request: GenerationRequest, session: str | None = None
    ) -> ReplicaLink:
        """The replica for a request with prompt_ids; with one candidate there is nothing to compute."""
        if len(candidates) == 1:
            return candidates[0]
        tokens = np.array([*(request.prompt_ids or []), *request.output_ids], dtype=np.int32)
        pages = -(-len(tokens) // self._page_size)
        room = [each for each in candidates if each.load < self._batch_size and each.free_pages >= pages]
        candidates = room or candidates
        if session is not None:
            return max(candidates, key=lambda each: hashlib.blake2b(f"{each.replica_id} {session}".encode()).digest())
        digests = self._digests(request, tokens)
        costs = [self._cost(each, digests) for each in candidates]
        least = min(costs)
        chosen = random.choice([each for each, cost in zip(candidates, costs, strict=True) if cost == least])
        chosen.prefixes.expect(digests)
        return chosen

    def _digests(self, request: GenerationRequest, tokens: np.ndarray) -> list[int]:
        key = self._adapters.get(request.adapter, ("", ""))[1] if request.adapter is not None else None
        chain = [root_digest(request.cache_salt, key)]
        extend_digests(chain, tokens[:-1], self._page_size)  # the last token is computed always
        digests: list[int] = short_digests(chain)[1:].tolist()
        return digests

    def _cost(self, candidate: ReplicaLink, digests: list[int]) -> int:
        cached = candidate.prefixes.overlap(digests) * self._page_size
        way = 0 if candidate.is_local else REMOTE_TOKENS
        return candidate.waiting_tokens + NEIGHBOUR_TOKENS * candidate.load + way - cached


class Membership:
    """Carries the replica set from Serve's request router to the loop it was made on.

    Serve builds a request router inside every process that calls a deployment and gives it no other way to meet that
    process's objects than the arguments of a call. So a Membership is passed as one; at the replica it arrives as None.
    """

    def __init__(self, on_change: Callable[[Mapping[str, bool]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_change = on_change

    def publish(self, replicas: Mapping[str, bool]) -> None:
        """The replicas there are, and whether each is on this node. Thread-safe: Serve may run the request router on a
        loop of its own."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_change, replicas)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return type(None), ()


class Engines:
    """The calls a Router makes to engine replicas, and to all Routers, over Serve handles."""

    def __init__(self, engines: DeploymentHandle[Any], routers: DeploymentHandle[Any] | None = None) -> None:
        self._handle = engines.options(request_serialization="pickle", response_serialization="pickle")
        self._routers = routers

    async def attach(self, membership: Membership) -> None:
        """Waits for a first replica. `membership` hears of every change from here on."""
        await _detached(self._await(self._handle.options(method_name="describe"), membership))

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

    async def call(self, replica_id: str, method: str, *args: Any) -> Any:
        """Of one replica; cancelling this cancels it there. Raises what the method raises, in a RayTaskError, or
        whatever says that the replica was lost."""
        return await _detached(self._await(self._handle.options(method_name=method, session_id=replica_id), *args))

    async def broadcast(self, method: str, *args: Any, timeout: float = 10) -> list[Any]:
        """Of every Router. Raises if one doesn't answer in time."""
        assert self._routers is not None
        answers: list[Any] = await _detached(self._routers.broadcast(method, *args).results_async(timeout_s=timeout))
        return answers

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
