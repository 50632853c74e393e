"""The simulator's arithmetic: against closed forms, the engine's own rule of acceptance, and the table in the docs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.speculation_simulator import Costs, ahead, synchronous, table, tokens_a_step
from engine.speculation import accept

GUIDE = Path(__file__).parents[1] / "docs" / "speculation.md"


@pytest.mark.parametrize(("acceptance", "gamma"), [(0.0, 3), (0.3, 1), (0.7, 4), (0.9, 8), (1.0, 5)])
def test_tokens_a_step_are_those_of_the_engines_rule(acceptance: float, gamma: int) -> None:
    rng = np.random.default_rng(0)
    drafts = np.zeros((20_000, gamma), dtype=np.int64)
    samples = (rng.random((20_000, gamma + 1)) >= acceptance).astype(np.int64)
    assert tokens_a_step(acceptance, gamma) == pytest.approx(accept(samples, drafts).mean() + 1, rel=0.02)


def test_synchronous_is_the_closed_form() -> None:
    a, g = 0.8, 4
    foretold = (1 - a ** (g + 1)) / (1 - a) / (0.03 + 4 * 0.002 + 0.01 + 4 * 0.0005)
    assert synchronous(a, g, Costs(step=0.03, draft=0.002, round_trip=0.01, token=0.0005)) == pytest.approx(foretold)


@pytest.mark.parametrize("acceptance", [0.0, 0.4, 0.8, 0.95, 1.0])
def test_ahead_with_a_draft_that_takes_no_time(acceptance: float) -> None:
    rate = ahead(acceptance, 4, Costs(step=0.5), tokens=10_000)
    assert rate == pytest.approx(tokens_a_step(acceptance, 4) / 0.5, rel=0.03)


@pytest.mark.parametrize(("acceptance", "gamma"), [(0.8, 2), (0.9, 4), (0.95, 6)])
def test_ahead_waits_only_after_a_miss(acceptance: float, gamma: int) -> None:
    """The next proposal is there when all drafts stand and the target's own token is the draft's too."""
    costs = Costs(step=1.0, draft=0.05, round_trip=0.1)
    miss = 1 - acceptance ** (gamma + 1)
    foretold = tokens_a_step(acceptance, gamma) / (1 + miss * (0.1 + gamma * 0.05))
    assert ahead(acceptance, gamma, costs, tokens=10_000) == pytest.approx(foretold, rel=0.03)
    assert ahead(acceptance, gamma, costs) > synchronous(acceptance, gamma, costs)


def test_ahead_is_bound_by_the_slower_of_the_two() -> None:
    assert ahead(1.0, 4, Costs(step=1.0, draft=0.1)) == pytest.approx(5, rel=0.01)
    assert ahead(1.0, 4, Costs(step=1.0, draft=0.4)) == pytest.approx(1 / 0.4, rel=0.02)


def test_ahead_doesnt_wait_for_a_draft_that_isnt_worth_it() -> None:
    assert ahead(0.3, 4, Costs(step=1.0, draft=0.5, round_trip=0.5)) >= 1.0
    assert synchronous(0.3, 4, Costs(step=1.0, draft=0.5, round_trip=0.5)) < 0.5


def test_the_guides_tables_are_the_simulators() -> None:
    assert table() in GUIDE.read_text()
