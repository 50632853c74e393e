"""Triton kernels for what lies between the matmuls of a decoder, and for the choice of a token.

Each reads and writes its tensors once, but for the scores of rows that filters choose anew for, where torch launches
from two to a hundred kernels. Tested in Triton's interpreter and compiled for sm_90; not run on hardware yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = tl.constexpr(4096)  # of the vocabulary, for a program
_REACH = tl.constexpr(64.0)  # what lies further below the best is never drawn, as in sampling
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


@triton.jit
def gumbel(token: tl.tensor, seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """sampling.gumbel_noise: splitmix64 over seed and position, murmur3's finaliser over the token."""
    key = seed + (position + 1) * -7046029254386353131
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
    return -tl.log(tl.where(rest == 1.0, u, -tl.log(rest) * (u / (1.0 - rest))))


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
        score = score / temperature + gumbel(token, tl.load(seeds + entry), tl.load(positions + row))
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


@triton.jit
def tempered(scores: tl.tensor, token: tl.tensor, vocab: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    return tl.load(scores + token, mask=token < vocab, other=float("-inf")).to(tl.float32) / temperature


@triton.jit
def cutoff(
    scores: tl.tensor,  # [vocab]
    vocab: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,  # the highest score over the temperature
    least: tl.tensor,  # scores below it don't count
    wanted: tl.tensor,
    BY_MASS: tl.constexpr,  # in units of the highest score's probability, or by their number
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The highest level from which on the scores are as many, or weigh as much, as is wanted.

    The range that is left is cut into eight at a time, nine times: to the last bit of an fp32 score of 4 to 8."""
    low, step = top - _REACH, _REACH + 0.0
    for _ in range(9):
        step /= 8
        # vectors, so that threads meet once, at the end
        zero = tl.zeros([BLOCK], tl.float32)
        s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            score = tempered(scores, token, vocab, temperature)
            weight = tl.where(score >= least, tl.exp(score - top) if BY_MASS else 1.0, 0.0)
            s1 += tl.where(score >= low + step, weight, 0.0)
            s2 += tl.where(score >= low + 2 * step, weight, 0.0)
            s3 += tl.where(score >= low + 3 * step, weight, 0.0)
            s4 += tl.where(score >= low + 4 * step, weight, 0.0)
            s5 += tl.where(score >= low + 5 * step, weight, 0.0)
            s6 += tl.where(score >= low + 6 * step, weight, 0.0)
            s7 += tl.where(score >= low + 7 * step, weight, 0.0)
        enough = (tl.sum(s1, 0) >= wanted).to(tl.float32) + (tl.sum(s2, 0) >= wanted).to(tl.float32)
        enough += (tl.sum(s3, 0) >= wanted).to(tl.float32) + (tl.sum(s4, 0) >= wanted).to(tl.float32)
        enough += (tl.sum(s5, 0) >= wanted).to(tl.float32) + (tl.sum(s6, 0) >= wanted).to(tl.float32)
        enough += (tl.sum(s7, 0) >= wanted).to(tl.float32)
        low += step * enough
    return low


@triton.jit(do_not_specialize_on_alignment=["row_ids", "positions"])
def filter_kernel(
    scores: tl.tensor,  # [rows, >= vocab], rows `stride` apart
    stride: tl.tensor,
    vocab: tl.tensor,
    row_ids: tl.tensor,  # int64 [rows], into the five that follow
    temperatures: tl.tensor,  # fp32
    seeds: tl.tensor,  # int64
    top_ks: tl.tensor,  # int64
    top_ps: tl.tensor,  # fp32
    log_min_ps: tl.tensor,  # fp32
    positions: tl.tensor,  # int64 [rows]
    chosen: tl.tensor,  # int64 [rows], of all scores; in place, of those that the filters keep
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    entry, choice = tl.load(row_ids + row), tl.load(chosen + row)
    temperature = tl.load(temperatures + entry)
    top_k, top_p, log_min_p = tl.load(top_ks + entry), tl.load(top_ps + entry), tl.load(log_min_ps + entry)
    scores += row * stride
    filtered = (top_k > 0) | (top_p < 1) | (log_min_p > float("-inf"))
    filtered &= tl.load(positions + row) > 0  # what pads a graph is at 0
    if filtered & (temperature > _COLDEST) & (choice >= 0):
        # Most often the winner of all is kept, which one look at the row tells. It lies within the noise's reach of the
        # highest, so weights relative to it don't overflow.
        winner = tl.load(scores + choice).to(tl.float32) / temperature
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        count = tl.zeros([BLOCK], tl.float32)
        heavier, whole = count, count
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            score = tempered(scores, token, vocab, temperature)
            weight, higher = tl.exp(score - winner), score > winner
            highest = tl.maximum(highest, score)
            count += higher.to(tl.float32)
            heavier += tl.where(higher, weight, 0.0)
            whole += weight
        top, above, mass_above = tl.max(highest, 0), tl.sum(count, 0), tl.sum(heavier, 0)
        mass = tl.where(top_k > 0, mass_above + 1.0, tl.sum(whole, 0))  # at least that much is left after top_k
        kept = ((top_k == 0) | (above < top_k)) & ((top_p >= 1) | (mass_above < top_p * mass))
        if not (kept & (winner - top >= log_min_p)):
            kth, nucleus = float("-inf"), float("-inf")
            if top_k > 0:
                kth = cutoff(scores, vocab, temperature, top, kth, top_k.to(tl.float32), False, BLOCK)
            if top_p < 1:
                whole = tl.zeros([BLOCK], tl.float32)
                for start in range(0, vocab, BLOCK):
                    token = start + tl.arange(0, BLOCK)
                    score = tempered(scores, token, vocab, temperature)
                    whole += tl.where(score >= kth, tl.exp(score - top), 0.0)
                nucleus = cutoff(scores, vocab, temperature, top, kth, top_p * tl.sum(whole, 0), True, BLOCK)
            least = tl.maximum(tl.maximum(kth, nucleus), top + log_min_p)
            seed, position = tl.load(seeds + entry), tl.load(positions + row)
            best = tl.full([BLOCK], float("-inf"), tl.float32)
            place = tl.zeros([BLOCK], tl.int32)
            for start in range(0, vocab, BLOCK):
                token = start + tl.arange(0, BLOCK)
                score = tempered(scores, token, vocab, temperature)
                score = tl.where(score >= least, score + gumbel(token, seed, position), float("-inf"))
                place = tl.where(score > best, token, place)
                best = tl.maximum(best, score)
            high = tl.max(best, 0)
            first = tl.min(tl.where(best == high, place, vocab), 0).to(tl.int64)
            tl.store(chosen + row, first, mask=high > float("-inf"))  # not so where the winner is infinite


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
    scores: Tensor,
    row_ids: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    filters: tuple[Tensor, Tensor, Tensor],
    nothing: int,
) -> Tensor:
    """Ids, int64 [R], of the best of scores [R, V] of any float type, with the noise of `sampling.gumbel_noise` among
    those that the filters keep where the row's temperature is above 0; of equal ones the first; `nothing` where a score
    is not a number or all are -inf. temperatures, seeds and filters, which are top_k (0: all), top_p and the logarithm
    of min_p: tables that row_ids [R] index."""
    rows, vocab = scores.shape
    blocks = triton.cdiv(vocab, _BLOCK.value)
    best = torch.empty((rows, blocks), dtype=torch.float32, device=scores.device)
    ids = torch.empty((rows, blocks), dtype=torch.int64, device=scores.device)
    chosen = torch.empty_like(row_ids)
    stride = scores.stride(0)
    best_of_block_kernel[(rows, blocks)](
        scores, stride, vocab, row_ids, temperatures, seeds, positions, best, ids, num_warps=8
    )
    padded = triton.next_power_of_2(blocks)
    best_of_blocks_kernel[(rows,)](best, ids, chosen, blocks, nothing, padded, num_warps=1)
    filter_kernel[(rows,)](
        scores, stride, vocab, row_ids, temperatures, seeds, *filters, positions, chosen, 1024, num_warps=8
    )
    return chosen
