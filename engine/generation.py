"""Text from a model without a server: generation backends, their registry, and the offline `LLM`."""

from __future__ import annotations

import itertools
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from engine.batch_engine import NO_CHOICE, ContinuousBatchingEngine, check_request, tokenize_prompt
from engine.kv_cache import KVCache
from engine.models.decoder import CausalLM, create_decoder_kv_caches
from engine.models.loader import as_dtype, check_tokenizer, load_generation_defaults, load_model, resolve_model
from engine.parallel import start_ranks
from engine.sampling import INVALID, Sampled, Sampler, SamplingTable, Vocabulary, draw_seed, gumbel_noise
from engine.schemas import FinishReason, GenerationRequest, GenerationResult, QueueFull, SamplingParams, StepTokens
from engine.speculation import SpeculationStats
from engine.tokenization import Message, TextStream, Tokenizer, load_tokenizer

_PREFILL_CHUNK = 512  # tokens whose logits the eager backend has in memory at once

Prompt = str | Sequence[int] | GenerationRequest
Deltas = Generator[str, None, GenerationResult]
T = TypeVar("T")
U = TypeVar("U")


def get_generation_backend(name: str = "eager", **options: Any) -> Any:
    """A new backend, made with `options`: "eager" (one sequence at a time), "batched" (continuous batching),
    "speculative" (one at a time, with a draft model), or one that a package offers under the entry-point group
    `pilotfish.generation_backends`. Raises ValueError that lists the names for another."""
    plugins = {entry.name: entry for entry in entry_points(group="pilotfish.generation_backends")}
    if name in _BACKENDS:
        return _BACKENDS[name](**options)
    if name in plugins:
        return plugins[name].load()(**options)
    known = ", ".join(sorted(_BACKENDS.keys() | plugins.keys()))
    raise ValueError(f"unknown generation backend {name!r}; known: {known}")


class GenerationBackend(ABC):
    """Continues prompts: text, token ids, or a GenerationRequest.

    Text and ids take SamplingParams, or keywords that are fields of GenerationRequest. Every prompt is checked before
    anything runs. One that doesn't fit into the context together with its max_new_tokens is a ValueError; with
    `truncate="left"` its first tokens are dropped instead.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_seq_len: int, truncate: Literal["left"] | None) -> None:
        if truncate not in (None, "left"):
            raise ValueError(f"truncate must be None or 'left', got {truncate!r}")
        self.tokenizer, self.max_seq_len, self.truncate = tokenizer, max_seq_len, truncate

    @abstractmethod
    def check(self, request: GenerationRequest) -> None:
        """Raise ValueError for a request, with prompt_ids, that can't be run."""

    @abstractmethod
    def run(self, request: GenerationRequest) -> Deltas:
        """Text of a prepared request as it comes; the generator returns the result. A forward that fails doesn't
        raise: the result has finish reason ERROR."""

    @abstractmethod
    def run_batch(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GenerationResult]]:
        """Results of prepared requests with their indices, as they end."""

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> GenerationRequest:
        """The request of a prompt: tokenized, truncated if that was asked for, and checked."""
        if isinstance(prompt, GenerationRequest):
            if params is not None or fields:
                raise ValueError("a GenerationRequest has its own sampling parameters")
            request = prompt
        else:
            fields["prompt" if isinstance(prompt, str) else "prompt_ids"] = prompt
            request = GenerationRequest(**(params.model_dump() if params is not None else {}) | fields)
        ids = tokenize_prompt(request, self.tokenizer)
        room = self.max_seq_len - request.max_new_tokens
        if self.truncate == "left" and room > 0:
            ids = ids[-room:]
        request = request.model_copy(update={"prompt": None, "prompt_ids": ids})
        self.check(request)
        return request

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> Deltas:
        """New text as it comes: the pieces add up to that of `generate`, and the generator returns the result. Closing
        it ends the request. Raises RuntimeError when the forward fails."""
        if self.tokenizer is None:
            raise ValueError("stream needs a tokenizer")
        return _raising(self.run(self.prepare(prompt, params, **fields)))

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> GenerationResult:
        """Raises RuntimeError when the forward fails."""
        return _drain(_raising(self.run(self.prepare(prompt, params, **fields))))

    def batch_generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, **fields: Any
    ) -> list[GenerationResult]:
        """Results in the order of the prompts. A bad prompt is a ValueError with its index; one whose forward fails
        has finish reason ERROR, and the others go on."""
        if isinstance(prompts, str):
            raise ValueError("batch_generate takes a list of prompts")
        return _in_order(self.run_batch(_each("prompts", prompts, lambda p: self.prepare(p, params, **fields))))


