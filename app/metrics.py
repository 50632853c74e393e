"""The one place that defines each metric, and how the series of many processes become one page.

Every process has one `Metrics(replica)` and answers `snapshot()`. Counters are never summed over processes: a sum
would fall when one of them dies.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

if TYPE_CHECKING:
    from engine.batch_engine import EngineStats, StepStats
    from engine.speculation import SpeculationStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENDPOINTS = ("generate", "batch_generate", "chat_completions", "completions")
HIT_RATIO_WINDOW = 60.0
"""Seconds of prompts that llm_kv_cache_hit_ratio looks back on."""

_REQUEST_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2, 0.225, 0.25, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0),
)
_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.25, 0.5, 1.0, 2.5, 5.0),
)
_TOKENS = tuple(float(2**i) for i in range(14))


class Metrics:
    """The metrics of one process, in a registry of its own. Impossible observations raise ValueError."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self._registry = CollectorRegistry()
        self._inflight = self._gauge("llm_inflight_requests", "generating HTTP requests in progress")
        self._tokens = self._counter("llm_tokens_generated", "sampled tokens of ended requests", "endpoint")
        self._tokens_per_request = self._histogram(
            "llm_tokens_per_request", "sampled tokens of an HTTP request", _TOKENS, "endpoint"
        )
        self._request_seconds = self._histogram(
            "llm_request_duration_seconds",
            "from a generating request's arrival to its last byte; status 499: the client left",
            _REQUEST_SECONDS,
            "endpoint",
            "status",
        )
        self._first_token = self._histogram(
            "llm_time_to_first_token_seconds", "of streams: arrival to first token", _REQUEST_SECONDS, "endpoint"
        )
        self._inter_token = self._histogram(
            "llm_inter_token_latency_seconds",
            "between two writes of a stream, by the tokens of the later one; one observation a write",
            _TOKEN_SECONDS,
            "endpoint",
        )
        self._http_requests = self._counter("llm_http_requests", "HTTP requests ended", "route", "status")
        self._http_seconds = self._histogram(
            "llm_http_request_duration_seconds", "from arrival to the last byte", _REQUEST_SECONDS, "route"
        )
        self._failovers = self._counter("llm_failovers", "attempts that a replica lost or gave back, made anew")

        self._fill = self._gauge("llm_batch_fill_ratio", "sequences in the last step by max_batch_size")
        self._hit_ratio = self._gauge(
            "llm_kv_cache_hit_ratio", f"prompt tokens found in the prefix cache, of the last {HIT_RATIO_WINDOW:g} s"
        )
        self._running = self._gauge("llm_requests_running", "sequences that hold KV pages")
        self._waiting = self._gauge("llm_requests_waiting", "sequences in the engine's queue")
        self._kv_use = self._gauge("llm_kv_cache_usage_ratio", "KV pages held by running sequences, of all")
        self._phases = tuple(
            self._histogram(f"llm_{name}_seconds", f"from a sequence's {phase}", _REQUEST_SECONDS)
            for name, phase in (
                ("queue_wait", "arrival at the engine to its first step"),
                ("prefill", "first step to its first token"),
                ("decode", "first token to its end"),
            )
        )
        self._engine_counts = {
            name: self._counter(f"llm_engine_{name}", help)
            for name, help in {
                "prompt_tokens": "prompt tokens of admitted sequences",
                "cached_tokens": "prompt tokens found in the prefix cache",
                "generated_tokens": "tokens sampled by the engine, those cut at stop strings included",
                "preemptions": "sequences that lost their pages and are computed again",
                "finished_requests": "sequences that came to their own end",
                "aborted_requests": "sequences aborted",
                "failed_requests": "sequences that ended with an error",
            }.items()
        }
        self._speculation_counts = {
            name: self._counter(f"llm_speculation_{name}", help)
            for name, help in {
                "drafted": "proposed tokens that the model verified",
                "accepted": "proposed tokens that were the model's own",
                "ready": "proposals of a draft process that were there before they were asked for",
            }.items()
        }
        self._speculation_counts["draft_losses"] = self._counter(
            "llm_draft_losses", "a draft process that had answered died, or was silent for too long"
        )
        self._draft_up = self._gauge("llm_draft_up", "1 while this engine's draft process answers it")
        self._draft_round_trip = self._histogram(
            "llm_draft_round_trip_seconds", "from a step's message to the draft process to its answer", _TOKEN_SECONDS
        )
        self._engine_seen = dict.fromkeys((*self._engine_counts, *self._speculation_counts), 0)
        self._hits: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)])
        for endpoint in ENDPOINTS:  # a series that begins at 0 has a first increase
            for metric in (self._tokens, self._tokens_per_request, self._first_token, self._inter_token):
                metric.labels(endpoint)

    # --- the ingress

    def request_started(self) -> None:
        self._inflight.inc()

    def request_ended(self, endpoint: str, status: int, seconds: float, tokens: int | None) -> None:
        """A generating request has ended, well or not. `tokens` is None for one that no engine was asked about."""
        self._request_seconds.labels(endpoint, str(status)).observe(_seconds(seconds))
        if tokens is not None:
            self._tokens.labels(endpoint).inc(_count(tokens))
            self._tokens_per_request.labels(endpoint).observe(tokens)
        self._inflight.dec()

    def http_ended(self, route: str, status: int, seconds: float) -> None:
        self._http_requests.labels(route, str(status)).inc()
        self._http_seconds.labels(route).observe(_seconds(seconds))

    def time_to_first_token(self, endpoint: str, seconds: float) -> None:
        self._first_token.labels(endpoint).observe(_seconds(seconds))

    def inter_token(self, endpoint: str, seconds: float) -> None:
        self._inter_token.labels(endpoint).observe(_seconds(seconds))

    # --- the Router

    def failover(self) -> None:
        self._failovers.inc()

    # --- the engine's process

    def record_batch_fill_ratio(self, step: StepStats) -> None:
        """An engine's step observer: one gauge a step."""
        if not 0 <= step.scheduled <= step.max_batch_size or step.max_batch_size < 1:
            raise ValueError(f"{step.scheduled} sequences in a step of at most {step.max_batch_size}")
        self._fill.set(step.scheduled / step.max_batch_size)

    def record_engine(self, stats: EngineStats) -> None:
        """The engine's state now, and what its counts grew by."""
        self._running.set(_count(stats.running))
        self._waiting.set(_count(stats.waiting))
        self._kv_use.set(_ratio(stats.held_pages, stats.total_pages))
        if not stats.running:
            self._fill.set(0.0)  # an idle engine steps no more, so its observer can't say so
        self._count_up(self._engine_counts, stats)
        self._record_hits(stats.prompt_tokens, stats.cached_tokens)

    def record_speculation(self, stats: SpeculationStats) -> None:
        """What the engine's speculation counts grew by, and whether its draft process answers."""
        self._count_up(self._speculation_counts, stats)
        self._draft_up.set(stats.draft_up)

    def _count_up(self, counters: dict[str, Counter], stats: object) -> None:
        for name, counter in counters.items():
            now = getattr(stats, name)
            counter.inc(_count(now - self._engine_seen[name]))
            self._engine_seen[name] = now

    def draft_round_trip(self, seconds: float) -> None:
        self._draft_round_trip.observe(_seconds(seconds))

    def _record_hits(self, prompt_tokens: int, cached_tokens: int) -> None:
        now = time.monotonic()
        self._hits.append((now, prompt_tokens, cached_tokens))
        while len(self._hits) > 1 and self._hits[1][0] <= now - HIT_RATIO_WINDOW:
            self._hits.popleft()
        _, prompt_before, cached_before = self._hits[0]
        # Prompts count at their arrival and hits at a start or restart, which may fall into different windows.
        prompts, hits = prompt_tokens - prompt_before, cached_tokens - cached_before
        self._hit_ratio.set(min(1.0, hits / prompts) if prompts else 0.0)

    def sequence_ended(self, queue_wait: float, prefill: float | None, decode: float | None) -> None:
        """Seconds that a sequence spent in each phase; None for those that it didn't come to."""
        for histogram, seconds in zip(self._phases, (queue_wait, prefill, decode), strict=True):
            if seconds is not None:
                histogram.observe(_seconds(seconds))

    # --- out

    def families(self) -> Iterator[Metric]:
        """Every metric with its samples now."""
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric

    def snapshot(self) -> bytes:
        """All series of this process, for `render`."""
        families = [
            (metric.name, metric.documentation, metric.type, [(s.name, s.labels, s.value) for s in metric.samples])
            for metric in self.families()
        ]
        return orjson.dumps((self.replica, families))

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(name, help, registry=self._registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, labels, registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, help, labels, buckets=buckets, registry=self._registry)


