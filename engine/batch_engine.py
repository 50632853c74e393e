"""The continuous-batching engine: plan a step, launch its forward and sampling, commit its results.

At depth 0 a step is committed before the next is planned; at depth 1 the next is planned and launched first, so that
the device doesn't wait for the host. What a step needs of the running sequences is in arrays; Python touches a
sequence when it arrives, ends, is preempted or fills a page.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from engine.digests import extend_digests, root_digest
from engine.grammars import GRAMMAR_ERROR
from engine.kv_cache import KVSlotPool
from engine.memory import fitting_pages
from engine.models.decoder import CausalLM, DecoderModel
from engine.models.lora import Adapter, AdapterSet
from engine.parallel import LeadingRunner, Ranks, Setup
from engine.runner import LaunchedStep, ModelRunner
from engine.sampling import INVALID, Sampled, Sampler, SamplingTable, Vocabulary, draw_seed
from engine.scheduler import MAX_GAMMA, Scheduler, StepPlan
from engine.schemas import FinishReason, GenerationRequest, GenerationResult, StepTokens, TokenLogprobs
from engine.sequence import Sequence, SequenceTable, Status
from engine.speculation import (
    CATCH_UP,
    NO_TOKEN,
    DraftChannel,
    Drafter,
    DraftModelProposer,
    NgramProposer,
    RemoteProposer,
    SpeculationStats,
    Speculator,
    accept,
)
from engine.structured import GrammarCompiler
from engine.tokenization import TextStream, Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepStats:
    """One step, as observers see it."""

    scheduled: int  # sequences that ran
    total_active_slots: int  # sequences that hold a row
    tokens: int  # tokens that ran, prompts included
    waiting: int
    free_pages: int  # neither held nor cached
    max_batch_size: int
    generated: int  # tokens given out
    finished: int  # requests ended


@dataclass(slots=True)
class EngineStats:
    """Where the engine stands; the counters run from its start."""

    total_pages: int
    page_size: int
    max_batch_size: int
    max_seq_len: int
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    held_pages: int = 0
    steps: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_requests: int = 0
    preemptions: int = 0


class ContinuousBatchingEngine:
    """Serves many requests with one model.

    max_seq_len: the context, at most the model's (the default). page_size: tokens a page, the attention backend's
    default if None; max_seq_len makes a page a whole sequence. num_pages, memory_fraction: see `fitting_pages`.
    max_batched_tokens: tokens a step. depth: steps that are launched before the last is committed. max_results:
    finished results kept until they are read. quantization: int8 or int4 weights in the layers, on a CPU. speculation:
    who proposes tokens to verify (draft: a model here, or one behind a channel), with gamma of them at a time or, None,
    as many as pay.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer | None,
        device: torch.device | str = "cpu",
        max_batch_size: int = 16,
        max_seq_len: int | None = None,
        dtype: torch.dtype | None = None,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        max_batched_tokens: int = 2048,
        depth: int = 1,
        enable_prefix_cache: bool = True,
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
        aging_seconds: float = 30.0,
        memory_fraction: float = 0.9,
        max_results: int = 65536,
        quantization: Literal["int8", "int4"] | None = None,
        speculation: Literal["off", "ngram", "draft"] = "off",
        draft_model: CausalLM | None = None,
        draft_channel: DraftChannel | None = None,
        gamma: int | None = None,
        max_adapters: int = 0,
    ) -> None:
        if depth not in (0, 1):
            raise ValueError(f"depth must be 0 or 1, got {depth}")
        for name, value in (("max_batch_size", max_batch_size), ("max_batched_tokens", max_batched_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device {device} is not supported; known: cpu, cuda")
        self.tokenizer = tokenizer
        self.depth = depth
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len or model.max_seq_len
        if self.max_seq_len > model.max_seq_len:
            raise ValueError(f"max_seq_len {self.max_seq_len} is above the model's {model.max_seq_len}")
        dtype = dtype or sane_dtype(model.dtype, self.device)
        model.attention.check(model.head_dim, dtype, self.device)
        page_size = page_size or model.attention.default_page_size
        model.attention.check_page_size(page_size)
        if not model.packed:
            model = model.to(device=self.device, dtype=dtype).eval()
        elif (model.device.type, model.dtype) != (self.device.type, dtype):
            raise ValueError(f"the model was packed as {model.dtype} on {model.device}: load it again for {dtype}")
        if model.packed and quantization != model.quantization:
            raise ValueError(f"the model was packed with quantization {model.quantization}, not {quantization}")
        if model.ranks is not None and quantization is not None:
            raise ValueError("quantization is not supported with tensor_parallel_size above 1")
        if dtype != torch.float32 or quantization is not None:
            model.pack(quantization)
        pages_a_sequence = -(-self.max_seq_len // page_size)
        sizes: dict[str, Any] = {
            "page_size": page_size,
            "max_seq_len": self.max_seq_len,
            "max_batch_size": max_batch_size,
            "max_batched_tokens": max_batched_tokens,
            "num_pages": num_pages,
            "memory_fraction": memory_fraction,
        }
        if model.ranks is not None:
            model.ranks.send(Setup(sizes, dtype, max_batch_size))
        fitting = fitting_pages(model, **sizes)
        self.pool = KVSlotPool(
            model,
            fitting if model.ranks is None else model.ranks.smallest(fitting),
            page_size,
            dtype=dtype,
            enable_prefix_cache=enable_prefix_cache,
            retention=model.retention,
        )
        self.table = SequenceTable(max_batch_size, self.max_seq_len, pages_a_sequence, self.device)
        self.sampling = self.table.sampling = SamplingTable(max_batch_size, self.device)
        self.scheduler = Scheduler(
            self.table,
            self.pool,
            max_batched_tokens=max_batched_tokens,
            max_queued=max_queued_requests,
            max_queued_tokens=max_queued_tokens,
            aging_seconds=aging_seconds,
        )
        self._adapters = self._make_adapters(model, max_adapters)
        self.vocabulary = Vocabulary(model.vocab_size, tokenizer)
        self.grammars = GrammarCompiler(self.vocabulary)
        sampler = Sampler(self.sampling, self.vocabulary, self.device)
        self._ranks: Ranks | None = model.ranks
        kind = ModelRunner if self._ranks is None else LeadingRunner
        self._runner: ModelRunner | None = kind(
            model, self.pool, self.table, sampler, self.table.page_table, adapters=self._adapters
        )
        self.hidden_size: int = getattr(model, "hidden_size", 0)  # 0: not known
        self._speculator = self._make_speculator(speculation, draft_model, draft_channel, gamma)
        self._lock = threading.Condition()
        self._turn = threading.Lock()  # a step at a time, whoever steps
        self._in_flight: LaunchedStep | None = None
        self._live: dict[str, Sequence] = {}
        self._results: OrderedDict[str, GenerationResult] = OrderedDict()
        self._max_results = max_results
        self._ended: list[tuple[int, GenerationResult]] = []  # ends the sink has not been told of
        self._aborts: list[tuple[Sequence, FinishReason]] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._next_uid = 0
        self._counters = EngineStats(self.pool.num_pages, page_size, max_batch_size, self.max_seq_len)
        self._observer: Callable[[StepStats], None] | None = None
        self._sink: Callable[[StepTokens], None] | None = None
        self._observed = 0  # ends that the stats of a step have counted
        self._checked = True

    def _make_speculator(
        self, speculation: str, draft_model: CausalLM | None, draft_channel: DraftChannel | None, gamma: int | None
    ) -> Speculator | None:
        if (speculation == "draft") != ((draft_model is None) != (draft_channel is None)):
            raise ValueError('speculation="draft" and one of draft_model and draft_channel go together')
        if speculation == "off":
            return None
        if speculation == "ngram":
            return Speculator(NgramProposer(self.table), self.table, gamma)
        if draft_channel is not None:
            return Speculator(RemoteProposer(draft_channel, self.table, gamma or MAX_GAMMA), self.table, gamma)
        if draft_model is None:
            raise ValueError(f"unknown speculation {speculation!r}; known: draft, ngram, off")
        draft_model = draft_model.to(device=self.device, dtype=self.pool.kv.dtype).eval()
        if (size := draft_model.target_hidden_size) not in (0, self.hidden_size):
            raise ValueError(f"the draft reads hidden states of {size}, not the target's of {self.hidden_size}")
        pages = None
        if self.device.type == "cuda":  # of the memory that the target's pool has left
            page_size = draft_model.attention.default_page_size
            sizes = {"max_seq_len": self.max_seq_len, "max_batch_size": self.max_batch_size}
            pages = fitting_pages(draft_model, page_size, **sizes, max_batched_tokens=CATCH_UP, memory_fraction=0.8)
        drafter = Drafter(draft_model, self.table, self.sampling, self.vocabulary, num_pages=pages)
        return Speculator(DraftModelProposer(drafter), self.table, gamma)

    def _make_adapters(self, model: CausalLM, limit: int) -> AdapterSet | None:
        if limit and (not isinstance(model, DecoderModel) or model.ranks is not None):
            what = "model in several ranks" if model.ranks is not None else type(model).__name__
            raise ValueError(f"max_adapters: a {what} takes no adapters")
        return AdapterSet(model, limit) if limit and isinstance(model, DecoderModel) else None

    @classmethod
    def from_serving_config(
        cls,
        config: Any,
        model: CausalLM,
        tokenizer: Tokenizer | None,
        draft_model: CausalLM | None = None,
        draft_channel: DraftChannel | None = None,
    ) -> ContinuousBatchingEngine:
        """An engine as a ServingConfig (or anything with its attributes) describes it."""
        device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        max_seq_len = config.max_model_len or model.max_seq_len
        eager = config.generation_backend == "eager"
        return cls(
            model,
            tokenizer,
            device,
            1 if eager else config.max_batch_size,
            max_seq_len,
            None if config.dtype == "auto" else getattr(torch, config.dtype),
            page_size=config.page_size if config.use_paged_attention else max_seq_len,
            num_pages=config.num_pages,
            memory_fraction=config.memory_fraction,
            max_batched_tokens=config.max_batched_tokens,
            depth=config.depth,
            enable_prefix_cache=config.enable_prefix_cache,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            quantization=config.quantization,
            speculation=config.proposer,
            draft_model=draft_model,
            draft_channel=draft_channel,
            gamma=config.gamma,
            max_adapters=config.adapter_limit,
        )

    # Requests

    def add_request(self, request: GenerationRequest, *, tag: int | None = None) -> str:
        """Queue a request; returns its id. From any thread.

        With a tag, its tokens and its end go to the sink under that tag, and whoever owns the sink cuts at stop
        strings. Without one the engine reads the text itself and keeps the result for `result`. Raises ValueError for
        a request that is malformed, of a live id, or can never fit; QueueFull when the queue is at its bound.
        """
        sequence = self._new_sequence(request, tag)
        if sequence.limit <= len(sequence.tokens):
            with self._lock:
                self._register(sequence)
                self._end(sequence, FinishReason.LENGTH, len(sequence.tokens))
                self._lock.notify_all()
            return request.request_id
        self.scheduler.check_fits(sequence)
        with self._lock:
            self._runner_or_raise()
            self.scheduler.check_queue(len(sequence.tokens))
            self._register(sequence)
            self.scheduler.add(sequence)
            if sequence.deadline < np.inf:
                heapq.heappush(self._deadlines, (sequence.deadline, sequence.uid, sequence))
            self._lock.notify_all()
        return request.request_id

    def check(self, request: GenerationRequest) -> None:
        """Raise ValueError for what `add_request` would refuse whenever it came."""
        self.scheduler.check_fits(self._new_sequence(request, None))

    def _new_sequence(self, request: GenerationRequest, tag: int | None) -> Sequence:
        prompt_ids = tokenize_prompt(request, self.tokenizer)
        if request.stop and tag is not None:
            raise ValueError("stop strings of a tagged request are its sink's")
        check_request(request, prompt_ids, self.vocabulary, self.max_seq_len)
        adapter = self._adapter_set(request.adapter).use(request.adapter) if request.adapter is not None else None
        grammar = None
        if request.grammar is not None:
            grammar = self.grammars.state(request.grammar, request.output_ids)
        reader = None
        if request.stop and self.tokenizer is not None:
            reader = TextStream(self.tokenizer, prompt_ids, request, request.output_ids)
        tokens = np.array([*prompt_ids, *request.output_ids], dtype=np.int32)
        digests = [root_digest(request.cache_salt, adapter.key if adapter is not None else None)]
        if self.pool.index is not None:
            extend_digests(digests, tokens, self.pool.page_size)
        now = time.monotonic()
        return Sequence(
            uid=-1,
            request=request,
            tag=-1 if tag is None else tag,
            tokens=tokens,
            prompt_len=len(prompt_ids),
            limit=len(prompt_ids) + request.max_new_tokens,
            key=now + request.priority * self.scheduler.aging_seconds,
            seed=draw_seed() if request.seed is None else request.seed,
            stop_ids=self.vocabulary.stop_ids(request),
            bad_words=self.vocabulary.bad_words(request),
            deadline=now + request.timeout if request.timeout is not None else np.inf,
            digests=digests,
            arrival=now,
            adapter=adapter,
            grammar=grammar,
            reader=reader,
        )

    def _register(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        if request_id in self._live:
            raise ValueError(f"request_id {request_id!r} is live already")
        self._results.pop(request_id, None)
        sequence.uid = self._next_uid
        self._next_uid += 1
        self._live[request_id] = sequence
        self._counters.prompt_tokens += sequence.prompt_len

    def load_adapter(self, name: str, path: str | Path, replace: bool = False) -> str:
        """Let requests name the adapter of a PEFT folder; returns its key, which is part of its prefixes'.

        The least recently used makes room where `max_adapters` are loaded. Raises ValueError for a name that is taken,
        unless by what is to be replaced, and for files that don't fit the model.
        """
        return self._adapter_set(name).load(name, path, replace).key

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter; those that have it keep it. Raises ValueError if it isn't loaded."""
        self._adapter_set(name).unload(name)

    def adapters(self) -> dict[str, Adapter]:
        """The loaded adapters by name."""
        return self._adapters.loaded() if self._adapters is not None else {}

    def _adapter_set(self, name: str) -> AdapterSet:
        if self._adapters is None:
            raise ValueError(f"unknown adapter {name!r}: adapters are off, max_adapters is 0")
        return self._adapters

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request; its pages are free by the first step planned after this. False if it isn't live."""
        with self._lock:
            sequence = self._live.get(request_id)
            if sequence is None:
                return False
            self._aborts.append((sequence, reason))
            self._lock.notify_all()
            return True

    def result(self, request_id: str) -> GenerationResult | None:
        """A finished request's result, once: reading drops it. None while it runs and for unknown ids."""
        with self._lock:
            return self._results.pop(request_id, None)

    # Steps

    def step(self) -> StepStats:
        """One step. From any thread: steppers take turns, so that a sequence has one run of tokens a step."""
        with self._turn:
            start = time.perf_counter()
            plan = self._lock_step_pre()
            launched, collected, error = self._forward_and_sample(plan)
            stats, output = self._lock_step_post(plan, launched, collected, error)
            if self._speculator is not None and plan is not None:
                self._speculator.observe(plan, time.perf_counter() - start)
            if output is not None and self._sink is not None:
                self._sink(output)
        self._observe(stats)
        return stats

    async def step_async(self) -> StepStats:
        """As `step`, in a worker thread."""
        return await asyncio.to_thread(self.step)

    def _lock_step_pre(self) -> StepPlan | None:
        with self._lock:
            self._runner_or_raise()
            self._end_overdue()
            drafts = self._speculator.lengths if self._speculator is not None else None
            return self.scheduler.plan(self._in_flight is not None, drafts)

    def _forward_and_sample(
        self, plan: StepPlan | None
    ) -> tuple[LaunchedStep | None, LaunchedStep | None, Exception | None]:
        """Launch the plan, then wait for the step to commit: the one in flight, else this one at depth 0 or when it
        verifies drafts or obeys grammars, so that the next can't be planned without."""
        runner = self._runner_or_raise()
        launched, error = None, None
        if plan is not None:
            try:
                if self._speculator is not None:
                    self._speculator.propose(plan)
                launched = runner.launch(plan)
            except Exception as e:
                if self._ranks is not None:
                    raise  # a rank is lost, or out of step
                logger.exception("a forward of %d sequences failed", len(plan.rows))
                error = e
        ready = launched if self._commits_at_once(plan) else self._in_flight
        if ready is not None:
            runner.collect(ready)
        return launched, ready, error

    def _commits_at_once(self, plan: StepPlan | None) -> bool:
        return self.depth == 0 or (plan is not None and (plan.verifies or plan.masked))

    def _lock_step_post(
        self, plan: StepPlan | None, launched: LaunchedStep | None, ready: LaunchedStep | None, error: Exception | None
    ) -> tuple[StepStats, StepTokens | None]:
        with self._lock:
            output = None
            generated = 0
            if ready is not None:
                self._record_prompt_logprobs(ready)
                output, generated = self._commit(ready.plan, ready.sampled, ready.states)
            if plan is not None and error is not None:
                self._fail(plan, error)
            self._in_flight = None if self._commits_at_once(plan) else launched
            if self._ended:
                output = output or StepTokens(*_NO_TOKENS)
                output.finished, self._ended = self._ended, []
            if self.pool.index is not None and self.pool.index.changes:
                output = output or StepTokens(*_NO_TOKENS)
                output.cached, self.pool.index.changes = self.pool.index.changes, {}
            tokens = 0
            if plan is not None:
                self._counters.steps += 1
                tokens = int(plan.counts.sum())
                self._counters.computed_tokens += tokens
                self._checked = False
            elif not self._checked and not self.scheduler.has_pending_work:
                self.pool.check()
                self._checked = True
            stats = StepStats(
                scheduled=0 if plan is None else len(plan.rows),
                total_active_slots=self.scheduler.num_running,
                tokens=tokens,
                waiting=self.scheduler.num_waiting,
                free_pages=self.pool.free_pages,
                max_batch_size=self.max_batch_size,
                generated=generated,
                finished=self._counters.finished_requests - self._observed,
            )
            self._observed = self._counters.finished_requests
            return stats, output

    def _commit(
        self, plan: StepPlan, sampled: Sampled | None, states: torch.Tensor | None
    ) -> tuple[StepTokens | None, int]:
        table = self.table
        live = table.uid[plan.rows] == plan.uids
        accepted = np.zeros_like(plan.drafts)
        if sampled is None:
            self.scheduler.commit(plan, live, accepted)
            return None, 0
        rows, lengths, alive = plan.rows[plan.samples], plan.lengths[plan.samples], live[plan.samples]
        counts, flat = np.ones_like(rows), np.arange(len(rows))  # of each run's new tokens; its first sample
        samples = sampled.ids.numpy()[:, None]  # [R, 1 + G], after the last known token and after each draft
        if plan.verifies:
            per_run = plan.drafts[plan.samples] + 1
            flat = np.cumsum(per_run) - per_run
            samples = np.full((len(rows), per_run.max()), NO_TOKEN, dtype=np.int64)
            samples[np.arange(samples.shape[1]) < per_run[:, None]] = sampled.ids.numpy()
            if self._speculator is not None and len(plan.draft_ids):
                accepted[plan.samples] = accept(samples, plan.draft_ids[plan.samples, : samples.shape[1] - 1])
                self._speculator.learn(plan, accepted)
                counts = accepted[plan.samples] + 1
        if not alive.all():
            rows, lengths, counts, flat, samples = (x[alive] for x in (rows, lengths, counts, flat, samples))
        for j, column in enumerate(samples.T):
            new = counts > j
            table.tokens[rows[new], lengths[new] + j] = column[new]
        self.scheduler.commit(plan, live, accepted)
        stopped, emits = np.zeros(len(rows), dtype=bool), counts.copy()
        stops = self.sampling.stop_ids.host[rows][:, None] == samples[:, :, None]
        if stops.any():  # seldom
            ends_here = stops.any(2) & (np.arange(samples.shape[1]) < counts[:, None])
            stopped = ends_here.any(1)
            emits = np.where(stopped, ends_here.argmax(1), counts)
        full = lengths + emits >= table.limit[rows]
        table.known[rows] = lengths + emits
        if states is not None:
            table.set_states(rows, lengths + counts - 1, states[torch.from_numpy(flat + counts - 1)])
        table.first_token[rows[table.first_token[rows] == 0]] = time.monotonic()
        for k in np.flatnonzero(table.has_grammar[rows]).tolist() if plan.masked else ():
            if not self._advance_grammar(int(rows[k]), samples[k, : counts[k]].tolist()):
                emits[k] = 0
        texts = np.flatnonzero(table.has_reader[rows] & (emits > 0))
        for k in texts.tolist():
            emits[k] = self._read(int(rows[k]), samples[k, : emits[k]].tolist())
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if sampled.logprob is not None:
            logprobs = self._record_logprobs(rows, sampled, flat, emits)
        generated = int(emits.sum())
        self._counters.generated_tokens += generated
        tags = table.tag[rows]
        told = (tags >= 0) & (emits > 0)
        emitted = told[:, None] & (np.arange(samples.shape[1]) < emits[:, None])
        tags, told_counts, tokens = tags[told], emits[told].astype(np.int32), samples[emitted].astype(np.int32)
        ends = stopped | full
        ends[texts] = True
        for k in np.flatnonzero(ends).tolist():
            sequence = table.sequences[rows[k]]
            if sequence is None:
                continue  # its reader or its grammar failed
            known = int(lengths[k] + emits[k])
            stop = sequence.reader.stop if sequence.reader else None
            if stop is not None:
                self._end(sequence, FinishReason.STOP, known, stop_reason=stop)
            elif stopped[k]:
                last = int(samples[k, emits[k]])
                if last == INVALID:
                    self._end(sequence, FinishReason.ERROR, known, error=NO_CHOICE)
                    continue
                by_id = last if last in sequence.request.stop_token_ids else None
                self._end(sequence, FinishReason.STOP, known, stop_reason=by_id)
            elif full[k]:
                self._end(sequence, FinishReason.LENGTH, known)
        if not len(tags):
            return None, generated
        origins = None
        if len(plan.draft_ids):
            ahead = np.zeros(len(alive), dtype=bool) if plan.ahead is None else plan.ahead[plan.samples]
            drafted = (np.arange(samples.shape[1]) < counts[:, None] - 1) * (1 + ahead[alive])[:, None]
            origins = drafted[emitted].astype(np.int8)
        return StepTokens(tags, told_counts, tokens, logprobs=logprobs, origins=origins), generated

    def _advance_grammar(self, row: int, token_ids: list[int]) -> bool:
        """Take the row's new tokens into its grammar; a sequence whose grammar can't go on ends."""
        sequence = self.table.sequences[row]
        assert sequence is not None and sequence.grammar is not None
        grammar = sequence.grammar
        if all(grammar.advance(token_id) or grammar.is_over for token_id in token_ids) and not grammar.error:
            return True
        error = grammar.error or f"{GRAMMAR_ERROR}allows no token here"
        self._end(sequence, FinishReason.ERROR, int(self.table.known[row]), error=error)
        return False

    def _read(self, row: int, token_ids: list[int]) -> int:
        """Give tokens to the row's reader; returns how many count, fewer where a stop string is complete."""
        sequence = self.table.sequences[row]
        assert sequence is not None and sequence.reader is not None
        try:
            return len(sequence.reader.push(token_ids).tokens)
        except ValueError as error:
            self._end(sequence, FinishReason.ERROR, int(self.table.known[row]), error=str(error))
            return 0

    def _record_logprobs(
        self, rows: np.ndarray, sampled: Sampled, flat: np.ndarray, emits: np.ndarray
    ) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of the rows that want them; returns those of tagged requests."""
        told: dict[int, list[TokenLogprobs]] = {}
        for row, first, count in zip(rows.tolist(), flat.tolist(), emits.tolist(), strict=True):
            wanted = int(self.sampling.num_logprobs[row])
            sequence = self.table.sequences[row]
            if wanted < 0 or sequence is None or not count:
                continue
            entries = [sampled.token_logprobs(i, wanted) for i in range(first, first + count)]
            sequence.logprobs += entries
            if sequence.tag >= 0:
                told[sequence.tag] = entries
        return told

    def _record_prompt_logprobs(self, ready: LaunchedStep) -> None:
        for index, offset, scores in ready.prompt_scores:
            sequence = self.table.sequences[ready.plan.rows[index]]
            if sequence is None or sequence.uid != ready.plan.uids[index]:
                continue
            start = int(ready.plan.starts[index]) + offset
            wanted = sequence.request.prompt_logprobs or 0
            del sequence.prompt_logprobs[start + 1 :]  # a preempted prompt is read again
            sequence.prompt_logprobs += [scores.token_logprobs(i, wanted) for i in range(len(scores.ids))]

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        message = f"{type(error).__name__}: {error}"
        for row in plan.rows[self.table.uid[plan.rows] == plan.uids].tolist():
            sequence = self.table.sequences[row]
            assert sequence is not None
            self._end(sequence, FinishReason.ERROR, int(self.table.known[row]), error=message)

    def _end_overdue(self) -> None:
        aborts, self._aborts = self._aborts, []
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            aborts.append((heapq.heappop(self._deadlines)[2], FinishReason.DEADLINE))
        for sequence, reason in aborts:
            if sequence.status is not Status.FINISHED:
                known = int(self.table.known[sequence.row]) if sequence.row >= 0 else len(sequence.tokens)
                self._end(sequence, reason, known)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        known: int,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """The one place where a request ends."""
        tokens = self.table.tokens[sequence.row] if sequence.row >= 0 else sequence.tokens
        token_ids = tokens[sequence.prompt_len : known].tolist()
        self.scheduler.finish(sequence)
        request = sequence.request
        del self._live[request.request_id]
        if len(self._deadlines) > 2 * len(self._live):
            self._deadlines = [entry for entry in self._deadlines if entry[2].status is not Status.FINISHED]
            heapq.heapify(self._deadlines)
        text = ""
        if sequence.tag < 0:
            try:
                text = self._text(sequence, token_ids)
            except ValueError as failure:
                reason, error = FinishReason.ERROR, str(failure)
        logprobs = sequence.logprobs[: len(token_ids)] if request.logprobs is not None else None
        now = time.monotonic()
        admitted, first_token = sequence.admitted or now, sequence.first_token
        result = GenerationResult(
            request_id=request.request_id,
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            prompt_tokens=sequence.prompt_len,
            cached_tokens=sequence.cached_tokens,
            stop_reason=stop_reason,
            error=error,
            attempt=request.attempt,
            queue_seconds=admitted - sequence.arrival,
            prefill_seconds=first_token - admitted if first_token else None,
            decode_seconds=now - first_token if first_token else None,
            logprobs=logprobs,
            prompt_logprobs=sequence.prompt_logprobs if request.prompt_logprobs is not None else None,
        )
        counters = self._counters
        counters.finished_requests += 1
        counters.aborted_requests += reason in (FinishReason.ABORT, FinishReason.DEADLINE)
        counters.failed_requests += reason is FinishReason.ERROR
        if sequence.tag >= 0:
            self._ended.append((sequence.tag, result))
            return
        self._results[request.request_id] = result
        while len(self._results) > self._max_results:
            self._results.popitem(last=False)

    def _text(self, sequence: Sequence, token_ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        reader = sequence.reader
        if reader is None:
            prompt_ids = sequence.tokens[: sequence.prompt_len].tolist()
            reader = TextStream(self.tokenizer, prompt_ids, sequence.request)
            reader.push(token_ids)
        reader.flush()
        return reader.text

    # Around the steps

    def set_step_observer(self, observer: Callable[[StepStats], None] | None) -> None:
        """Called once a step, idle steps included. One that raises is logged and breaks nothing."""
        self._observer = observer

    def set_token_sink(self, sink: Callable[[StepTokens], None] | None) -> None:
        """Takes tokens and ends of tagged requests and changes of the prefix cache, once a step that has any, in the
        order of the steps."""
        self._sink = sink
        if self.pool.index is not None:
            self.pool.index.record()

    def backlog(self) -> tuple[int, int]:
        """Tokens of waiting requests, and pages that no sequence holds. Takes no lock."""
        return self.scheduler.waiting_tokens, self.pool.available

    def _observe(self, stats: StepStats) -> None:
        if self._observer is None:
            return
        try:
            self._observer(stats)
        except Exception:
            logger.exception("the step observer failed")

    def wait_for_work(self, timeout: float) -> bool:
        """Block until a step has something to do, or for `timeout` seconds."""
        with self._lock:
            return self._lock.wait_for(self._has_work, timeout)

    def _has_work(self) -> bool:
        return bool(self.scheduler.has_pending_work or self._aborts or self._ended or self._in_flight)

    def stats(self) -> EngineStats:
        with self._lock:
            return replace(
                self._counters,
                running=self.scheduler.num_running,
                waiting=self.scheduler.num_waiting,
                free_pages=self.pool.free_pages,
                cached_pages=self.pool.cached_pages,
                held_pages=self.pool.held_pages,
                preemptions=self.scheduler.preemptions,
                cached_tokens=self.scheduler.cached_tokens,
            )

    def speculation_stats(self) -> SpeculationStats:
        return self._speculator.stats() if self._speculator is not None else SpeculationStats(0, 0, [])

    def unload_model(self) -> None:
        """End every request with an error, and let go of the weights and the pool. The engine is of no more use."""
        with self._turn:
            with self._lock:
                for sequence in list(self._live.values()):
                    known = int(self.table.known[sequence.row]) if sequence.row >= 0 else len(sequence.tokens)
                    self._end(sequence, FinishReason.ERROR, known, error="the model was unloaded")
                self._in_flight = None
                if self._runner is not None and self._ranks is not None:
                    self._ranks.send(None)
                self._runner = None
                self.pool.drop()
                ended, self._ended = self._ended, []
            self.grammars.close()
            if ended and self._sink is not None:
                self._sink(StepTokens(*_NO_TOKENS, finished=ended))

    def _runner_or_raise(self) -> ModelRunner:
        if self._runner is None:
            raise ValueError("the model was unloaded")
        return self._runner


NO_CHOICE = "no token can follow: the model's logits are not numbers, or every token is forbidden"
_NO_TOKENS = (np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32))


def tokenize_prompt(request: GenerationRequest, tokenizer: Tokenizer | None) -> list[int]:
    """The prompt's ids, as given or as the tokenizer has them. Raises ValueError when there are none."""
    if request.prompt_ids is not None:
        return request.prompt_ids
    if tokenizer is None:
        raise ValueError("prompt needs a tokenizer: give prompt_ids")
    prompt_ids = tokenizer.encode(request.prompt or "")
    if not prompt_ids:
        raise ValueError("prompt has no tokens")
    return prompt_ids


def check_request(request: GenerationRequest, prompt_ids: list[int], vocabulary: Vocabulary, max_seq_len: int) -> None:
    """Raise ValueError for a request that can't be run, whatever runs it."""
    if len(prompt_ids) + request.max_new_tokens > max_seq_len:
        raise ValueError(
            f"prompt of {len(prompt_ids)} tokens and max_new_tokens {request.max_new_tokens} "
            f"are more than the context of {max_seq_len}"
        )
    if len(request.output_ids) > request.max_new_tokens:
        raise ValueError(
            f"output_ids: {len(request.output_ids)} tokens are more than max_new_tokens {request.max_new_tokens}"
        )
    if vocabulary.tokenizer is None and (request.stop or request.bad_words):
        raise ValueError(f"{'stop' if request.stop else 'bad_words'} needs a tokenizer")
    vocabulary.check(request, [*prompt_ids, *request.output_ids])


def sane_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The model's own on an accelerator; on a CPU half precision only where it has instructions for it."""
    if device.type != "cpu" or dtype == torch.float32:
        return dtype
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
