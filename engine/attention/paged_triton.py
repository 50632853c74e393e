"""The `triton` backend: one Triton kernel that attends over pages, for decodes, verifications and prompts alike.

A program does a tile: some queries of one run, for all query heads of one KV head, over all keys they see or, where
there are few tiles, over a part of them (split-K, Dao et al. 2023, "Flash-Decoding"); a second kernel joins the parts.
What has no pages, as in training, is done by `mha`.

Not run on hardware yet: its tests run the kernels in Triton's interpreter and compile them for sm_90.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention import PackedBatch
from engine.attention.sdpa import SDPAttention

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LONG_ROWS = 64  # rows of a tile for runs that don't fit a small one
_MOST_SPLITS = 32


@triton.jit(do_not_specialize=["page_table", "run_stride", "page_stride", "tokens"])
def attend_kernel(
    q: tl.tensor,  # [tokens, HEADS, HEAD_DIM]
    k_pages: tl.tensor,  # [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM]
    v_pages: tl.tensor,
    tiles: tl.tensor,  # int32 [4, tiles]: run, first token, number of tokens, position of the first
    page_table: tl.tensor,  # int32
    run_stride: tl.tensor,
    page_stride: tl.tensor,
    out: tl.tensor,  # [tokens, HEADS, HEAD_DIM] or, split, fp32 [splits, tokens, HEADS, HEAD_DIM]
    weights: tl.tensor,  # split: fp32 [splits, tokens, HEADS], log2 of the sum of exponentials
    tokens: tl.tensor,
    scale: tl.tensor,  # of the scores, in powers of 2
    WINDOW: tl.constexpr,  # 0: none
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,  # of the tile: tokens times query heads of a KV head, padded
    KEYS: tl.constexpr,  # at a time
    DIM: tl.constexpr,  # HEAD_DIM, padded
) -> None:
    GROUP: tl.constexpr = HEADS // KV_HEADS
    num_tiles, kv_head = tl.num_programs(0), tl.program_id(1)
    entry = tiles + tl.program_id(0)
    run, first = tl.load(entry), tl.load(entry + num_tiles)
    count, position = tl.load(entry + 2 * num_tiles), tl.load(entry + 3 * num_tiles)
    row, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    own = position + row // GROUP
    live = row // GROUP < count
    place = (first + row // GROUP).to(tl.int64) * HEADS + kv_head * GROUP + row % GROUP
    inner = d < HEAD_DIM
    query = tl.load(q + place[:, None] * HEAD_DIM + d[None, :], mask=live[:, None] & inner[None, :], other=0.0)
    low, high = 0, position + count
    if WINDOW > 0:
        low = tl.maximum(position - WINDOW + 1, 0)
    if SPLIT:
        part = tl.cdiv(tl.cdiv(high - low, KEYS), tl.num_programs(2)) * KEYS
        low += tl.program_id(2) * part
        high = tl.minimum(high, low + part)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(low, high, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < high
        page = tl.load(page_table + run * run_stride + key // PAGE_SIZE * page_stride, mask=inside, other=0)
        at = ((page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        keys = tl.load(k_pages + at[None, :] + d[:, None], mask=inside[None, :] & inner[:, None], other=0.0)
        scores = tl.dot(query, keys, input_precision="ieee") * scale
        seen = inside[None, :] & (key[None, :] <= own[:, None])
        if WINDOW > 0:
            seen &= key[None, :] > own[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(better == float("-inf"), 0.0, better)  # a row that sees none of these keys
        weight = tl.exp2(scores - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(weight, 1)
        values = tl.load(v_pages + at[:, None] + d[None, :], mask=inside[:, None] & inner[None, :], other=0.0)
        acc = acc * fade[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
        best = better
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLIT:
        place += tl.program_id(2).to(tl.int64) * tokens * HEADS
        tl.store(weights + place, best + tl.log2(total), mask=live)
    tl.store(out + place[:, None] * HEAD_DIM + d[None, :], acc, mask=live[:, None] & inner[None, :])


@triton.jit
def join_kernel(
    parts: tl.tensor,  # fp32 [SPLITS, rows, HEAD_DIM]
    weights: tl.tensor,  # fp32 [SPLITS, rows]
    out: tl.tensor,  # [rows, HEAD_DIM]
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    row, rows = tl.program_id(0), tl.num_programs(0)
    d = tl.arange(0, DIM)
    place = tl.arange(0, SPLITS).to(tl.int64) * rows + row
    weight = tl.load(weights + place)
    weight = tl.exp2(weight - tl.max(weight, 0))
    part = tl.load(parts + place[:, None] * HEAD_DIM + d[None, :], mask=d[None, :] < HEAD_DIM, other=0.0)
    acc = tl.sum(part * (weight / tl.sum(weight, 0))[:, None], 0)
    tl.store(out + row.to(tl.int64) * HEAD_DIM + d, acc, mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=["slots"])
def append_kernel(
    q: tl.tensor,  # a token's heads in a row, tokens q_stride apart; k and v alike
    k: tl.tensor,
    v: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    cos: tl.tensor,  # fp32 [tokens, 2 * HALF_DIM], as of RotaryEmbedding.rows
    sin: tl.tensor,
    slots: tl.tensor,  # [tokens]; -1: nowhere
    rotated: tl.tensor,  # [tokens, HEADS, HEAD_DIM]
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    HEADS: tl.constexpr,  # 0: nothing is rotated
    KV_HEADS: tl.constexpr,
    HALF_DIM: tl.constexpr,
    Q_ROWS: tl.constexpr,  # HEADS, padded
    KV_ROWS: tl.constexpr,
    HALF: tl.constexpr,  # HALF_DIM, padded
) -> None:
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF)[None, :]
    inner = d < HALF_DIM
    head = tl.arange(0, KV_ROWS)[:, None]
    slot = tl.load(slots + token).to(tl.int64)
    real = (head < tl.where(slot >= 0, KV_HEADS, 0)) & inner
    at = head * (2 * HALF_DIM) + d
    x = tl.load(k + token * k_stride + at, mask=real, other=0.0).to(tl.float32)
    y = tl.load(k + token * k_stride + at + HALF_DIM, mask=real, other=0.0).to(tl.float32)
    if HEADS > 0:
        second = token * (2 * HALF_DIM) + HALF_DIM + d
        c = tl.load(cos + second, mask=inner, other=0.0)
        s = tl.load(sin + second, mask=inner, other=0.0)
        x, y = x * c - y * s, y * c + x * s
    to = slot * (2 * HALF_DIM * KV_HEADS) + at
    # a hidden key still counts with weight 0, and 0 * nan is nan: one token's overflow must not be another's
    tl.store(k_pages + to, tl.where(tl.abs(x) < float("inf"), x, 0.0), mask=real)
    tl.store(k_pages + to + HALF_DIM, tl.where(tl.abs(y) < float("inf"), y, 0.0), mask=real)
    x = tl.load(v + token * v_stride + at, mask=real, other=0.0).to(tl.float32)
    y = tl.load(v + token * v_stride + at + HALF_DIM, mask=real, other=0.0).to(tl.float32)
    tl.store(v_pages + to, tl.where(tl.abs(x) < float("inf"), x, 0.0), mask=real)
    tl.store(v_pages + to + HALF_DIM, tl.where(tl.abs(y) < float("inf"), y, 0.0), mask=real)
    if HEADS > 0:
        head = tl.arange(0, Q_ROWS)[:, None]
        real = (head < HEADS) & inner
        at = head * (2 * HALF_DIM) + d
        x = tl.load(q + token * q_stride + at, mask=real, other=0.0).to(tl.float32)
        y = tl.load(q + token * q_stride + at + HALF_DIM, mask=real, other=0.0).to(tl.float32)
        to = token * (2 * HALF_DIM * HEADS) + at
        tl.store(rotated + to, x * c - y * s, mask=real)
        tl.store(rotated + to + HALF_DIM, y * c + x * s, mask=real)


@dataclass(slots=True)
class _Paged:
    """What the layers of a step share; it is cut into tiles when the first layer tells how many heads share a key."""

    batch: PackedBatch
    window: int
    page_table: Tensor
    strides: tuple[int, int]  # of a run and of a page in the table
    tiles: list[tuple[Tensor, int]] = field(default_factory=list)  # int32 [4, tiles], rows of each
    splits: int = 1


class TritonAttention(SDPAttention):
    """fp32, fp16 and bf16, head_dim up to 256, pages of any size, on NVIDIA GPUs from Ampere on."""

    default_page_size = 64  # as many keys as a program takes at a time
    takes_token_pages = True

    def check(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        if dtype not in _DTYPES or head_dim > 256:
            raise ValueError(
                f"triton needs float32, float16 or bfloat16 and a head_dim up to 256, got {dtype} and {head_dim}"
            )
        if os.environ.get("TRITON_INTERPRET") == "1":
            return
        if device.type != "cuda":
            raise ValueError(f"triton needs a CUDA device, got {device}: use attn_impl 'mha'")
        if torch.cuda.get_device_capability(device) < (8, 0):
            name = torch.cuda.get_device_name(device)
            raise ValueError(f"triton needs compute capability 8.0 or above, {name} is older: use attn_impl 'mha'")

    def plan(self, batch: PackedBatch, window: int | None) -> Any:
        if batch.token_pages is not None:
            return _Paged(batch, window or 0, batch.token_pages, (1, batch.token_pages.stride(0)))
        if batch.page_table is None:
            return super().plan(batch, window)
        pages = -(-int(batch.kv_lens.max()) // batch.page_size)
        return _Paged(batch, window or 0, batch.to_device(batch.page_table[:, :pages]), (pages, 1))

    @staticmethod
    def _cut(plan: _Paged, group: int, kv_heads: int, device: torch.device) -> None:
        """Fill in the tiles, and the splits: as many parts as fill the device, of 128 keys or more."""
        batch, small = plan.batch, max(16, triton.next_power_of_2(group))
        if batch.token_pages is not None:
            token = torch.arange(len(batch.positions), dtype=torch.int32, device=device)
            position = batch.positions.to(torch.int32)
            plan.tiles = [(torch.stack((token, token, torch.ones_like(token), position)), small)]
            longest = batch.token_pages.shape[0] * batch.page_size
        else:
            lens, longest = batch.query_lens, int(batch.kv_lens.max())
            starts = np.cumsum(lens) - lens
            fits = lens <= small // group
            for rows, runs in ((small, np.flatnonzero(fits)), (max(_LONG_ROWS, small), np.flatnonzero(~fits))):
                tokens = rows // group
                counts = -(-lens[runs] // tokens)
                run = np.repeat(runs, counts)
                done = (np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
                count = np.minimum(lens[run] - done, tokens)
                tiles = np.stack((run, starts[run] + done, count, (batch.kv_lens - lens)[run] + done))
                if len(run):
                    plan.tiles.append((batch.to_device(tiles.astype(np.int32)), rows))
        if plan.window:
            longest = min(longest, plan.window + _LONG_ROWS)
        programs = kv_heads * sum(tiles.shape[1] for tiles, _ in plan.tiles)
        cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
        wanted = min(-(-4 * cores // programs), longest // 128, _MOST_SPLITS)
        plan.splits = 1 << (max(wanted, 1).bit_length() - 1)

    def write(self, k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        self.append(k[:, :0], k, v, k, k, (k_pages, v_pages), slot_mapping)

    def append(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        pages: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
    ) -> Tensor:
        (tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
        rotated = q.new_empty(q.shape)
        q, k, v = (x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (q, k, v))
        append_kernel[(tokens,)](
            *(q, k, v, q.stride(0), k.stride(0), v.stride(0), cos, sin, slot_mapping, rotated, *pages),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF_DIM=head_dim // 2,
            Q_ROWS=triton.next_power_of_2(max(heads, 1)),
            KV_ROWS=triton.next_power_of_2(kv_heads),
            HALF=triton.next_power_of_2(head_dim // 2),
        )
        return rotated

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
        if not isinstance(plan, _Paged):
            return super().attend(q, k, v, plan)
        (tokens, heads, head_dim), (page_size, kv_heads) = q.shape, k.shape[1:3]
        if not plan.tiles:
            self._cut(plan, heads // kv_heads, kv_heads, q.device)
        q, out, splits = q.contiguous(), q.new_empty(q.shape), plan.splits
        parts, weights = out, out
        if splits > 1:
            parts = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
            weights = torch.empty((splits, tokens, heads), dtype=torch.float32, device=q.device)
        for tiles, rows in plan.tiles:
            attend_kernel[(tiles.shape[1], kv_heads, splits)](
                *(q, k, v, tiles, plan.page_table, *plan.strides, parts, weights, tokens),
                math.log2(math.e) / math.sqrt(head_dim),
                WINDOW=plan.window,
                HEADS=heads,
                KV_HEADS=kv_heads,
                HEAD_DIM=head_dim,
                PAGE_SIZE=page_size,
                SPLIT=splits > 1,
                **attend_options(head_dim, q.dtype, rows),
            )
        if splits > 1:
            dim = triton.next_power_of_2(head_dim)
            join_kernel[(tokens * heads,)](parts, weights, out, splits, head_dim, dim, num_warps=1)
        return out


def attend_options(head_dim: int, dtype: torch.dtype, rows: int) -> dict[str, int]:
    """Block sizes and launch options of `attend_kernel` that spill no registers on Hopper, but for prompts in fp32 with
    a head_dim above 128."""
    exact, wide = dtype == torch.float32, head_dim > 128  # fp32 products are not made by tensor cores
    return {
        "ROWS": rows,
        "KEYS": 16 if exact else 32 if wide else 64,
        "DIM": max(16, triton.next_power_of_2(head_dim)),
        "num_warps": 8 if exact or (wide and rows >= 64) else 4,
        "num_stages": 2 if exact or wide else 3,
    }
