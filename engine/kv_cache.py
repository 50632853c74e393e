"""Key-value storage: `KVCache` for one layer and a plain loop, `KVSlotPool` with its `PrefixIndex` for the engine.

A page is a slot of the pool. With page_size = max_seq_len that is the classic slot-per-sequence pool, with a smaller
one it is paged attention (Kwon et al. 2023); nothing else differs.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.attention import PackedBatch, write_kv

if TYPE_CHECKING:
    from engine.models.decoder import CausalLM

_SIBLINGS = 64  # how many pages are compared for a hit that ends inside a page


class KVCache:
    """Keys and values of one layer for up to `max_batch_size` sequences that grow together.

    The buffers are allocated once and written in place. Every call that would not fit raises ValueError before
    anything is written.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (max_batch_size, max_seq_len, num_kv_heads, head_dim)
        if min(shape) < 1:
            raise ValueError(f"KVCache dimensions must be at least 1, got {shape}")
        self.max_batch_size, self.max_seq_len = max_batch_size, max_seq_len
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.pages = (torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype))
        self._seq_len = 0
        self._batch_size = 0

    @classmethod
    def from_model_config(
        cls,
        max_batch_size: int,
        max_seq_len: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[KVCache]:
        """One cache a layer, none sharing storage."""
        return [cls(max_batch_size, max_seq_len, num_kv_heads, head_dim, device, dtype) for _ in range(num_layers)]

    @property
    def seq_len(self) -> int:
        return self._seq_len

    @property
    def device(self) -> torch.device:
        return self.pages[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.pages[0].dtype

    @property
    def k(self) -> Tensor:
        """Keys so far, a view [batch, num_kv_heads, seq_len, head_dim]."""
        return self.pages[0][: self._batch_size, : self._seq_len].transpose(1, 2)

    @property
    def v(self) -> Tensor:
        """Values so far, a view [batch, num_kv_heads, seq_len, head_dim]."""
        return self.pages[1][: self._batch_size, : self._seq_len].transpose(1, 2)

    def data_ptr(self) -> int:
        """Address of the key buffer: it never changes."""
        return self.pages[0].data_ptr()

    def check(self, batch_size: int, length: int) -> None:
        """Raise ValueError unless `length` more tokens of `batch_size` sequences fit."""
        wanted = self._seq_len + length
        if wanted > self.max_seq_len:
            raise ValueError(f"KVCache overflow: {wanted} tokens wanted, the maximum is {self.max_seq_len}")
        if batch_size > self.max_batch_size:
            raise ValueError(f"KVCache overflow: {batch_size} sequences wanted, the maximum is {self.max_batch_size}")
        if self._seq_len and batch_size != self._batch_size:
            raise ValueError(f"KVCache holds {self._batch_size} sequences, not {batch_size}: reset() it first")

    def packed_batch(self, batch_size: int, length: int) -> PackedBatch:
        """The next `length` tokens of every sequence as a batch over this cache's buffers."""
        table = np.arange(batch_size, dtype=np.int32)[:, None]
        computed = np.full(batch_size, self._seq_len)
        return PackedBatch.paged(table, self.max_seq_len, computed, np.full(batch_size, length), self.device)

    def advance(self, batch_size: int, length: int) -> None:
        """Count tokens that a forward has written."""
        self._batch_size = batch_size
        self._seq_len += length

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [batch, num_kv_heads, new, head_dim] in place; returns views of all keys and values so far."""
        if k.shape != v.shape or k.dim() != 4 or k.shape[1] != self.num_kv_heads or k.shape[3] != self.head_dim:
            expected = f"[batch, {self.num_kv_heads}, new, {self.head_dim}]"
            raise ValueError(f"KVCache.update takes k and v of shape {expected}, got {list(k.shape)}, {list(v.shape)}")
        batch_size, length = k.shape[0], k.shape[2]
        self.check(batch_size, length)
        slots = self.packed_batch(batch_size, length).slot_mapping
        assert slots is not None
        write_kv(*self.pages, k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1), slots)
        self.advance(batch_size, length)
        return self.k, self.v

    def truncate(self, seq_len: int) -> None:
        """Forget the tokens from `seq_len` on. Raises ValueError if there are fewer."""
        if not 0 <= seq_len <= self._seq_len:
            raise ValueError(f"KVCache holds {self._seq_len} tokens: it can't be cut to {seq_len}")
        self._seq_len = seq_len

    def reset(self) -> None:
        self._seq_len = self._batch_size = 0


def reset_all_caches(caches: Sequence[KVCache]) -> None:
    for cache in caches:
        cache.reset()


@dataclass(slots=True)
class _Entry:
    parent: bytes
    tokens: np.ndarray
    digest: bytes | None  # of the run of tokens that this page ends; None unless the page is full


class PrefixIndex:
    """Which page holds which run of tokens.

    A full page is found by the digest of all tokens up to its end, chained page by page. Pages with the same digest
    before them are siblings; the one with the longest common start serves a hit that ends inside a page. After
    `record`, `changes` tells which digests came (True) or went since somebody emptied it.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._by_digest: dict[bytes, int] = {}
        self._siblings: dict[bytes, dict[int, None]] = {}
        self._entries: dict[int, _Entry] = {}
        self.changes: dict[bytes, bool] | None = None

    def __contains__(self, page: int) -> bool:
        return page in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def record(self) -> None:
        """Keep `changes` from now on, beginning with all there is."""
        self.changes = dict.fromkeys(self._by_digest, True)

    def match(self, digests: list[bytes], tokens: np.ndarray, retention: int | None) -> tuple[list[int], int, int]:
        """The longest cached run at the start of `tokens` (int32; digests of its full pages given): whole pages, then
        a page and how many of its tokens are to be copied. With a retention of w tokens, a hit needs only the pages
        that hold the last w - 1 tokens before its end; the others are -1."""
        found = [self._by_digest.get(digest, -1) for digest in digests[1:]]
        missing = [i for i, page in enumerate(found) if page < 0]
        hit = missing[0] if missing else len(found)
        if retention is not None:
            for end in range(len(found), hit, -1):
                first = max(0, end * self.page_size - retention + 1) // self.page_size
                if all(page >= 0 for page in found[first:end]):
                    hit = end
                    break
        rest = tokens[hit * self.page_size : (hit + 1) * self.page_size]
        pages, tail_page, tail = found[:hit], -1, 0
        siblings = self._siblings.get(digests[hit])
        if siblings and len(rest):
            for page in islice(reversed(siblings), _SIBLINGS):
                common = _common_start(self._entries[page].tokens, rest)
                if common > tail:
                    tail_page, tail = page, common
        if retention is not None:
            first = max(0, hit * self.page_size + tail - retention + 1) // self.page_size
            pages[:first] = [-1] * min(first, hit)
        return pages, tail_page, tail

    def publish(self, page: int, parent: bytes, tokens: np.ndarray, digest: bytes | None) -> int:
        """Say what a page holds (again, when it holds more). Returns the page that is known for the digest: another
        one if the same run was published before."""
        if digest is not None:
            known = self._by_digest.get(digest)
            if known is not None and known != page:
                return known
        self.discard(page)
        self._entries[page] = _Entry(parent, tokens.copy(), digest)
        self._siblings.setdefault(parent, {})[page] = None
        if digest is not None:
            self._by_digest[digest] = page
            if self.changes is not None:
                self.changes[digest] = True
        return page

    def discard(self, page: int) -> None:
        entry = self._entries.pop(page, None)
        if entry is None:
            return
        siblings = self._siblings[entry.parent]
        del siblings[page]
        if not siblings:
            del self._siblings[entry.parent]
        if entry.digest is not None:
            del self._by_digest[entry.digest]
            if self.changes is not None:
                self.changes[entry.digest] = False


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros; on a CPU, memory that the system gives when a page is first written (torch.zeros would take it all)."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    count = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)


def _common_start(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


class KVSlotPool:
    """All layers' pages, who holds them, and which are free.

    A page is held (by one or more sequences), cached (by nobody, but in the prefix index), or free; the three always
    add up to `num_pages`. A page with two owners is never written. `kv` is [layers, 2, pages, page_size, kv_heads,
    head_dim].
    """

    def __init__(
        self,
        model: CausalLM,
        num_pages: int,
        page_size: int,
        *,
        dtype: torch.dtype,
        enable_prefix_cache: bool = True,
        retention: int | None = None,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least one page of one token, got {num_pages} of {page_size}")
        self.num_pages, self.page_size = num_pages, page_size
        shape = (model.num_layers, 2, num_pages, page_size, model.num_kv_heads, model.head_dim)
        self.kv = _zeros(shape, model.device, dtype)
        self.pages = [(layer[0], layer[1]) for layer in self.kv]
        self.index = PrefixIndex(page_size) if enable_prefix_cache else None
        self.retention = retention
        self._refs = np.zeros(num_pages, dtype=np.int32)
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def free_pages(self) -> int:
        return self._num_free

    @property
    def cached_pages(self) -> int:
        return len(self._cached)

    @property
    def held_pages(self) -> int:
        return self.num_pages - self._num_free - len(self._cached)

    @property
    def available(self) -> int:
        """Pages that can be had without taking one from a sequence."""
        return self._num_free + len(self._cached)

    def allocate(self, count: int) -> np.ndarray:
        """Hold `count` pages, int32; evicts the least recently used cached ones when the free ones run out. Raises
        ValueError when more are wanted than are `available`."""
        if count > self.available:
            raise ValueError(f"{count} pages wanted, {self.available} of {self.num_pages} are available")
        while self._num_free < count:
            page, _ = self._cached.popitem(last=False)
            assert self.index is not None
            self.index.discard(page)
            self._push_free(np.array([page], dtype=np.int32))
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count].copy()
        self._refs[pages] = 1
        return pages

    def _push_free(self, pages: np.ndarray) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def hold(self, pages: Sequence[int]) -> None:
        """Add an owner to pages that are held or cached."""
        for page in pages:
            if self._refs[page] == 0:
                del self._cached[page]
            self._refs[page] += 1

    def release(self, pages: np.ndarray) -> None:
        """Take an owner from each of distinct held pages, given in the order of the tokens in them. The last ones are
        evicted first: without its predecessors a page is of no use."""
        if len(pages) == 0:
            return
        self._refs[pages] -= 1
        unowned = pages[self._refs[pages] == 0]
        if self.index is None:
            self._push_free(unowned)
            return
        for page in unowned[::-1].tolist():
            if page in self.index:
                self._cached[page] = None
            else:
                self._push_free(np.array([page], dtype=np.int32))

    def publish(self, page: int, parent: bytes, tokens: np.ndarray, digest: bytes | None) -> int:
        """Make a held page's tokens known to the prefix index. Returns the page to use from now on: when another holds
        the same run already, that one, which is then held instead of `page`."""
        if self.index is None:
            return page
        known = self.index.publish(page, parent, tokens, digest)
        if known != page:
            self.hold([known])
            self.release(np.array([page], dtype=np.int32))
        return known

    def touch(self, page: int) -> None:
        """Count a use of a page that is only read."""
        if page in self._cached:
            self._cached.move_to_end(page)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` entries of a page, all layers at once."""
        if source != target:
            self.kv[:, :, target, :tokens] = self.kv[:, :, source, :tokens]

    def clear_cache(self) -> None:
        """Forget every cached page."""
        self.release(self.allocate(self.available))

    def drop(self) -> None:
        """Let go of the storage."""
        self.clear_cache()
        self.kv, self.pages = self.kv.new_empty(0), []

    def check(self) -> None:
        """Raise RuntimeError unless free, cached and held pages are disjoint and add up to the pool."""
        free = self._free[: self._num_free]
        held = np.flatnonzero(self._refs > 0)
        everything = np.concatenate((free, np.fromiter(self._cached, np.int64, len(self._cached)), held))
        if len(everything) != self.num_pages or len(np.unique(everything)) != self.num_pages:
            raise RuntimeError(
                f"page leak: {len(free)} free + {len(self._cached)} cached + {len(held)} held != {self.num_pages}"
            )
        if (self._refs < 0).any():
            raise RuntimeError("a page was released more often than held")
