"""What the engine must do, written a second time: one token at a time, in float64, with no cache and no batch.

Nothing here is shared with the engine but the request type: the noise, the order of operations on a row of logits and
the stopping rules are those that the docstrings promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.models.decoder import DecoderModel
from engine.schemas import FinishReason, GenerationRequest, GenerationResult, SamplingParams, TokenLogprobs
from engine.tokenization import SimpleCharacterTokenizer, Tokenizer

NEAR_TIE = 1e-4  # closer than this, fp32 may decide either way

_M32, _M64 = 2**32 - 1, 2**64 - 1


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """The halves of splitmix64's output for state seed + (position + 1) * 2**64 / phi."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _M64
    z ^= z >> 31
    return z & _M32, z >> 32


def noise_bits(seed: int, position: int, token_id: int) -> int:
    """31 bits: murmur3's finaliser over token_id times a prime near 2**32 / phi, keyed at its start and its middle."""
    first, second = noise_keys(seed, position)
    h = ((token_id * 2654435761) & _M32) ^ first
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & _M32
    h ^= h >> 13
    h = ((h + second) * 0xC2B2AE35) & _M32
    h ^= h >> 16
    return h & 0x7FFFFFFF


def gumbel(seed: int, position: int, size: int) -> np.ndarray:
    """Noise of ids 0 .. size - 1, float64."""
    first, second = noise_keys(seed, position)
    h = np.arange(size, dtype=np.uint64) * 2654435761 & _M32 ^ first
    h ^= h >> 16
    h = h * 0x85EBCA6B & _M32
    h ^= h >> 13
    h = (h + second) * 0xC2B2AE35 & _M32
    h ^= h >> 16
    uniform = ((h & 0x7FFFFFFF).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31)
    return -np.log(-np.log1p(-np.minimum(uniform, np.float32(1 - 2.0**-24)).astype(np.float64)))


@dataclass
class Rules:
    """What a request's row of logits is subject to, besides its numbers."""

    size: int  # ids from here on are never chosen
    forbidden: tuple[int, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    bad_words: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, request: SamplingParams, model_size: int, tokenizer: Tokenizer | None) -> Rules:
        if tokenizer is None:
            return cls(model_size, stop_ids=frozenset(request.stop_token_ids))
        eos = frozenset() if request.ignore_eos else tokenizer.eos_token_ids
        words = [text for word in request.bad_words for text in (word, " " + word.lstrip())]
        pad = tokenizer.pad_token_id
        return cls(
            min(model_size, tokenizer.vocab_size),
            () if pad is None or pad in tokenizer.eos_token_ids else (pad,),
            eos | frozenset(request.stop_token_ids),
            [tokenizer.encode(text, add_special_tokens=False) for text in words],
        )


