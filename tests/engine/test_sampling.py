"""Sampling against an oracle that shares nothing with it, against transformers' processors, and by chi-square."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import HealthCheck, given, settings
from transformers.generation import logits_process as hf

from engine.batch_engine import ContinuousBatchingEngine
from engine.sampling import Sampler, SamplingTable, Vocabulary, gumbel_noise, noise_bits, noise_keys
from engine.schemas import FinishReason, GenerationRequest, GenerationResult, SamplingParams
from engine.tokenization import SimpleCharacterTokenizer
from tests.engine import oracle
from tests.engine.oracle import Reference, Rules, tiny_model

CPU = torch.device("cpu")
TOKENIZER = SimpleCharacterTokenizer(60)
REFERENCE = Reference(tiny_model(), TOKENIZER)
EDGES = (0, 1, -1, 42, 2**63 - 1, -(2**63))


def sample(
    logits: np.ndarray,
    requests: Sequence[tuple[SamplingParams, int, list[int], list[int]]],
    rules: Rules,
    tokenizer: SimpleCharacterTokenizer | None = None,
) -> list[int]:
    """One call for all rows of logits [R, V]; a row's params, seed, prompt and output are given."""
    table = SamplingTable(len(requests), CPU)
    longest = max(len(prompt) + len(output) for _, _, prompt, output in requests)
    tokens = torch.full((len(requests), longest + 1), rules.size + 7, dtype=torch.int32)
    for row, (params, seed, prompt, output) in enumerate(requests):
        table.set(row, params, seed, len(prompt), sorted(rules.stop_ids), rules.bad_words)
        tokens[row, : len(prompt) + len(output)] = torch.tensor([*prompt, *output])
    lengths = np.array([len(prompt) + len(output) for _, _, prompt, output in requests])
    sampler = Sampler(table, Vocabulary(logits.shape[1], tokenizer), CPU)
    return sampler(torch.from_numpy(logits.copy()), np.arange(len(requests)), lengths, tokens).ids.tolist()


def sample_many(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], count: int
) -> np.ndarray:
    """The next token of one request under the seeds 0 .. count - 1."""
    table = SamplingTable(count, CPU)
    for row in range(count):
        table.set(row, params, row, len(prompt), [], [])
    tokens = torch.tensor([*prompt, *output, 0], dtype=torch.int32).repeat(count, 1)
    lengths = np.full(count, len(prompt) + len(output))
    sampler = Sampler(table, Vocabulary(len(logits), None), CPU)
    return sampler(torch.from_numpy(logits).repeat(count, 1), np.arange(count), lengths, tokens).ids.numpy()


