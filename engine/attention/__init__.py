"""Attention backends: the packed batch they all take, their common face, and the registry of their names."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class PackedBatch:
    """Token runs of several sequences, one after the other, T tokens of B sequences.

    A run is appended to its sequence: of `query_lens[b]` tokens the last has position `kv_lens[b] - 1`.
    `page_table` row b lists the pages of sequence b in order; a page that has left the window is -1.
    Without a page table (`page_table is None`) nothing is cached: the B sequences are whole, of equal length, and
    `attn_mask` may restrict them further.
    """

    positions: Tensor  # int64 [T]
    query_lens: np.ndarray  # int64 [B]
    kv_lens: np.ndarray  # int64 [B], keys after the run
    page_table: np.ndarray | None = None  # int32 [B, P]
    slot_mapping: Tensor | None = None  # int64 [T], page * page_size + offset, where the run's keys go
    page_size: int = 0
    attn_mask: Tensor | None = None  # [B or 1, heads or 1, S, S]
    # int32 [P, T], on the device, for backends that take it: every token is a run of its own, with these pages. The
    # host knows no lengths then, as in a CUDA graph
    token_pages: Tensor | None = None

    @classmethod
    def uncached(cls, batch: int, length: int, device: torch.device, attn_mask: Tensor | None = None) -> PackedBatch:
        """B whole sequences of equal length that use no cache."""
        lens = np.full(batch, length)
        return cls(torch.arange(length, device=device).repeat(batch), lens, lens, attn_mask=attn_mask)

    @classmethod
    def paged(
        cls,
        page_table: np.ndarray,
        page_size: int,
        computed: np.ndarray,
        query_lens: np.ndarray,
        device: torch.device,
    ) -> PackedBatch:
        """Runs of `query_lens` tokens after `computed` cached ones; pages are in place for both."""
        kv_lens = computed + query_lens
        rows = np.repeat(np.arange(len(query_lens)), query_lens)
        run_ends = np.cumsum(query_lens)
        positions = np.arange(len(rows)) + np.repeat(kv_lens - run_ends, query_lens)
        slots = page_table[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size
        both = to_device(np.stack((positions, slots)), device)
        return cls(both[0], query_lens, kv_lens, page_table, both[1], page_size)

    def to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.positions.device)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of the array; on an accelerator by way of pinned memory, so that the host waits for nothing."""
    source = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return source
    staged = torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source)
    return staged.to(device, non_blocking=True)


class AttentionBackend(ABC):
    """Causal attention of a packed batch, with or without pages.

    `plan` does once per step and window what every layer needs; `attend` does one layer. The keys and values of the
    run are in the pages already when `attend` is called (`write`).
    """

    default_page_size = 16
    takes_token_pages = False

    def check(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:  # noqa: B027
        """Raise ValueError when this backend can't serve such a model."""

    def check_page_size(self, page_size: int) -> None:  # noqa: B027
        """Raise ValueError when this backend can't work with such pages."""

    def write(self, k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Write a run's keys and values [T, kv_heads, head_dim] in place into the pages of one layer."""
        write_kv(k_pages, v_pages, k, v, slot_mapping)

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
        """Rotate a run's queries and keys by `RotaryEmbedding.rows`, write its keys and values into the layer's pages,
        and return the queries [T, heads, head_dim]."""
        rotated = rotate(torch.cat((q, k), 1), cos, sin)
        self.write(*pages, rotated[:, q.shape[1] :], v, slot_mapping)
        return rotated[:, : q.shape[1]]

    @abstractmethod
    def plan(self, batch: PackedBatch, window: int | None) -> Any: ...

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
        """q: [T, heads, head_dim]. k, v: the layer's pages [pages, page_size, kv_heads, head_dim], or, uncached, the
        run's own [T, kv_heads, head_dim]. Returns [T, heads, head_dim]."""


@cache
def has_triton(device: torch.device) -> bool:
    """Whether the kernels of `engine.fused` and of the backend `triton` run there."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def attention_for(attn_impl: str, device: torch.device | str) -> str:
    """The backend that a name stands for on a device: `auto` is `triton` where that runs, else `mha`."""
    if attn_impl != "auto":
        return attn_impl
    return "triton" if has_triton(torch.device(device)) else "mha"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, head_dim] by the rows of `RotaryEmbedding.rows`, in the rotate-half form."""
    wide = x.float()
    return (wide * cos).add_(wide.roll(wide.shape[-1] // 2, -1).mul_(sin)).to(x.dtype)


def write_kv(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write a run's keys and values [T, kv_heads, head_dim] in place into the pages of one layer."""
    k_pages.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_pages.flatten(0, 1).index_copy_(0, slot_mapping, v)


T = TypeVar("T")


def imported(kind: str, path: str) -> Any:
    """What `package.module:name` names. Raises ValueError when it can't be imported."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{kind} {path!r} can't be imported: {error}") from error


class Registry(Generic[T]):
    """Names and the factories behind them; a user may add to it, or name a factory as `package.module:name`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._factories: dict[str, Callable[..., T]] = {}

    def register(self, name: str, factory: Callable[..., T]) -> None:
        self._factories[name] = factory

    def create(self, name: str, *args: Any, **kwargs: Any) -> T:
        """Raises ValueError that lists the known names."""
        if ":" in name:
            factory: Callable[..., T] = imported(self.kind, name)
            return factory(*args, **kwargs)
        if name not in self._factories:
            raise ValueError(f"unknown {self.kind} {name!r}; known: {', '.join(sorted(self._factories))}")
        return self._factories[name](*args, **kwargs)

    def names(self) -> list[str]:
        return sorted(self._factories)


ATTENTION: Registry[AttentionBackend] = Registry("attention implementation")


def _triton() -> AttentionBackend:
    try:
        from engine.attention.paged_triton import TritonAttention
    except ImportError as error:
        raise ImportError("attn_impl 'triton' needs the package triton; attn_impl 'mha' needs nothing") from error
    return TritonAttention()


ATTENTION.register("mha", partial(ATTENTION.create, "engine.attention.sdpa:SDPAttention"))
ATTENTION.register("triton", _triton)
ATTENTION.register("flash_attn", partial(ATTENTION.create, "engine.attention.flash:FlashAttention"))
