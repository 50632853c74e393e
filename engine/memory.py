"""How many KV pages fit beside the weights and what a forward takes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.autograd.profiler import profile

from engine.attention import PackedBatch
from engine.models.decoder import CausalLM

_CGROUP = Path("/sys/fs/cgroup")  # where a container (cgroup v2) sees its own limits


def fitting_pages(
    model: CausalLM,
    page_size: int,
    *,
    max_seq_len: int,
    max_batch_size: int,
    max_batched_tokens: int,
    num_pages: int | None = None,
    memory_fraction: float = 0.9,
) -> int:
    """`num_pages`, or None: pages for `max_batch_size` whole contexts, or as many as there is memory for.

    That is `memory_fraction` of the device's free memory, less what the largest forward takes at its peak, which is
    measured by one. Raises ValueError with the numbers when there is less than `num_pages`, or than one context, need.
    """
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction must be above 0 and at most 1, got {memory_fraction}")
    page_bytes = 2 * model.num_layers * page_size * model.num_kv_heads * model.head_dim * model.dtype.itemsize
    one = -(-max_seq_len // page_size)
    wanted, least = (num_pages, num_pages) if num_pages else (one * max_batch_size, one)
    free = _free_memory(model.device)
    allowed = int(free * memory_fraction)
    # A CPU's forward is slow, and a pool that leaves half of the memory leaves enough for it.
    enough = model.device.type == "cpu" and 2 * wanted * page_bytes <= allowed
    forward = 0
    if least * page_bytes <= allowed and not enough:
        forward = _forward_memory(model, page_size, max_seq_len, max_batch_size, max_batched_tokens)
    pages = min(wanted, max(0, allowed - forward) // page_bytes)
    if pages < least:
        what = f"{num_pages} pages" if num_pages else f"one context of {one * page_size} tokens"
        also = f" and a forward of {max_batched_tokens} tokens takes {_mib(forward)}" if forward else ""
        raise ValueError(
            f"the KV pool doesn't fit: {what} need {_mib(least * page_bytes)}, {memory_fraction:.0%} of the free "
            f"{_mib(free)} may be used{also}: lower {'num_pages' if num_pages else 'max_seq_len'} or max_batched_tokens"
        )
    return pages


def _forward_memory(model: CausalLM, page_size: int, max_seq_len: int, rows: int, tokens: int) -> int:
    """Bytes at the peak of a forward of `tokens` tokens at the end of whole contexts, with the logits of `rows`."""
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)
    count = min(tokens, max_seq_len)
    runs = min(rows, -(-tokens // count))
    # all pages of all layers are one and the same
    storage = torch.zeros(2, 1, page_size, model.num_kv_heads, model.head_dim, dtype=model.dtype, device=model.device)
    table = np.zeros((runs, -(-max_seq_len // page_size)), np.int32)
    starts, counts = np.full(runs, max_seq_len - count), np.full(runs, count)

    @torch.inference_mode()
    def forward() -> None:
        batch = PackedBatch.paged(table, page_size, starts, counts, model.device)
        ids = torch.zeros(runs * count, dtype=torch.long, device=model.device)
        hidden = model.hidden_states(ids, batch, [(storage[0], storage[1])] * model.num_layers)
        model.logits(hidden[:rows]).float()

    return _peak_memory(forward, model.device)


def _peak_memory(run: Callable[[], None], device: torch.device) -> int:
    """Bytes of tensors that `run` makes at its peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()
        return peak - before
    # The kernel's marks hold more than tensors, above all the pages of libraries, which come and go.
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler says on stderr that it starts and stops
    with profile(profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    import psutil  # benchmarks/gpu.py runs where it isn't installed

    available = psutil.virtual_memory().available
    try:
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit, which is "max"
        return available
    return max(0, min(available, limit - used + int(stat.get("inactive_file", 0))))  # the file cache makes room


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
