"""Speculation changes speed, never text: every proposer, every schedule, every way of sampling."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch_engine import ContinuousBatchingEngine
from engine.generation import batch_generate_requests
from engine.models.decoder import DecoderModel
from engine.models.loader import load_model
from engine.scheduler import StepPlan
from engine.schemas import GenerationRequest
from engine.sequence import SequenceTable
from engine.speculation import NO_TOKEN, DraftModelProposer, NgramProposer, Speculator, accept
from engine.tokenization import SimpleCharacterTokenizer, load_tokenizer
from tests.engine.oracle import tiny_model

CONTEXT = 128


def make(seed: int, layers: int = 2, **changes) -> DecoderModel:
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "num_heads": 8, "num_kv_heads": 2, "vocab_size": 100, "max_seq_len": CONTEXT}
    model = DecoderModel(**{**shape, "num_layers": layers, **changes}).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module", params=(None, 20), ids=("no window", "window"))
def target(request) -> DecoderModel:
    return make(0, window_size=request.param)


@pytest.fixture(scope="module")
def drafts(target: DecoderModel) -> dict[str, DecoderModel | None]:
    near = make(0, window_size=target.config.window_size)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter += torch.randn_like(parameter) * 0.01
    return {"ngram": None, "itself": target, "near": near, "random": make(1, layers=1)}


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    rng = random.Random(0)
    shared = [rng.randrange(3, 100) for _ in range(30)]
    ways = (
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.3, "min_tokens": 1},
        {"temperature": 1.0, "top_k": 20, "logit_bias": {7: 2.0}},
    )
    made = []
    for i in range(12):
        prompt = shared[: rng.randrange(30)] + [rng.randrange(3, 100) for _ in range(rng.randrange(1, 30))]
        if i % 3 == 0:
            prompt = (prompt[:7] * 8)[:60]
        made.append(
            GenerationRequest(
                request_id=str(i),
                prompt_ids=prompt,
                max_new_tokens=rng.randrange(1, 30),
                seed=i,
                stop_token_ids=[5],
                logprobs=2,
                **ways[i % 4],
            )
        )
    return made


def run(target: DecoderModel, requests: list[GenerationRequest], **options):
    engine = ContinuousBatchingEngine(target, None, max_batch_size=8, **options)
    rng, arriving = random.Random(1), list(requests)
    while arriving or engine.scheduler.has_pending_work:
        if arriving and rng.random() < 0.5:
            engine.add_request(arriving.pop())
        engine.step()
        engine.pool.check()
    assert engine.stats().held_pages == 0
    results = [engine.result(request.request_id) for request in requests]
    return engine, [
        (r.token_ids, r.finish_reason, [(e.token_id, round(e.logprob, 2), len(e.top)) for e in r.logprobs])
        for r in results
    ]


@pytest.fixture(scope="module")
def plain(target, requests):
    return run(target, requests)[1]


@pytest.mark.parametrize("name", ("ngram", "itself", "near", "random"))
@pytest.mark.parametrize(("page_size", "depth"), list(itertools.product((1, 16, CONTEXT), (0, 1))))
def test_text_is_that_of_plain_decoding(target, drafts, requests, plain, name: str, page_size: int, depth: int) -> None:
    for gamma, pages, budget in ((3, CONTEXT // page_size, 7), (8, None, 64), (None, None, 2048)):
        engine, results = run(
            target,
            requests,
            page_size=page_size,
            depth=depth,
            num_pages=pages,
            max_batched_tokens=budget,
            speculation="ngram" if name == "ngram" else "draft",
            draft_model=drafts[name],
            gamma=gamma,
        )
        assert results == plain
        stats = engine.speculation_stats()
        if name == "itself":
            assert stats.drafted == stats.accepted and (gamma is None or stats.drafted > 0)


def test_draft_like_the_target_saves_steps(target, drafts, requests) -> None:
    steps = [
        run(target, requests, speculation="draft", draft_model=drafts[name], gamma=4)[0].stats().steps
        for name in ("itself", "random")
    ]
    assert steps[0] * 1.4 < steps[1]


def test_useless_draft_is_left_alone(target, drafts) -> None:
    """Auto: counted after the first 64 tokens of a sequence, for which it may be tried."""
    engine = ContinuousBatchingEngine(
        make(0, max_seq_len=1024), None, speculation="draft", draft_model=make(1, layers=1, max_seq_len=1024)
    )
    # fixed costs, so that the test doesn't depend on the machine: a token more costs a tenth of a step
    speculator = engine._speculator
    assert isinstance(speculator, Speculator)
    observe = Speculator.observe
    speculator.observe = lambda plan, seconds: observe(  # type: ignore[method-assign]
        speculator, plan, speculator._proposed + 1 + 0.1 * int(plan.counts.sum())
    )
    for i in range(8):
        engine.add_request(GenerationRequest(prompt_ids=[i + 1, 2, 3], max_new_tokens=900, temperature=1.0, seed=i))
    while engine.stats().generated_tokens < 64 * 8:
        engine.step()
    before = (engine.speculation_stats().drafted, engine.stats().generated_tokens)
    while engine.scheduler.has_pending_work:
        engine.step()
    drafted = engine.speculation_stats().drafted - before[0]
    generated = engine.stats().generated_tokens - before[1]
    assert 0 < drafted <= 0.02 * generated


def test_rows_that_draft_alone_are_not_waited_for() -> None:
    """Auto, where verifying doubles a step however little is drafted: over all that takes 2 % longer at most."""
    context = 4000
    engine = ContinuousBatchingEngine(
        make(0, max_seq_len=context), None, speculation="draft", draft_model=make(1, layers=1, max_seq_len=context)
    )
    speculator = engine._speculator
    assert isinstance(speculator, Speculator)
    steps = {True: 0, False: 0}
    observe = Speculator.observe

    def take(plan: StepPlan, seconds: float) -> None:
        steps[plan.verifies] += 1
        observe(speculator, plan, speculator._proposed + 1 + plan.verifies)

    speculator.observe = take  # type: ignore[method-assign]
    for i in range(120):  # one in 16 starts with hope
        engine.add_request(GenerationRequest(prompt_ids=[i % 90 + 1], max_new_tokens=60, temperature=1.0, seed=i))
    while engine.stats().generated_tokens < 64 * 8:
        engine.step()
    steps[True] = 0
    while engine.scheduler.has_pending_work:
        engine.step()
    assert engine.speculation_stats().drafted > 0
    assert steps[True] <= 0.02 * steps[False]


def test_stop_string_inside_an_accepted_run() -> None:
    tokenizer = SimpleCharacterTokenizer()
    model = make(3, vocab_size=tokenizer.vocab_size)
    whole = ContinuousBatchingEngine(model, tokenizer)
    request = {"prompt": "abcabc", "max_new_tokens": 60, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    request_id = whole.add_request(GenerationRequest(**request))
    while whole.scheduler.has_pending_work:
        whole.step()
    text = whole.result(request_id).text
    for stop in (text[10:12], text[23:26], text[40]):
        answers = []
        for options in ({}, {"speculation": "draft", "draft_model": model, "gamma": 7}):
            engine = ContinuousBatchingEngine(model, tokenizer, **options)
            request_id = engine.add_request(GenerationRequest(**request, stop=[stop]))
            while engine.scheduler.has_pending_work:
                engine.step()
            answers.append(engine.result(request_id))
        assert answers[0].text == answers[1].text
        assert answers[1].text == text[: text.index(stop)]
        assert answers[0].token_ids == answers[1].token_ids and answers[1].stop_reason == stop


def test_accept_counts_the_leading_agreement() -> None:
    samples = np.array([[1, 2, 3], [1, 9, 3], [9, 2, 3], [4, NO_TOKEN, NO_TOKEN]])
    drafts = np.array([[1, 2], [1, 2], [1, 2], [NO_TOKEN, NO_TOKEN]])
    assert accept(samples, drafts).tolist() == [2, 1, 0, 0]


def test_ngram_finds_the_last_continuation() -> None:
    table = SequenceTable(3, 32, 1, torch.device("cpu"))
    for row, tokens in enumerate(([1, 2, 3, 4, 9, 1, 2, 3], [7, 8, 5, 7, 8, 6, 7, 8], [1, 2, 3, 4])):
        table.tokens[row, : len(tokens)] = tokens
        table.known[row] = len(tokens)
    drafts = NgramProposer(table).propose(np.array([0, 1, 2]), np.array([3, 2, 4]), np.zeros(3))
    assert drafts.tolist() == [[4, 9, 1, NO_TOKEN], [6, 7, NO_TOKEN, NO_TOKEN], [NO_TOKEN] * 4]


def test_what_is_refused(target) -> None:
    for options, message in (
        ({"speculation": "draft"}, "go together"),
        ({"speculation": "nope"}, "unknown speculation 'nope'; known: draft, ngram, off"),
        ({"speculation": "ngram", "gamma": 0}, "gamma must be at least 1"),
        ({"speculation": "draft", "draft_model": make(1, vocab_size=99)}, "vocabulary of 99 is below the target's 100"),
        ({"speculation": "draft", "draft_model": make(1, max_seq_len=64)}, "context of 64 is below the target's 128"),
    ):
        with pytest.raises(ValueError, match=message):
            ContinuousBatchingEngine(target, None, **options)


def test_ngram_on_the_real_model_drafts_what_it_copies(smollm2: Path) -> None:
    """An extractive prompt in fp32: fewer steps, the same text."""
    tokenizer = load_tokenizer(smollm2)
    model = load_model(smollm2, dtype=torch.float32)
    sentence = "The quick brown fox jumps over the lazy dog near the old stone bridge."
    prompt = tokenizer.encode_chat([{"role": "user", "content": f"Repeat this sentence three times: {sentence}"}])
    answers = []
    for speculation in ("off", "ngram"):
        engine = ContinuousBatchingEngine(
            model,
            tokenizer,
            max_batch_size=1,
            max_seq_len=512,
            speculation=speculation,
            gamma=None if speculation == "off" else 4,
        )
        request_id = engine.add_request(GenerationRequest(prompt_ids=prompt, max_new_tokens=40, temperature=0))
        while engine.scheduler.has_pending_work:
            engine.step()
        answers.append((engine.result(request_id).token_ids, engine.stats().steps))
    assert answers[0][0] == answers[1][0]
    assert answers[1][1] < 0.8 * answers[0][1]


def test_a_local_draft_rereads_what_it_drafted_before_plain_steps() -> None:
    """Positions of rejected drafts are not read text, however many tokens have come since."""
    draft = tiny_model(3, max_seq_len=128)
    options: dict[str, Any] = {"speculation": "draft", "draft_model": draft, "gamma": 6, "depth": 0}
    engine = ContinuousBatchingEngine(tiny_model(max_seq_len=128), None, max_batch_size=2, page_size=16, **options)
    engine.add_request(GenerationRequest(prompt_ids=[5, 9, 13, 2, 7, 11], max_new_tokens=60, temperature=0))
    for _ in range(5):
        engine.step()
    speculator = engine._speculator
    assert speculator is not None and isinstance(speculator.proposer, DraftModelProposer)
    speculator.lengths = lambda rows: np.zeros_like(rows)  # type: ignore[method-assign]
    for _ in range(3):
        engine.step()
    rows, gammas, worth = np.array([0]), np.array([6]), np.zeros(1)
    proposed = speculator.proposer.propose(rows, gammas, worth)
    speculator.proposer.drafter.rewind(rows, np.array([0]))
    assert (speculator.proposer.propose(rows, gammas, worth) == proposed).all()


@pytest.mark.parametrize("depth", (0, 1))
def test_a_proposer_that_fails_costs_nothing_but_its_proposals(depth: int) -> None:
    prompts = [[5, 9, 13, 2, 7, 11, 30, 22, 41, 3, 6, last] for last in (40, 8, 9, 8)]
    model, options = tiny_model(), {"max_batch_size": 2, "page_size": 16, "depth": depth}

    def texts(**more: Any) -> list[list[int]]:
        engine = ContinuousBatchingEngine(model, None, **options, **more)
        if engine._speculator is not None:
            engine._speculator.proposer.propose = fail  # type: ignore[method-assign]
        requests = [GenerationRequest(prompt_ids=ids, max_new_tokens=12, temperature=0) for ids in prompts]
        return [result.token_ids for result in batch_generate_requests(engine, requests)]

    def fail(*args: Any) -> np.ndarray:
        raise RuntimeError("out of memory")

    assert texts(speculation="ngram", gamma=3) == texts()
