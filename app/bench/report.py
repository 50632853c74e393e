"""What a benchmark run says: numbers from its samples, as JSON and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import numpy as np
from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from app.bench.load import UNFINISHED, Run, Sample

PERCENTILES = (50, 90, 95, 99, 99.9)
LATENCIES = ("ttft", "tpot", "e2e")
SPREADS = {
    "time to first token, ms": "ttft_ms",
    "time per output token, ms": "tpot_ms",
    "inter-token latency, ms": "itl_ms",
    "end to end, ms": "e2e_ms",
    "sent after schedule, ms": "late_ms",
    "input tokens": "input_tokens",
    "of them cached": "cached_tokens",
    "output tokens": "output_tokens",
}
"""The fields of a Report that are spreads, by what a reader calls them."""


class Spread(BaseModel):
    """Of `n` values: mean, extremes, and percentiles by linear interpolation (numpy's default)."""

    n: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None for no values; None among them is left out."""
        array = np.array([value for value in values if value is not None])
        if not array.size:
            return None
        levels = {
            f"p{q}".replace(".", ""): float(value)
            for q, value in zip(PERCENTILES, np.percentile(array, PERCENTILES), strict=True)
        }
        return cls(n=array.size, mean=float(array.mean()), min=float(array.min()), max=float(array.max()), **levels)


class Objective(BaseModel):
    """Bounds in milliseconds that an answer keeps, or doesn't; a failed request never does."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def is_kept(self, sample: Sample) -> bool:
        if sample.error is not None:
            return False
        bounds = ((name, bound) for name, bound in self if bound is not None)
        return all((value := latency(sample, name)) is not None and value <= bound for name, bound in bounds)


class KindReport(BaseModel):
    """What became of one kind of a mix."""

    name: str
    succeeded: int
    failed: int
    input_tokens: Spread | None
    output_tokens: Spread | None
    ttft_ms: Spread | None
    e2e_ms: Spread | None


class Failure(BaseModel):
    kind: str
    count: int
    example: str


class Probe(BaseModel):
    """One rate that was tried; p99_ms is that of the bounded latency, None for infinity."""

    rate: float
    p99_ms: float | None
    is_kept: bool


class Report(BaseModel):
    """The measured part of a run. Latencies are of the requests that succeeded, in milliseconds.

    ttft_ms, e2e_ms: from the scheduled send time to the first text and to the end of the answer. itl_ms: between
    successive pieces of text of an answer, all answers pooled. tpot_ms: one value an answer, its time from first to
    last text over its tokens less one; unlike itl_ms it doesn't depend on how many tokens a piece holds. late_ms: how
    long after its schedule the client sent a request. `seconds` is from the first scheduled send to the last end;
    rates are over it. Of all requests that came to an end, goodput_share kept the objective, goodput of them a second;
    p99_ms are percentiles over all of these, a failure counting as endless: None is infinity. cached_tokens are those
    input tokens that the server had in its prefix cache, if it says so. client_cpu_ms is this
    process's CPU time per request, client_cpu_share its part of one core. search: what --find-rate tried.
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
    cached_tokens: Spread | None = None
    output_tokens: Spread | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    late_ms: Spread | None
    objective: Objective
    goodput: float
    goodput_share: float
    p99_ms: dict[str, float | None]
    kinds: list[KindReport]
    client_cpu_ms: float
    client_cpu_share: float
    warnings: list[str]
    search: list[Probe] = []
    requests: list[dict[str, Any]]

    @classmethod
    def of(
        cls,
        run: Run,
        *,
        started: datetime,
        options: dict[str, Any],
        interrupted: bool = False,
        objective: Objective | None = None,
    ) -> Report:
        objective = objective or Objective()
        samples = run.samples
        good = [sample for sample in samples if sample.error is None]
        bad = [sample for sample in samples if sample.error not in (None, UNFINISHED)]
        seconds = max((sample.end for sample in samples), default=run.start) - run.start

        def a_second(amount: float) -> float:
            return amount / seconds if seconds > 0 else 0.0

        def spread(name: str) -> Spread | None:
            return Spread.of(latency(sample, name) for sample in good)

        ended = len(good) + len(bad)
        kept = sum(objective.is_kept(sample) for sample in good)
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
            cached_tokens=Spread.of(sample.cached_tokens for sample in good),
            output_tokens=Spread.of(sample.output_tokens for sample in good),
            ttft_ms=spread("ttft"),
            tpot_ms=spread("tpot"),
            itl_ms=Spread.of(1000 * gap for sample in good for gap in sample.gaps),
            e2e_ms=spread("e2e"),
            late_ms=Spread.of(1000 * (sample.sent - sample.scheduled) for sample in samples),
            objective=objective,
            goodput=a_second(kept),
            goodput_share=kept / ended if ended else 0.0,
            p99_ms={name: _p99(good, len(bad), name) for name in LATENCIES},
            kinds=[_kind(kind.name, samples) for kind in run.load.mix] if len(run.load.mix) > 1 else [],
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
        if self.objective != Objective():
            bounds = ", ".join(f"{name} {bound:g} ms" for name, bound in self.objective if bound is not None)
            rates.append(f"\nGoodput {self.goodput:.2f} requests/s: {self.goodput_share:.1%} kept {bounds}")
        spreads = table("", "mean", *(f"p{q}" for q in PERCENTILES), "max")
        for name, field in SPREADS.items():
            spread: Spread | None = getattr(self, field)
            if spread:
                values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.p999, spread.max)
                spreads.add_row(name, *(f"{value:.1f}" for value in values))
        parts: list[RenderableType] = [counts, rates, spreads]
        if self.kinds:
            names = ("kind", "succeeded", "failed", "input", "output", "ttft p50", "ttft p99", "e2e p50", "e2e p99")
            kinds = table(*names)
            for kind in self.kinds:
                ttft, e2e = kind.ttft_ms, kind.e2e_ms
                lengths = [kind.input_tokens and kind.input_tokens.mean, kind.output_tokens and kind.output_tokens.mean]
                times = [ttft and ttft.p50, ttft and ttft.p99, e2e and e2e.p50, e2e and e2e.p99]
                shown = ["–" if value is None else f"{value:.1f}" for value in (*lengths, *times)]
                kinds.add_row(kind.name, str(kind.succeeded), str(kind.failed), *shown)
            parts.append(kinds)
        if self.search:
            probes = table("requests/s", "p99, ms", "bound kept")
            for probe in self.search:
                p99 = "–" if probe.p99_ms is None else f"{probe.p99_ms:.1f}"
                probes.add_row(f"{probe.rate:.2f}", p99, "yes" if probe.is_kept else "no")
            parts.append(probes)
        if self.failures:
            failures = Table("failure", "count", "the first one")
            for failure in self.failures:
                failures.add_row(failure.kind, str(failure.count), Text(failure.example))
            parts.append(failures)
        parts += [Text(f"Warning: {warning}", style="yellow") for warning in self.warnings]
        return Group(*parts)


def latency(sample: Sample, name: str) -> float | None:
    """One of LATENCIES, in milliseconds; None where there is none."""
    if name == "e2e":
        return 1000 * (sample.end - sample.scheduled)
    if sample.first is None:
        return None
    if name == "ttft":
        return 1000 * (sample.first - sample.scheduled)
    if sample.last is None or sample.output_tokens < 2:
        return None
    return 1000 * (sample.last - sample.first) / (sample.output_tokens - 1)


def _p99(good: list[Sample], failed: int, name: str) -> float | None:
    values = [value for sample in good if (value := latency(sample, name)) is not None] + [np.inf] * failed
    # between a number and infinity nothing is interpolated
    p99 = float(np.percentile(values, 99, method="inverted_cdf" if failed else "linear")) if values else np.inf
    return p99 if p99 < np.inf else None


def _kind(name: str, samples: list[Sample]) -> KindReport:
    mine = [sample for sample in samples if sample.kind == name]
    good = [sample for sample in mine if sample.error is None]
    return KindReport(
        name=name,
        succeeded=len(good),
        failed=sum(sample.error not in (None, UNFINISHED) for sample in mine),
        input_tokens=Spread.of(sample.input_tokens for sample in good),
        output_tokens=Spread.of(sample.output_tokens for sample in good),
        ttft_ms=Spread.of(latency(sample, "ttft") for sample in good),
        e2e_ms=Spread.of(latency(sample, "e2e") for sample in good),
    )


def table(*names: str) -> Table:
    """A table with numbers in all columns but the first."""
    made = Table(*names)
    for column in made.columns[1:]:
        column.justify = "right"
    return made


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
    counts = {"input": sample.input_tokens, "output": sample.output_tokens}
    return row | counts | {"kind": sample.kind, "error": sample.error}


def _warnings(report: Report, good: list[Sample], run: Run) -> list[str]:
    warnings = []
    if uncounted := sum(sample.input_tokens is None for sample in good):
        warnings.append(f"{uncounted} answers came without usage: their output tokens are pieces of text, counted here")
    odd = sum(sample.output_tokens != sample.asked_tokens for sample in good)
    if run.target.ignore_eos and odd:
        warnings.append(f"{odd} answers have another length than asked for: the server doesn't do ignore_eos")
    if report.client_cpu_share > 0.8:
        warnings.append("the client was busy most of the time: its own delays are in the latencies")
    elif report.late_ms and report.e2e_ms and report.late_ms.p99 > 0.1 * report.e2e_ms.p50:
        warnings.append(
            f"one request in a hundred was sent {report.late_ms.p99:.0f} ms late: the client had no free core"
        )
    return warnings
