"""The two seeds of the API, as their users write them, and what surrounds them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from unittest import mock

import pytest
import torch

from engine.batch_engine import ContinuousBatchingEngine, StepStats
from engine.generation import batch_generate_requests
from engine.kv_cache import KVCache, reset_all_caches
from engine.models.decoder import DecoderModel, create_decoder_kv_caches
from engine.schemas import FinishReason, GenerationRequest, QueueFull
from engine.tokenization import SimpleCharacterTokenizer
from tests.engine.oracle import tiny_model


@pytest.fixture(scope="module")
def tokenizer() -> SimpleCharacterTokenizer:
    return SimpleCharacterTokenizer()


@pytest.fixture(scope="module")
def model(tokenizer) -> DecoderModel:
    torch.manual_seed(0)
    return DecoderModel(
        vocab_size=tokenizer.vocab_size, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=128
    ).eval()


def make_engine(model, tokenizer, **options) -> ContinuousBatchingEngine:
    return ContinuousBatchingEngine(model=model, tokenizer=tokenizer, device="cpu", max_batch_size=4, **options)


@pytest.mark.parametrize(
    "options", ({}, {"num_kv_heads": 1}, {"num_kv_heads": 4}, {"window_size": 5}, {"use_glu": False})
)
def test_kv_cache_loop(options) -> None:
    torch.manual_seed(0)
    model = DecoderModel(**{"hidden_size": 128, "num_layers": 2, "num_heads": 16, "num_kv_heads": 4, **options}).eval()
    input_ids = torch.randint(0, model.vocab_size, (1, 10))
    kv_caches = create_decoder_kv_caches(model, batch_size=1)
    addresses = [cache.data_ptr() for cache in kv_caches]
    generated = []
    with torch.no_grad():
        logits, kv_caches = model(input_ids, kv_caches=kv_caches, use_cache=True)
        assert logits.shape == (1, 10, model.vocab_size)
        for _ in range(8):
            next_id = logits[0, -1, :].argmax(-1).unsqueeze(0)
            generated.append(int(next_id))
            logits, kv_caches = model(next_id, kv_caches=kv_caches, use_cache=True)
            assert logits.shape == (1, 1, model.vocab_size)
        whole = model(torch.cat((input_ids, torch.tensor([generated])), dim=1))
    assert [cache.seq_len for cache in kv_caches] == [18, 18]
    assert [cache.data_ptr() for cache in kv_caches] == addresses
    assert len(set(addresses)) == 2
    assert whole[0, 9:-1].argmax(-1).tolist() == generated
    torch.testing.assert_close(whole[:, -1:], logits, atol=1e-5, rtol=1e-5)
    reset_all_caches(kv_caches)
    with torch.no_grad():
        again, _ = model(input_ids, kv_caches=kv_caches, use_cache=True)
        fresh, _ = model(input_ids, kv_caches=create_decoder_kv_caches(model, 1), use_cache=True)
    torch.testing.assert_close(again, fresh, atol=0, rtol=0)


def test_kv_cache_update_writes_in_place() -> None:
    cache = KVCache(max_batch_size=2, max_seq_len=4, num_kv_heads=3, head_dim=8)
    address, parts = cache.data_ptr(), []
    for length in (1, 2):
        k, v = torch.randn(2, 3, length, 8), torch.randn(2, 3, length, 8)
        parts.append((k, v))
        keys, values = cache.update(k, v)
    torch.testing.assert_close(keys, torch.cat([k for k, _ in parts], 2))
    torch.testing.assert_close(values, torch.cat([v for _, v in parts], 2))
    assert cache.data_ptr() == address and keys.untyped_storage().data_ptr() == address
    assert (cache.seq_len, cache.device.type, cache.dtype) == (3, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("batch", "length", "message"),
    ((2, 3, "5 tokens wanted, the maximum is 4"), (3, 1, "3 sequences wanted, the maximum is 2"), (1, 1, "reset")),
)
def test_kv_cache_overflow_changes_nothing(batch: int, length: int, message: str) -> None:
    cache = KVCache(2, 4, 1, 8)
    cache.update(torch.ones(2, 1, 2, 8), torch.ones(2, 1, 2, 8))
    before = [page.clone() for page in cache.pages]
    with pytest.raises(ValueError, match=message):
        cache.update(torch.zeros(batch, 1, length, 8), torch.zeros(batch, 1, length, 8))
    assert cache.seq_len == 2
    assert all(torch.equal(a, b) for a, b in zip(cache.pages, before, strict=True))


def test_model_refuses_what_caches_cannot_hold(model) -> None:
    caches = create_decoder_kv_caches(model, batch_size=2, max_seq_len=8)
    before = [cache.pages[0].clone() for cache in caches]
    for ids, message in (
        (torch.zeros(2, 9, dtype=torch.long), "9 tokens wanted"),
        (torch.zeros(3, 1, dtype=torch.long), "3 sequences wanted"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, kv_caches=caches, use_cache=True)
    assert all(torch.equal(cache.pages[0], kept) for cache, kept in zip(caches, before, strict=True))
    with pytest.raises(ValueError, match="use_cache"):
        model(torch.zeros(1, 1, dtype=torch.long), use_cache=True)
    with pytest.raises(ValueError, match="attn_mask"):
        ids = torch.zeros(2, 2, dtype=torch.long)
        model(ids, kv_caches=caches, use_cache=True, attn_mask=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="unknown attention implementation 'nope'; known: .*mha"):
        DecoderModel(attn_impl="nope")
    with pytest.raises(ValueError, match="num_heads 6 is not divisible by num_kv_heads 4"):
        DecoderModel(hidden_size=96, num_heads=6, num_kv_heads=4)


def test_gqa_cache_is_four_times_smaller() -> None:
    sizes = []
    for kv_heads in (32, 8):
        model = DecoderModel(hidden_size=256, num_heads=32, num_kv_heads=kv_heads, num_layers=1, vocab_size=16)
        sizes.append(sum(page.nbytes for cache in create_decoder_kv_caches(model, 2) for page in cache.pages))
    assert sizes[0] == 4 * sizes[1]


def test_add_request_and_step(model, tokenizer) -> None:
    engine = make_engine(model, tokenizer)
    seen: list[StepStats] = []
    engine.set_step_observer(seen.append)
    ids = [engine.add_request(GenerationRequest(prompt=p, max_new_tokens=6, ignore_eos=True)) for p in ("ab", "hello")]
    while engine.scheduler.has_pending_work:
        stats = engine.step()
        assert 0 <= stats.scheduled <= stats.total_active_slots + stats.finished
    assert len(seen) < 20
    assert engine.step().scheduled == 0 and len(seen) > 0  # an idle step is observed too
    for request_id in ids:
        result = engine.result(request_id)
        assert result.finish_reason is FinishReason.LENGTH
        assert len(result.token_ids) == 6 and result.text == tokenizer.decode(result.token_ids)
        assert engine.result(request_id) is None
    assert engine.stats().held_pages == 0


async def test_step_async(model, tokenizer) -> None:
    engine = make_engine(model, tokenizer)
    ids = [engine.add_request(GenerationRequest(prompt="x" * n, max_new_tokens=5, seed=n)) for n in (1, 5, 9)]
    while engine.scheduler.has_pending_work:
        await asyncio.gather(engine.step_async(), engine.step_async())
    assert all(engine.result(request_id) is not None for request_id in ids)


def test_lock_is_free_during_the_forward(model, tokenizer) -> None:
    """A request can be queued and aborted while a forward runs."""
    engine = make_engine(model, tokenizer, depth=0)
    engine.add_request(GenerationRequest(request_id="a", prompt="abc", max_new_tokens=3))
    inside, go_on = threading.Event(), threading.Event()

    def wait_here() -> None:
        inside.set()
        assert go_on.wait(10)

    handle = model.model.norm.register_forward_pre_hook(lambda *_: wait_here())
    try:
        stepper = threading.Thread(target=engine.step)
        stepper.start()
        assert inside.wait(10)
        engine.add_request(GenerationRequest(request_id="b", prompt="abc", max_new_tokens=3))
        assert engine.abort("b")
        assert engine.stats().waiting == 1
    finally:
        go_on.set()
        stepper.join()
        handle.remove()
    while engine.scheduler.has_pending_work:
        engine.step()
    assert engine.result("b").finish_reason is FinishReason.ABORT
    assert engine.result("a").finish_reason is not FinishReason.ABORT


def test_what_add_request_refuses(model, tokenizer) -> None:
    engine = make_engine(model, tokenizer, num_pages=2, page_size=16, max_queued_requests=0)
    for request, message in (
        (GenerationRequest(prompt="a" * 100, max_new_tokens=100), "more than the context of 128"),
        (GenerationRequest(prompt="a" * 30, max_new_tokens=10), "can never fit.*need 3 pages of 16, the pool has 2"),
        (GenerationRequest(prompt_ids=[5000], max_new_tokens=1), "5000 is outside the vocabulary"),
        (GenerationRequest(prompt="a", max_new_tokens=1, logit_bias={9999: 1.0}), "logit_bias: id 9999"),
        (GenerationRequest(prompt="a", max_new_tokens=1, adapter="x"), "unknown adapter 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add_request(request)
    for i in range(engine.max_batch_size):
        engine.add_request(GenerationRequest(request_id=f"a{i}", prompt="a", max_new_tokens=1))
    with pytest.raises(QueueFull, match="the bound is 0"):
        engine.add_request(GenerationRequest(request_id="b", prompt="a", max_new_tokens=1))
    engine.step()
    assert not engine.abort("unknown")


def test_the_queue_is_bounded_in_tokens(model, tokenizer) -> None:
    engine = make_engine(model, tokenizer, max_queued_tokens=40)
    asked = [GenerationRequest(request_id=str(i), prompt="a" * 25, max_new_tokens=4) for i in range(4)]
    engine.add_request(asked[0])  # however long, where nothing waits
    with pytest.raises(QueueFull, match="tokens are waiting, the bound is 40"):
        engine.add_request(asked[1])
    waiting = engine.backlog()[0]
    assert 25 <= waiting <= 40
    engine.step()
    assert engine.backlog()[0] == 0
    engine.add_request(asked[1])
    engine.abort("1")
    engine.add_request(GenerationRequest(request_id="short", prompt="a" * (40 - waiting - 2), max_new_tokens=1))
    while engine.scheduler.has_pending_work:
        engine.step()
    assert engine.backlog() == (0, engine.pool.num_pages)


def test_duplicate_live_id(model, tokenizer) -> None:
    engine = make_engine(model, tokenizer)
    engine.add_request(GenerationRequest(request_id="a", prompt="a", max_new_tokens=1))
    with pytest.raises(ValueError, match="'a' is live already"):
        engine.add_request(GenerationRequest(request_id="a", prompt="a", max_new_tokens=1))
    while engine.scheduler.has_pending_work:
        engine.step()
    engine.add_request(GenerationRequest(request_id="a", prompt="a", max_new_tokens=1))


@pytest.mark.parametrize("depth", (0, 1))
def test_abort_frees_by_the_next_step(model, tokenizer, depth: int) -> None:
    engine = make_engine(model, tokenizer, depth=depth, enable_prefix_cache=False)
    engine.add_request(GenerationRequest(request_id="a", prompt="a" * 20, max_new_tokens=100, ignore_eos=True))
    for _ in range(5):
        engine.step()
    assert engine.stats().held_pages > 0
    assert engine.abort("a")
    stats = engine.step()
    assert stats.scheduled == 0 and stats.free_pages == engine.pool.num_pages
    assert engine.result("a").finish_reason is FinishReason.ABORT


def test_unload_model(model, tokenizer) -> None:
    engine = make_engine(model, tokenizer)
    engine.add_request(GenerationRequest(request_id="a", prompt="a", max_new_tokens=5))
    engine.step()
    engine.unload_model()
    assert engine.result("a").finish_reason is FinishReason.ERROR
    assert not engine.scheduler.has_pending_work
    for call in (engine.step, lambda: engine.add_request(GenerationRequest(prompt="a"))):
        with pytest.raises(ValueError, match="unloaded"):
            call()


def test_the_bound_is_of_those_that_have_no_row() -> None:
    engine = ContinuousBatchingEngine(tiny_model(), None, max_batch_size=4, max_queued_requests=1)
    requests = [GenerationRequest(prompt_ids=[5, i], max_new_tokens=2) for i in range(6)]
    for request in requests[:5]:
        engine.add_request(request)
    with pytest.raises(QueueFull, match="the bound is 1"):
        engine.add_request(requests[5])
    none = ContinuousBatchingEngine(tiny_model(), None, max_batch_size=1, max_queued_requests=0)
    none.add_request(requests[0])
    with pytest.raises(QueueFull, match="the bound is 0"):
        none.add_request(requests[1])


def test_a_hit_counts_prompt_tokens_alone() -> None:
    engine = ContinuousBatchingEngine(tiny_model(), None, max_batch_size=1, page_size=4)
    whole = GenerationRequest(prompt_ids=[5, 6, 7, 8, 9], max_new_tokens=20, seed=1)
    (first,) = batch_generate_requests(engine, [whole])
    again = whole.model_copy(update={"output_ids": first.token_ids[:12], "request_id": "again"})
    (second,) = batch_generate_requests(engine, [again])
    assert second.token_ids == first.token_ids
    assert (second.prompt_tokens, second.cached_tokens, engine.stats().cached_tokens) == (5, 5, 5)


def test_a_step_that_fails_before_its_copies_leaves_no_page_that_lies() -> None:
    model = tiny_model()
    start = [5, 9, 13, 2, 7, 11, 30, 22, 41, 3, 6]

    def ask(engine: ContinuousBatchingEngine, last: int) -> Any:
        (result,) = batch_generate_requests(
            engine, [GenerationRequest(prompt_ids=[*start, last], max_new_tokens=8, temperature=0)]
        )
        return result

    engine = ContinuousBatchingEngine(model, None, max_batch_size=2, page_size=16, depth=0)
    ask(engine, 40)
    runner = engine._runner
    assert runner is not None
    with mock.patch.object(runner, "launch", side_effect=RuntimeError("out of memory")):
        assert ask(engine, 8).finish_reason is FinishReason.ERROR
    plain = ContinuousBatchingEngine(model, None, max_batch_size=2, page_size=16, depth=0, enable_prefix_cache=False)
    assert ask(engine, 9).token_ids == ask(plain, 9).token_ids