class EagerBackend(GenerationBackend):
    """One sequence at a time: a plain loop over the model and its KV caches. It samples as the engine does, so that a
    seeded request gives the same tokens. The model is moved to `device` and `dtype` where they are given."""

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        max_seq_len: int | None = None,
        truncate: Literal["left"] | None = None,
    ) -> None:
        super().__init__(tokenizer, max_seq_len or model.max_seq_len, truncate)
        if self.max_seq_len > model.max_seq_len:
            raise ValueError(f"max_seq_len {self.max_seq_len} is above the model's {model.max_seq_len}")
        self.model = model.to(device=device, dtype=dtype).eval()
        self.vocabulary = Vocabulary(model.vocab_size, tokenizer)

    def check(self, request: GenerationRequest) -> None:
        for name in ("grammar", "adapter"):
            if getattr(request, name) is not None:
                raise ValueError(f"{name} is not supported here: use the batched backend")
        check_request(request, request.prompt_ids or [], self.vocabulary, self.max_seq_len)

    def run_batch(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GenerationResult]]:
        return ((index, _drain(self.run(request))) for index, request in enumerate(requests))

    def run(self, request: GenerationRequest) -> Deltas:
        reader = _reader(self.tokenizer, request)
        result = GenerationResult(
            request_id=request.request_id,
            text="",
            token_ids=list(request.output_ids),
            finish_reason=FinishReason.LENGTH,
            prompt_tokens=len(request.prompt_ids or ()),
            attempt=request.attempt,
            logprobs=[] if request.logprobs is not None else None,
            prompt_logprobs=[None] if request.prompt_logprobs is not None else None,
        )
        try:
            for token_id in self._tokens(request, result):
                result.token_ids.append(token_id)
                if reader is not None:
                    if text := reader.push((token_id,)).text:
                        yield text
                    if reader.finished:
                        break
        except Exception as error:
            result.finish_reason, result.error = FinishReason.ERROR, f"{type(error).__name__}: {error}"
        if reader is not None and (rest := _conclude(reader, request, result)):
            yield rest
        return result

    def _tokens(self, request: GenerationRequest, result: GenerationResult) -> Iterator[int]:
        """Sampled tokens up to the limit; another end and log-probabilities go into the result."""
        deadline = time.monotonic() + (request.timeout or float("inf"))
        prompt_ids, device = request.prompt_ids or [], self.model.device
        known, limit = len(prompt_ids) + len(request.output_ids), len(prompt_ids) + request.max_new_tokens
        if known >= limit:
            return
        stop_ids, bad_words = self.vocabulary.stop_ids(request), self.vocabulary.bad_words(request)
        table = SamplingTable(1, device)
        table.set(
            0, request, draw_seed() if request.seed is None else request.seed, len(prompt_ids), stop_ids, bad_words
        )
        sampler = Sampler(table, self.vocabulary, device)
        caches = _caches(self.model, limit)
        tokens = torch.zeros(1, limit, dtype=torch.int32, device=device)
        tokens[0, :known] = torch.tensor([*prompt_ids, *request.output_ids])
        draft = self._draft(sampler, tokens)
        while known < limit:
            if time.monotonic() >= deadline:
                result.finish_reason = FinishReason.DEADLINE
                return
            start = caches[0].seq_len
            end = min(known, start + _PREFILL_CHUNK)
            with torch.inference_mode():
                gamma = draft.propose(known) if draft is not None and end == known else 0
                logits = self.model(tokens[:, start : end + gamma], kv_caches=caches, use_cache=True)[0][0]
                if result.prompt_logprobs is not None and request.prompt_logprobs is not None:
                    targets = tokens[0, start + 1 : min(end + 1, len(prompt_ids))].long()
                    sampled = sampler.with_logprobs(logits[: len(targets)], targets, request.prompt_logprobs)
                    entries = [sampled.token_logprobs(i, request.prompt_logprobs) for i in range(len(targets))]
                    result.prompt_logprobs += entries
                if end < known:
                    continue
                logits = logits[-1 - gamma :]
                if draft is not None and gamma:
                    sampled = Sampled(draft.accept(logits, known))
                    if request.logprobs is not None:
                        logits = logits[: len(sampled.ids)]
                        sampled = sampler.with_logprobs(logits, sampled.ids, request.logprobs)
                else:
                    sampled = sampler(logits, np.zeros(1, dtype=np.int64), np.array([known]), tokens)
                ids = sampled.ids.tolist()
                tokens[0, known : known + len(ids)] = sampled.ids
                for cache in caches:
                    cache.truncate(known + len(ids) - 1)
            for i, token_id in enumerate(ids):
                if token_id == INVALID:
                    raise RuntimeError(NO_CHOICE)
                if token_id in stop_ids:
                    result.finish_reason = FinishReason.STOP
                    result.stop_reason = token_id if token_id in request.stop_token_ids else None
                    return
                if result.logprobs is not None and request.logprobs is not None:
                    result.logprobs.append(sampled.token_logprobs(i, request.logprobs))
                known += 1
                yield token_id

    def _draft(self, sampler: Sampler, tokens: Tensor) -> _Draft | None:
        """Who proposes tokens for a new sequence."""
        return None


