"""Router: admission, placement on a replica, and streams that outlive the replica that feeds them."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import logging
import math
import random
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError

from app.metrics import Metrics
from app.placement import Engines, Membership, Placement, PrefixView
from app.replica import TAG_BITS, PumpMessage, Refusal
from app.settings import ServingConfig
from engine.grammars import GRAMMAR_ERROR
from engine.schemas import FinishReason, GenerationRequest, GenerationResult, QueueFull, TokenLogprobs
from engine.tokenization import TextStream, Tokenizer

AdapterChange = tuple[float, tuple[str, str] | None]
"""When an adapter came or went at run time, in seconds since the epoch; its folder and key, if it came."""

logger = logging.getLogger(__name__)

KEY_BITS = 22
MAX_ATTEMPTS = 5
"""A request that loses this many replicas in a row is more likely the cause than the victim."""
PROGRESS = 64
"""Tokens between two losses that are not in a row."""


class Overloaded(QueueFull):
    """No queue has room. `retry_after` is a guess, in whole seconds, of when one will."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(Exception):
    """No replica is running yet, or any more."""


class GenerationError(Exception):
    """A generation that ended without a result; `status` is the HTTP status for it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(slots=True)
class TextChunk:
    """New text of a stream, and the tokens and log-probabilities that came with it."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    origins: bytes = b""  # of the first tokens, as in StepTokens; 0 for the others


