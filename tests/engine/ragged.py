"""Random packed batches over pages, and what attention must give for them: one query at a time, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.attention import PackedBatch

GARBAGE = 1e3  # in every place that no query may look at


@dataclass
class Ragged:
    batch: PackedBatch
    window: int | None
    q: Tensor  # [T, heads, head_dim]
    k: Tensor  # [pages, page_size, kv_heads, head_dim]
    v: Tensor
    expected: Tensor  # [T, heads, head_dim]


def naive(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Attention of a sequence's last queries [Q, heads, head_dim] over its keys and values [K, kv_heads, head_dim]."""
    out = torch.empty_like(q)
    group = q.shape[1] // keys.shape[1]
    for i, head in np.ndindex(q.shape[0], q.shape[1]):
        end = len(keys) - len(q) + i + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        k, v = keys[seen, head // group].double(), values[seen, head // group].double()
        weights = torch.softmax(k @ q[i, head].double() / q.shape[2] ** 0.5, 0)
        out[i, head] = (weights @ v).to(q.dtype)
    return out


def make(
    seed: int,
    query_lens: list[int],
    computed: list[int],
    page_size: int,
    heads: int,
    kv_heads: int,
    window: int | None,
    head_dim: int = 8,
) -> Ragged:
    """Sequences of `computed` cached tokens and runs of `query_lens` more, on pages in random order. Pages that the
    window has left are -1."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    counts = np.array(query_lens)
    kv_lens = np.array(computed) + counts
    num_pages = [-(-int(n) // page_size) for n in kv_lens]
    free = rng.permutation(sum(num_pages) + 3).astype(np.int32)
    table = np.full((len(kv_lens), max(num_pages) + 1), -1, dtype=np.int32)
    k = torch.full((len(free), page_size, kv_heads, head_dim), GARBAGE)
    v = torch.full_like(k, GARBAGE)
    q = torch.randn(int(counts.sum()), heads, head_dim, generator=generator)
    expected, start, used = [], 0, 0
    for row, length in enumerate(kv_lens.tolist()):
        keys, values = (torch.randn(length, kv_heads, head_dim, generator=generator) for _ in range(2))
        queries = q[start : start + query_lens[row]]
        expected.append(naive(queries, keys, values, window))
        pages = free[used : used + num_pages[row]]
        first = 0 if window is None else max(0, computed[row] - window + 1)
        for position in range(first, length):
            page, offset = pages[position // page_size], position % page_size
            k[page, offset], v[page, offset] = keys[position], values[position]
        gone = first // page_size
        table[row, gone : len(pages)] = pages[gone:]
        start, used = start + query_lens[row], used + num_pages[row]
    batch = PackedBatch.paged(table, page_size, np.array(computed), counts, torch.device("cpu"))
    return Ragged(batch, window, q, k, v, torch.cat(expected))


def batches(page_sizes: tuple[int, ...], most_computed: int) -> st.SearchStrategy[Ragged]:
    """Mixed batches: decodes, verifications and chunks, of sequences at any length."""
    run = st.tuples(st.sampled_from([1, 1, 1, 2, 5, 33, 40]), st.integers(0, most_computed))
    return st.builds(
        lambda seed, runs, page_size, kv_heads, group, window: make(
            seed, [n for n, _ in runs], [n for _, n in runs], page_size, kv_heads * group, kv_heads, window
        ),
        st.integers(0, 2**16),
        st.lists(run, min_size=1, max_size=6),
        st.sampled_from(page_sizes),
        st.sampled_from([1, 2]),
        st.sampled_from([1, 3]),
        st.sampled_from([None, 1, 5, 7, 64]),
    )
