"""A report as one HTML file: numbers in tables, plots as SVG, nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from jinja2 import Environment

from app.bench.compare import compare, other_options, row_latencies
from app.bench.report import LATENCIES, SPREADS, Report

_NAMES = {"ttft": "Time to first token", "tpot": "Time per output token", "e2e": "End to end"}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 260, 64, 44

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines or dots over two linear axes that begin at 0; `ticks` are those of x, with their names."""

    title: str
    x: str
    y: str
    series: Sequence[tuple[str, Points]]
    ticks: Sequence[tuple[float, str]] = ()
    dots: bool = False

    def svg(self) -> str:
        points = [point for _, part in self.series for point in part]
        if not points:
            return ""
        right = max([x for x, _ in points] + [x for x, _ in self.ticks]) or 1.0
        top = max(y for _, y in points) or 1.0
        ticks = self.ticks or [(value, f"{value:g}") for value in _round_steps(right)]

        def place(x: float, y: float) -> tuple[float, float]:
            across = _LEFT + (_WIDTH - _LEFT - 16) * x / right
            return round(across, 1), round(_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - 14) * y / top, 1)

        parts = []
        for value in _round_steps(top):
            y = place(0, value)[1]
            parts.append(f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - 16}"/>')
            parts.append(f'<text class="y" x="{_LEFT - 6}" y="{y + 4}">{value:g}</text>')
        for value, name in ticks:
            x = place(value, 0)[0]
            parts.append(f'<path class="grid" d="M{x} 14V{_HEIGHT - _BOTTOM}"/>')
            parts.append(f'<text class="x" x="{x}" y="{_HEIGHT - _BOTTOM + 16}">{escape(name)}</text>')
        for i, (_, part) in enumerate(self.series):
            places = [place(*point) for point in part]
            if self.dots:
                parts += [f'<circle class="s{i}" cx="{x}" cy="{y}" r="2"/>' for x, y in places]
            elif places:
                line = "L".join(f"{x} {y}" for x, y in places)
                parts.append(f'<path class="line s{i}" d="M{line}"/>')
        parts.append(f'<text class="x" x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}">{escape(self.x)}</text>')
        parts.append(f'<text class="x" transform="rotate(-90)" x="{-_HEIGHT / 2 + 16}" y="14">{escape(self.y)}</text>')
        names = "; ".join(name for name, _ in self.series if name)
        label = escape(f"{self.title}: {self.y} over {self.x}" + (f", of {names}" if names else ""), quote=True)
        return f'<svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(parts)}</svg>'


