"""The `mha` backend: torch's scaled_dot_product_attention, one call per group of runs of similar length.

Runs are grouped by the power of two of their length and of the keys they see, so that no run pays for more than twice
its own keys. Keys and values are never repeated per query head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import AttentionBackend, PackedBatch, write_kv

_LONG = 32  # runs of more tokens than this share a call only with their like: padding costs more than a call


@dataclass(slots=True)
class _Group:
    batch: int
    tokens: Tensor | None  # int64 [B, Q]: rows of the packed batch; None when they are simply all, in order, Q = 1
    pages: Tensor  # int64 [B * P]
    lone: int | None  # the one page of a lone run
    num_keys: int  # keys of the P pages that are looked at
    causal: bool  # every run is its whole sequence: no mask needed
    mask: Tensor | None  # [B, 1, Q, num_keys]: bool, from the first layer on to be added


@dataclass(slots=True)
class _Whole:
    batch: int
    mask: Tensor | None  # [*, *, S, S]


class SDPAttention(AttentionBackend):
    def write(self, k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        # a masked key still counts with weight 0, and 0 * nan is nan: one sequence's overflow must not be another's
        write_kv(k_pages, v_pages, k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0), slot_mapping)

    def plan(self, batch: PackedBatch, window: int | None) -> list[_Group] | _Whole:
        if batch.page_table is None:
            return self._plan_whole(batch, window)
        query_lens, kv_lens, page_size = batch.query_lens, batch.kv_lens, batch.page_size
        starts = kv_lens - query_lens  # position of the first query
        first_key = np.zeros_like(starts) if window is None else np.maximum(0, starts - window + 1)
        first_page = first_key // page_size
        seen = kv_lens - first_page * page_size
        classes = _log2(query_lens) * 64 + _log2(seen)
        classes = np.where(query_lens > _LONG, -(query_lens << 32) - seen, classes)
        run_starts = np.cumsum(query_lens) - query_lens
        groups = []
        for cls in np.unique(classes):
            rows = np.flatnonzero(classes == cls)
            queries = int(query_lens[rows].max())
            num_keys = int(seen[rows].max())
            page_index = first_page[rows, None] + np.arange(-(-num_keys // page_size))
            page_index = np.minimum(page_index, batch.page_table.shape[1] - 1)
            pages = np.maximum(batch.page_table[rows[:, None], page_index], 0).astype(np.int64)
            # a short run repeats its last query: the same output is written to the same place
            offset = np.minimum(np.arange(queries), query_lens[rows, None] - 1)
            tokens = run_starts[rows, None] + offset
            causal = bool((query_lens[rows] == num_keys).all()) and (window is None or num_keys <= window)
            mask = None
            if not causal:
                key_pos = (first_page[rows] * page_size)[:, None, None] + np.arange(num_keys)
                query_pos = (starts[rows, None] + offset)[:, :, None]
                allowed = key_pos <= query_pos
                if window is not None:
                    allowed &= key_pos > query_pos - window
                if not allowed.all():
                    mask = batch.to_device(allowed[:, None])
            everything = queries == 1 and len(rows) == len(query_lens)
            groups.append(
                _Group(
                    len(rows),
                    None if everything else batch.to_device(tokens),
                    batch.to_device(pages.ravel()),
                    pages[0, 0] if pages.size == 1 else None,
                    num_keys,
                    causal,
                    mask,
                )
            )
        return groups

    @staticmethod
    def _plan_whole(batch: PackedBatch, window: int | None) -> _Whole:
        mask = batch.attn_mask
        length = int(batch.query_lens[0])
        if mask is not None or (window is not None and window < length):
            pos = torch.arange(length, device=batch.positions.device)
            allowed = pos <= pos[:, None]
            if window is not None:
                allowed &= pos > pos[:, None] - window
            if mask is None:
                mask = allowed[None, None]
            elif mask.dtype == torch.bool:
                mask = mask & allowed
            else:
                mask = mask.masked_fill(~allowed, float("-inf"))
        return _Whole(len(batch.query_lens), mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: list[_Group] | _Whole) -> Tensor:
        if isinstance(plan, _Whole):
            q, k, v = (x.unflatten(0, (plan.batch, -1)).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=plan.mask, is_causal=plan.mask is None, enable_gqa=q.shape[1] != k.shape[1]
            )
            return out.transpose(1, 2).flatten(0, 1)
        if len(plan) == 1 and plan[0].tokens is None:
            return self._attend_group(q.unsqueeze(1), k, v, plan[0]).squeeze(1)
        out = torch.empty_like(q)
        for group in plan:
            assert group.tokens is not None
            result = self._attend_group(q[group.tokens], k, v, group)
            out.index_copy_(0, group.tokens.flatten(), result.flatten(0, 1))
        return out

    @staticmethod
    def _attend_group(q: Tensor, k: Tensor, v: Tensor, group: _Group) -> Tensor:
        """q: [B, Q, heads, head_dim] -> the same."""
        keys, values = _gather(k, group).transpose(1, 2), _gather(v, group).transpose(1, 2)
        batch, queries, heads, head_dim = q.shape
        kv_heads = keys.shape[1]
        if group.mask is not None and group.mask.dtype == torch.bool:  # torch would do this in every layer
            group.mask = torch.where(group.mask, 0.0, float("-inf")).to(q.dtype)
        if queries == 1:
            # the query heads of one KV head become its queries: no kernel sees a head twice
            grouped = q.view(batch, kv_heads, heads // kv_heads, head_dim)
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask).view(q.shape)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=group.mask,
            is_causal=group.causal,
            enable_gqa=heads != kv_heads,
        )
        return out.transpose(1, 2)


def _gather(pages: Tensor, group: _Group) -> Tensor:
    """The group's keys or values [B, num_keys, kv_heads, head_dim]; a lone page is a view, not a copy."""
    if group.lone is not None:
        return pages[group.lone : group.lone + 1, : group.num_keys]
    if group.num_keys <= pages.shape[1]:
        return pages[:, : group.num_keys][group.pages]
    gathered = pages.index_select(0, group.pages)
    return gathered.view(group.batch, -1, *pages.shape[2:])[:, : group.num_keys]


def _log2(x: np.ndarray) -> np.ndarray:
    """ceil(log2(x)) of positive integers."""
    return np.ceil(np.log2(x)).astype(np.int64)
