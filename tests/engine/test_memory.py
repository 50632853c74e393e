"""What an engine keeps: nothing of requests that ended, and shared prompts once."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from typing import Any

import pytest

from engine.batch_engine import ContinuousBatchingEngine
from engine.schemas import FinishReason, GenerationRequest, StepTokens
from engine.sequence import Sequence
from engine.tokenization import SimpleCharacterTokenizer
from tests.engine.oracle import tiny_model

TOKENIZER = SimpleCharacterTokenizer(60)
MiB = 2**20


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fields(i: int) -> dict[str, Any]:
    rng = random.Random(i)
    return {
        "prompt_ids": rng.choices(range(3, 60), k=rng.randint(1, 12)),
        "max_new_tokens": rng.randint(1, 4),
        "temperature": rng.choice([0.0, 1.0]),
        "top_p": rng.choice([1.0, 0.9]),
        "frequency_penalty": rng.choice([0.0, 0.5]),
        "logprobs": rng.choice([None, None, 2]),
        "stop": rng.choice([[], [], ["A"]]),
        "timeout": rng.choice([None, 600.0]),
        "priority": rng.randint(-1, 1),
    }


def sequences() -> int:
    gc.collect()
    return sum(type(thing) is Sequence for thing in gc.get_objects())


def test_ten_thousand_requests() -> None:
    """A third through the sink, a third read as results, a third never read; some aborted, running or waiting."""
    earlier = sequences()  # other tests' own
    engine = ContinuousBatchingEngine(tiny_model(), TOKENIZER, max_batch_size=64, page_size=4, max_results=100)
    ends: Counter[FinishReason] = Counter()
    tokens = 0

    def sink(step: StepTokens) -> None:
        nonlocal tokens
        tokens += len(step.tokens)
        ends.update(result.finish_reason for _, result in step.finished)

    engine.set_token_sink(sink)
    expected = 0
    read: list[str] = []
    early = resident()
    for i in range(10_000):
        request = GenerationRequest(request_id=str(i), **fields(i))
        tagged = i % 3 == 0 and not request.stop
        engine.add_request(request, tag=i if tagged else None)
        expected += tagged
        if i % 3 == 1:
            read.append(request.request_id)
        if i % 50 == 0:
            engine.abort(str(i))
        if i % 16 == 0:
            engine.step()
        if i % 64 == 0:
            read = [id for id in read if engine.result(id) is None]
        if i == 1000:
            gc.collect()
            early = resident()
    while engine.scheduler.has_pending_work:
        engine.step()
    engine.step()
    read = [id for id in read if engine.result(id) is None]
    gc.collect()
    assert resident() <= early + 16 * MiB
    assert sequences() <= earlier
    assert sum(ends.values()) == expected and len(read) < 100
    stats = engine.stats()
    assert stats.finished_requests == 10_000 and stats.failed_requests == 0
    assert stats.held_pages == stats.running == stats.waiting == 0
    assert stats.free_pages + stats.cached_pages == stats.total_pages
    assert len(engine._results) <= 100


def test_counters_are_those_of_the_results() -> None:
    engine = ContinuousBatchingEngine(tiny_model(), TOKENIZER, max_batch_size=8, page_size=4, num_pages=30)
    for i in range(300):
        engine.add_request(GenerationRequest(request_id=str(i), **fields(i)))
        if i % 11 == 0:
            engine.abort(str(i))
        if i % 3 == 0:
            engine.step()
    while engine.scheduler.has_pending_work:
        engine.step()
    results = [engine.result(str(i)) for i in range(300)]
    stats = engine.stats()
    reasons = Counter(result.finish_reason for result in results if result)
    assert stats.finished_requests == sum(reasons.values()) == 300
    assert stats.aborted_requests == reasons[FinishReason.ABORT] > 0
    assert stats.generated_tokens == sum(len(result.token_ids) for result in results if result)
    assert stats.prompt_tokens == sum(result.prompt_tokens for result in results if result)
    assert stats.cached_tokens == sum(result.cached_tokens for result in results if result)


@pytest.mark.parametrize("page_size", (16, 64))
@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("budget", (128, 2048))
def test_one_system_prompt_for_many_chats(page_size: int, depth: int, budget: int) -> None:
    """32 chats that arrive together: the 1,000 tokens they share are computed once, but for less than a page each."""
    model = tiny_model(max_seq_len=1100, num_layers=1)
    engine = ContinuousBatchingEngine(
        model, TOKENIZER, max_batch_size=32, page_size=page_size, depth=depth, max_batched_tokens=budget
    )
    system = random.Random(0).choices(range(3, 60), k=1000)
    own = [[3 + i, *random.Random(i).choices(range(3, 60), k=20 + i)] for i in range(32)]
    for i, question in enumerate(own):
        engine.add_request(
            GenerationRequest(
                request_id=str(i), prompt_ids=system + question, max_new_tokens=4, temperature=0, ignore_eos=True
            )
        )
    while engine.scheduler.has_pending_work:
        engine.step()
    stats = engine.stats()
    decoded = 32 * 3
    repeated = stats.computed_tokens - decoded - 1000 - sum(len(question) for question in own)
    assert 0 <= repeated < 31 * (1000 % page_size + 1)
    assert stats.cached_tokens == 31 * 1000 - repeated
    alone = ContinuousBatchingEngine(model, TOKENIZER, max_batch_size=1, enable_prefix_cache=False)
    for i in (0, 31):
        alone.add_request(
            GenerationRequest(
                request_id=str(i), prompt_ids=system + own[i], max_new_tokens=4, temperature=0, ignore_eos=True
            )
        )
        while alone.scheduler.has_pending_work:
            alone.step()
        together, single = engine.result(str(i)), alone.result(str(i))
        assert together is not None and single is not None and together.token_ids == single.token_ids


def test_one_prompt_many_choices() -> None:
    """The followers of n choices recompute their last token, not the prompt."""
    engine = ContinuousBatchingEngine(tiny_model(max_seq_len=256), TOKENIZER, max_batch_size=8, page_size=16)
    prompt = random.Random(0).choices(range(3, 60), k=200)
    for i in range(8):
        engine.add_request(
            GenerationRequest(request_id=str(i), prompt_ids=prompt, max_new_tokens=1, seed=i, ignore_eos=True)
        )
    while engine.scheduler.has_pending_work:
        engine.step()
    assert engine.stats().computed_tokens == 200 + 7
