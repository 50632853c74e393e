"""The fused kernels in Triton's interpreter, against torch and against the sampler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine import fused, sampling
from engine.sampling import gumbel_noise
from tests.engine.test_sampling import sampled_rows, test_every_row_is_the_oracles

judge = test_every_row_is_the_oracles.hypothesis.inner_test  # type: ignore[attr-defined]
del test_every_row_is_the_oracles


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("size", (64, 100, 576))
def test_add_rms_norm(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, size, generator=generator), torch.randn(size, generator=generator)
    delta = torch.randn(5, size, generator=generator).to(dtype)
    for added in (None, delta):
        total = x if added is None else x + added
        inplace = x.clone()
        out = fused.add_rms_norm(inplace, added, weight, 1e-5, dtype)
        torch.testing.assert_close(inplace, total)
        torch.testing.assert_close(out, F.rms_norm(total, (size,), weight, 1e-5).to(dtype))


def test_silu_mul() -> None:
    gate_up = torch.randn(3, 2 * 1500, generator=torch.Generator().manual_seed(0)) * 5
    gate, up = gate_up.chunk(2, 1)
    torch.testing.assert_close(fused.silu_mul(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("vocab", (50, 4096, 9000))
def test_choose(vocab: int) -> None:
    """Greedy rows and drawn ones, at any seed and position; of equal scores the first; no choice is told."""
    generator = torch.Generator().manual_seed(vocab)
    padded = torch.randn(40, vocab + 7, generator=generator)
    padded[:, vocab:] = 1e9
    scores = padded[:, :vocab]
    temperatures = torch.tensor([1e-30, 1.0, 0.7, 1.3])
    seeds = torch.tensor([3, -5, 2**62, 7])
    row_ids = torch.randint(0, 4, (40,), generator=generator)
    positions = torch.randint(0, 2**17, (40,), generator=generator)
    row_ids[:4] = torch.tensor([0, 0, 1, 1])
    scores[0, 11] = scores[0, vocab - 3] = 50.0
    scores[1], scores[2] = -torch.inf, -torch.inf
    scores[3, vocab - 1] = torch.nan
    noise = gumbel_noise(seeds[row_ids], positions, torch.arange(vocab, dtype=torch.int32).unsqueeze(0))
    drawn = (row_ids > 0).unsqueeze(1)
    noisy = torch.where(drawn, scores / temperatures[row_ids].unsqueeze(1) + noise, scores)
    expected = noisy.max(1).indices
    expected[0], expected[1:4] = 11, -2
    filters = torch.zeros(4, dtype=torch.int64), torch.ones(4), torch.full((4,), -torch.inf)
    got = fused.choose(scores, row_ids, positions, temperatures, seeds, filters, -2)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize(("vocab", "spread"), ((50, 1), (2500, 1), (2500, 4)))
def test_choose_among_what_filters_keep(vocab: int, spread: float) -> None:
    """What they keep is transformers'."""
    generator = torch.Generator().manual_seed(vocab)
    table = [
        (temperature, top_k, top_p, min_p)
        for temperature in (1.0, 0.6, 1e-30)
        for top_k, top_p, min_p in (
            (0, 0.4, 0),
            (7, 1.0, 0),
            (0, 1.0, 0.3),
            (20, 0.7, 0.1),
            (0, 0.999, 0),
            (vocab, 1.0, 0),
        )
    ]
    temperatures, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*table, strict=True))
    row_ids = torch.arange(len(table)).repeat(3)
    scores = (torch.randn(len(row_ids), vocab + 7, generator=generator) * spread)[:, :vocab]
    scores[-len(table), 9] = torch.inf
    seeds, positions = torch.arange(len(table)) * 7, torch.arange(len(row_ids)) * 31 + 1
    noise = gumbel_noise(seeds[row_ids], positions, torch.arange(vocab, dtype=torch.int32).unsqueeze(0))
    expected, moved = [], 0
    for i, row in enumerate(row_ids.tolist()):
        temperature, *filters = table[row]
        if temperature < 1e-9:
            expected.append(int(scores[i].argmax()))
            continue
        tempered = scores[i : i + 1] / temperature
        warpers = [
            warper(value)
            for warper, value in zip((TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper), filters, strict=True)
            if value and value != 1.0
        ]
        kept = LogitsProcessorList(warpers)(None, tempered)  # type: ignore[arg-type]
        expected.append(int((kept + noise[i]).argmax()))
        moved += expected[-1] != int((tempered + noise[i]).argmax())
    got = fused.choose(scores, row_ids, positions, temperatures, seeds, (top_k, top_p, min_p.log()), -2)
    assert got.tolist() == expected
    assert moved > 3


@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(case=sampled_rows())
def test_sampler(monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    """As the sampler's own test, by the fused choice."""
    monkeypatch.setattr(sampling, "has_triton", lambda device: True)
    judge(case)