class SpeculativeDecodingBackend(EagerBackend):
    """One sequence at a time, whose next tokens, up to `gamma`, a draft model samples and the target judges in one
    forward, by the accept/resample rule of Leviathan et al. 2023 (arXiv 2211.17192): the text has the target's
    distribution, and is its own where temperature is 0. `options` are those of EagerBackend, for the target; past the
    draft's context there are no drafts. Raises ValueError for a draft of another vocabulary or device."""

    def __init__(
        self,
        target_model: CausalLM,
        draft_model: CausalLM,
        gamma: int = 5,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> None:
        super().__init__(target_model, tokenizer, **options)
        if gamma < 1:
            raise ValueError(f"gamma must be at least 1, got {gamma}")
        for what in ("vocab_size", "device"):
            ours, theirs = getattr(self.model, what), getattr(draft_model, what)
            if ours != theirs:
                raise ValueError(f"{what}: the draft's {theirs} is not the target's {ours}")
        self.draft_model, self.gamma = draft_model.eval(), gamma
        self.stats = SpeculationStats(0, 0, [0] * gamma)

    def _draft(self, sampler: Sampler, tokens: Tensor) -> _Draft:
        return _Draft(self.draft_model, self.gamma, sampler, tokens, self.stats)


class _Draft:
    """What a draft model proposes for one sequence, and what of it stands. Noise beyond that of the vocabulary's ids
    decides about acceptance and draws from residuals, so that a seed gives the same tokens again."""

    def __init__(self, model: CausalLM, gamma: int, sampler: Sampler, tokens: Tensor, stats: SpeculationStats) -> None:
        self.model, self.gamma, self.sampler, self.tokens, self.stats = model, gamma, sampler, tokens, stats
        self.caches = _caches(model, min(tokens.shape[1], model.max_seq_len))
        self.q: list[Tensor] = []  # the distribution [1, V] of each draft

    def propose(self, known: int) -> int:
        """Write up to gamma tokens after the known ones; returns how many."""
        for cache in self.caches:
            cache.truncate(min(cache.seq_len, known - 1))
        self.q = []
        room = min(self.gamma, self.tokens.shape[1] - known - 1, self.model.max_seq_len + 1 - known)
        for place in range(known, known + room):
            while (start := self.caches[0].seq_len) < place:
                ids = self.tokens[:, start : min(place, start + _PREFILL_CHUNK)]
                logits = self.model(ids, kv_caches=self.caches, use_cache=True)[0][0, -1:]
            q = self._probabilities(logits, place)
            token_id = self._draw(q, place)
            if token_id == INVALID:
                break
            self.tokens[0, place] = token_id
            self.q.append(q)
        return len(self.q)

    def accept(self, logits: Tensor, known: int) -> Tensor:
        """The drafts that stand under the target's logits [1 + drafts, V], and a token after them."""
        count = len(self.q)
        p, q = self._probabilities(logits, known), torch.cat(self.q)
        drafts = self.tokens[0, known : known + count].long()
        odds = (p[:count] / q).gather(1, drafts.unsqueeze(1))
        # Gumbel noise is -log(-log(u)) of a uniform u
        noise = self._noise(known + torch.arange(count), 2 * self.sampler.token_ids[:, -1:] + 2)
        uniform = noise.neg().exp().neg().exp()
        kept = int((uniform <= odds).cumprod(0).sum())
        left = p[kept : kept + 1]
        if kept < count:
            residual = (left - q[kept]).clamp_(min=0)
            left = residual if residual.any() else left
        self.stats.drafted += count
        self.stats.accepted += kept
        for place in range(kept):
            self.stats.accepted_at[place] += 1
        last = self._draw(left, known + kept, again=kept < count)
        return torch.cat((drafts[:kept], drafts.new_tensor([last])))

    def _probabilities(self, logits: Tensor, length: int) -> Tensor:
        rows = np.zeros(len(logits), dtype=np.int64)
        return self.sampler.probabilities(logits, rows, length + np.arange(len(logits)), self.tokens)

    def _draw(self, weights: Tensor, position: int, again: bool = False) -> int:
        """A token by weights [1, V], not normalised; `again` where the position's own noise has been used."""
        ids = self.sampler.token_ids
        noisy = self._noise(torch.tensor([position]), ids + ids.shape[1] if again else ids) + weights.log()
        best = noisy.max(-1)
        return int(best.indices) if best.values > float("-inf") else INVALID

    def _noise(self, positions: Tensor, ids: Tensor) -> Tensor:
        positions = positions.to(ids.device)
        return gumbel_noise(self.sampler.table.seed.device.expand(len(positions)), positions, ids)


class BatchedBackend(GenerationBackend):
    """Continuous batching, on `engine`; `engine_options` are those of ContinuousBatchingEngine."""

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer | None = None,
        *,
        device: torch.device | str | None = None,
        truncate: Literal["left"] | None = None,
        **engine_options: Any,
    ) -> None:
        self.engine = ContinuousBatchingEngine(model, tokenizer, device or model.device, **engine_options)
        super().__init__(tokenizer, self.engine.max_seq_len, truncate)
        self._tags = itertools.count()
        self._events: dict[int, deque[int | GenerationResult]] = {}
        self.engine.set_token_sink(self._deliver)

    def check(self, request: GenerationRequest) -> None:
        self.engine.check(request)

    def run_batch(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GenerationResult]]:
        return _run_on_engine(self.engine, requests)

    def run(self, request: GenerationRequest) -> Deltas:
        tag = next(self._tags)
        events = self._events[tag] = deque()
        reader = _reader(self.tokenizer, request)
        result: GenerationResult | None = None
        added = False
        try:
            self.engine.add_request(request.model_copy(update={"stop": []}), tag=tag)
            added = True
            while result is None:
                while not events:
                    self.engine.step()
                event = events.popleft()
                if isinstance(event, GenerationResult):
                    result = event
                elif reader is not None and not reader.finished:
                    if text := reader.push((event,)).text:
                        yield text
                    if reader.finished:
                        self.engine.abort(request.request_id)
        finally:
            del self._events[tag]
            if added and result is None and self.engine.abort(request.request_id):
                self.engine.step()
        if reader is not None and (rest := _conclude(reader, request, result)):
            yield rest
        return result

    def _deliver(self, step: StepTokens) -> None:
        tags = np.repeat(step.tags, step.counts).tolist()
        for tag, event in [*zip(tags, step.tokens.tolist(), strict=True), *step.finished]:
            if tag in self._events:
                self._events[tag].append(event)


