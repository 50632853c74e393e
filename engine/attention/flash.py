"""The `flash_attn` backend: flash-attention 2 (Dao 2023) over pages, for fp16 and bf16 on NVIDIA GPUs from Ampere on.

Not run on hardware yet: its tests compare it with `mha` over a stand-in that has the package's signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionBackend, PackedBatch

_DTYPES = (torch.float16, torch.bfloat16)
_INSTALL = (
    "attn_impl 'flash_attn' needs the package flash-attn, which is compiled with nvcc for the installed torch: "
    "pip install ninja packaging psutil setuptools wheel && pip install --no-build-isolation 'pilotfish[perf]'; "
    "attn_impl 'mha' needs nothing"
)


@dataclass(slots=True)
class _Call:
    kernel: Callable[..., Tensor]  # lacks q, k and v
    tokens: Tensor | None  # int64: the rows of the packed batch that it does; None: all
    query_len: int | None  # q is [B, query_len, heads, head_dim]; None: packed


class FlashAttention(AttentionBackend):
    """Runs of one length, as in decode and verification, go through the kernel that splits long keys among the
    multiprocessors, others packed through the one for variable lengths: at most two calls a layer.

    Raises ImportError, with what to install, where the package is missing.
    """

    default_page_size = 256

    def __init__(self) -> None:
        try:
            from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
        except ImportError as error:
            raise ImportError(_INSTALL) from error
        self._varlen, self._kvcache = flash_attn_varlen_func, flash_attn_with_kvcache

    def check(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        if device.type != "cuda" or dtype not in _DTYPES:
            raise ValueError(
                f"flash_attn needs float16 or bfloat16 on a CUDA device, got {dtype} on {device}: use attn_impl 'mha'"
            )
        if head_dim % 8 or head_dim > 256:
            raise ValueError(f"flash_attn needs a head_dim that is a multiple of 8, up to 256, got {head_dim}")
        if torch.cuda.get_device_capability(device) < (8, 0):
            name = torch.cuda.get_device_name(device)
            raise ValueError(f"flash_attn needs compute capability 8.0 or above, {name} is older: use attn_impl 'mha'")

    def check_page_size(self, page_size: int) -> None:
        if page_size % 256:
            raise ValueError(f"flash_attn needs a page_size that is a multiple of 256, got {page_size}")

    def plan(self, batch: PackedBatch, window: int | None) -> list[_Call]:
        if batch.attn_mask is not None:
            raise ValueError("attn_mask is not supported by flash_attn: use attn_impl 'mha'")
        if batch.page_table is None:
            return [self._packed(batch, np.arange(len(batch.kv_lens)), window)]
        self.check_page_size(batch.page_size)
        query_lens = batch.query_lens
        if (query_lens == query_lens[0]).all():
            return [self._uniform(batch, np.arange(len(query_lens)), window)]
        single = query_lens == 1
        if not single.any():
            return [self._packed(batch, np.arange(len(query_lens)), window)]
        calls = [
            self._uniform(batch, np.flatnonzero(single), window),
            self._packed(batch, np.flatnonzero(~single), window),
        ]
        for call, runs in zip(calls, (single, ~single), strict=True):
            call.tokens = batch.to_device(np.flatnonzero(np.repeat(runs, query_lens)))
        return calls

    def _uniform(self, batch: PackedBatch, rows: np.ndarray, window: int | None) -> _Call:
        kernel = partial(
            self._kvcache,
            cache_seqlens=batch.to_device(batch.kv_lens[rows].astype(np.int32)),
            block_table=_block_table(batch, rows),
            causal=True,
            window_size=_window_size(window),
        )
        return _Call(kernel, None, int(batch.query_lens[rows[0]]))

    def _packed(self, batch: PackedBatch, rows: np.ndarray, window: int | None) -> _Call:
        query_lens, kv_lens = batch.query_lens[rows], batch.kv_lens[rows]
        kernel = partial(
            self._varlen,
            cu_seqlens_q=batch.to_device(_cumulative(query_lens)),
            cu_seqlens_k=batch.to_device(_cumulative(kv_lens)),
            max_seqlen_q=int(query_lens.max()),
            max_seqlen_k=int(kv_lens.max()),
            causal=True,
            window_size=_window_size(window),
            block_table=None if batch.page_table is None else _block_table(batch, rows),
        )
        return _Call(kernel, None, None)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: list[_Call]) -> Tensor:
        if not q.is_cuda or q.dtype not in _DTYPES:
            self.check(q.shape[-1], q.dtype, q.device)
        if len(plan) == 1:
            return _run(plan[0], q, k, v)
        out = torch.empty_like(q)
        for call in plan:
            assert call.tokens is not None
            out.index_copy_(0, call.tokens, _run(call, q[call.tokens], k, v))
        return out


def _run(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if call.query_len is None:
        return call.kernel(q, k, v)
    return call.kernel(q.unflatten(0, (-1, call.query_len)), k, v).flatten(0, 1)


def _block_table(batch: PackedBatch, rows: np.ndarray) -> Tensor:
    """Pages of the runs, int32; those that have left the window are read by nobody, but must exist."""
    assert batch.page_table is not None
    pages = -(-int(batch.kv_lens[rows].max()) // batch.page_size)
    return batch.to_device(np.maximum(batch.page_table[rows, :pages], 0))


def _window_size(window: int | None) -> tuple[int, int]:
    """Keys to the left and to the right of a query's own; -1: all (those after it are hidden anyway)."""
    return (-1, -1) if window is None else (window - 1, 0)


def _cumulative(lens: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
