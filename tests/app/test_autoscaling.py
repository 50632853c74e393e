"""How many replicas a load wants."""

from __future__ import annotations

from types import SimpleNamespace

from app.autoscaling import policy, pressure


def wanted(*loads: tuple[int, int, int], current: int | None = None) -> int:
    """For replicas of 16 rows and 100 pages with these (running, waiting, held pages)."""
    found = {str(i): pressure(running, waiting, 16, held, 100) for i, (running, waiting, held) in enumerate(loads)}
    context = SimpleNamespace(
        aggregated_metrics={"pressure": found}, current_num_replicas=current or len(loads), target_num_replicas=7
    )
    return policy(context)[0]


def test_the_fuller_of_rows_and_pages_counts() -> None:
    assert wanted((0, 0, 0), (0, 0, 0)) == 0  # Serve keeps the minimum
    assert wanted((12, 0, 10)) == wanted((1, 0, 75)) == 1
    assert wanted((13, 0, 10)) == wanted((1, 0, 80)) == 2
    assert wanted((13, 0, 80), (2, 0, 10), (2, 0, 10)) == 2


def test_what_waits_counts_by_what_runs_at_once() -> None:
    assert wanted((16, 16, 50)) == 3
    assert wanted((4, 4, 100)) == 3  # pages are short: 4 run where 16 could
    assert wanted((0, 8, 0)) == 1


def test_without_word_of_a_replica_nothing_changes() -> None:
    assert wanted((0, 0, 0), current=2) == 7
    context = SimpleNamespace(aggregated_metrics=None, current_num_replicas=1, target_num_replicas=1)
    assert policy(context)[0] == 1
