"""The highest rate that a server keeps up with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from app.bench.report import Probe, Report

LOWEST = 1 / 8
"""Of the first rate: below it nothing is tried, as a hundred requests would take too long."""


async def find_rate(
    measure: Callable[[float], Awaitable[Report]],
    name: str,
    bound_ms: float,
    start: float,
    precision: float = 0.05,
) -> Report | None:
    """The report of the highest rate found at which the p99 of latency `name` is at most `bound_ms`; None for none.

    From `start` in doublings or halvings to a rate that is kept and one that isn't, then between them, until they are
    within `precision`. The report's `search` has all that was tried. An interrupted run ends the search.
    """
    probes: list[Probe] = []
    best: Report | None = None
    kept, missed = 0.0, float("inf")
    rate = start
    while missed > kept * (1 + precision) and rate >= start * LOWEST:
        report = await measure(rate)
        if report.interrupted:
            break
        p99 = report.p99_ms[name]
        is_kept = p99 is not None and p99 <= bound_ms
        probes.append(Probe(rate=rate, p99_ms=p99, is_kept=is_kept))
        if is_kept:
            kept, best = rate, report
        else:
            missed = rate
        rate = 2 * kept if missed == float("inf") else (kept * missed) ** 0.5 if kept else missed / 2
    return best and best.model_copy(update={"search": probes})