def modify(
    logits: np.ndarray, params: SamplingParams, rules: Rules, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """Penalties, bias and forbidden ids, float64."""
    scores = logits[: rules.size].astype(np.float64)
    for token in {*prompt, *output}:
        if token < rules.size:
            scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token in output:
        scores[token] -= params.frequency_penalty
    for token in set(output):
        scores[token] -= params.presence_penalty
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if len(output) < params.min_tokens:
        scores[list(rules.stop_ids)] = -np.inf
    history = [*prompt, *output]
    for word in rules.bad_words:
        if word[:-1] == history[len(history) - len(word) + 1 :]:
            scores[word[-1]] = -np.inf
    scores[list(rules.forbidden)] = -np.inf
    return scores


def kept(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Which of the tempered scores top_k, top_p and min_p leave, in that order. Equal ones stay or go together."""
    keep = scores > -np.inf
    descending = np.sort(scores)[::-1]
    if params.top_k is not None and params.top_k < len(scores):
        keep &= scores >= descending[params.top_k - 1]
    if params.top_p < 1:
        mass = np.where(keep, np.exp(scores - scores.max()), 0)
        mass /= mass.sum()
        order = np.argsort(-scores, kind="stable")
        before = np.cumsum(mass[order]) - mass[order]
        keep &= scores >= scores[order[before < params.top_p]].min()
    if params.min_p > 0:
        keep &= scores >= scores.max() + np.log(params.min_p)
    return keep


def probabilities(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution of the next token, from modified scores."""
    scores = scores / params.temperature
    mass = np.where(kept(scores, params), np.exp(scores - scores.max()), 0)
    return mass / mass.sum()


def choose(scores: np.ndarray, params: SamplingParams, seed: int, position: int) -> tuple[int, bool]:
    """The next token from modified scores, and whether fp32 might see another one."""
    unsure = False
    if params.temperature > 0:
        scores = scores / params.temperature
        keep = kept(scores, params)
        if not keep.all():
            edge = scores[keep].min() - scores[~keep].max()
            unsure = edge < NEAR_TIE or any(
                (kept(scores, params.model_copy(update=change)) != keep).any()
                for factor in (1 - 1e-5, 1 + 1e-5)
                for change in ({"top_p": params.top_p * factor}, {"min_p": params.min_p * factor})
            )
        scores = np.where(keep, scores + gumbel(seed, position, len(scores)), -np.inf)
    best, second = (np.partition(scores, -2)[-2:][::-1]) if len(scores) > 1 else (0.0, -np.inf)
    return int(scores.argmax()), bool(unsure or best - second < NEAR_TIE)


class Reference:
    """Judges what an engine gave, by a full uncached forward over each prompt and output."""

    def __init__(self, model: DecoderModel, tokenizer: SimpleCharacterTokenizer | None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.tokens = 0
        self.near_ties = 0
        self._logits: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """[len(ids), vocab_size], remembered."""
        key = tuple(ids)
        if key not in self._logits:
            if len(self._logits) > 2000:
                self._logits.clear()
            with torch.no_grad():
                self._logits[key] = self.model(torch.tensor([key]))[0].numpy()
        return self._logits[key]

    def generate(self, request: GenerationRequest) -> list[int]:
        """The request's tokens, one forward each."""
        assert request.prompt_ids is not None
        rules = Rules.of(request, self.model.vocab_size, self.tokenizer)
        output = list(request.output_ids)
        while len(output) < request.max_new_tokens:
            history = [*request.prompt_ids, *output]
            scores = modify(self.logits(history)[-1], request, rules, request.prompt_ids, output)
            token, _ = choose(scores, request, request.seed or 0, len(history))
            if token in rules.stop_ids:
                break
            output.append(token)
        return output

    def check(self, request: GenerationRequest, result: GenerationResult, read: bool = True) -> None:
        """Raise AssertionError unless the result is what the request asks for, as far as it goes; `read`: its text
        too. A difference at a near-tie ends the comparison and is counted."""
        prompt, output = request.prompt_ids, result.token_ids
        assert prompt is not None
        assert result.request_id == request.request_id and result.prompt_tokens == len(prompt)
        assert 0 <= result.cached_tokens < len(prompt) + len(request.output_ids)
        assert output[: len(request.output_ids)] == request.output_ids
        assert len(output) <= request.max_new_tokens
        rules = Rules.of(request, self.model.vocab_size, self.tokenizer)
        logits = self.logits([*prompt, *output])
        self._check_logprobs(request, result, logits[:, : rules.size])
        stopped = result.finish_reason is FinishReason.STOP and not isinstance(result.stop_reason, str)
        for i in range(len(request.output_ids), len(output) + stopped):
            scores = modify(logits[len(prompt) - 1 + i], request, rules, prompt, output[:i])
            token, near_tie = choose(scores, request, request.seed or 0, len(prompt) + i)
            self.tokens += 1
            right = token == output[i] and token not in rules.stop_ids if i < len(output) else token in rules.stop_ids
            if not right:
                got = output[i] if i < len(output) else "a stop"
                assert near_tie, f"{request!r}: output {i} is {got}, not {token}, in {output}"
                self.near_ties += 1
                return
        if stopped:
            assert result.stop_reason == (token if token in request.stop_token_ids else None)
        if result.finish_reason is FinishReason.LENGTH:
            assert len(result.token_ids) == request.max_new_tokens
        if read and self.tokenizer is not None:
            self._check_text([self.tokenizer.decode(output[:n]) for n in range(len(output) + 1)], request, result)

    @staticmethod
    def _check_text(texts: list[str], request: GenerationRequest, result: GenerationResult) -> None:
        """`texts`: those of the first 0, 1, ... output tokens; no token has more than one character."""
        stops = [
            (count, stop)
            for count in range(max(request.min_tokens, 1), len(texts))
            for stop in request.stop
            if texts[count].endswith(stop) and texts[count] != texts[count - 1]
        ]
        if isinstance(result.stop_reason, str):
            assert stops[0][0] == len(texts) - 1 and (len(texts) - 1, result.stop_reason) in stops
            assert result.text + result.stop_reason == texts[-1]
        else:
            assert not stops and result.text == texts[-1]

    @staticmethod
    def _check_logprobs(request: GenerationRequest, result: GenerationResult, logits: np.ndarray) -> None:
        prompt, first = request.prompt_ids, len(request.output_ids)
        assert prompt is not None
        assert (result.logprobs is None, result.prompt_logprobs is None) == (
            request.logprobs is None,
            request.prompt_logprobs is None,
        )
        if result.logprobs is not None:
            assert [entry.token_id for entry in result.logprobs] == result.token_ids[first:]
            for i, entry in enumerate(result.logprobs, start=len(prompt) - 1 + first):
                check_logprobs(entry, logits[i], request.logprobs or 0)
        if result.prompt_logprobs is not None:
            known = [None if entry is None else entry.token_id for entry in result.prompt_logprobs]
            whole = [None, *prompt[1:]]
            assert known == (whole if len(result.token_ids) > first else whole[: len(known)])
            for row, scored in zip(logits, result.prompt_logprobs[1:], strict=False):
                assert scored is not None
                check_logprobs(scored, row, request.prompt_logprobs or 0)

    def check_rate(self) -> None:
        """Raise AssertionError when more than 1 token in 10,000 differed."""
        assert self.near_ties <= max(1, self.tokens / 10_000), f"{self.near_ties} near-ties in {self.tokens} tokens"


def check_logprobs(entry: TokenLogprobs, logits: np.ndarray, wanted: int) -> None:
    """Raise AssertionError unless the entry says what torch's log_softmax says of a row of unmodified logits."""
    expected = torch.from_numpy(logits).log_softmax(-1)
    own = expected[entry.token_id]
    assert abs(entry.logprob - own) < NEAR_TIE
    assert (expected > own + NEAR_TIE).sum() + 1 <= entry.rank <= (expected > own - NEAR_TIE).sum()
    assert len(entry.top) == len({token for token, _ in entry.top}) == min(wanted, len(expected))
    for (token, logprob), best in zip(entry.top, expected.topk(len(entry.top)).values, strict=True):
        assert abs(logprob - expected[token]) < NEAR_TIE and abs(logprob - best) < NEAR_TIE


def tiny_model(seed: int = 0, **config: object) -> DecoderModel:
    """A random fp32 decoder whose greedy output varies from token to token."""
    shape = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DecoderModel(**(shape | {"max_seq_len": 48, "intermediate_size": 64} | config)).float().eval()  # type: ignore[arg-type]
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    return model
