"""Triton kernels for what lies between the matmuls of a decoder, and for the choice of a token.

Each reads and writes its tensors once, where torch launches from two to a hundred kernels. Tested in Triton's
interpreter and compiled for sm_90; not run on hardware yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = tl.constexpr(4096)  # of the vocabulary, for a program
_COLDEST = tl.constexpr(1e-30)  # a temperature at which nothing is drawn, as in SamplingTable


@triton.jit
def add_rms_norm_kernel(
    x: tl.tensor,  # fp32 [tokens, SIZE]
    delta: tl.tensor,  # [tokens, SIZE]
    weight: tl.tensor,  # [SIZE]
    out: tl.tensor,  # [tokens, SIZE]
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE, padded
    ADD: tl.constexpr,
) -> None:
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * SIZE + i
    real = i < SIZE
    value = tl.load(x + at, mask=real, other=0.0)
    if ADD:
        value += tl.load(delta + at, mask=real, other=0.0).to(tl.float32)
        tl.store(x + at, value, mask=real)
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / SIZE + eps)
    tl.store(out + at, value * scale * tl.load(weight + i, mask=real, other=0.0), mask=real)


@triton.jit
def silu_mul_kernel(
    gate_up: tl.tensor,  # [tokens, 2 * SIZE]
    out: tl.tensor,  # [tokens, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + token * 2 * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + i, gate / (1.0 + tl.exp(-gate)) * up, mask=i < SIZE)


@triton.jit(do_not_specialize_on_alignment=["row_ids", "positions"])
def best_of_block_kernel(
    scores: tl.tensor,  # [rows, >= vocab], rows `stride` apart
    stride: tl.tensor,
    vocab: tl.tensor,
    row_ids: tl.tensor,  # int64 [rows], into the two that follow
    temperatures: tl.tensor,  # fp32
    seeds: tl.tensor,  # int64
    positions: tl.tensor,  # int64 [rows]
    best: tl.tensor,  # fp32 [rows, blocks]
    ids: tl.tensor,  # int64 [rows, blocks]
) -> None:
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = block * _BLOCK + tl.arange(0, _BLOCK)
    score = tl.load(scores + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    entry = tl.load(row_ids + row)
    temperature = tl.load(temperatures + entry)
    if temperature > _COLDEST:
        # sampling.gumbel_noise: splitmix64 over seed and position, murmur3's finaliser over the token
        key = tl.load(seeds + entry) + (tl.load(positions + row) + 1) * -7046029254386353131
        key = (key ^ ((key >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
        key = (key ^ ((key >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
        key = key ^ ((key >> 31) & 0x1FFFFFFFF)
        bits = (token * -1640531535) ^ key.to(tl.int32)
        bits = (bits ^ ((bits >> 16) & 0xFFFF)) * -2048144789
        bits = ((bits ^ ((bits >> 13) & 0x7FFFF)) + (key >> 32).to(tl.int32)) * -1028477387
        bits = (bits ^ ((bits >> 16) & 0xFFFF)) & 0x7FFFFFFF
        u = tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)
        rest = 1.0 - u
        # -log1p(-u), by way of the rounding error of 1 - u (Kahan)
        exponential = tl.where(rest == 1.0, u, -tl.log(rest) * (u / (1.0 - rest)))
        score = score / temperature - tl.log(exponential)
    high = tl.max(score, 0)
    first = tl.min(tl.where(score == high, token, vocab), 0)  # of equal ones the first
    numbers = tl.max((score != score).to(tl.int32), 0) == 0
    tl.store(best + row * blocks + block, tl.where(numbers, high, float("nan")))
    tl.store(ids + row * blocks + block, first.to(tl.int64))


@triton.jit
def best_of_blocks_kernel(
    best: tl.tensor,  # fp32 [rows, blocks]
    ids: tl.tensor,  # int64 [rows, blocks]
    chosen: tl.tensor,  # int64 [rows]
    blocks: tl.tensor,
    nothing: tl.tensor,  # in the place of an id where a score is not a number, or all are -inf
    BLOCKS: tl.constexpr,  # blocks, padded
) -> None:
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    score = tl.load(best + row * blocks + i, mask=i < blocks, other=float("-inf"))
    token = tl.load(ids + row * blocks + i, mask=i < blocks, other=0x7FFFFFFF)
    high = tl.max(score, 0)
    first = tl.min(tl.where(score == high, token, 0x7FFFFFFF), 0)
    broken = (tl.max((score != score).to(tl.int32), 0) > 0) | (high == float("-inf"))
    tl.store(chosen + row, tl.where(broken, nothing, first))


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add `delta` [T, size] to the fp32 `x` in place, and return the root mean square norm of the sum."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    warps = min(max(block // 512, 1), 16)
    add_rms_norm_kernel[(len(x),)](
        x, x if delta is None else delta, weight, out, eps, size, block, delta is not None, num_warps=warps
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2 * size]."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, size)
    silu_mul_kernel[(tokens, triton.cdiv(size, 1024))](gate_up, out, size, 1024)
    return out


def choose(
    scores: Tensor, row_ids: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, nothing: int
) -> Tensor:
    """Ids, int64 [R], of the best of scores [R, V] of any float type, with the noise of `sampling.gumbel_noise` where
    the row's temperature is above 0; of equal ones the first; `nothing` where a score is not a number or all are -inf.
    temperatures and seeds: a table that row_ids [R] index."""
    rows, vocab = scores.shape
    blocks = triton.cdiv(vocab, _BLOCK.value)
    best = torch.empty((rows, blocks), dtype=torch.float32, device=scores.device)
    ids = torch.empty((rows, blocks), dtype=torch.int64, device=scores.device)
    chosen = torch.empty_like(row_ids)
    best_of_block_kernel[(rows, blocks)](
        scores, scores.stride(0), vocab, row_ids, temperatures, seeds, positions, best, ids, num_warps=8
    )
    padded = triton.next_power_of_2(blocks)
    best_of_blocks_kernel[(rows,)](best, ids, chosen, blocks, nothing, padded, num_warps=1)
    return chosen
