"""Two runs side by side, with how sure the differences are."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.text import Text

from app.bench.report import LATENCIES, Report, table

_RESAMPLES = 1000


class Difference(BaseModel):
    """A number of both runs. `low` and `high` hold new / base with 95 % confidence (percentile bootstrap over requests,
    Efron 1979); None where there is nothing to resample."""

    name: str
    base: float
    new: float
    low: float | None = None
    high: float | None = None

    @property
    def is_clear(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def row_latencies(report: Report, name: str) -> np.ndarray:
    """One of LATENCIES of every request that succeeded, in milliseconds."""
    return np.array([value for row in report.requests if (value := _latency(row, name)) is not None])


def _latency(row: dict[str, Any], name: str) -> float | None:
    if row["error"] is not None:
        return None
    if name == "e2e":
        return float(1000 * (row["end"] - row["scheduled"]))
    if row["first"] is None:
        return None
    if name == "ttft":
        return float(1000 * (row["first"] - row["scheduled"]))
    return float(1000 * (row["last"] - row["first"]) / (row["output"] - 1)) if row["output"] > 1 else None


def compare(base: Report, new: Report) -> list[Difference]:
    """What both runs have, in the same order always."""
    found = [
        Difference(name=name, base=getattr(base, field), new=getattr(new, field))
        for name, field in (
            ("requests/s", "requests_per_second"),
            ("output tokens/s", "output_tokens_per_second"),
            ("goodput, requests/s", "goodput"),
            ("failed", "failed"),
        )
    ]
    for latency in LATENCIES:
        old, now = row_latencies(base, latency), row_latencies(new, latency)
        if not len(old) or not len(now):
            continue
        for q in (50, 99):
            low, high = _interval(old, now, q)
            was, is_now = float(np.percentile(old, q)), float(np.percentile(now, q))
            found.append(Difference(name=f"{latency} p{q}, ms", base=was, new=is_now, low=low, high=high))
    return found


def _interval(base: np.ndarray, new: np.ndarray, q: float) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    ratios = [
        np.percentile(rng.choice(new, len(new)), q) / max(np.percentile(rng.choice(base, len(base)), q), 1e-9)
        for _ in range(_RESAMPLES)
    ]
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


def other_options(base: Report, new: Report) -> list[str]:
    """What the runs were not asked alike."""
    names = sorted(base.options.keys() | new.options.keys())
    pairs = [(name, base.options.get(name), new.options.get(name)) for name in names]
    return [f"{name}: {old} and {now}" for name, old, now in pairs if old != now]


def render(base: Report, new: Report) -> RenderableType:
    shown = table("", "base", "new", "new / base", "95 % interval")
    for each in compare(base, new):
        ratio = f"{each.new / each.base:.3f}" if each.base else "–"
        interval = "" if each.low is None or each.high is None else f"{each.low:.3f} to {each.high:.3f}"
        style = "bold" if each.is_clear else ""
        shown.add_row(each.name, f"{each.base:.2f}", f"{each.new:.2f}", ratio, interval, style=style)
    notes = [Text(f"Asked differently: {line}", style="yellow") for line in other_options(base, new)]
    return Group(shown, *notes)