class TextGeneration:
    """One request on its way: an async iterator of text, whichever replicas it takes.

    Chunks merge when the reader falls behind. After the last one `result` says how it ended. Raises GenerationError.
    """

    result: GenerationResult

    def __init__(self, router: Router, request: GenerationRequest, session: str | None) -> None:
        self.request = request
        self.session = session
        self.attempt = request.attempt
        self.sent = time.monotonic()  # when the last attempt was
        self._router = router
        self._text = TextStream(router.tokenizer, request.prompt_ids or [], request, request.output_ids)
        self._received = list(request.output_ids)
        self._logprobs: list[TokenLogprobs] | None = None if request.logprobs is None else []
        self._unread: list[int] = []
        self._unread_logprobs: list[TokenLogprobs] = []
        self._unread_origins = b""
        self._changed = asyncio.Event()
        self._outcome: GenerationResult | Exception | None = None
        self._over = False
        self._at: tuple[str, int] | None = None
        self._stopper: asyncio.Task[None] | None = None
        self._call: asyncio.Task[Any] | None = None
        known = router.adapters.get(request.adapter or "")
        self._adapter_path = None if known is None else known[0]  # kept when its name is dropped
        self._driver = asyncio.create_task(self._drive())
        self._driver.add_done_callback(self._ended)

    def __aiter__(self) -> TextGeneration:
        return self

    async def __anext__(self) -> TextChunk:
        chunk = TextChunk("", [], None if self._logprobs is None else [])
        while not self._over:
            if self._unread:
                self._read_into(chunk)
                if chunk.text:
                    return chunk
            elif self._outcome is None:
                await self._change()
            else:
                self._over = True
                if isinstance(self._outcome, Exception):
                    raise self._outcome
                chunk.text += self._text.flush()
                self._set_result(self._outcome)
                if chunk.text or chunk.token_ids:
                    return chunk
        raise StopAsyncIteration

    async def collect(self) -> GenerationResult:
        """The result, without the chunks: this task wakes once, unless there are stop strings to look for."""
        if not self.request.stop:
            await asyncio.wait([self._driver])
        async for _ in self:
            pass
        return self.result

    async def started(self) -> None:
        """Returns when there is something to read; raises what `Router.open` raises."""
        while not self._unread and self._outcome is None:
            await self._change()
        if isinstance(self._outcome, Exception) and not self._unread:
            self._over = True
            raise self._outcome

    async def aclose(self) -> None:
        """Aborts the generation, wherever it is, unless it has ended. May be called again."""
        self._over = True
        self._driver.cancel()
        await asyncio.wait([self._driver])

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _read_into(self, chunk: TextChunk) -> None:
        ids, self._unread = self._unread, []
        logprobs, self._unread_logprobs = self._unread_logprobs, []
        origins, self._unread_origins = self._unread_origins, b""
        delta = self._text.push(ids)
        if origins:
            chunk.origins = chunk.origins.ljust(len(chunk.token_ids), b"\0") + origins[: len(delta.tokens)]
        chunk.text += delta.text
        chunk.token_ids += delta.tokens
        if chunk.logprobs is not None:
            chunk.logprobs += logprobs[: len(delta.tokens)]
        if delta.stop is not None and self._outcome is None and self._at is not None and self._stopper is None:
            self._stopper = asyncio.create_task(self._stop(*self._at))

    async def _stop(self, replica_id: str, tag: int) -> None:
        """Ends the attempt at a stop string. Its call stays open for its reply, which has the usage, unless the replica
        is gone or on its way out: then nobody there can be asked."""
        try:
            await self._router.engines.call(replica_id, "abort", tag)
        except Exception:
            if self._call is not None:
                self._call.cancel()
            self._router.usable.set()

    @property
    def needs_no_more(self) -> bool:
        """Whether its text is over by a stop string, and nothing else is wanted of a replica."""
        return self._text.stop is not None and self.request.prompt_logprobs is None

    def _set_result(self, ended: GenerationResult) -> None:
        kept = self._text.token_ids
        if self._text.stop is not None:
            ended = dataclasses.replace(ended, finish_reason=FinishReason.STOP, stop_reason=self._text.stop)
        self.result = dataclasses.replace(
            ended,
            request_id=self.request.request_id,
            text=self._text.text,
            token_ids=kept,
            attempt=self.attempt,
            logprobs=None if self._logprobs is None else self._logprobs[: len(kept)],
        )

    # --- the writing side

    def receive(self, ids: list[int], logprobs: list[TokenLogprobs] | None, origins: bytes = b"") -> None:
        """New tokens of the current attempt."""
        if origins:
            self._unread_origins = self._unread_origins.ljust(len(self._unread), b"\0") + origins
        ids = ids[: self.request.max_new_tokens - len(self._received)]
        self._received += ids
        self._unread += ids
        if self._logprobs is not None and logprobs:
            self._logprobs += logprobs
            self._unread_logprobs += logprobs
        self._changed.set()

    async def _drive(self) -> None:
        timeout = self.request.timeout
        limit = self._router.config.request_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(limit):
                self._outcome = await self._run()
        except TimeoutError:
            status = 504 if timeout is None else 408
            self._outcome = GenerationError(f"the request wasn't finished after {limit:g} s", status)
        except Exception as error:
            self._outcome = error

    def _ended(self, driver: asyncio.Task[None]) -> None:
        self._changed.set()
        self._router.leave(self, isinstance(self._outcome, GenerationResult))

    async def _run(self) -> GenerationResult:
        """Attempts, one after the other, until one brings the result."""
        full: set[str] = set()
        failures = 0
        while True:
            had = len(self._received)
            if (link := await self._router.place(self, full)) is None:
                return self._bare_result()
            reply = await self._try(link)
            if self._text.stop is not None and isinstance(reply, GenerationResult):
                return reply
            if self.needs_no_more:
                return self._bare_result()
            if isinstance(reply, GenerationResult) and reply.finish_reason is not FinishReason.ABORT:
                if reply.finish_reason is FinishReason.ERROR:
                    if (reply.error or "").startswith(GRAMMAR_ERROR):
                        raise ValueError(reply.error)
                    raise GenerationError(reply.error or "the engine failed", 500)
                if reply.finish_reason is FinishReason.DEADLINE:
                    raise TimeoutError
                missing = reply.token_ids[len(self._received) :]
                self.receive(missing, reply.logprobs[-len(missing) :] if missing and reply.logprobs else None)
                return reply
            if isinstance(reply, Refusal) and reply.status == 429:
                full.add(link.replica_id)
                continue
            if isinstance(reply, Refusal) and reply.status == 503:
                link.leaving = True
                continue
            if isinstance(reply, Refusal) and reply.status == 400:
                raise ValueError(reply.message)
            failures = 1 if len(self._received) >= had + PROGRESS else failures + 1
            if failures == MAX_ATTEMPTS:
                raise GenerationError(f"{failures} attempts were lost with their replicas", 503)
            self.attempt += 1
            full.clear()
            self._router.metrics.failover()
            if len(self._received) >= self.request.max_new_tokens and self.request.prompt_logprobs is None:
                return self._bare_result()
            await asyncio.sleep(0.01 * 2**failures)

    def _bare_result(self) -> GenerationResult:
        """For a generation that is complete, though the replica died before it could say so."""
        return GenerationResult("", "", [], FinishReason.LENGTH, len(self.request.prompt_ids or []))

    async def _try(self, link: ReplicaLink) -> GenerationResult | Refusal | None:
        """One attempt on one replica; None when it was lost."""
        tag = link.new_tag()
        known = self._received[: self.request.max_new_tokens - 1]
        request = self.request.model_copy(
            update={"output_ids": known, "attempt": self.attempt, "stop": [], "timeout": None}
        )
        if self._text.stop is not None:
            request.max_new_tokens = len(known) + 1
        path = self._adapter_path
        call = asyncio.create_task(self._router.engines.call(link.replica_id, "generate", request, tag, path))
        self._call = call
        link.attempts[tag] = (self, call)
        self._at = link.replica_id, tag
        self.sent = time.monotonic()
        try:
            await asyncio.wait([call])
            if call.cancelled():
                return None
            if (error := call.exception()) is not None:
                logger.warning("attempt %d on %s was lost: %r", self.attempt, link.replica_id, error)
                return None
            return call.result()
        finally:
            del link.attempts[tag]
            if not call.done():
                call.cancel()
                await asyncio.wait([call])


