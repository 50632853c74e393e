"""Attention of the decoder: with and without caches, windows, masks, gradients, memory, pages held; the registry."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from engine.attention import ATTENTION, PackedBatch
from engine.attention.sdpa import SDPAttention
from engine.batch_engine import ContinuousBatchingEngine
from engine.models.decoder import DecoderModel, create_decoder_kv_caches
from engine.models.families import decoder_config
from engine.models.layers import MLPS, GatedMLP
from engine.schemas import GenerationRequest
from tests.engine import ragged
from tests.engine.oracle import tiny_model

WINDOWS = (None, 1, 5, 7)


def ours(reference: Any) -> DecoderModel:
    """transformers' model as a DecoderModel, with its weights."""
    model = DecoderModel.from_config(decoder_config(reference.config.to_dict()))
    model.load_state_dict(reference.state_dict())
    return model


def ids_of(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 131, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@settings(max_examples=80, deadline=None)
@given(case=ragged.batches((1, 3, 16, 64), 90))
def test_ragged_batches(case: ragged.Ragged) -> None:
    backend = SDPAttention()
    close(backend.attend(case.q, case.k, case.v, backend.plan(case.batch, case.window)), case.expected, 1e-5)


CACHED = {(kv, w): tiny_model(num_kv_heads=kv, window_size=w) for kv in (4, 2, 1) for w in WINDOWS}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kv_heads", (4, 2, 1))
@settings(max_examples=8, deadline=None)
@given(parts=st.lists(st.sampled_from([1, 1, 1, 2, 5, 11, 17]), min_size=1, max_size=12), batch=st.integers(1, 3))
def test_cached_logits_are_the_uncached(kv_heads: int, window: int | None, parts: list[int], batch: int) -> None:
    model = CACHED[kv_heads, window]
    ids = ids_of(batch, min(sum(parts), model.max_seq_len), seed=len(parts)) % model.vocab_size
    caches, logits, done = create_decoder_kv_caches(model, batch), [], 0
    with torch.no_grad():
        for part in parts:
            if done < ids.shape[1]:
                out, caches = model(ids[:, done : done + part], kv_caches=caches, use_cache=True)
                logits.append(out)
                done += part
        close(torch.cat(logits, 1), model(ids))


@pytest.mark.parametrize("window", WINDOWS)
def test_a_query_sees_exactly_w_keys(window: int | None) -> None:
    """Over one layer, a token's logits depend on it and the w - 1 tokens before it."""
    model = tiny_model(num_layers=1, window_size=window)
    ids = ids_of(1, 20) % model.vocab_size
    with torch.no_grad():
        before = model(ids)[0]
        for position in range(20):
            changed = ids.clone()
            changed[0, position] = (ids[0, position] + 1) % model.vocab_size
            differ = (model(changed)[0] - before).abs().amax(-1) > 1e-6
            end = 20 if window is None else min(20, position + window)
            assert differ.nonzero().flatten().tolist() == list(range(position, end))


@pytest.mark.parametrize(
    ("family", "changes"),
    (
        ("llama", {}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4}),
        ("mistral", {"sliding_window": 1}),
        ("mistral", {"sliding_window": 5}),
        ("qwen3", {"head_dim": 24}),
    ),
)
def test_gradients_are_those_of_transformers(
    family: str, changes: dict[str, Any], tiny_reference: Callable[..., Any]
) -> None:
    reference = tiny_reference(family, **changes)
    model, ids = ours(reference), ids_of(2, 24)
    probe = torch.randn(2, 24, 131, generator=torch.Generator().manual_seed(1))
    (model(ids) * probe).sum().backward()
    (reference(ids).logits * probe).sum().backward()
    gradients = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None and gradients[name].grad is not None, name
        scale = parameter.grad.abs().max()
        close(gradients[name].grad / scale, parameter.grad / scale, 1e-5)


@pytest.mark.parametrize("side", ("left", "right"))
def test_boolean_padding_mask_is_that_of_transformers(side: str, tiny_reference: Callable[..., Any]) -> None:
    reference = tiny_reference("llama")
    model, ids = ours(reference), ids_of(3, 20)
    lengths = torch.tensor([20, 13, 1])
    kept = torch.arange(20) < lengths[:, None]
    kept = kept.flip(1) if side == "left" else kept
    with torch.no_grad():
        expected = reference(ids, attention_mask=kept.long(), position_ids=torch.arange(20).expand(3, -1)).logits
        out = model(ids, attn_mask=kept[:, None, None])
    close(out[kept], expected[kept])


