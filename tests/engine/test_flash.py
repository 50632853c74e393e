"""The flash_attn backend over a stand-in for the package: its signatures, its checks, plain arithmetic."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from engine.attention import ATTENTION
from engine.attention.flash import FlashAttention
from engine.attention.sdpa import SDPAttention
from engine.batch_engine import ContinuousBatchingEngine
from engine.generation import EagerBackend
from engine.models.decoder import DecoderModel, create_decoder_kv_caches
from engine.schemas import GenerationRequest
from tests.engine import ragged
from tests.engine.oracle import tiny_model

# of flash-attn 2.7.0 to 2.8.3, without annotations
SIGNATURES = {
    "flash_attn_varlen_func": "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
    "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False, block_table=None)",
    "flash_attn_with_kvcache": "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False)",
}


def signature(function: Any) -> str:
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(parameters))


@dataclass
class FakeFlash:
    """Computes what the package documents, and refuses what its kernels refuse."""

    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # name and shape of q

    def module(self) -> ModuleType:
        module = ModuleType("flash_attn")

        def flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p=0.0,
            softmax_scale=None,
            causal=False,
            window_size=(-1, -1),
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
            return_attn_probs=False,
            block_table=None,
        ):
            self.calls.append(("varlen", tuple(q.shape)))
            batch = len(cu_seqlens_q) - 1
            check_indices(cu_seqlens_q, (batch + 1,))
            check_indices(cu_seqlens_k, (batch + 1,))
            assert type(max_seqlen_q) is int and max_seqlen_q == cu_seqlens_q.diff().max()
            assert type(max_seqlen_k) is int and max_seqlen_k == cu_seqlens_k.diff().max()
            assert q.dim() == 3 and cu_seqlens_q[-1] == len(q)
            if block_table is None:
                assert k.shape == v.shape == (int(cu_seqlens_k[-1]), *k.shape[1:]) and k.dim() == 3
            out = []
            for row, (start, end) in enumerate(zip(cu_seqlens_q, cu_seqlens_q[1:], strict=False)):
                first, last = int(cu_seqlens_k[row]), int(cu_seqlens_k[row + 1])
                if block_table is None:
                    keys, values = k[first:last], v[first:last]
                else:
                    keys, values = gather(k, v, block_table, row, last - first, batch)
                out.append(attention(q[start:end], keys, values, causal, window_size))
            return torch.cat(out)

        def flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k=None,
            v=None,
            rotary_cos=None,
            rotary_sin=None,
            cache_seqlens=None,
            cache_batch_idx=None,
            cache_leftpad=None,
            block_table=None,
            softmax_scale=None,
            causal=False,
            window_size=(-1, -1),
            softcap=0.0,
            rotary_interleaved=True,
            alibi_slopes=None,
            num_splits=0,
            return_softmax_lse=False,
        ):
            self.calls.append(("kvcache", tuple(q.shape)))
            assert q.dim() == 4 and block_table is not None and cache_seqlens is not None
            check_indices(cache_seqlens, (len(q),))
            out = []
            for row, length in enumerate(cache_seqlens.tolist()):
                keys, values = gather(k_cache, v_cache, block_table, row, length, len(q))
                out.append(attention(q[row], keys, values, causal, window_size))
            return torch.stack(out)

        module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
        module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
        return module


def check_indices(x: Tensor, shape: tuple[int, ...]) -> None:
    assert (x.dtype, x.shape, x.is_contiguous()) == (torch.int32, shape, True)


def gather(k: Tensor, v: Tensor, block_table: Tensor, row: int, length: int, batch: int) -> tuple[Tensor, Tensor]:
    assert k.shape == v.shape and k.dim() == 4 and k.shape[1] % 256 == 0
    check_indices(block_table, (batch, block_table.shape[1]))
    assert length <= block_table.shape[1] * k.shape[1]
    pages = block_table[row].long()
    assert (pages >= 0).all() and (pages < len(k)).all()
    return k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length]


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """q [Q, heads, head_dim] over k, v [K, kv_heads, head_dim]; the mask is aligned to the bottom right."""
    assert q.dtype == k.dtype == v.dtype and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.shape[1] % k.shape[1] == 0 and q.shape[2] == k.shape[2]
    left, right = window_size
    own = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))
    right = 0 if causal else right
    hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
    if left >= 0:
        hidden |= key < own - left
    if right >= 0:
        hidden |= key > own + right
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFlash]:
    """The package stands there, and a CPU and fp32 are taken for what it wants."""
    fake = FakeFlash()
    monkeypatch.setitem(sys.modules, "flash_attn", fake.module())
    monkeypatch.setattr(FlashAttention, "check", lambda *args: None)
    yield fake


def flash_twin(model: DecoderModel) -> DecoderModel:
    """The same weights over flash_attn."""
    twin = tiny_model(
        **{name: getattr(model.config, name) for name in ("num_kv_heads", "window_size", "max_seq_len")},
        attn_impl="flash_attn",
    )
    twin.load_state_dict(model.state_dict())
    return twin


def test_stand_in_has_the_signatures_of_the_package() -> None:
    module = FakeFlash().module()
    assert {name: signature(getattr(module, name)) for name in SIGNATURES} == SIGNATURES


def test_package_has_the_recorded_signatures() -> None:
    package = pytest.importorskip("flash_attn")
    assert {name: signature(getattr(package, name)) for name in SIGNATURES} == SIGNATURES


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "flash_attn" in ATTENTION.names()
    with pytest.raises(ImportError, match=r"pip install --no-build-isolation 'pilotfish\[perf\]'"):
        DecoderModel(attn_impl="flash_attn")


def test_refuses_what_its_kernels_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", FakeFlash().module())
    backend, cuda = FlashAttention(), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    backend.check(64, torch.float16, cuda)
    backend.check(256, torch.bfloat16, cuda)
    for head_dim, dtype, device, message in (
        (64, torch.float32, cuda, "float16 or bfloat16 on a CUDA device, got torch.float32 on cuda"),
        (64, torch.bfloat16, torch.device("cpu"), "got torch.bfloat16 on cpu"),
        (264, torch.float16, cuda, "head_dim that is a multiple of 8, up to 256, got 264"),
        (36, torch.float16, cuda, "got 36"),
    ):
        with pytest.raises(ValueError, match=message):
            backend.check(head_dim, dtype, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match="capability 8.0 or above, a GPU is older"):
        backend.check(64, torch.float16, cuda)
    model = tiny_model(attn_impl="flash_attn")
    with pytest.raises(ValueError, match="got torch.float32 on cpu"):
        ContinuousBatchingEngine(model, None)
    with pytest.raises(ValueError, match="got torch.float32 on cpu"):
        model(torch.zeros(1, 3, dtype=torch.long))


def test_page_sizes(flash: FakeFlash) -> None:
    model = tiny_model(attn_impl="flash_attn", max_seq_len=1000)
    assert ContinuousBatchingEngine(model, None).pool.page_size == 256
    assert ContinuousBatchingEngine(model, None, max_seq_len=100).pool.page_size == 256
    assert ContinuousBatchingEngine(model, None, page_size=512).pool.page_size == 512
    for page_size in (16, 1000):
        with pytest.raises(ValueError, match=f"page_size that is a multiple of 256, got {page_size}"):
            ContinuousBatchingEngine(model, None, page_size=page_size)
    with pytest.raises(ValueError, match="multiple of 256, got 1000"):
        model(torch.zeros(1, 3, dtype=torch.long), kv_caches=create_decoder_kv_caches(model, 1), use_cache=True)


def test_attn_mask_is_refused(flash: FakeFlash) -> None:
    model = tiny_model(attn_impl="flash_attn")
    with pytest.raises(ValueError, match="attn_mask is not supported by flash_attn"):
        model(torch.zeros(1, 3, dtype=torch.long), attn_mask=torch.ones(3, 3, dtype=torch.bool))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=ragged.batches((256, 512), 600))
def test_ragged_batches_are_those_of_mha(flash: FakeFlash, case: ragged.Ragged) -> None:
    backend = FlashAttention()
    flash.calls.clear()
    out = backend.attend(case.q, case.k, case.v, backend.plan(case.batch, case.window))
    torch.testing.assert_close(out, case.expected, atol=1e-5, rtol=1e-4)
    mha = SDPAttention()
    torch.testing.assert_close(out, mha.attend(case.q, case.k, case.v, mha.plan(case.batch, case.window)))
    lens = case.batch.query_lens
    kinds = [kind for kind, _ in flash.calls]
    if (lens == lens[0]).all():
        assert kinds == ["kvcache"]
    else:
        assert kinds == ["kvcache"] * bool((lens == 1).any()) + ["varlen"]
    assert sum(shape[0] if len(shape) == 3 else shape[0] * shape[1] for _, shape in flash.calls) == len(case.q)


@pytest.mark.parametrize("window", (None, 1, 7))
@pytest.mark.parametrize("kv_heads", (1, 2, 4))
def test_model_equals_mha(flash: FakeFlash, kv_heads: int, window: int | None) -> None:
    model = tiny_model(num_kv_heads=kv_heads, window_size=window, max_seq_len=512)
    twin = flash_twin(model)
    assert list(twin.state_dict()) == list(model.state_dict())
    ids = torch.randint(0, 64, (3, 40), generator=torch.Generator().manual_seed(0))
    expected = model(ids)
    out = twin(ids)
    assert {kind for kind, _ in flash.calls} == {"varlen"}
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for a, b in zip(
        torch.autograd.grad((out * probe).sum(), list(twin.parameters())),
        torch.autograd.grad((expected * probe).sum(), list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    caches, parts = create_decoder_kv_caches(twin, 3), []
    with torch.no_grad():
        for part in ids.split([21, 1, 1, 5, 12], dim=1):
            parts.append(twin(part, kv_caches=caches, use_cache=True)[0])
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("window", (None, 20))
def test_engine_gives_the_same_tokens(flash: FakeFlash, window: int | None, depth: int) -> None:
    """Prompts that cross pages, chunked, beside decodes, with hits; and one request at a time."""
    model = tiny_model(window_size=window, max_seq_len=600)
    twin = flash_twin(model)
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(0, 64, (300,), generator=generator).tolist()
    prompts = [
        shared[:n] + torch.randint(0, 64, (m,), generator=generator).tolist()
        for n, m in ((0, 5), (300, 9), (300, 220), (0, 250), (270, 1))
    ]
    outputs = []
    for which in (model, twin):
        engine = ContinuousBatchingEngine(which, None, max_batch_size=3, max_batched_tokens=90, depth=depth)
        for i, prompt in enumerate(prompts):
            engine.add_request(
                GenerationRequest(request_id=str(i), prompt_ids=prompt, max_new_tokens=12, temperature=0)
            )
        while engine.scheduler.has_pending_work:
            engine.step()
            engine.pool.check()
        outputs.append([engine.result(str(i)).token_ids for i in range(len(prompts))])
        assert engine.stats().cached_tokens > 0
    assert outputs[0] == outputs[1]
    assert {kind for kind, _ in flash.calls} == {"kvcache", "varlen"}
    eager = EagerBackend(twin)
    request = GenerationRequest(prompt_ids=prompts[1], max_new_tokens=12, temperature=0)
    ((_, result),) = eager.run_batch([request])
    assert result.token_ids == outputs[0][1]