class ReplicaLink:
    """One replica as this Router sees it: its pump, its load, and the attempts that are there.

    load: requests running or waiting there; waiting_tokens: of those that wait; free_pages: held by no sequence;
    is_local: on this process's node; is_foreign: token ids have another meaning there.
    """

    def __init__(self, router: Router, replica_id: str, is_local: bool) -> None:
        self.replica_id = replica_id
        self.is_local = is_local
        self.attempts: dict[int, tuple[TextGeneration, asyncio.Task[Any]]] = {}
        self.leaving = False
        self.is_foreign = False
        self.is_open = False
        self.step_age = 0.0
        self.waiting_tokens = 0
        self.free_pages = 0
        self.prefixes = PrefixView()
        self.last_message = time.monotonic()
        self._others = 0
        self._router = router
        self._key = 0
        self._counter = itertools.count()
        self.task = asyncio.create_task(self._run())

    @property
    def load(self) -> int:
        return self._others + len(self.attempts)

    @property
    def silence(self) -> float:
        """Seconds since the replica was last heard of."""
        return time.monotonic() - self.last_message

    @property
    def is_stuck(self) -> bool:
        """Whether it says nothing, or its engine has work and makes no step."""
        config = self._router.config
        return self.silence > config.heartbeat_timeout or self.step_age > config.step_timeout

    @property
    def is_usable(self) -> bool:
        return self.is_open and not self.leaving and not self.is_stuck

    def new_tag(self) -> int:
        return self._key << TAG_BITS | next(self._counter)

    def lose_attempts(self) -> None:
        """Gives up what runs there; each request goes on with another attempt."""
        for _, call in self.attempts.values():
            call.cancel()

    async def _run(self) -> None:
        delay = 0.05
        while not self.leaving:
            self._key = random.getrandbits(KEY_BITS)
            self._counter = itertools.count()
            try:
                description = await self._router.engines.call(self.replica_id, "describe")
                self.is_foreign = not self._router.learn(description)
                if self.is_foreign:
                    logger.info("%s runs another model than this Router's: it is left alone", self.replica_id)
                    return
                async for message in self._router.engines.pump(self.replica_id, self._key):
                    self._dispatch(message)
                    delay = 0.05
                    if self.leaving and not self.attempts:
                        break
            except Exception as error:
                logger.warning("the pump of %s broke: %r", self.replica_id, error)
            finally:
                self.is_open = False
                self.lose_attempts()
            await asyncio.sleep(delay)
            delay = min(2 * delay, 1.0)

    def _dispatch(self, message: PumpMessage) -> None:
        was_usable = self.is_usable
        self.last_message = time.monotonic()
        self.is_open = True
        self.step_age = message.step_age
        self.waiting_tokens, self.free_pages = message.waiting_tokens, message.free_pages
        if message.cache is not None:
            self.prefixes.update(message.cache)
        self._others = max(0, message.load - len(self.attempts))
        if not was_usable:
            self._router.usable.set()
        if not len(message.tags):
            return
        tokens = message.tokens.tolist()
        origins = b"" if message.origins is None else message.origins.tobytes()
        start = 0
        for tag, count in zip(message.tags.tolist(), message.counts.tolist(), strict=True):
            end = start + count
            if (attempt := self.attempts.get(tag)) is not None:
                attempt[0].receive(tokens[start:end], message.logprobs.pop(tag, None), origins[start:end])
            start = end