@pytest.mark.parametrize("window", (None, 5))
@pytest.mark.parametrize("shape", ((20, 20), (1, 1, 20, 20), (1, 4, 20, 20), (2, 1, 20, 20), (2, 4, 1, 20)))
def test_additive_mask_is_that_of_transformers(
    shape: tuple[int, ...], window: int | None, tiny_reference: Callable[..., Any]
) -> None:
    """transformers takes a 4-D mask as it is, causality and window included; ours adds them."""
    reference = tiny_reference("mistral", sliding_window=window)
    model, ids = ours(reference), ids_of(2, 20)
    bias = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    allowed = torch.ones(20, 20, dtype=torch.bool).tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    whole = bias.expand(2, 4, 20, 20).masked_fill(~allowed, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = reference(ids, attention_mask=whole).logits
        assert (expected - reference(ids).logits).abs().max() > 0.1
        close(model(ids, attn_mask=bias), expected)
        boolean = bias > -1
        boolean = boolean | torch.eye(20, dtype=torch.bool) if shape[-2] == 20 else boolean.fill_(True)
        hidden = torch.zeros(()).masked_fill(~(boolean & allowed).expand(2, 4, 20, 20), torch.finfo(torch.float32).min)
        close(model(ids, attn_mask=boolean), reference(ids, attention_mask=hidden).logits)


def allocations(run: Callable[[], Any]) -> tuple[int, int]:
    """The most bytes that torch's CPU allocator had given out at once, above where it stood; and all it gave."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    peak = held = given = 0
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
            given += max(event.nbytes(), 0)
    return peak, given


def wide_model(heads: int, kv_heads: int, window: int | None, dtype: torch.dtype) -> DecoderModel:
    return tiny_model(
        num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=16, max_seq_len=1024, window_size=window
    ).to(dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("page_size", (64, 1024))
@pytest.mark.parametrize("window", (None, 900))
@pytest.mark.parametrize("length", (1, 5, 64))
@pytest.mark.parametrize("batch", (1, 4))
def test_memory_of_cached_keys_does_not_depend_on_query_heads(
    batch: int, length: int, window: int | None, page_size: int, dtype: torch.dtype
) -> None:
    """700 more keys cost 16 query heads no more memory than one, but for the kernel's fixed scratch."""

    def peak(heads: int, computed: int) -> int:
        model = wide_model(heads, 1, window, dtype)
        pages = -(-(computed + length) // page_size)
        table = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
        shape = (batch * pages, page_size, 1, 16)
        lens = np.full(batch, length)
        runs = PackedBatch.paged(table, page_size, np.full(batch, computed), lens, torch.device("cpu"))
        storage = [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))]
        ids = ids_of(1, batch * length)[0] % model.vocab_size
        with torch.inference_mode():
            return allocations(lambda: model.hidden_states(ids, runs, storage))[0]

    one, sixteen = (peak(heads, 900) - peak(heads, 200) for heads in (1, 16))
    repeated = batch * 15 * 700 * 16 * dtype.itemsize
    assert sixteen < one + repeated / 2


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("window", (None, 200))
@pytest.mark.parametrize("cached", (True, False))
def test_memory_of_a_whole_prompt_does_not_depend_on_kv_heads(
    cached: bool, window: int | None, dtype: torch.dtype
) -> None:
    """16 query heads over one KV head take no more than over 16, less what is gathered from the pages of 15."""
    backend, lens = SDPAttention(), np.array([512])
    batch = PackedBatch.uncached(1, 512, torch.device("cpu"))
    if cached:
        batch = PackedBatch.paged(np.arange(8, dtype=np.int32)[None], 64, np.array([0]), lens, torch.device("cpu"))

    def peak(kv_heads: int) -> int:
        plan = backend.plan(batch, window)
        q = torch.zeros(512, 16, 16, dtype=dtype)
        k, v = torch.zeros(2, *((8, 64) if cached else (512,)), kv_heads, 16, dtype=dtype)
        return allocations(lambda: backend.attend(q, k, v, plan))[0]

    gathered = 2 * 15 * 512 * 16 * dtype.itemsize if cached else 0
    assert peak(1) <= peak(16) - gathered


@pytest.mark.parametrize("whole", (True, False))
def test_a_decode_step_moves_what_its_live_tokens_need(whole: bool) -> None:
    """In bytes that a step's operators write: nothing depends on max_seq_len, and a long neighbour pads nobody."""

    def given(max_seq_len: int, lengths: list[int]) -> int:
        model = tiny_model(max_seq_len=max_seq_len)
        engine = ContinuousBatchingEngine(
            model, None, max_batch_size=32, page_size=max_seq_len if whole else 16, depth=0
        )
        for i, length in enumerate(lengths):
            prompt = [(i + j) % 64 for j in range(length)]
            engine.add_request(GenerationRequest(prompt_ids=prompt, max_new_tokens=100, temperature=0))
        while engine.step().generated < len(lengths):
            pass
        return allocations(engine.step)[1]

    for rows in (1, 4):
        assert given(512, [32] * rows) == given(4096, [32] * rows)
    short, long, together = given(4096, [32] * 31), given(4096, [3000]), given(4096, [32] * 31 + [3000])
    assert together < 1.3 * (short + long)