def check_distribution(ids: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square; bins that are too rare for it are put together."""
    counts = np.bincount(ids, minlength=len(expected))
    assert not counts[expected == 0].any(), "a filtered token was sampled"
    order = np.argsort(-expected)
    counts, wanted = counts[order].astype(float), expected[order] * len(ids)
    bins = np.floor(np.cumsum(wanted) / 8 - 1e-9).astype(int)  # at least 8 expected in each but the last
    counts, wanted = np.bincount(bins, counts), np.bincount(bins, wanted)
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    if len(counts) > 1 and wanted[-1] < 5:
        counts, wanted = np.append(counts[:-2], counts[-2:].sum()), np.append(wanted[:-2], wanted[-2:].sum())
    if len(counts) > 1:
        assert scipy.stats.chisquare(counts, wanted).pvalue > 1e-5


# Noise


def test_noise_bits_are_the_documented_hash() -> None:
    rng = random.Random(0)
    seeds = [*EDGES, *(rng.randrange(-(2**63), 2**63) for _ in range(20))]
    positions = [0, 1, 2, 4095, 2**20, 2**31]
    ids = [0, 1, 2, 511, 49151, 128255, 2**31 - 1]
    for seed, position in itertools.product(seeds, positions):
        first, second = noise_keys(torch.tensor([seed]), torch.tensor([position]))
        bits = noise_bits((first.unsqueeze(1), second.unsqueeze(1)), torch.tensor([ids], dtype=torch.int32))
        assert bits.tolist() == [[oracle.noise_bits(seed, position, id) for id in ids]]


@pytest.mark.parametrize(
    ("seed", "position", "token_id", "bits"),
    ((0, 0, 0, 1436738103), (0, 1, 1, 1003483237), (-1, 4095, 49151, 204201504), (2**63 - 1, 7, 128255, 362826182)),
)
def test_noise_never_changes(seed: int, position: int, token_id: int, bits: int) -> None:
    """A request may be resumed by another version: these values are for ever."""
    first, second = noise_keys(torch.tensor([seed]), torch.tensor([position]))
    assert noise_bits((first[:, None], second[:, None]), torch.tensor([[token_id]], dtype=torch.int32)).item() == bits


def test_gumbel_noise() -> None:
    seeds, positions = torch.arange(-3, 5), torch.arange(10, 18)
    noise = gumbel_noise(seeds, positions, torch.arange(20_000, dtype=torch.int32).unsqueeze(0))
    assert noise.isfinite().all()
    for row, seed, position in zip(noise, seeds.tolist(), positions.tolist(), strict=True):
        np.testing.assert_allclose(row.numpy(), oracle.gumbel(seed, position, 20_000), atol=2e-6, rtol=2e-6)
    assert scipy.stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-3


def test_noise_of_neighbouring_seeds_positions_and_ids_is_unrelated() -> None:
    noise = np.array([[oracle.gumbel(seed, position, 64) for position in range(32)] for seed in range(32)])
    for axis in range(3):
        for lag in (1, 2, 4, 16):
            a = noise.take(range(noise.shape[axis] - lag), axis).ravel()
            b = noise.take(range(lag, noise.shape[axis]), axis).ravel()
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(len(a))


# Distribution

SMALL = np.array([1.5, 1.2, 0.9, 0.3, 0.0, -0.4, -0.8, -1.0, -1.5, -2.5, 2.0, -0.1], dtype=np.float32)
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": -0.5}
HISTORY: tuple[list[int], list[int]] = ([0, 8, 3], [10, 1, 10, 7])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "penalties"),
    list(itertools.product((0.5, 1.0, 1.7), (None, 4), (1.0, 0.7), (0.0, 0.15), ({}, PENALTIES))),
)
def test_distribution(
    temperature: float, top_k: int | None, top_p: float, min_p: float, penalties: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, **penalties)
    scores = oracle.modify(SMALL, params, Rules(len(SMALL)), *HISTORY)
    expected = oracle.probabilities(scores, params)
    np.testing.assert_allclose(expected, by_transformers(SMALL, params, *HISTORY), atol=1e-6)
    check_distribution(sample_many(SMALL, params, *HISTORY, count=4000), expected)


@pytest.mark.parametrize("spread", (0.0, 0.3, 3.0))
@pytest.mark.parametrize(
    "filters",
    (
        {"top_p": 0.9},
        {"top_k": 700},
        {"top_k": 600, "top_p": 0.8},
        {"min_p": 0.3},
        {"top_p": 0.95, "min_p": 0.01, "temperature": 2.0},
        {"top_k": 5, "top_p": 0.999},
        {},
    ),
)
def test_distribution_over_more_than_the_candidates(spread: float, filters: dict[str, Any]) -> None:
    """1,000 ids: flat rows, rows where the filters keep more than the sampler looks at first, and peaked ones."""
    logits = np.random.default_rng(3).normal(size=1000).astype(np.float32) * np.float32(spread)
    params = SamplingParams(**filters)
    expected = oracle.probabilities(logits.astype(np.float64), params)
    if spread:
        np.testing.assert_allclose(expected, by_transformers(logits, params, [1], []), atol=1e-6)
    check_distribution(sample_many(logits, params, [1], [], count=1500), expected)


def by_transformers(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Probabilities by transformers' processors; it has no frequency and presence penalties."""
    ids, scores = torch.tensor([[*prompt, *output]]), torch.from_numpy(logits[None].astype(np.float64))
    scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(logits))
    scores = scores - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty
    scores = hf.TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k is not None:
        scores = hf.TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = hf.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        scores = hf.MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0].softmax(-1).numpy()


# Token for token


@st.composite
def sampled_rows(draw: st.DrawFn) -> tuple[np.ndarray, list[tuple[SamplingParams, int, list[int], list[int]]], Rules]:
    size = draw(st.sampled_from([2, 3, 12, 60, 511, 513, 700]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = draw(st.integers(1, 8))
    spread = draw(st.sampled_from([0.0, 0.01, 1.0, 5.0, 40.0]))
    logits = (rng.normal(size=(rows, size)) * spread).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    if draw(st.booleans()):
        logits[rng.random(logits.shape) < 0.2] = draw(st.sampled_from([-1e4, -1e9, -1e30]))
    ids = st.integers(0, size - 1)
    tokens = st.lists(ids, max_size=6)
    rules = Rules(
        size,
        stop_ids=frozenset(draw(st.lists(ids, max_size=1))),
        bad_words=draw(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=1)),
    )
    requests = []
    for _ in range(rows):
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.0, 1e-40, 0.01, 0.6, 1.0, 1.0, 3.0, 100.0])),
            top_k=draw(st.sampled_from([None, None, 1, 2, 5, 512, 513, 600, 10_000])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.9, 0.999])),
            min_p=draw(st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.2, 100.0])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -2.0])),
            presence_penalty=draw(st.sampled_from([0.0, 0.0, 2.0, -0.3])),
            logit_bias=draw(st.dictionaries(ids, st.sampled_from([-100.0, 2.5, 100.0]), max_size=5)),
            min_tokens=draw(st.sampled_from([0, 0, 3])),
        )
        requests.append((params, draw(st.integers(-5, 5)), draw(tokens) or [0], draw(tokens)))
    return logits, requests, rules


