"""A request's tokens depend on its prompt, its parameters and its seed, and on nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.batch_engine import ContinuousBatchingEngine
from engine.schemas import GenerationRequest, GenerationResult
from engine.tokenization import SimpleCharacterTokenizer
from tests.engine.oracle import Reference, tiny_model

TOKENIZER = SimpleCharacterTokenizer(60)
REFERENCE = Reference(tiny_model(max_seq_len=128), TOKENIZER)
LENGTH = 24

SUBJECTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "filtered": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3, "logprobs": 4},
    "steered": {"logit_bias": {8: 4.0, 9: 4.0, 11: -9.0}, "bad_words": ["A", "%&"], "top_p": 0.95},
    "stopping": {"min_tokens": 6, "stop_token_ids": [*range(10, 25)]},
}


def subject(name: str, **fields: Any) -> GenerationRequest:
    prompt = random.Random(name).choices(range(3, 60), k=11)
    defaults = {"request_id": name, "prompt_ids": prompt, "max_new_tokens": LENGTH, "seed": 5}
    return GenerationRequest(**(defaults | SUBJECTS[name] | fields))


def neighbour(i: int, prompt: list[int]) -> GenerationRequest:
    """Any request; every feature is used by some, and some share a prefix with the subject."""
    rng = random.Random(i)
    fields: dict[str, Any] = {
        "prompt_ids": prompt[: rng.randrange(len(prompt))] + rng.choices(range(3, 60), k=rng.randint(1, 40)),
        "max_new_tokens": rng.randint(1, 40),
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.0]),
        "top_k": rng.choice([None, 1, 7, 1000]),
        "top_p": rng.choice([1.0, 0.5, 0.9]),
        "min_p": rng.choice([0.0, 0.1]),
        "repetition_penalty": rng.choice([1.0, 1.5]),
        "frequency_penalty": rng.choice([0.0, 1.0, -1.0]),
        "presence_penalty": rng.choice([0.0, 1.0]),
        "logit_bias": {rng.randrange(60): rng.uniform(-100, 100) for _ in range(rng.choice([0, 3, 30]))},
        "seed": rng.choice([None, 5, i]),
        "stop": rng.choice([[], ["A", "B"]]),
        "stop_token_ids": rng.choice([[], list(range(20, 50))]),
        "bad_words": rng.choice([[], ["C", "DE"]]),
        "ignore_eos": rng.random() < 0.5,
        "logprobs": rng.choice([None, 0, 20]),
        "prompt_logprobs": rng.choice([None, 0, 3]),
        "cache_salt": rng.choice([None, "salt"]),
        "priority": rng.randint(-2, 2),
    }
    fields["min_tokens"] = rng.randint(0, fields["max_new_tokens"])
    return GenerationRequest(request_id=f"neighbour {i}", **fields)


def make_engine(**options: Any) -> ContinuousBatchingEngine:
    return ContinuousBatchingEngine(tiny_model(max_seq_len=128), TOKENIZER, **({"max_batch_size": 32} | options))


def finish(engine: ContinuousBatchingEngine, request: GenerationRequest) -> GenerationResult:
    while engine.scheduler.has_pending_work:
        engine.step()
    engine.pool.check()
    result = engine.result(request.request_id)
    assert result is not None and result.error is None
    REFERENCE.check(request, result)
    return result


ALONE = {name: REFERENCE.generate(subject(name)) for name in SUBJECTS}


def test_the_subjects_differ_from_what_they_would_be_without_their_features() -> None:
    for name in SUBJECTS:
        if name != "plain":
            bare = GenerationRequest(prompt_ids=subject(name).prompt_ids, seed=5, max_new_tokens=LENGTH)
            assert REFERENCE.generate(bare) != ALONE[name], name


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("depth", (0, 1))
def test_neighbours_do_not_matter(name: str, depth: int) -> None:
    request = subject(name)
    assert finish_alone(request, depth) == ALONE[name]
    for seed in range(3):
        engine = make_engine(depth=depth, page_size=[1, 16, 128][seed])
        order = [neighbour(100 * seed + i, request.prompt_ids or []) for i in range(31)]
        order.insert(seed * 15, request)
        waiting = iter(order)
        for _ in range(8 * seed):  # the last ones arrive while the first run
            engine.add_request(next(waiting))
            engine.step()
        for other in waiting:
            engine.add_request(other)
        assert finish(engine, request).token_ids == ALONE[name]
        for other in order:
            if other is not request and (other.temperature == 0 or other.seed is not None):
                result = engine.result(other.request_id)
                assert result is not None
                REFERENCE.check(other, result)


@pytest.mark.parametrize("page_size", (1, 4, 16, 128))
def test_a_neighbour_whose_numbers_overflow(page_size: int) -> None:
    """Its keys and values are not a number: they reach neither those beside it nor those that get its pages later."""
    model = tiny_model(max_seq_len=128)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = float("nan")  # of the padding, which nobody else has
    engine = ContinuousBatchingEngine(model, TOKENIZER, max_batch_size=8, page_size=page_size)
    engine.add_request(GenerationRequest(prompt_ids=[0] * 20, max_new_tokens=20, ignore_eos=True))
    beside = [subject(name, request_id=f"{name} beside") for name in SUBJECTS]
    for request in beside:
        engine.add_request(request)
    results = [finish(engine, request) for request in beside]
    for name in SUBJECTS:
        engine.add_request(subject(name))
        results.append(finish(engine, subject(name)))
    assert [result.token_ids for result in results] == [*ALONE.values(), *ALONE.values()]


def finish_alone(request: GenerationRequest, depth: int) -> list[int]:
    engine = make_engine(depth=depth)
    engine.add_request(request)
    return finish(engine, request).token_ids


@pytest.mark.parametrize("name", SUBJECTS)
def test_resumed_at_any_token(name: str) -> None:
    """As after the death of a replica: in a fresh engine, from any of its tokens on."""
    for cut in range(len(ALONE[name]) + 1):
        request = subject(name, output_ids=ALONE[name][:cut], attempt=1)
        engine = make_engine(max_batch_size=2)
        engine.add_request(request)
        assert finish(engine, request).token_ids == ALONE[name]


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("prefix_cache", (False, True))
@pytest.mark.parametrize("depth", (0, 1))
def test_preempted(name: str, prefix_cache: bool, depth: int) -> None:
    """The pool holds two of its kind; older and more important ones take its pages away."""
    preempted = 0
    for seed in range(4):
        engine = make_engine(page_size=4, num_pages=17, depth=depth, enable_prefix_cache=prefix_cache)
        request = subject(name, priority=3)
        engine.add_request(request)
        for i in range(6):
            prompt = random.Random(seed * 10 + i).choices(range(3, 60), k=8)
            fields = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
            for _ in range(2):
                engine.step()
            engine.add_request(GenerationRequest(request_id=str(i), prompt_ids=prompt, **fields))
        assert finish(engine, request).token_ids == ALONE[name]
        preempted += engine.stats().preemptions
    assert preempted
