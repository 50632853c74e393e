"""What a benchmark run says: numbers from its samples, as JSON and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import numpy as np
from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from app.bench.load import UNFINISHED, Run, Sample

PERCENTILES = (50, 90, 95, 99)


class Spread(BaseModel):
    """Of `n` values: mean, extremes, and percentiles by linear interpolation (numpy's default)."""

    n: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None for no values; None among them is left out."""
        array = np.array([value for value in values if value is not None])
        if not array.size:
            return None
        levels = {
            f"p{q}": float(value) for q, value in zip(PERCENTILES, np.percentile(array, PERCENTILES), strict=True)
        }
        return cls(n=array.size, mean=float(array.mean()), min=float(array.min()), max=float(array.max()), **levels)


class Failure(BaseModel):
    kind: str
    count: int
    example: str


class Report(BaseModel):
    """The measured part of a run. Latencies are of the requests that succeeded, in milliseconds.

    ttft_ms, e2e_ms: from the scheduled send time to the first text and to the end of the answer. itl_ms: between
    successive pieces of text of an answer, all answers pooled. tpot_ms: one value an answer, its time from first to
    last text over its tokens less one; unlike itl_ms it doesn't depend on how many tokens a piece holds. late_ms: how
    long after its schedule the client sent a request. `seconds` is from the first scheduled send to the last end;
    rates are over it. client_cpu_ms is this process's CPU time per request, client_cpu_share its part of one core.
    """

    started: datetime
    options: dict[str, Any]
    interrupted: bool
    seconds: float
    succeeded: int
    failed: int
    unfinished: int
    failures: list[Failure]
    requests_per_second: float
    output_tokens_per_second: float
    input_tokens_per_second: float
    input_tokens: Spread | None
    output_tokens: Spread | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    late_ms: Spread | None
    client_cpu_ms: float
    client_cpu_share: float
    warnings: list[str]
    requests: list[dict[str, Any]]

    @classmethod
    def of(cls, run: Run, *, started: datetime, options: dict[str, Any], interrupted: bool = False) -> Report:
        samples = run.samples
        good = [sample for sample in samples if sample.error is None]
        bad = [sample for sample in samples if sample.error not in (None, UNFINISHED)]
        seconds = max((sample.end for sample in samples), default=run.start) - run.start

        def a_second(amount: float) -> float:
            return amount / seconds if seconds > 0 else 0.0

        def milliseconds(value: Callable[[Sample], float | None]) -> Spread | None:
            return Spread.of(None if (x := value(sample)) is None else 1000 * x for sample in good)

        cpu_seconds = run.cpu_seconds if samples else 0.0
        report = cls(
            started=started,
            options=options,
            interrupted=interrupted,
            seconds=seconds,
            succeeded=len(good),
            failed=len(bad),
            unfinished=len(samples) - len(good) - len(bad),
            failures=_failures(bad),
            requests_per_second=a_second(len(good)),
            output_tokens_per_second=a_second(sum(sample.output_tokens for sample in good)),
            input_tokens_per_second=a_second(sum(sample.input_tokens or 0 for sample in good)),
            input_tokens=Spread.of(sample.input_tokens for sample in good),
            output_tokens=Spread.of(sample.output_tokens for sample in good),
            ttft_ms=milliseconds(lambda sample: sample.first and sample.first - sample.scheduled),
            tpot_ms=milliseconds(_time_per_output_token),
            itl_ms=Spread.of(1000 * gap for sample in good for gap in sample.gaps),
            e2e_ms=milliseconds(lambda sample: sample.end - sample.scheduled),
            late_ms=Spread.of(1000 * (sample.sent - sample.scheduled) for sample in samples),
            client_cpu_ms=1000 * cpu_seconds / max(1, len(samples)),
            client_cpu_share=a_second(cpu_seconds),
            warnings=[],
            requests=[_row(sample, run.start) for sample in sorted(samples, key=lambda sample: sample.scheduled)],
        )
        report.warnings = _warnings(report, good, run)
        return report

    def render(self) -> RenderableType:
        counts = Text(f"{self.succeeded} requests succeeded in {self.seconds:.1f} s", style="bold")
        if self.failed:
            counts.append(f", {self.failed} failed", style="bold red")
        if self.unfinished:
            counts.append(f", {self.unfinished} unfinished (interrupted)", style="bold yellow")
        rates = Text(
            f"{self.requests_per_second:.2f} requests/s · {self.output_tokens_per_second:.1f} output tokens/s · "
            f"{self.input_tokens_per_second:.1f} input tokens/s · client {self.client_cpu_ms:.2f} CPU ms a request "
            f"({self.client_cpu_share:.0%} of a core)"
        )
        spreads = Table("", "mean", *(f"p{q}" for q in PERCENTILES), "max", title_justify="left")
        for column in spreads.columns[1:]:
            column.justify = "right"
        for name, spread in (
            ("time to first token, ms", self.ttft_ms),
            ("time per output token, ms", self.tpot_ms),
            ("inter-token latency, ms", self.itl_ms),
            ("end to end, ms", self.e2e_ms),
            ("sent after schedule, ms", self.late_ms),
            ("input tokens", self.input_tokens),
            ("output tokens", self.output_tokens),
        ):
            if spread:
                values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
                spreads.add_row(name, *(f"{value:.1f}" for value in values))
        parts: list[RenderableType] = [counts, rates, spreads]
        if self.failures:
            failures = Table("failure", "count", "the first one")
            for failure in self.failures:
                failures.add_row(failure.kind, str(failure.count), Text(failure.example))
            parts.append(failures)
        parts += [Text(f"Warning: {warning}", style="yellow") for warning in self.warnings]
        return Group(*parts)


def _time_per_output_token(sample: Sample) -> float | None:
    if sample.first is None or sample.last is None or sample.output_tokens < 2:
        return None
    return (sample.last - sample.first) / (sample.output_tokens - 1)


def _failures(bad: list[Sample]) -> list[Failure]:
    examples: dict[str, str] = {}
    for sample in bad:
        examples.setdefault(str(sample.error), sample.detail)
    counts = Counter(str(sample.error) for sample in bad)
    return [Failure(kind=kind, count=count, example=examples[kind]) for kind, count in counts.most_common()]


def _row(sample: Sample, start: float) -> dict[str, Any]:
    """Times in seconds from the start of the measured part, to the microsecond."""
    times = {name: getattr(sample, name) for name in ("scheduled", "sent", "first", "last", "end")}
    row: dict[str, Any] = {name: None if at is None else round(at - start, 6) for name, at in times.items()}
    return row | {"input": sample.input_tokens, "output": sample.output_tokens, "error": sample.error}


def _warnings(report: Report, good: list[Sample], run: Run) -> list[str]:
    warnings = []
    if uncounted := sum(sample.input_tokens is None for sample in good):
        warnings.append(f"{uncounted} answers came without usage: their output tokens are pieces of text, counted here")
    odd = sum(sample.output_tokens != sample.asked_tokens for sample in good)
    if run.target.ignore_eos and odd:
        warnings.append(f"{odd} answers have another length than asked for: the server doesn't do ignore_eos")
    if report.client_cpu_share > 0.8:
        warnings.append("the client was busy most of the time: its own delays are in the latencies")
    return warnings
