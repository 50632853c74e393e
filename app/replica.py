"""EngineReplica: a thread that steps the engine, and a front that streams from it.

This module imports no torch: the Router needs the message types, and thread settings must be in the environment before
torch is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from app.autoscaling import pressure
from app.metrics import Metrics
from app.settings import DUMMY_MODEL, ServingConfig
from engine.digests import short_digests
from engine.schemas import GenerationRequest, GenerationResult, QueueFull, StepTokens, TokenLogprobs
from engine.tokenization import HuggingFaceTokenizer, SimpleCharacterTokenizer, Tokenizer

if TYPE_CHECKING:
    from app.draft import SocketChannel
    from engine.batch_engine import ContinuousBatchingEngine, EngineStats
    from engine.models.decoder import CausalLM
    from engine.speculation import SpeculationStats

logger = logging.getLogger(__name__)

TAG_BITS = 40
"""A tag is a pump's key above this many bits, and a counter below."""

SEEN_TAGS = 65536


@dataclass(slots=True)
class Refusal:
    """A request that a replica didn't take. `status` is the HTTP status; 0: another attempt may succeed; 503: not here
    any more."""

    status: int
    message: str


@dataclass(slots=True)
class CacheChanges:
    """Full pages, by `short_digests`, that came into a prefix cache or left it; whole: those that came are all."""

    came: np.ndarray
    left: np.ndarray
    whole: bool


@dataclass(slots=True)
class PumpMessage:
    """What came since the last message, or nothing: then it is a heartbeat.

    `tags`, `counts`, `tokens`, `logprobs`, `origins`: as in StepTokens, but a tag may occur more than once, in order.
    load: requests running or waiting at the replica. step_age: seconds since the engine last stepped or was idle.
    waiting_tokens, free_pages: as in `ContinuousBatchingEngine.backlog`.
    """

    load: int
    step_age: float
    waiting_tokens: int
    free_pages: int
    tags: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    cache: CacheChanges | None = None
    origins: np.ndarray | None = None


class Pump:
    """The replica's end of one Router's stream: what the Router hasn't fetched yet, merged.

    `held` are the pages of the prefix cache, which the replica keeps; the first message has them all, and so has one
    that would have more changes than that.
    """

    def __init__(self, held: dict[bytes, None]) -> None:
        self.ready = asyncio.Event()
        self._parts: list[StepTokens] = []
        self._held = held
        self._changes: dict[bytes, bool] | None = None
        self._beats = True

    def put(self, part: StepTokens) -> None:
        self._parts.append(part)
        self.ready.set()

    def put_changes(self, changes: dict[bytes, bool]) -> None:
        """Pages that came or left. They go with the next heartbeat: nobody waits for them."""
        if self._changes is not None:
            self._changes |= changes
            if len(self._changes) > len(self._held) + 64:
                self._changes = None

    def beat(self) -> None:
        """Has a message go out now, with the changes since the last beat."""
        self._beats = True
        self.ready.set()

    def _take_changes(self) -> CacheChanges | None:
        if not self._beats:
            return None
        self._beats = False
        changes, self._changes = self._changes, {}
        if changes is None:
            return CacheChanges(short_digests(list(self._held)), short_digests([]), True)
        if not changes:
            return None
        came, left = ([digest for digest, came in changes.items() if came is wanted] for wanted in (True, False))
        return CacheChanges(short_digests(came), short_digests(left), False)

    def take(self, load: int, step_age: float, backlog: tuple[int, int]) -> PumpMessage:
        parts, self._parts = self._parts, []
        self.ready.clear()
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for part in parts:
            for tag, values in part.logprobs.items():
                logprobs.setdefault(tag, []).extend(values)
        return PumpMessage(
            load,
            step_age,
            *backlog,
            _join([part.tags for part in parts], np.int64),
            _join([part.counts for part in parts], np.int32),
            _join([part.tokens for part in parts], np.int32),
            logprobs,
            self._take_changes(),
            _join_origins(parts),
        )