@settings(max_examples=1000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(sampled_rows())
def test_every_row_is_the_oracles(
    case: tuple[np.ndarray, list[tuple[SamplingParams, int, list[int], list[int]]], Rules],
) -> None:
    """Any mix of parameters in one batch, ties, masked logits and flat rows included."""
    logits, requests, rules = case
    for row, (token, given_) in enumerate(zip(sample(logits, requests, rules), requests, strict=True)):
        params, seed, prompt, output = given_
        scores = oracle.modify(logits[row], params, rules, prompt, output)
        if (scores == -np.inf).all():
            continue  # nothing may be chosen: anything is
        expected, near_tie = oracle.choose(scores, params, seed, len(prompt) + len(output))
        assert token == expected or near_tie, (token, expected, given_, rules, logits[row], scores)


@pytest.mark.parametrize("penalty", (1.0, 1.3, 2.0, 100.0))
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    rng = np.random.default_rng(int(penalty))
    for _ in range(50):
        logits = rng.normal(size=(1, 40)).astype(np.float32)
        history = rng.integers(0, 40, size=rng.integers(1, 60)).tolist()
        split = int(rng.integers(0, len(history))) + 1
        params = SamplingParams(temperature=0, repetition_penalty=penalty)
        scores = hf.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), torch.from_numpy(logits))
        chosen = sample(logits, [(params, 0, history[:split], history[split:])], Rules(40))
        assert chosen == scores.argmax(-1).tolist()


