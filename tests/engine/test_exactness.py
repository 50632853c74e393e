"""Law 1 over the whole product of page size, chunk budget, depth and pool size, against transformers; prefix hits."""

from __future__ import annotations

import gc
import itertools
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.batch_engine import ContinuousBatchingEngine
from engine.models.decoder import DecoderModel
from engine.schemas import FinishReason, GenerationRequest

MAX_LEN = 96
PAGE_SIZES = (1, 16, 64, MAX_LEN)
POOLS = ("one sequence", "three sequences", "plenty")


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model(reference: LlamaForCausalLM) -> DecoderModel:
    model = DecoderModel(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        max_seq_len=MAX_LEN,
    )
    model.load_state_dict(reference.state_dict())
    return model


@pytest.fixture(scope="module")
def requests(reference: LlamaForCausalLM) -> list[tuple[list[int], list[int]]]:
    """Prompts, half of them with a common start, and the tokens that transformers gives for them."""
    rng = random.Random(7)
    shared = [rng.randrange(128) for _ in range(33)]
    cases = []
    for _ in range(12):
        prompt = shared[: rng.choice((0, 15, 16, 17, 33))] + [rng.randrange(128) for _ in range(rng.randrange(1, 30))]
        count = rng.randrange(1, 16)
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        cases.append((prompt, out[0, len(prompt) :].tolist()))
    return cases


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("budget", (7, 64, 2048))
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_greedy_equals_transformers(model, requests, page_size: int, budget: int, depth: int, pool: str) -> None:
    whole = -(-78 // page_size)
    engine = ContinuousBatchingEngine(
        model,
        None,
        max_batch_size=6,
        page_size=page_size,
        num_pages={"one sequence": whole, "three sequences": 3 * whole, "plenty": None}[pool],
        max_batched_tokens=budget,
        depth=depth,
    )
    rng = random.Random(f"{page_size} {budget} {depth} {pool}")
    arriving = list(enumerate(requests))
    rng.shuffle(arriving)
    steps = 0
    while arriving or engine.scheduler.has_pending_work:
        while arriving and rng.random() < 0.5:
            i, (prompt, expected) = arriving.pop()
            engine.add_request(
                GenerationRequest(request_id=str(i), prompt_ids=prompt, max_new_tokens=len(expected), temperature=0)
            )
        engine.step()
        engine.pool.check()
        steps += 1
        assert steps < 2000
    for i, (_, expected) in enumerate(requests):
        result = engine.result(str(i))
        assert result is not None
        assert (result.token_ids, result.finish_reason) == (expected, FinishReason.LENGTH)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.held_pages) == (0, 0, 0)
    assert stats.free_pages + stats.cached_pages == stats.total_pages


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("page_size", (1, 16))
def test_preempted_sequences_end_the_same(model, reference, page_size: int, depth: int) -> None:
    """Sequences that outgrow the pool together: the last come back later, all with the same tokens."""
    engine = ContinuousBatchingEngine(
        model, None, max_batch_size=4, page_size=page_size, num_pages=64 // page_size, depth=depth
    )
    prompts = [[10 * i + j for j in range(1, 9)] for i in range(4)]
    for i, prompt in enumerate(prompts):
        engine.add_request(GenerationRequest(request_id=str(i), prompt_ids=prompt, max_new_tokens=50, temperature=0))
    while engine.scheduler.has_pending_work:
        engine.step()
        engine.pool.check()
    assert engine.stats().preemptions >= 3
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=50, do_sample=False)
        assert engine.result(str(i)).token_ids == out[0, 8:].tolist()


def run_one(engine: ContinuousBatchingEngine, prompt: list[int], count: int = 4) -> tuple[list[int], int]:
    """Its tokens, and how many tokens were computed for it."""
    before = engine.stats().computed_tokens
    request_id = engine.add_request(GenerationRequest(prompt_ids=prompt, max_new_tokens=count, temperature=0))
    while engine.scheduler.has_pending_work:
        engine.step()
    result = engine.result(request_id)
    assert result is not None
    assert result.cached_tokens + engine.stats().computed_tokens - before == len(prompt) + count - 1
    return result.token_ids, engine.stats().computed_tokens - before


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("offset", (-1, 0, 1))
def test_prefix_hits_in_computed_tokens(model, page_size: int, offset: int) -> None:
    """A prompt that starts as a finished one is computed from where they part, wherever in a page that is."""
    rng = random.Random(page_size * 10 + offset)
    engine = ContinuousBatchingEngine(model, None, max_batch_size=4, page_size=page_size, depth=0)
    cold = ContinuousBatchingEngine(model, None, max_batch_size=4, page_size=page_size, enable_prefix_cache=False)
    shared_len = max(1, min(2 * page_size, 64) + offset)
    shared = [rng.randrange(64) for _ in range(shared_len)]
    first = shared + [100, 101, 102]
    tokens, computed = run_one(engine, first)
    assert computed == len(first) + 3
    second = shared + [110, 111]
    tokens, computed = run_one(engine, second)
    assert computed == 2 + 3  # its own two prompt tokens, and the three outputs that are read again
    assert tokens == run_one(cold, second)[0]
    repeated, computed = run_one(engine, second)
    assert computed == 1 + 3  # the last token is always computed
    assert repeated == tokens
    longer, computed = run_one(engine, second + tokens[:3] + [120])
    assert computed == 1 + 3  # an answer is a prefix of the next prompt
    assert longer == run_one(cold, second + tokens[:3] + [120])[0]


def test_cache_salt_separates(model) -> None:
    engine = ContinuousBatchingEngine(model, None, max_batch_size=4)
    prompt = list(range(40))
    cached = []
    for salt in (None, None, "a", "a", "None"):
        request_id = engine.add_request(
            GenerationRequest(prompt_ids=prompt, max_new_tokens=1, temperature=0, cache_salt=salt)
        )
        while engine.scheduler.has_pending_work:
            engine.step()
        cached.append(engine.result(request_id).cached_tokens)
    assert cached == [0, 39, 0, 39, 0]


def test_decode_python_and_operators_do_not_grow_with_rows(model) -> None:
    """Steady-state decode: the same Python calls and the same torch operators a step for 1, 64 and 256 rows."""
    import sys

    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    for depth, temperature in itertools.product((0, 1), (0.0, 1.0)):
        counts = []
        for rows in (1, 64, 256):
            engine = ContinuousBatchingEngine(model, None, max_batch_size=256, page_size=64, num_pages=256, depth=depth)
            for i in range(rows):
                prompt = [i % 128, 1 + i // 128, 5, 6, 7]
                engine.add_request(
                    GenerationRequest(prompt_ids=prompt, max_new_tokens=40, temperature=temperature, seed=i), tag=i
                )
            while engine.step().scheduled < rows or engine.scheduler.num_waiting:
                pass
            for _ in range(3):
                engine.step()
            python = 0

            def profile(frame, event, arg):
                nonlocal python
                python += event in ("call", "c_call")

            gc.disable()  # other tests' libraries have left callbacks with the collector, whose calls would count
            sys.setprofile(profile)
            try:
                stats = engine.step()
            finally:
                sys.setprofile(None)
                gc.enable()
            assert stats.generated == rows
            Count.calls = 0
            with Count():
                engine.step()
            counts.append((python, Count.calls))
        assert len(set(counts)) == 1, (depth, temperature, counts)
