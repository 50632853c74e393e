"""The size of the KV pool: what fits into the memory that the weights and a forward leave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import memory
from engine.batch_engine import ContinuousBatchingEngine
from engine.memory import fitting_pages
from engine.models.decoder import DecoderModel
from engine.schemas import GenerationRequest
from tests.engine.oracle import tiny_model

PAGE = 2 * 2 * 16 * 2 * 8 * 4  # keys and values, layers, tokens, heads, head_dim, bytes
SIZES = {"max_seq_len": 48, "max_batch_size": 4, "max_batched_tokens": 64}


@pytest.fixture
def model() -> DecoderModel:
    return tiny_model()


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(memory, "_free_memory", lambda device: size)


def test_whole_contexts_where_there_is_memory(model: DecoderModel) -> None:
    assert fitting_pages(model, 16, **SIZES) == 4 * 3
    assert fitting_pages(model, 16, **SIZES, num_pages=7) == 7


def test_what_a_forward_takes_is_not_given_away(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def forward(run: object, device: object) -> int:
        run()  # type: ignore[operator]
        seen.append(device)
        return 10 * PAGE

    monkeypatch.setattr(memory, "_peak_memory", forward)
    free(monkeypatch, 40 * PAGE)
    assert fitting_pages(model, 16, **SIZES, memory_fraction=0.5) == 20 - 10
    assert fitting_pages(model, 16, **SIZES) == 12
    assert fitting_pages(model, 16, **SIZES, num_pages=10, memory_fraction=0.5) == 10
    assert len(seen) == 1  # on a CPU a pool that leaves half of the memory is not worth a forward
    with pytest.raises(ValueError, match="11 pages need .* 50% of the free .* and a forward of 64 tokens takes 0 MiB"):
        fitting_pages(model, 16, **SIZES, num_pages=11, memory_fraction=0.5)
    assert len(seen) == 2


def test_more_than_there_is_fails_with_the_numbers(model: DecoderModel) -> None:
    """By the machine's own figures, and before anything of that size is allocated."""
    with pytest.raises(ValueError, match=r"1000000000000 pages need \d{9,} MiB, 90% of the free \d{2,} MiB"):
        ContinuousBatchingEngine(model, None, page_size=16, num_pages=10**12)
    large = tiny_model(max_seq_len=1 << 20)
    with pytest.raises(ValueError, match=r"one context of 1048576 tokens need 256 MiB, .*: lower max_seq_len"):
        ContinuousBatchingEngine(large, None, page_size=16, memory_fraction=1e-9)
    with pytest.raises(ValueError, match="memory_fraction must be above 0 and at most 1, got 90"):
        ContinuousBatchingEngine(model, None, memory_fraction=90)


def test_an_engine_with_fewer_pages_than_wanted_works(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_peak_memory", lambda run, device: (run(), PAGE)[1])
    free(monkeypatch, 6 * PAGE)
    engine = ContinuousBatchingEngine(model, None, max_batch_size=4, memory_fraction=1.0, page_size=16)
    assert engine.stats().total_pages == 5
    for i in range(4):
        engine.add_request(GenerationRequest(prompt_ids=[5, 6, i], max_new_tokens=40, request_id=str(i), temperature=0))
    while engine.scheduler.has_pending_work:
        engine.step()
    assert all(len(engine.result(str(i)).token_ids) == 40 for i in range(4))


@pytest.mark.parametrize("window", (None, 5))
def test_the_measured_forward_is_the_largest(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a step, at the end of as many contexts as they take, and a row of logits a sequence."""
    model = tiny_model(window_size=window)
    calls = []
    hidden_states, logits = model.hidden_states, model.logits

    def note(call: Callable[..., Tensor], tokens: Tensor, *rest: object) -> Tensor:
        calls.append(len(tokens))
        return call(tokens, *rest)

    monkeypatch.setattr(model, "hidden_states", partial(note, hidden_states))
    monkeypatch.setattr(model, "logits", partial(note, logits))
    for tokens, expected in ((20, [20, 4]), (96, [96, 4]), (1000, [192, 4])):
        calls.clear()
        assert memory._forward_memory(model, 16, 48, rows=4, tokens=tokens) >= 0
        assert calls == expected


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    cpu = torch.device("cpu")
    machine = memory._free_memory(cpu)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{60 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {20 << 20}\n")
    assert memory._free_memory(cpu) > machine / 2
    for limit, free in ((100, 60), (10, 0)):
        (tmp_path / "memory.max").write_text(f"{limit << 20}\n")
        assert memory._free_memory(cpu) == free << 20


def test_measured_peak() -> None:
    old = torch.ones(32 << 20, dtype=torch.uint8)

    def run() -> None:
        nonlocal old
        torch.ones(128 << 20, dtype=torch.uint8)
        torch.ones(64 << 20, dtype=torch.uint8)
        old = torch.ones(())

    assert memory._peak_memory(run, torch.device("cpu")) == 128 << 20