class Router:
    """Takes requests and finds each a replica. A plain class: `app.main` makes the Serve ingress of it."""

    def __init__(self, config: ServingConfig, engines: Engines, tokenizer: Tokenizer, name: str = "Router") -> None:
        self.config = config
        self.metrics = Metrics(name)
        self.engines = engines
        self.tokenizer = tokenizer
        self.max_model_len = config.max_model_len or 0
        self.sampling_defaults: dict[str, Any] = {}
        self.description: dict[str, Any] = {}
        # folder and key, which is not known before a replica has loaded it
        self.adapters = {name: (path, "") for name, path in config.adapter_paths().items()}
        self._adapter_changes: dict[str, AdapterChange] = {}
        self._links: dict[str, ReplicaLink] = {}
        self._closing: set[ReplicaLink] = set()
        self._live: set[TextGeneration] = set()
        self._ended: deque[float] = deque(maxlen=64)
        self._next_place = 0.0
        self._placement: Placement
        self.usable = asyncio.Event()
        self._tasks = [asyncio.create_task(self._join()), asyncio.create_task(self._watch())]

    @property
    def model_names(self) -> list[str]:
        return [*self.config.model_names(), *sorted(self.adapters)]

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve the LoRA adapter of a PEFT folder as a model of this name. ValueError: it can't be."""
        if name in self.model_names and self.adapters.get(name, ("", ""))[0] != path:
            raise ValueError(f"{name} is the name of another model")
        keys = await asyncio.gather(
            *(self.engines.call(replica, "load_adapter", name, path) for replica in self._own),
            return_exceptions=True,
        )
        for error in keys:
            if isinstance(error, BaseException):
                if name not in self.adapters:  # an adapter that is served goes on being served
                    await self.unload_adapter(name)
                raise error if isinstance(error, ValueError) else Unavailable(f"a replica was lost: {error!r}")
        if not keys:
            raise Unavailable("no replica is ready")
        await self._tell_routers(name, (path, str(keys[0])))

    async def unload_adapter(self, name: str) -> None:
        """Requests that run with it go on."""
        await self._tell_routers(name, None)
        calls = [self.engines.call(replica, "unload_adapter", name) for replica in self._own]
        await asyncio.gather(*calls, return_exceptions=True)  # one that doesn't answer is asked by nobody either

    async def _tell_routers(self, name: str, place: tuple[str, str] | None) -> None:
        before = self._adapter_changes.get(name, (0.0, None))[0]
        when = max(time.time(), math.nextafter(before, math.inf))  # later than what it follows, whose clock may be fast
        try:
            await self.engines.broadcast(
                "set_adapters", {name: (when, place)}, self.config.meaning, self.config.version
            )
        except Exception as error:
            raise Unavailable(f"a Router couldn't be told: {error!r}") from None

    async def set_adapters(self, changes: Mapping[str, AdapterChange], meaning: str, version: str) -> None:
        """What another Router was asked, which may be of another model, or of a version that configures others.

        Of two changes of a name the later one counts, whichever is heard of first.
        """
        if meaning != self.config.meaning or not self.config.adapter_limit:
            return
        own = {} if version == self.config.version else self.config.adapter_paths()
        for name, (when, place) in changes.items():
            if name in own or name in self.config.model_names():
                continue
            if when >= self._adapter_changes.get(name, (0.0, None))[0]:
                self._adapter_changes[name] = when, place
                self.adapters.pop(name, None)
                if place is not None:
                    self.adapters[name] = place

    async def adapter_changes(self) -> tuple[dict[str, AdapterChange], str, str]:
        """For a Router that starts later: a replica may have been started later too, or have made room for others."""
        return self._adapter_changes, self.config.meaning, self.config.version

    @property
    def _own(self) -> list[str]:
        """The replicas of this Router's model, as far as is known."""
        return [name for name, link in self._links.items() if not link.is_foreign]

    async def settled(self) -> None:
        """Returns when a replica serves what this Router does, or when, after a while, none serves another model."""
        deadline = time.monotonic() + max(self.config.heartbeat_timeout, 10.0)
        while not self.description:
            if time.monotonic() > deadline and not any(link.is_foreign for link in self._links.values()):
                break
            await asyncio.sleep(0.1)

    @property
    def ready(self) -> bool:
        """Whether a request would find a replica now."""
        return bool(self.description) and any(link.is_usable for link in self._links.values())

    async def open(self, request: GenerationRequest, session: str | None = None) -> TextGeneration:
        """Starts a request that has prompt_ids; returns when its first tokens are there, or its end.

        Without a seed it gets one that follows from its request_id, so that a client's own retry gets the same text.
        Requests of a session stay on one replica as long as they can.

        ValueError: it can never be served. Overloaded: try later. Unavailable: nothing is running. GenerationError.
        """
        await self.described()
        length = len(request.prompt_ids or [])
        if length + request.max_new_tokens > self.max_model_len:
            raise ValueError(
                f"prompt of {length} tokens and max_new_tokens {request.max_new_tokens} together exceed "
                f"the context of {self.max_model_len} tokens"
            )
        places = max(1, len(self._own)) * (self._batch_size + self.config.max_queued_requests)
        if len(self._live) >= places:
            raise self._overloaded()
        if request.seed is None:
            digest = hashlib.blake2b(request.request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            request = request.model_copy(update={"seed": int.from_bytes(digest) >> 1})
        generation = TextGeneration(self, request, session)
        self._live.add(generation)
        try:
            await generation.started()
        except BaseException:
            await generation.aclose()
            raise
        return generation

    async def described(self) -> None:
        """Returns when a replica has said what it serves: lengths, sampling defaults, adapters. Unavailable: none."""
        try:
            async with asyncio.timeout(self.config.heartbeat_timeout):
                while not self.description:
                    await self._wait_usable()
        except TimeoutError:
            raise Unavailable("no replica is ready") from None

    async def alive(self) -> tuple[bool, dict[str, Any]]:
        """Whether some replica's engine is stepping, and what is known of each."""
        replicas = {
            link.replica_id: {
                "is_local": link.is_local,
                "is_usable": link.is_usable,
                "silence": round(link.silence, 3),
                "step_age": round(link.step_age, 3),
                "load": link.load,
            }
            for link in self._links.values()
        }
        return any(link.is_usable for link in self._links.values()), {"replicas": replicas}

    async def snapshot(self, timeout: float = 2.0) -> list[bytes]:
        """`Metrics.snapshot` of every process, Router or replica, that answers in time."""
        calls = [asyncio.wait_for(self.engines.call(name, "snapshot"), timeout) for name in self._links]
        routers, *replicas = await asyncio.gather(
            self.engines.broadcast("own_metrics", timeout=timeout), *calls, return_exceptions=True
        )
        if isinstance(routers, BaseException):  # one of them is late: at least this one's own
            routers = [self.metrics.snapshot()]
        return [*routers, *(answer["metrics"] for answer in replicas if not isinstance(answer, BaseException))]

    async def own_metrics(self) -> bytes:
        """`Metrics.snapshot` of this process."""
        return self.metrics.snapshot()

    async def close(self) -> None:
        """Ends everything; running generations are aborted."""
        for generation in list(self._live):
            await generation.aclose()
        self._closing.update(self._links.values())
        for link in self._closing:
            link.leaving = True
        tasks = [*self._tasks, *(link.task for link in self._closing)]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    # --- for TextGeneration and ReplicaLink

    async def place(self, generation: TextGeneration, full: set[str]) -> ReplicaLink | None:
        """A usable replica outside of `full`; waits for one when there is none. None for who needs none any more.

        Without end while Serve has one of this model, which may be slow to connect or be replaced: that one's end is
        Serve's to find. Without any, Unavailable after heartbeat_timeout, unless a replica was lost on the way.
        """
        while not generation.needs_no_more:
            usable = [link for link in self._links.values() if link.is_usable]
            if free := [link for link in usable if link.replica_id not in full]:
                return self._placement.choose(free, generation.request, generation.session)
            if usable and generation.attempt == generation.request.attempt:
                raise self._overloaded()
            if usable:  # it was let in before, and waits for a place in the queues of those that are left
                await asyncio.sleep(0.1)
                full.clear()
                continue
            try:
                async with asyncio.timeout(self.config.heartbeat_timeout):
                    await self._wait_usable()
            except TimeoutError:
                if not self._own and generation.attempt == generation.request.attempt:
                    raise Unavailable("no replica is ready") from None
        return None

    async def _wait_usable(self) -> None:
        self.usable.clear()
        await self.usable.wait()

    def leave(self, generation: TextGeneration, well: bool) -> None:
        """A generation has ended: well, which is with a result, or not."""
        self._live.discard(generation)
        if well:
            self._ended.append(time.monotonic())
        self._close_idle()

    # --- replicas come and go

    async def _join(self) -> None:
        membership = Membership(self._set_replicas)
        await self._ask_others()  # at once: those of an older version go when this one is there
        while True:
            try:
                await self.engines.attach(membership)
                break
            except Exception:
                logger.exception("Serve told of no replica; asking again")
                await asyncio.sleep(1.0)
        await self.settled()
        await asyncio.sleep(5.0)  # until Serve has told the others of this one
        await self._ask_others()

    async def _ask_others(self) -> None:
        for _ in range(3):
            try:
                for answer in await self.engines.broadcast("adapter_changes", timeout=1):
                    await self.set_adapters(*answer)
                return
            except DeploymentUnavailableError:  # there is no other
                return
            except Exception:  # one of them is late, or has just died
                await asyncio.sleep(0.1)

    def learn(self, description: Mapping[str, Any]) -> bool:
        """What a replica says it serves; whether token ids mean there what they mean here.

        While versions change, one of another version is believed until one of this Router's own has spoken.
        """
        if description["meaning"] != self.config.meaning:
            return False
        if not self.description or self.config.version == description["version"] != self.description["version"]:
            self.max_model_len = description["max_model_len"]
            self.sampling_defaults = description.get("sampling_defaults", {})
            self._placement = Placement(description["page_size"], self._batch_size, self.adapters)
            self.description = dict(description)
            self.usable.set()
        for name, place in description["adapters"].items():
            if self.adapters.get(name, ("", ""))[0] == place[0]:
                self.adapters[name] = place
            elif self.config.adapter_limit and name not in {
                **description["configured_adapters"],
                **self.adapters,
                **self._adapter_changes,
            }:
                self._adapter_changes[name], self.adapters[name] = (0.0, place), place
        return True

    def _set_replicas(self, replicas: Mapping[str, bool]) -> None:
        for replica_id in self._links.keys() - replicas.keys():
            link = self._links.pop(replica_id)
            link.leaving = True
            self._closing.add(link)
        for replica_id in replicas.keys() - self._links.keys():
            self._links[replica_id] = ReplicaLink(self, replica_id, replicas[replica_id])
        self._close_idle()

    def _close_idle(self) -> None:
        """A replica that leaves drains until nothing is open there, so an idle pump must go at once."""
        for link in [link for link in self._closing if not link.attempts]:
            self._closing.discard(link)
            link.task.cancel()

    async def _watch(self) -> None:
        """A replica that is stuck, though its process may live, loses its requests if there is another one."""
        while True:
            await asyncio.sleep(self.config.heartbeat_timeout / 4)
            usable = any(link.is_usable for link in self._links.values())
            for link in [*self._links.values(), *self._closing]:
                if usable and link.attempts and link.is_stuck:
                    message = "%s is silent for %.1f s, without a step for %.1f s: its requests move"
                    logger.warning(message, link.replica_id, link.silence, link.step_age)
                    link.lose_attempts()
            self._close_idle()

    @property
    def _batch_size(self) -> int:
        return 1 if self.config.generation_backend == "eager" else self.config.max_batch_size

    def _overloaded(self) -> Overloaded:
        """Requests end at a rate that is measured, and each end makes a place: whoever is turned away is told of the
        next one that nobody else was told of."""
        now = time.monotonic()
        recent = [moment for moment in self._ended if now - moment < 30]
        interval = (now - recent[0]) / len(recent) if recent else 1.0
        self._next_place = min(max(self._next_place, now) + interval, now + 60)
        return Overloaded("every queue is full", max(1, math.ceil(self._next_place - now)))
