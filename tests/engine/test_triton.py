"""The triton backend in Triton's interpreter, against arithmetic in float64 and against `mha`."""

from __future__ import annotations

import sys
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from triton.runtime import interpreter

from engine.attention import ATTENTION, PackedBatch
from engine.attention.paged_triton import TritonAttention
from engine.attention.sdpa import SDPAttention
from engine.batch_engine import ContinuousBatchingEngine
from engine.models.decoder import DecoderModel, create_decoder_kv_caches
from engine.schemas import GenerationRequest
from engine.tokenization import SimpleCharacterTokenizer
from tests.engine import ragged
from tests.engine.oracle import Reference, tiny_model


def attend(case: ragged.Ragged, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    backend = TritonAttention()
    plan = backend.plan(case.batch, case.window)
    return backend.attend(case.q.to(dtype), case.k.to(dtype), case.v.to(dtype), plan)


@settings(max_examples=15, deadline=None)
@given(case=ragged.batches((16, 17, 64, 256), 300))
def test_ragged_batches_are_those_of_float64(case: ragged.Ragged) -> None:
    torch.testing.assert_close(attend(case), case.expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(3, 3, 64), (9, 3, 64), (4, 1, 80), (8, 2, 128), (8, 1, 96), (17, 1, 256)]
)
@pytest.mark.parametrize("window", (None, 100))
def test_head_shapes_and_long_contexts(heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    """Decodes, verifications and a chunk, up to 2000 keys, so that keys are split and tiles are cut."""
    runs = ([1, 5, 1], [0, 100, 1999]) if heads < 8 else ([20, 1], [37, 400])
    case = ragged.make(heads, *runs, 16, heads, kv_heads, window, head_dim)
    backend = TritonAttention()
    plan = backend.plan(case.batch, window)
    torch.testing.assert_close(backend.attend(case.q, case.k, case.v, plan), case.expected, atol=1e-5, rtol=1e-4)
    assert plan.splits > 1 or window is not None


@pytest.fixture
def bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bf16 as its bits, and multiplies those."""
    builder = interpreter.interpreter_builder
    create_dot = builder.create_dot

    def fp32(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(builder, "create_dot", lambda a, b, *rest: create_dot(fp32(a), fp32(b), *rest))


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_half_precision(dtype: torch.dtype, error: float, bf16_products: None) -> None:
    case = ragged.make(5, [1, 5, 1, 40], [3, 100, 700, 20], 16, 6, 2, None, 64)
    out = attend(case, dtype)
    assert out.dtype == dtype
    assert (out.float() - case.expected).norm() / case.expected.norm() < error


@settings(max_examples=8, deadline=None)
@given(case=ragged.batches((16, 48), 300), pad=st.integers(0, 3))
def test_tokens_as_runs_of_their_own(case: ragged.Ragged, pad: int) -> None:
    """As in a CUDA graph: nothing but the device knows the lengths, and tokens that pad the batch change nothing."""
    batch = case.batch
    assert batch.page_table is not None and batch.slot_mapping is not None
    rows = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)
    pages = torch.zeros(batch.page_table.shape[1] + 2, len(rows) + pad, dtype=torch.int32)
    pages[: batch.page_table.shape[1], : len(rows)] = torch.from_numpy(batch.page_table[rows].T.copy())
    positions = torch.nn.functional.pad(batch.positions, (0, pad))
    none = np.empty(0, np.int64)
    single = PackedBatch(positions, none, none, page_size=batch.page_size, token_pages=pages)
    backend = TritonAttention()
    q = torch.nn.functional.pad(case.q, (0, 0, 0, 0, 0, pad))
    out = backend.attend(q, case.k, case.v, backend.plan(single, case.window))
    torch.testing.assert_close(out[: len(rows)], case.expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (5, 1, 16)])
def test_append_is_rotation_and_write(heads: int, kv_heads: int, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(7, (heads + 2 * kv_heads) * head_dim, generator=generator)
    packed[2, heads * head_dim], packed[3, -1] = torch.inf, torch.nan
    q, k, v = (
        x.unflatten(1, (-1, head_dim)) for x in packed.split([n * head_dim for n in (heads, kv_heads, kv_heads)], 1)
    )
    angles = torch.rand(7, 1, head_dim // 2, generator=generator) * 6
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    slots = torch.tensor([5, 40, 0, 63, 17, 16, 8])
    results = []
    for backend in (SDPAttention(), TritonAttention()):
        pages = torch.zeros(2, 4, 16, kv_heads, head_dim)
        rotated = backend.append(q, k, v, cos, sin, (pages[0], pages[1]), slots)
        written = torch.zeros(2, 4, 16, kv_heads, head_dim)
        backend.write(written[0], written[1], k, v, slots)
        results.append((rotated, pages, written))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert results[1][1].isfinite().all()
    pages = torch.zeros(2, 4, 16, kv_heads, head_dim)
    slots[1] = -1
    TritonAttention().append(q, k, v, cos, sin, (pages[0], pages[1]), slots)
    expected = results[0][1].clone()
    expected.flatten(1, 2)[:, 40] = 0
    torch.testing.assert_close(pages, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kv_heads", (1, 4))
@pytest.mark.parametrize("window", (None, 7))
def test_model_equals_mha(kv_heads: int, window: int | None) -> None:
    model = tiny_model(num_kv_heads=kv_heads, window_size=window)
    twin = tiny_model(num_kv_heads=kv_heads, window_size=window, attn_impl="triton")
    ids = torch.randint(0, 64, (3, 30), generator=torch.Generator().manual_seed(0))
    expected = model(ids)
    torch.testing.assert_close(twin(ids), expected)  # without pages it is mha, and can be trained
    caches, parts = create_decoder_kv_caches(twin, 3), []
    with torch.no_grad():
        for part in ids.split([21, 1, 1, 5, 2], dim=1):
            parts.append(twin(part, kv_caches=caches, use_cache=True)[0])
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)


def test_engine_keeps_its_laws() -> None:
    """Chunked prompts, shared prefixes, preemption and verification, one schedule; test_laws has them all."""
    model = tiny_model(num_layers=1, max_seq_len=48)
    reference = Reference(model, SimpleCharacterTokenizer(60))
    twin = tiny_model(num_layers=1, max_seq_len=48, attn_impl="triton")
    engine = ContinuousBatchingEngine(
        twin,
        SimpleCharacterTokenizer(60),
        max_batch_size=3,
        page_size=16,
        num_pages=4,
        max_batched_tokens=24,
        speculation="draft",
        draft_model=twin,
        gamma=3,
    )
    requests = [
        GenerationRequest(
            request_id=str(i),
            prompt_ids=[*range(3, 21), 5 + i],
            max_new_tokens=20,
            temperature=i % 2,
            seed=i,
            ignore_eos=True,
        )
        for i in range(4)
    ]
    for request in requests:
        engine.add_request(request)
    while engine.scheduler.has_pending_work:
        engine.step()
    for request in requests:
        result = engine.result(request.request_id)
        assert result is not None
        reference.check(request, result)
    engine.pool.check()
    stats = engine.stats()
    assert stats.preemptions and stats.cached_tokens and engine.speculation_stats().accepted


def test_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, cuda = TritonAttention(), torch.device("cuda")
    backend.check(64, torch.float32, torch.device("cpu"))  # interpreted
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    backend.check(256, torch.bfloat16, cuda)
    for head_dim, dtype, device, message in (
        (64, torch.bfloat16, torch.device("cpu"), "needs a CUDA device, got cpu: use attn_impl 'mha'"),
        (64, torch.float64, cuda, "needs float32, float16 or bfloat16 .* got torch.float64"),
        (264, torch.float16, cuda, "head_dim up to 256, got torch.float16 and 264"),
    ):
        with pytest.raises(ValueError, match=message):
            backend.check(head_dim, dtype, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match="capability 8.0 or above, a GPU is older"):
        backend.check(64, torch.float16, cuda)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "engine.attention.paged_triton"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "triton" in ATTENTION.names()
    with pytest.raises(ImportError, match="attn_impl 'triton' needs the package triton"):
        DecoderModel(attn_impl="triton")