_BACKENDS: Mapping[str, Callable[..., GenerationBackend]] = {
    "eager": EagerBackend,
    "batched": BatchedBackend,
    "speculative": SpeculativeDecodingBackend,
}


def batch_generate_requests(
    target: ContinuousBatchingEngine | GenerationBackend, requests: Sequence[GenerationRequest]
) -> list[GenerationResult]:
    """Runs requests together on an engine, which this steps, or on a backend. Results are in the order of the
    requests; a bad request is a ValueError with its index before anything runs."""
    if not isinstance(target, ContinuousBatchingEngine):
        return target.batch_generate(requests)
    _each("requests", requests, target.check)
    return _in_order(_run_on_engine(target, requests))


def _run_on_engine(
    engine: ContinuousBatchingEngine, requests: Sequence[GenerationRequest]
) -> Iterator[tuple[int, GenerationResult]]:
    """Keeps the engine's queue filled; what still runs when the iterator is closed is aborted."""
    if len({request.request_id for request in requests}) < len(requests):
        raise ValueError("two requests have the same request_id")
    waiting = deque(enumerate(requests))
    live: dict[str, int] = {}
    ended = -1
    try:
        while waiting or live:
            while waiting and len(live) < 2 * engine.max_batch_size:
                index, request = waiting[0]
                try:
                    engine.add_request(request)
                except QueueFull:
                    break
                waiting.popleft()
                live[request.request_id] = index
            engine.step()
            busy = engine.wait_for_work(0)
            before, ended = ended, engine.stats().finished_requests
            if busy and ended == before:
                continue
            for request_id in list(live):
                if (result := engine.result(request_id)) is not None:
                    yield live.pop(request_id), result
            if live and not busy:
                raise RuntimeError(f"results of {len(live)} requests were read or dropped by someone else")
    finally:
        if any([engine.abort(request_id) for request_id in live]):
            engine.step()
        for request_id in live:
            engine.result(request_id)