def _round_steps(top: float) -> list[float]:
    """About five round values from 0 to `top`."""
    step = 10 ** math.floor(math.log10(top / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if top / (step * factor) <= 6)
    return [round(i * step, 12) for i in range(int(top / step + 1e-9) + 1)]


def _percentiles(report: Report, name: str) -> Points:
    """(-log10 of the share above, milliseconds), up to where one request is left: each nine is as wide as the last."""
    values = np.sort(row_latencies(report, name))
    if not len(values):
        return []
    nines = np.linspace(0, math.log10(len(values)), 200)
    return list(zip(nines.tolist(), np.percentile(values, 100 - 100 * 10**-nines).tolist(), strict=True))


def _over_time(report: Report, value: Callable[[dict[str, float]], float]) -> Points:
    """What ended in each of up to a hundred equal parts of the run, a second."""
    rows = [row for row in report.requests if row["error"] is None]
    if not rows or report.seconds <= 0:
        return []
    bins = np.linspace(0, report.seconds, min(100, max(2, round(report.seconds))) + 1)
    amounts, _ = np.histogram([row["end"] for row in rows], bins, weights=[value(row) for row in rows])
    return list(zip(((bins[1:] + bins[:-1]) / 2).tolist(), (amounts / np.diff(bins)).tolist(), strict=True))


def charts(runs: Sequence[tuple[str, Report]]) -> list[Chart]:
    nines = [(0.0, "0 %"), (math.log10(2), "50 %"), (1.0, "90 %"), (2.0, "99 %"), (3.0, "99.9 %")]
    most = max((len(report.requests) for _, report in runs), default=0)
    ticks = [tick for tick in nines if tick[0] <= math.log10(max(most, 1)) + 1e-9]
    made = [
        Chart(_NAMES[name], "requests", "ms", [(label, _percentiles(report, name)) for label, report in runs], ticks)
        for name in LATENCIES
    ]
    ends = [
        (label, [(row["scheduled"], 1000 * (row["end"] - row["scheduled"])) for row in r.requests if not row["error"]])
        for label, r in runs
    ]
    made.append(Chart("End to end, request by request", "seconds", "ms", ends, dots=True))
    rates = [(label, _over_time(report, lambda row: 1.0)) for label, report in runs]
    made.append(Chart("Requests ended", "seconds", "requests/s", rates))
    tokens = [(label, _over_time(report, lambda row: row["output"])) for label, report in runs]
    made.append(Chart("Output tokens of ended requests", "seconds", "tokens/s", tokens))
    searches = [
        (label, sorted((probe.rate, probe.p99_ms) for probe in report.search if probe.p99_ms is not None))
        for label, report in runs
    ]
    made.append(Chart("The rates tried", "requests/s", "p99, ms", searches, dots=True))
    return [chart for chart in made if any(points for _, points in chart.series)]


def page(runs: Sequence[tuple[str, Report]]) -> str:
    """The whole file, of one run or of two, the first being the base."""
    return _PAGE.render(
        runs=runs,
        charts=[(chart.title, chart.svg()) for chart in charts(runs)],
        spreads=SPREADS,
        columns=("mean", "p50", "p90", "p95", "p99", "p999", "max"),
        differences=compare(runs[0][1], runs[1][1]) if len(runs) == 2 else [],
        others=other_options(runs[0][1], runs[1][1]) if len(runs) == 2 else [],
    )


_PAGE = Environment(autoescape=True).from_string(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>llm-bench: {{ runs | map("first") | join(" and ") }}</title>
<style>
:root { color-scheme: light dark; --ink: light-dark(#1b2126, #e7eaec); --ground: light-dark(#ffffff, #15181b);
  --line: light-dark(#d5dade, #3a4248); --a: light-dark(#0b5c8a, #7cc4ee); --b: light-dark(#b3470f, #f3a26b); }
body { max-width: 76rem; margin: 0 auto; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--ground); }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; } svg text { fill: var(--ink); font-size: 12px; }
.x { text-anchor: middle; } .y { text-anchor: end; }
.grid { stroke: var(--line); } .line { fill: none; stroke-width: 2; }
.line.s0 { stroke: var(--a); } .line.s1 { stroke: var(--b); stroke-dasharray: 6 3; }
circle.s0 { fill: var(--a); } circle.s1 { fill: var(--b); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid var(--line); }
th:first-child { text-align: left; } .clear { font-weight: 700; }
.key::before { content: ""; display: inline-block; width: 1.5rem; border-top: 3px solid var(--a); margin-right: .4rem;
  vertical-align: middle; } .key.s1::before { border-top: 3px dashed var(--b); }
</style>
</head>
<body>
<main>
<h1>llm-bench</h1>
{% if runs | length > 1 %}<p>{% for label, _ in runs %}<span class="key s{{ loop.index0 }}">{{ label }}</span>
{% endfor %}</p>{% endif %}
{% if differences %}
<h2>Compared</h2>
<table>
<tr><th scope="col">number</th><th scope="col">{{ runs[0][0] }}</th><th scope="col">{{ runs[1][0] }}</th>
<th scope="col">ratio</th><th scope="col">95 % interval</th></tr>
{% for d in differences %}<tr{% if d.is_clear %} class="clear"{% endif %}><th scope="row">{{ d.name }}</th>
<td>{{ "%.2f" | format(d.base) }}</td><td>{{ "%.2f" | format(d.new) }}</td>
<td>{% if d.base %}{{ "%.3f" | format(d.new / d.base) }}{% endif %}</td>
<td>{% if d.low is not none %}{{ "%.3f to %.3f" | format(d.low, d.high) }}{% endif %}</td></tr>
{% endfor %}</table>
{% for line in others %}<p>Asked differently: {{ line }}</p>{% endfor %}
{% endif %}
<h2>Plots</h2>
<div class="plots">
{% for title, svg in charts %}<figure><figcaption>{{ title }}</figcaption>{{ svg | safe }}</figure>
{% endfor %}</div>
{% for label, r in runs %}
<h2>{{ label }}</h2>
<p>{{ r.started.strftime("%Y-%m-%d %H:%M:%S %Z") }}: {{ r.succeeded }} requests succeeded, {{ r.failed }} failed,
{{ r.unfinished }} unfinished, in {{ "%.1f" | format(r.seconds) }} s.
{{ "%.2f" | format(r.requests_per_second) }} requests/s,
{{ "%.1f" | format(r.output_tokens_per_second) }} output tokens/s,
{{ "%.1f" | format(r.input_tokens_per_second) }} input tokens/s.
{% if r.objective.model_dump(exclude_none=True) %}Goodput {{ "%.2f" | format(r.goodput) }} requests/s:
{{ "%.1f" | format(100 * r.goodput_share) }} % kept{% for name, bound in r.objective %}
{% if bound is not none %} {{ name }} {{ "%g" | format(bound) }} ms{% endif %}{% endfor %}.{% endif %}</p>
<div class="scroll" role="region" aria-label="Numbers of {{ label }}" tabindex="0"><table>
<tr><th scope="col">number</th>
{% for c in columns %}<th scope="col">{{ c | replace("p999", "p99.9") }}</th>{% endfor %}</tr>
{% for name, field in spreads.items() %}{% if r[field] %}<tr><th scope="row">{{ name }}</th>
{% for c in columns %}<td>{{ "%.1f" | format(r[field][c]) }}</td>{% endfor %}</tr>{% endif %}
{% endfor %}
{% for kind in r.kinds %}{% if kind.e2e_ms %}<tr><th scope="row">end to end, ms: {{ kind.name }}</th>
{% for c in columns %}<td>{{ "%.1f" | format(kind.e2e_ms[c]) }}</td>{% endfor %}</tr>{% endif %}
{% endfor %}</table></div>
{% for f in r.failures %}<p>{{ f.count }} × {{ f.kind }}: {{ f.example }}</p>{% endfor %}
{% for w in r.warnings %}<p>Warning: {{ w }}</p>{% endfor %}
<details><summary>Options</summary><dl>{% for name, value in r.options.items() %}<dt>{{ name }}</dt>
<dd>{{ value | string }}</dd>{% endfor %}</dl></details>
{% endfor %}
</main>
</body>
</html>
"""
)