class EngineReplica:
    """One engine and one model. A plain class: `app.main` makes a Serve deployment of it.

    `engine` is one of `build_engine`, loaded and warm.
    """

    heartbeat_interval = 1.0

    def __init__(
        self,
        engine: ContinuousBatchingEngine,
        config: ServingConfig,
        description: dict[str, Any],
        name: str = "EngineReplica",
        draft: SocketChannel | None = None,
    ) -> None:
        self.engine = engine
        self.config = config
        self.description = description
        self.metrics = Metrics(name)
        self.draft = draft
        if draft is not None:
            draft.on_round_trip = self.metrics.draft_round_trip
        self._loop = asyncio.get_running_loop()
        self._adapter_lock = asyncio.Lock()
        self._grammar_lock = asyncio.Lock()  # costly ones wait here, and not in the threads that others need
        self._calls: dict[int, asyncio.Future[GenerationResult]] = {}
        self._seen: dict[int, None] = {}
        self._pumps: dict[int, Pump] = {}
        self._held: dict[bytes, None] = {}  # full pages in the prefix cache
        self._inbox: deque[StepTokens] = deque()
        self._scheduled = False
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._last_step = time.monotonic()
        engine.set_token_sink(self._sink)
        engine.set_step_observer(self.metrics.record_batch_fill_ratio)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._heart = self._loop.create_task(self._beat())

    # --- the engine's thread

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self.engine.wait_for_work(0.2):
                    self.engine.step()
                self._last_step = time.monotonic()
        except BaseException as error:
            self._failure = error
            logger.exception("the engine's loop died")
            self._loop.call_soon_threadsafe(self._fail_calls, error)

    def _sink(self, step: StepTokens) -> None:
        self._inbox.append(step)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._deliver)

    # --- the event loop's side

    def _deliver(self) -> None:
        self._scheduled = False
        while self._inbox:
            step = self._inbox.popleft()
            if step.cached:
                self._note_cached(step.cached)
            for key, part in _split(step):
                if (pump := self._pumps.get(key)) is not None:
                    pump.put(part)
            for tag, result in step.finished:
                self.metrics.sequence_ended(result.queue_seconds, result.prefill_seconds, result.decode_seconds)
                call = self._calls.get(tag)
                if call is not None and not call.done():
                    call.set_result(result)

    def _note_cached(self, changes: dict[bytes, bool]) -> None:
        for digest, came in changes.items():
            if came:
                self._held[digest] = None
            else:
                self._held.pop(digest, None)
        for pump in self._pumps.values():
            pump.put_changes(changes)

    def _fail_calls(self, error: BaseException) -> None:
        for call in self._calls.values():
            if not call.done():
                call.set_exception(RuntimeError(f"the engine died: {error!r}"))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_interval)
            for pump in self._pumps.values():
                pump.beat()
            try:
                self._record_stats()
            except Exception:  # no reason to be taken for dead
                logger.exception("the engine's statistics failed")

    @property
    def step_age(self) -> float:
        """Seconds since the engine's thread last finished a step or found nothing to do."""
        return time.monotonic() - self._last_step

    async def describe(self, membership: None = None) -> dict[str, Any]:
        """What is really running here."""
        adapters = {name: (adapter.path, adapter.key) for name, adapter in self.engine.adapters().items()}
        draft = {} if self.draft is None else {"draft": self.draft.description}
        own = {"meaning": self.config.meaning, "version": self.config.version, "adapters": adapters}
        return {**self.description, **draft, **own, "configured_adapters": self.config.adapter_paths()}

    async def load_adapter(self, name: str, path: str) -> str:
        """Has the adapter of a PEFT folder, as it is now, ready for requests; returns its key. Raises ValueError."""
        async with self._adapter_lock:
            return await self._load_adapter(name, path)

    async def _load_adapter(self, name: str, path: str) -> str:
        # To its end, whoever leaves: a thread goes on, and the next one would meet what it loads.
        loading = asyncio.ensure_future(asyncio.to_thread(self.engine.load_adapter, name, path, replace=True))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            await asyncio.wait([loading])
            raise

    async def unload_adapter(self, name: str) -> None:
        if name in self.engine.adapters():
            self.engine.unload_adapter(name)

    def _speculation_stats(self) -> SpeculationStats:
        stats = self.engine.speculation_stats()
        if self.draft is not None:
            stats.draft_up = self.draft.up  # which an idle engine hasn't noticed
        return stats

    def _record_stats(self) -> EngineStats:
        stats = self.engine.stats()
        self.metrics.record_engine(stats)
        self.metrics.record_speculation(self._speculation_stats())
        return stats

    async def generate(
        self, request: GenerationRequest, tag: int, adapter_path: str | None = None
    ) -> GenerationResult | Refusal:
        """Runs one request to its end; its tokens leave by the pump whose key is in `tag`. Cancelling aborts it.

        adapter_path: where the request's adapter is, if it isn't loaded here yet, or not any more.
        """
        if tag >> TAG_BITS not in self._pumps:
            return Refusal(0, "no pump is open for this tag")
        if tag in self._seen:
            return Refusal(0, "this attempt was here before")
        if self._failure is not None:
            return Refusal(503, "the engine has died")
        self._seen[tag] = None
        if len(self._seen) > SEEN_TAGS:
            self._seen.pop(next(iter(self._seen)))
        call: asyncio.Future[GenerationResult] = self._loop.create_future()
        self._calls[tag] = call
        request_id = _engine_id(tag)
        try:
            if request.grammar is not None:  # the engine finds it compiled
                async with contextlib.nullcontext() if request.grammar.is_plain else self._grammar_lock:
                    await asyncio.to_thread(self.engine.grammars.compile, request.grammar)
            request = request.model_copy(update={"request_id": request_id})
            if request.adapter is None or adapter_path is None:
                self.engine.add_request(request, tag=tag)
            else:
                async with self._adapter_lock:  # nobody else's takes its place in between
                    loaded = self.engine.adapters().get(request.adapter)
                    if loaded is None or loaded.path != adapter_path:
                        await self._load_adapter(request.adapter, adapter_path)
                    self.engine.add_request(request, tag=tag)
            return await call
        except QueueFull as error:
            return Refusal(429, str(error))
        except ValueError as error:
            return Refusal(400, str(error))
        finally:
            del self._calls[tag]
            if not call.done() or call.cancelled():
                self.engine.abort(request_id)

    async def abort(self, tag: int) -> None:
        """Ends a request early: its `generate` returns what there is, with finish reason abort."""
        self.engine.abort(_engine_id(tag))

    async def pump(self, key: int) -> AsyncIterator[PumpMessage]:
        """The tokens of every request whose tag carries `key`; the first message, empty, says that it is open."""
        if key in self._pumps:
            raise ValueError("this key is taken")
        pump = self._pumps[key] = Pump(self._held)
        pump.ready.set()
        try:
            while True:
                await pump.ready.wait()
                yield pump.take(len(self._calls), self.step_age, self.engine.backlog())
        finally:
            del self._pumps[key]

    async def snapshot(self) -> dict[str, Any]:
        """Counters of this replica's engine, and `Metrics.snapshot` of this process."""
        return {
            "engine": asdict(self._record_stats()),
            "speculation": asdict(self._speculation_stats()),
            "draft": self.draft.description if self.draft is not None else None,
            "calls": len(self._calls),
            "pumps": len(self._pumps),
            "pid": os.getpid(),
            "metrics": self.metrics.snapshot(),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this, for `app.autoscaling.policy`."""
        stats = self.engine.stats()
        held, pages = stats.held_pages, stats.total_pages
        return {"pressure": pressure(stats.running, stats.waiting, stats.max_batch_size, held, pages)}

    def check_health(self) -> None:
        """Serve calls this: raises when the engine's thread is dead or stuck."""
        if self._failure is not None or not self._thread.is_alive():
            raise RuntimeError(f"the engine's thread has died: {self._failure!r}")
        if self.step_age > self.config.step_timeout:
            raise RuntimeError(f"no step for {self.step_age:.0f} s")

    def close(self) -> None:
        """Stops the engine's thread after the step it is in."""
        self._stop.set()
        self._heart.cancel()
        self._thread.join(timeout=10)
        if self.draft is not None:
            self.draft.close()


def _engine_id(tag: int) -> str:
    return f"{tag:x}"


def _join(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _join_origins(parts: list[StepTokens]) -> np.ndarray | None:
    if all(part.origins is None for part in parts):
        return None
    return np.concatenate(
        [np.zeros(len(part.tokens), np.int8) if part.origins is None else part.origins for part in parts]
    )


def _split(step: StepTokens) -> list[tuple[int, StepTokens]]:
    """A step's tokens by pump key; with one Router, which is the usual case, the arrays go on as they are."""
    if not len(step.tags):
        return []
    keys = step.tags >> TAG_BITS
    first = int(keys[0])
    if (keys == first).all():
        return [(first, step)]
    parts = []
    for key in np.unique(keys).tolist():
        mine = keys == key
        logprobs = {tag: values for tag, values in step.logprobs.items() if tag >> TAG_BITS == key}
        each = np.repeat(mine, step.counts)
        origins = None if step.origins is None else step.origins[each]
        part = StepTokens(step.tags[mine], step.counts[mine], step.tokens[each], logprobs=logprobs, origins=origins)
        parts.append((key, part))
    return parts


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def engine_threads(config: ServingConfig) -> int:
    """CPU threads of an engine, or of each of its ranks.

    A parallel region waits for its slowest thread: one on a core shared with Router, proxy and clients costs more than
    it gives.
    """
    return config.num_threads or max(1, (available_cores() - 1) // config.tensor_parallel_size)


def set_thread_environment(threads: int, wait_policy: str) -> None:
    """OpenMP reads these once, when torch is loaded."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["OMP_WAIT_POLICY"] = wait_policy.upper()


def build_engine(
    config: ServingConfig, draft_channel: SocketChannel | None = None, rank_address: str | None = None
) -> tuple[ContinuousBatchingEngine, dict[str, Any]]:
    """Loads model and tokenizer, builds the engine and warms it up. Also returns a description of what runs.

    rank_address: where the other ranks are met, when the model is in several parts.
    """
    threads = engine_threads(config)
    set_thread_environment(threads, config.omp_wait_policy)
    config.check_files()
    import torch

    torch.set_num_threads(threads)
    from engine.attention import attention_for
    from engine.batch_engine import ContinuousBatchingEngine

    tokenizer, defaults = load_tokenizer(config), _generation_defaults(config)
    tokenizer.eos_token_ids |= frozenset(defaults.pop("eos_token_ids"))  # unknown to a tokenizer from elsewhere
    model = load_model(config, tokenizer, rank_address)
    # The engine packs the weights, after which they are no parameters any more.
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    draft = None
    if config.draft_model is not None and draft_channel is None:
        draft = load_model(config.of_draft(), tokenizer)
    engine = ContinuousBatchingEngine.from_serving_config(config, model, tokenizer, draft, draft_channel)
    for name, path in config.adapter_paths().items():
        engine.load_adapter(name, path)
    engine.add_request(GenerationRequest(prompt="warm", max_new_tokens=2, ignore_eos=True, request_id="warm-up"))
    while engine.scheduler.has_pending_work:
        engine.step()
    engine.result("warm-up")
    stats = engine.stats()
    return engine, {
        "model": config.model_names()[0],
        "model_class": type(model).__name__,
        "param_count_total": sum(size for size, _ in sizes),
        "param_count_trainable": sum(size for size, trainable in sizes if trainable),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": config.quantization,
        "device": str(model.device),
        "max_seq_len": stats.max_seq_len,
        "max_model_len": stats.max_seq_len,
        "max_batch_size": stats.max_batch_size,
        "page_size": stats.page_size,
        "num_pages": stats.total_pages,
        "attn_impl": attention_for(config.attn_impl, model.device),
        "mlp_impl": config.mlp_impl,
        "generation_backend": config.generation_backend,
        "enable_prefix_cache": config.enable_prefix_cache,
        "use_paged_attention": config.use_paged_attention,
        "speculation": config.proposer,
        "draft_model": config.draft_model,
        "gamma": config.gamma,
        "sampling_defaults": defaults,
        "tensor_parallel_size": config.tensor_parallel_size,
        "num_threads": torch.get_num_threads(),
        "api_key_set": config.api_key is not None,
    }


def load_tokenizer(config: ServingConfig) -> Tokenizer:
    """The tokenizer that goes with the configured model. Raises ValueError."""
    if config.model == DUMMY_MODEL and config.tokenizer is None:
        return SimpleCharacterTokenizer()
    if config.tokenizer not in (None, config.model):
        return HuggingFaceTokenizer(config.tokenizer)
    return HuggingFaceTokenizer(config.model, config.revision)


def _generation_defaults(config: ServingConfig) -> dict[str, Any]:
    """What the model's makers set in generation_config.json: what ends a text, and sampling parameters for requests
    that don't say."""
    if config.model == DUMMY_MODEL:
        return {"eos_token_ids": []}
    from engine.models.loader import load_generation_defaults, resolve_model

    return load_generation_defaults(resolve_model(config.model, config.revision))


def load_options(config: ServingConfig) -> dict[str, Any]:
    """What `engine.models.loader.load_model` is given of the options."""
    import torch

    from engine.models.decoder import DecoderModel

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "dtype": None if config.dtype == "auto" else getattr(torch, config.dtype),
        "device": device,
        "attn_impl": config.attn_impl,
        "mlp_impl": config.mlp_impl,
        "revision": config.revision,
        "model_class": config.model_class or DecoderModel,
    }


def load_model(config: ServingConfig, tokenizer: Tokenizer, rank_address: str | None = None) -> CausalLM:
    """The configured model, on its device. Raises ValueError."""
    import torch

    from engine.attention import attention_for
    from engine.models import loader
    from engine.models.decoder import DecoderModel

    options = load_options(config)
    device, dtype = options["device"], options["dtype"]
    if config.model != DUMMY_MODEL:
        ranks = None
        if rank_address is not None:
            from engine.parallel import Ranks

            ranks = Ranks(0, config.tensor_parallel_size, rank_address, device)
        model = loader.load_model(config.model, ranks=ranks, **options)
        loader.check_tokenizer(model, tokenizer)
        return model
    torch.manual_seed(0)
    model = DecoderModel(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=config.max_model_len or 2048,
        attn_impl=attention_for(config.attn_impl, device),
        mlp_impl=config.mlp_impl,
    )
    return model.to(device=device, dtype=dtype or torch.float32).eval()
