"""The backend with a draft model: the target's own text where temperature is 0, else its distribution."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine import GenerationRequest
from engine.generation import EagerBackend, SpeculativeDecodingBackend
from engine.models.decoder import DecoderModel
from engine.schemas import FinishReason
from engine.tokenization import SimpleCharacterTokenizer

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "speculation.md"
PROMPT = [1, 2, 0]


def make(seed: int, std: float = 0.4, **changes: Any) -> DecoderModel:
    torch.manual_seed(seed)
    shape = {"vocab_size": 131, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 64}
    model = DecoderModel(**{**shape, **changes}).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model


def near(target: DecoderModel, scale: float) -> DecoderModel:
    model = DecoderModel.from_config(target.config).eval()
    model.load_state_dict(target.state_dict())
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * scale
    return model


@pytest.fixture(scope="module")
def target() -> DecoderModel:
    return make(0)


@pytest.fixture(scope="module")
def drafts(target: DecoderModel) -> dict[str, DecoderModel]:
    return {
        "itself": target,
        "near": near(target, 0.05),
        "random": make(1),
        "short context": make(1, max_seq_len=20),
        "window": near(make(0, window_size=5), 0.05),
    }


DISTRIBUTIONS: dict[str, dict[str, float]] = {
    "unfiltered": {},
    "filtered": {"top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3, "temperature": 1.2},
}


def exact(model: DecoderModel, params: dict[str, float], count: int) -> np.ndarray:
    """The probability of every text of `count` tokens, [vocab_size] * count, by transformers' processors."""
    makers = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    processors = LogitsProcessorList([maker(params[name]) for name, maker in makers.items() if name in params])
    joint = torch.ones(1, dtype=torch.float64)
    for length in range(count):
        texts = torch.tensor([[*PROMPT, *text] for text in itertools.product(range(model.vocab_size), repeat=length)])
        with torch.inference_mode():
            scores = processors(texts, model(texts)[:, -1])
        joint = joint.unsqueeze(-1) * scores.double().softmax(-1).view(*joint.shape, -1)
    return joint.squeeze(0).numpy()


@pytest.mark.parametrize("case", DISTRIBUTIONS)
def test_output_has_the_targets_distribution(case: str) -> None:
    model = make(0, vocab_size=4)
    backend = SpeculativeDecodingBackend(model, near(model, 0.15), gamma=4)
    samples = 700
    seen = np.zeros([4] * 5)
    for seed in range(samples):
        result = backend.generate(PROMPT, max_new_tokens=5, seed=seed, **DISTRIBUTIONS[case])
        seen[tuple(result.token_ids)] += 1
    expected = exact(model, DISTRIBUTIONS[case], 5) * samples
    stats = backend.stats
    assert stats.acceptance_rate < 0.8 and stats.accepted_at[3] > samples / 20  # runs that stand, and that don't
    for others in ((3, 4), (0, 1)):  # the first three tokens, the last three
        observed, wanted = seen.sum(others).ravel(), expected.sum(others).ravel()
        assert observed[wanted == 0].sum() == 0
        rare = wanted < 5
        parts = [np.append(x[~rare], x[rare].sum()) for x in (observed, wanted)]
        keep = parts[1] > 0
        assert keep.sum() > 5
        assert chisquare(parts[0][keep], parts[1][keep]).pvalue > 1e-3


@pytest.mark.parametrize("name", ("itself", "near", "random", "short context", "window"))
def test_greedy_is_plain_greedy(name: str, target: DecoderModel, drafts: dict[str, DecoderModel]) -> None:
    """Also past the end of the draft's context, up to the end of the target's."""
    eager = EagerBackend(target)
    for gamma, (count, params) in itertools.product(
        (1, 4, 7), ((1, {}), (23, {"repetition_penalty": 1.3}), (61, {"frequency_penalty": 0.4, "logprobs": 2}))
    ):
        backend = SpeculativeDecodingBackend(target, drafts[name], gamma)
        options = {"max_new_tokens": count, "temperature": 0, **params}
        plain, result = eager.generate(PROMPT, **options), backend.generate(PROMPT, **options)
        assert len(result.token_ids) == count
        assert (result.token_ids, result.finish_reason) == (plain.token_ids, plain.finish_reason)
        for a, b in zip(plain.logprobs or [], result.logprobs or [], strict=True):
            assert (a.token_id, a.rank) == (b.token_id, b.rank)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.mark.parametrize("params", ({}, {"top_p": 0.7}, {"top_k": 5, "frequency_penalty": 1.0}, {"temperature": 0}))
def test_draft_like_the_target_is_always_accepted(params: dict[str, float], target: DecoderModel) -> None:
    backend = SpeculativeDecodingBackend(target, target, gamma=4)
    for seed in range(4):
        assert len(backend.generate(PROMPT, max_new_tokens=22, seed=seed, **params).token_ids) == 22
    # four runs of 4 and a token, then one of 1 and a token
    assert backend.stats.accepted_at == [20, 16, 16, 16]
    assert (backend.stats.drafted, backend.stats.rejected, backend.stats.acceptance_rate) == (68, 0, 1.0)