def run_engine(
    engine: ContinuousBatchingEngine, prompts: list[list[int]], count: int, after: Callable[[], None]
) -> list[list[int]]:
    names = [engine.add_request(GenerationRequest(prompt_ids=p, max_new_tokens=count, temperature=0)) for p in prompts]
    while engine.scheduler.has_pending_work:
        engine.step()
        engine.pool.check()
        after()
    results = [engine.result(name) for name in names]
    return [result.token_ids for result in results if result is not None]


@pytest.fixture(scope="module")
def windowed(
    tiny_reference: Callable[..., Any],
) -> Callable[[int], tuple[DecoderModel, list[list[int]], list[list[int]]]]:
    """For a window: our model, prompts that share starts, and transformers' greedy tokens for them."""
    known: dict[int, tuple[DecoderModel, list[list[int]], list[list[int]]]] = {}

    def get(window: int) -> tuple[DecoderModel, list[list[int]], list[list[int]]]:
        if window not in known:
            reference = tiny_reference("mistral", sliding_window=window, eos_token_id=None)
            rng = random.Random(window)
            shared = [rng.randrange(3, 131) for _ in range(60)]
            prompts = [
                shared[:n] + [rng.randrange(3, 131) for _ in range(m)]
                for n, m in ((0, 3), (60, 9), (60, 30), (41, 1), (0, 80))
            ]
            expected = []
            for prompt in prompts:
                ids = torch.tensor([prompt])
                out = reference.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, use_cache=False
                )
                expected.append(out[0, len(prompt) :].tolist())
            known[window] = ours(reference), prompts, expected
        return known[window]

    return get


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("budget", (3, 2048))
@pytest.mark.parametrize("page_size", (1, 16, 256))
@pytest.mark.parametrize("window", (1, 5, 33))
def test_window_in_the_engine(windowed: Any, window: int, page_size: int, budget: int, depth: int) -> None:
    """Mistral's own greedy tokens; and after each step a sequence holds no more pages than its window needs, besides
    those that the step in flight writes."""
    model, prompts, expected = windowed(window)
    engine = ContinuousBatchingEngine(
        model, None, max_batch_size=3, page_size=page_size, max_batched_tokens=budget, depth=depth
    )
    table = engine.table
    most = 0

    def check() -> None:
        nonlocal most
        for row in range(3):
            if table.uid[row] >= 0:
                held = table.pages(row)
                in_flight = int(table.computed[row] - table.committed[row])
                # pages leave when a later one is full, so that a step in flight may meet one more
                assert len(held) <= -(-(window + in_flight) // page_size) + 1 + depth and (held >= 0).all()
                most = max(most, len(held))

    assert run_engine(engine, prompts, 30, check) == expected
    assert most >= -(-(window - 1) // page_size)
    again = engine.stats().cached_tokens
    assert run_engine(engine, prompts, 30, check) == expected  # over what the first round has left in the cache
    assert engine.stats().cached_tokens > again
    assert engine.stats().held_pages == 0


def test_window_lets_many_more_sequences_in(windowed: Any) -> None:
    """A pool of a few windows holds contexts that would not fit whole."""
    model, prompts, expected = windowed(5)
    engine = ContinuousBatchingEngine(model, None, max_batch_size=3, page_size=4, num_pages=3 * 3, depth=0)
    assert run_engine(engine, prompts, 30, lambda: None) == expected


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for registry in (ATTENTION, MLPS):
        monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    yield


def test_registries_are_open(registries: None) -> None:
    class Negated(SDPAttention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
            return -super().attend(q, k, v, plan)

    ATTENTION.register("negated", Negated)
    MLPS.register("gated", GatedMLP)
    model = tiny_model()
    other = tiny_model(attn_impl="negated", mlp_impl="gated")
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.neg_()
    ids = ids_of(1, 10) % model.vocab_size
    with torch.no_grad():
        close(other(ids), model(ids), 1e-6)
    for options in ({"attn_impl": "nope"}, {"mlp_impl": "nope"}):
        with pytest.raises(ValueError, match="unknown .* 'nope'; known: .*(mha|gated)"):
            tiny_model(**options)


def test_devices_that_are_not_supported_are_named() -> None:
    with pytest.raises(ValueError, match="device mps is not supported; known: cpu, cuda"):
        ContinuousBatchingEngine(tiny_model(), None, device="mps")