@pytest.mark.parametrize("params", ({"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 3}, {"top_p": 0.9}))
def test_pad_and_ids_past_the_tokenizer_are_never_chosen(params: dict[str, Any]) -> None:
    logits = np.zeros((200, 64), dtype=np.float32)
    logits[:, [TOKENIZER.pad_token_id, 60, 61, 62, 63]] = 50
    requests = [(SamplingParams(**params), seed, [5], [6]) for seed in range(200)]
    ids = sample(logits, requests, Rules(64), TOKENIZER)
    assert TOKENIZER.pad_token_id not in ids and max(ids) < 60


# Through the engine


def run(tokenizer: SimpleCharacterTokenizer | None = TOKENIZER, **fields: Any) -> GenerationResult:
    """One request, judged by the oracle."""
    request = GenerationRequest(**({"prompt_ids": [9, 8, 7], "max_new_tokens": 8, "temperature": 0.0} | fields))
    reference = REFERENCE if tokenizer is TOKENIZER else Reference(tiny_model(), tokenizer)
    engine = ContinuousBatchingEngine(tiny_model(), tokenizer, max_batch_size=2)
    engine.add_request(request)
    while engine.scheduler.has_pending_work:
        engine.step()
    result = engine.result(request.request_id)
    assert result is not None and result.error is None
    if request.temperature == 0 or request.seed is not None:
        reference.check(request, result)
    return result


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_logit_bias(temperature: float) -> None:
    assert run(logit_bias={33: 100.0}, temperature=temperature).token_ids == [33] * 8
    plain = run().token_ids
    assert plain[0] not in run(logit_bias={plain[0]: -100.0}, temperature=temperature).token_ids


def test_bad_words() -> None:
    letters = TOKENIZER.encode("AB ")
    liked = {"logit_bias": dict.fromkeys(letters, 60.0), "temperature": 1.0, "max_new_tokens": 40}
    free = "".join(run(**liked, seed=seed).text for seed in range(3))
    assert "AB" in free and "A" in free
    for seed in range(3):
        assert "AB" not in run(**liked, seed=seed, bad_words=["AB"]).text
        assert "A" not in run(**liked, seed=seed, bad_words=["A"]).text
        assert "BB" not in run(**liked, seed=seed, bad_words=["BB", "ABA"]).text


def test_min_tokens_and_stop_token_ids() -> None:
    liked = {40: 100.0, 41: 90.0}
    result = run(logit_bias=liked, stop_token_ids=[40])
    assert (result.token_ids, result.finish_reason, result.stop_reason) == ([], FinishReason.STOP, 40)
    result = run(logit_bias=liked, stop_token_ids=[40], min_tokens=5)
    assert (result.token_ids, result.finish_reason, result.stop_reason) == ([41] * 5, FinishReason.STOP, 40)
    result = run(logit_bias=liked, stop_token_ids=[40], min_tokens=8)
    assert (result.token_ids, result.finish_reason, result.stop_reason) == ([41] * 8, FinishReason.LENGTH, None)
    many = [*range(10, 40), 40]
    result = run(logit_bias=liked, stop_token_ids=many, min_tokens=2, seed=1, temperature=1.0)
    assert (result.token_ids, result.stop_reason) == ([41] * 2, 40)


def test_eos() -> None:
    liked = {1: 100.0, 41: 90.0}
    result = run(logit_bias=liked)
    assert (result.token_ids, result.text, result.finish_reason, result.stop_reason) == (
        [],
        "",
        FinishReason.STOP,
        None,
    )
    result = run(logit_bias=liked, min_tokens=3)
    assert (result.token_ids, result.finish_reason) == ([41] * 3, FinishReason.STOP)
    result = run(logit_bias=liked, ignore_eos=True)
    assert (result.token_ids, result.finish_reason) == ([1] * 8, FinishReason.LENGTH)
    result = run(logit_bias=liked, ignore_eos=True, stop_token_ids=[1], min_tokens=2)
    assert (result.token_ids, result.stop_reason) == ([41] * 2, 1)


@pytest.mark.parametrize("fields", ({}, {"seed": 3, "temperature": 1.0}, {"repetition_penalty": 2.0}))
@pytest.mark.parametrize("wanted", (0, 1, 20))
def test_logprobs(wanted: int, fields: dict[str, Any]) -> None:
    for prompt in ([9], [9, 8, 7, 6, 5]):
        result = run(prompt_ids=prompt, logprobs=wanted, prompt_logprobs=wanted, **fields)
        assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
        assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == len(prompt)


def test_more_logprobs_than_a_vocabulary_has() -> None:
    tokenizer = SimpleCharacterTokenizer(10)
    result = run(tokenizer, logprobs=20, prompt_logprobs=20)
    assert result.logprobs is not None and len(result.logprobs[0].top) == 10


def test_a_seed_is_drawn_when_none_is_given() -> None:
    assert len({tuple(run(temperature=2.0, ignore_eos=True).token_ids) for _ in range(4)}) == 4
    assert len({tuple(run(temperature=2.0, ignore_eos=True, seed=7).token_ids) for _ in range(4)}) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"logit_bias": {60: 1.0}}, "logit_bias: id 60"),
        ({"stop_token_ids": [60]}, "stop_token_ids: id 60"),
        ({"prompt_ids": [3, 64]}, "token: id 64"),
        ({"output_ids": [63]}, "token: id 63"),
        ({"max_new_tokens": 46}, "context of 48"),
    ),
)
def test_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**fields)


@pytest.mark.parametrize("fields", ({"stop": ["x"]}, {"bad_words": ["x"]}, {"prompt_ids": None, "prompt": "x"}))
def test_text_needs_a_tokenizer(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{list(fields)[-1]} needs a tokenizer"):
        run(None, **fields)


def test_a_device_of_its_own_is_told_of_all_rows_at_once() -> None:
    table = SamplingTable(4, CPU)
    table.on_host = False
    columns = [column for column in vars(table).values() if hasattr(column, "host")]
    for column in columns:
        column.device = column.device.clone()
    sampler = Sampler(table, Vocabulary(50, None), CPU)
    logits, tokens = (
        torch.randn(4, 50, generator=torch.Generator().manual_seed(0)),
        torch.zeros(4, 9, dtype=torch.int32),
    )
    for seed in (1, 2):  # every row changes
        rows = [
            SamplingParams(temperature=1.0, top_k=seed + row, logit_bias={n: 5.0 for n in range(row * 2)})
            for row in range(4)
        ]
        for row, params in enumerate(rows):
            table.set(row, params, 10 * seed + row, 1, [row], [])
        own = SamplingTable(4, CPU)
        for row, params in enumerate(rows):
            own.set(row, params, 10 * seed + row, 1, [row], [])
        lengths = np.full(4, 3)
        expected = Sampler(own, Vocabulary(50, None), CPU)(logits.clone(), np.arange(4), lengths, tokens).ids
        assert torch.equal(sampler(logits.clone(), np.arange(4), lengths, tokens).ids, expected)
        assert all(np.array_equal(column.host, column.device.numpy()) for column in columns)
        assert columns[0].device.data_ptr() != columns[0].host.ctypes.data