def test_counters_of_a_draft_that_differs(target: DecoderModel, drafts: dict[str, DecoderModel]) -> None:
    backend = SpeculativeDecodingBackend(target, drafts["near"], gamma=3)
    assert backend.stats.acceptance_rate == 0
    for seed in range(5):
        backend.generate(PROMPT, max_new_tokens=30, seed=seed)
    stats = backend.stats
    assert 0 < stats.accepted < stats.drafted == stats.accepted + stats.rejected
    assert stats.accepted == sum(stats.accepted_at)
    assert stats.accepted_at == sorted(stats.accepted_at, reverse=True)
    assert stats.acceptance_rate == stats.accepted / stats.drafted


def test_seed_gives_the_same_again_and_batches_keep_their_order(
    target: DecoderModel, drafts: dict[str, DecoderModel]
) -> None:
    backend = SpeculativeDecodingBackend(target, drafts["near"])
    requests = [GenerationRequest(prompt_ids=[3 + i], seed=i % 2, max_new_tokens=9 + i) for i in range(4)]
    results = backend.batch_generate(requests)
    assert [len(result.token_ids) for result in results] == [9, 10, 11, 12]
    assert [result.token_ids for result in results] == [backend.generate(request).token_ids for request in requests]
    assert results[0].token_ids != backend.generate([3], seed=1, max_new_tokens=9).token_ids


def test_ends_inside_an_accepted_run(target: DecoderModel) -> None:
    """With draft = target the run of 8 is accepted whole, and what ends the text stands in its middle."""
    tokenizer = SimpleCharacterTokenizer(131)
    backend = SpeculativeDecodingBackend(target, target, gamma=8, tokenizer=tokenizer)
    eager = EagerBackend(target, tokenizer)
    options: dict[str, Any] = {"max_new_tokens": 8, "seed": 3, "temperature": 5, "ignore_eos": True, "logprobs": 0}
    whole = backend.generate("abc", **options)
    text, ids = whole.text, whole.token_ids
    assert len(set(ids)) == 8 and 1 not in ids
    for end in range(2, 7):
        by_id = backend.generate("abc", **options, stop_token_ids=[ids[end]])
        assert (by_id.token_ids, by_id.finish_reason, by_id.stop_reason) == (ids[:end], FinishReason.STOP, ids[end])
        stop = text[end - 1 : end + 1]
        for keeps in (False, True):
            by_text = backend.generate("abc", **options, stop=[stop], include_stop_str_in_output=keeps)
            assert (by_text.text, by_text.stop_reason) == (text[: end + 1 if keeps else end - 1], stop)
            assert by_text.token_ids == ids[: end + 1]
            assert len(by_text.logprobs or []) == end + 1
            assert (
                "".join(backend.stream("abc", **options, stop=[stop], include_stop_str_in_output=keeps)) == by_text.text
            )
    places = set()
    for prompt in "abcdefghijkl":
        request = GenerationRequest(prompt=prompt, max_new_tokens=30, temperature=0, logit_bias={1: 1.0})
        plain = eager.generate(request)
        assert backend.generate(request) == plain
        if plain.finish_reason is FinishReason.STOP:
            places.add(len(plain.token_ids) % 9)
    assert places & set(range(1, 8))


@pytest.mark.parametrize("logprobs", (None, 2))
def test_logits_that_are_not_numbers(target: DecoderModel, logprobs: int | None) -> None:
    broken = near(target, 0)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="no token can follow"):
        SpeculativeDecodingBackend(broken, target, 3).generate(PROMPT, max_new_tokens=5, logprobs=logprobs)


def test_what_is_refused(target: DecoderModel) -> None:
    for draft, options, message in (
        (make(1, vocab_size=130), {}, "vocab_size: the draft's 130 is not the target's 131"),
        (make(1).to("meta"), {}, "device: the draft's meta is not the target's cpu"),
        (target, {"gamma": 0}, "gamma must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeculativeDecodingBackend(target, draft, **options)
    backend = SpeculativeDecodingBackend(target, target, tokenizer=SimpleCharacterTokenizer(131))
    for fields in ({"grammar": {"kind": "regex", "text": "a"}}, {"adapter": "x"}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            backend.generate("abc", **fields)


@pytest.mark.parametrize("snippet", re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S))
def test_the_guides_snippets_run_as_printed(
    snippet: str, smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A comment `# True ...` or `# 30` after a print is what it must print."""
    monkeypatch.chdir(ROOT)
    exec(snippet, {})
    lines = capsys.readouterr().out.splitlines()
    promised = re.findall(r"^ *print\(.*\)  # ([A-Z0-9].*)$", snippet, re.M)
    assert promised and all(line in lines for line in promised), lines