@dataclass(slots=True)
class RequestOutput:
    """A prompt and what came of it. `prompt` is the text, rendered for a chat, or None for token ids. The one element
    of `outputs` has text, token_ids, finish_reason, logprobs and the rest of GenerationResult."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[GenerationResult]
    finished: bool = True


class LLM:
    """Offline inference in this process, under the names that vLLM's class has.

    model: a Hugging Face folder, a hub id (at `revision`), a .gguf file, or a CausalLM. tokenizer: the same, or a
    Tokenizer; a model that is loaded brings its own. gpu_memory_utilization: how much of the device's free memory the
    KV pool may take. max_model_len: the context; None is the model's. max_num_seqs: sequences a step; None is 256 on
    an accelerator, 16 on a CPU. quantization: int8 or int4 weights, on a CPU. tensor_parallel_size:
    processes that share the model, a device each. seed: makes requests without a seed repeatable. Raises ValueError.
    """

    def __init__(
        self,
        model: str | Path | CausalLM,
        tokenizer: str | Path | Tokenizer | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        quantization: Literal["int8", "int4"] | None = None,
        device: str | torch.device = "auto",
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        enable_prefix_caching: bool = True,
        seed: int | None = None,
        revision: str | None = None,
    ) -> None:
        if tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size must be at least 1, got {tensor_parallel_size}")
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {gpu_memory_utilization}")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        target = None if dtype == "auto" else as_dtype(dtype)
        self._defaults: dict[str, Any] = {}
        eos: list[int] = []
        if not isinstance(model, CausalLM):
            path = resolve_model(model, revision)
            self._defaults = load_generation_defaults(path)
            eos = self._defaults.pop("eos_token_ids")
            tokenizer = path if tokenizer is None else tokenizer
            options: dict[str, Any] = {"dtype": target, "max_seq_len": max_model_len}
            ranks = None
            if tensor_parallel_size > 1:
                ranks = start_ranks(tensor_parallel_size, str(device), path, **options)
                device = ranks.device
            model = load_model(path, device=device, ranks=ranks, **options)
        elif tensor_parallel_size > 1:
            raise ValueError("tensor_parallel_size needs a model that is loaded here: a folder, a hub id or a file")
        elif revision is not None:
            raise ValueError("revision is for hub models")
        if isinstance(tokenizer, (str, Path)):
            tokenizer = load_tokenizer(tokenizer)
            tokenizer.eos_token_ids |= frozenset(eos)
        if tokenizer is not None:
            check_tokenizer(model, tokenizer)
        self.tokenizer = tokenizer
        self.backend = BatchedBackend(
            model,
            tokenizer,
            device=device,
            dtype=target,
            quantization=quantization,
            max_seq_len=max_model_len,
            max_batch_size=max_num_seqs or (16 if torch.device(device).type == "cpu" else 256),
            memory_fraction=gpu_memory_utilization,
            enable_prefix_cache=enable_prefix_caching,
        )
        self._seeds = None if seed is None else random.Random(seed)

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used without `sampling_params`: generation_config.json's, where the model has one."""
        return SamplingParams(**self._defaults)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues a prompt or many, each text or token ids, with one SamplingParams for all or one each. Outputs
        are in the order of the prompts. A bad prompt is a ValueError with its index, before anything runs; one whose
        forward fails has finish_reason "error"."""
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many: list[Any] = [prompts] if single else list(prompts)
        return self._generate(many, [p if isinstance(p, str) else None for p in many], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """As `generate`, for a conversation or many. `options` are add_generation_prompt, continue_final_message and
        tools of `Tokenizer.apply_chat_template`; chat_template_kwargs are further variables of the template."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError("chat needs a tokenizer")
        many: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        options |= chat_template_kwargs or {}
        texts = _each("messages", many, lambda m: tokenizer.apply_chat_template(m, **options))
        prompts = [tokenizer.encode(text, add_special_tokens=not tokenizer.has_chat_template) for text in texts]
        return self._generate(prompts, texts, sampling_params, use_tqdm)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str | None],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling_params for {len(prompts)} prompts")
        requests = _each("prompts", zip(prompts, each, strict=True), lambda pair: self._prepare(*pair))
        outputs: list[tuple[int, RequestOutput]] = []
        tokens, start = 0, time.monotonic()
        with tqdm(total=len(requests), desc="Generating", unit="prompt", disable=not use_tqdm) as bar:
            for index, result in self.backend.run_batch(requests):
                tokens += len(result.token_ids)
                bar.set_postfix_str(f"{tokens / (time.monotonic() - start):.0f} tokens/s", refresh=False)
                bar.update()
                outputs.append((index, RequestOutput(texts[index], requests[index].prompt_ids or [], [result])))
        return _in_order(outputs)

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> GenerationRequest:
        if self._seeds is not None and params.seed is None:
            params = params.model_copy(update={"seed": self._seeds.getrandbits(63)})
        return self.backend.prepare(prompt, params)