def render(snapshots: Iterable[bytes]) -> bytes:
    """The union of the processes' series in Prometheus text format, told apart by the label `replica`."""
    families: dict[str, Metric] = {}
    for snapshot in snapshots:
        replica, metrics = orjson.loads(snapshot)
        for name, help, kind, samples in metrics:
            family = families.setdefault(name, Metric(name, help, kind))
            for sample_name, labels, value in samples:
                family.add_sample(sample_name, {**labels, "replica": replica}, value)
    return generate_latest(SimpleNamespace(collect=families.values))


class RayExporter:
    """Gives a process's series to Ray's own metrics, under the same names (Ray puts `ray_` before them).

    Counters become Ray counters, every other sample (a histogram's buckets, sum and count too) a Ray gauge, so that
    an observation costs nothing twice.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._series: dict[str, Any] = {}
        self._pushed: dict[tuple[str, tuple[str, ...]], float] = {}

    def push(self) -> None:
        """Sends all gauges, which Ray forgets when they are not set again, and what counters have grown by. Needs a
        running Ray."""
        from ray.util import metrics as ray_metrics

        for family in self._metrics.families():
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.values()))
                before = self._pushed.get(key, 0.0)
                if family.type == "counter" and sample.value == before:
                    continue
                series = self._series.get(sample.name)
                if series is None:
                    make = ray_metrics.Counter if family.type == "counter" else ray_metrics.Gauge
                    series = make(sample.name, family.documentation, ("replica", *sample.labels))
                    self._series[sample.name] = series
                tags = {"replica": self._metrics.replica, **sample.labels}
                if family.type == "counter":
                    series.inc(sample.value - (before or 0.0), tags)
                else:
                    series.set(sample.value, tags)
                self._pushed[key] = sample.value


def _seconds(value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"a duration of {value} s")
    return value


def _count(value: int) -> int:
    if value < 0:
        raise ValueError(f"a count of {value}")
    return value


def _ratio(part: int, whole: int) -> float:
    if not 0 <= part <= whole:
        raise ValueError(f"{part} of {whole}")
    return part / whole if whole else 0.0