def _reader(tokenizer: Tokenizer | None, request: GenerationRequest) -> TextStream | None:
    if tokenizer is None:
        return None
    return TextStream(tokenizer, request.prompt_ids or (), request, request.output_ids)


def _conclude(reader: TextStream, request: GenerationRequest, result: GenerationResult) -> str:
    """Writes the text and the cut at a stop string into the result; returns what was held back of the text."""
    rest = reader.flush()
    result.text = reader.text
    if reader.stop is not None:
        result.token_ids, result.finish_reason = reader.token_ids, FinishReason.STOP
        result.stop_reason, result.error = reader.stop, None
        if result.logprobs is not None:
            del result.logprobs[len(reader.token_ids) - len(request.output_ids) :]
    return rest


def _caches(model: CausalLM, max_seq_len: int) -> list[KVCache]:
    page_size = model.attention.default_page_size
    return create_decoder_kv_caches(model, 1, -(-max_seq_len // page_size) * page_size)


def _raising(deltas: Deltas) -> Deltas:
    result = yield from deltas
    if result.finish_reason is FinishReason.ERROR:
        raise RuntimeError(result.error)
    return result


def _drain(deltas: Deltas) -> GenerationResult:
    while True:
        try:
            next(deltas)
        except StopIteration as end:
            result: GenerationResult = end.value
            return result


def _each(name: str, items: Iterable[T], make: Callable[[T], U]) -> list[U]:
    made = []
    for index, item in enumerate(items):
        try:
            made.append(make(item))
        except ValueError as error:
            raise ValueError(f"{name}[{index}]: {error}") from error
    return made


def _in_order(indexed: Iterable[tuple[int, T]]) -> list[T]:
    return [item for _, item in sorted(indexed, key=lambda pair: pair[0])]
