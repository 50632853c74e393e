"""Metrics: names, labels, buckets, idle gauges, impossible observations, and the union over processes."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app import metrics as metrics_module
from app.metrics import ENDPOINTS, Metrics, RayExporter, render
from engine.batch_engine import EngineStats, StepStats


def step(scheduled: int, limit: int = 16) -> StepStats:
    return StepStats(
        scheduled=scheduled,
        total_active_slots=scheduled,
        tokens=scheduled,
        waiting=0,
        free_pages=0,
        max_batch_size=limit,
        generated=scheduled,
        finished=0,
    )


def stats(running: int = 0, waiting: int = 0, held_pages: int = 0, **counts: int) -> EngineStats:
    return EngineStats(
        running=running,
        waiting=waiting,
        free_pages=10 - held_pages,
        cached_pages=0,
        held_pages=held_pages,
        total_pages=10,
        page_size=16,
        max_batch_size=16,
        max_seq_len=160,
        **counts,
    )


def read(*sources: Metrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name -> labels -> value, as Prometheus itself would read the page."""
    page = render([source.snapshot() for source in sources]).decode()
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            series = samples.setdefault(sample.name, {})
            key = tuple(sorted(sample.labels.items()))
            assert key not in series, f"{sample.name}{key} appears twice"
            series[key] = sample.value
    return samples


def value(samples: dict[str, Any], name: str, **labels: str) -> float:
    found: float = samples[name][tuple(sorted(labels.items()))]
    return found


def test_the_named_metrics_have_their_types_and_labels() -> None:
    metrics = Metrics("r1")
    metrics.request_started()
    metrics.request_ended("generate", 200, 0.19, 7)
    page = render([metrics.snapshot()]).decode()
    kinds = dict(line.split()[2:4] for line in page.splitlines() if line.startswith("# TYPE"))
    assert kinds["llm_tokens_generated_total"] == "counter"
    assert kinds["llm_tokens_per_request"] == "histogram"
    assert kinds["llm_request_duration_seconds"] == "histogram"
    for gauge in ("llm_batch_fill_ratio", "llm_kv_cache_hit_ratio", "llm_inflight_requests"):
        assert kinds[gauge] == "gauge"
    samples = read(metrics)
    assert value(samples, "llm_tokens_generated_total", endpoint="generate", replica="r1") == 7
    assert value(samples, "llm_tokens_per_request_sum", endpoint="generate", replica="r1") == 7
    assert value(samples, "llm_request_duration_seconds_count", endpoint="generate", status="200", replica="r1") == 1
    for endpoint in ENDPOINTS:
        assert (("endpoint", endpoint), ("replica", "r1")) in samples["llm_tokens_generated_total"]
    assert "_created" not in page


def test_buckets() -> None:
    metrics = Metrics("r1")
    metrics.request_started()
    metrics.request_ended("completions", 200, 0.19, 20)
    samples = read(metrics)
    seconds = {float(dict(key)["le"]): count for key, count in samples["llm_request_duration_seconds_bucket"].items()}
    assert {0.05, 0.25, 1.0, 5.0, 30.0} <= seconds.keys()
    assert (seconds[0.175], seconds[0.2]) == (0, 1)
    tokens = {
        float(dict(key)["le"]): count
        for key, count in samples["llm_tokens_per_request_bucket"].items()
        if dict(key)["endpoint"] == "completions"
    }
    assert {16.0, 64.0, 256.0, 1024.0, 4096.0} <= tokens.keys()
    assert (tokens[16.0], tokens[32.0]) == (0, 1)


def test_gauges_fall_to_zero_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(metrics_module.time, "monotonic", lambda: clock[0])
    metrics = Metrics("r1")
    metrics.request_started()
    metrics.record_batch_fill_ratio(step(4))
    metrics.record_engine(stats(running=4, waiting=2, held_pages=4, prompt_tokens=100, cached_tokens=40))
    samples = read(metrics)
    busy = {
        "llm_batch_fill_ratio": 0.25,
        "llm_kv_cache_hit_ratio": 0.4,
        "llm_inflight_requests": 1,
        "llm_requests_running": 4,
        "llm_requests_waiting": 2,
        "llm_kv_cache_usage_ratio": 0.4,
    }
    assert {name: value(samples, name, replica="r1") for name in busy} == busy

    metrics.request_ended("generate", 200, 0.1, 3)
    clock[0] += 90
    metrics.record_engine(stats(prompt_tokens=100, cached_tokens=40))
    clock[0] += 1
    metrics.record_engine(stats(prompt_tokens=100, cached_tokens=40))
    samples = read(metrics)
    assert {name: value(samples, name, replica="r1") for name in busy} == dict.fromkeys(busy, 0)
    assert value(samples, "llm_engine_prompt_tokens_total", replica="r1") == 100


def test_hits_of_prompts_that_came_before_the_window() -> None:
    metrics = Metrics("r1")
    metrics.record_engine(stats(prompt_tokens=1, cached_tokens=3))
    assert value(read(metrics), "llm_kv_cache_hit_ratio", replica="r1") == 1


def test_an_idle_step_empties_the_batch() -> None:
    metrics = Metrics("r1")
    metrics.record_batch_fill_ratio(step(16))
    metrics.record_batch_fill_ratio(step(0))
    assert value(read(metrics), "llm_batch_fill_ratio", replica="r1") == 0


def test_engine_counts_are_differences() -> None:
    metrics = Metrics("r1")
    for generated in (5, 5, 12):
        metrics.record_engine(stats(generated_tokens=generated))
    assert value(read(metrics), "llm_engine_generated_tokens_total", replica="r1") == 12


@pytest.mark.parametrize(
    "observe",
    [
        lambda m: m.record_batch_fill_ratio(step(17)),
        lambda m: m.record_batch_fill_ratio(step(-1)),
        lambda m: m.record_batch_fill_ratio(step(0, 0)),
        lambda m: m.request_ended("generate", 200, -0.1, 1),
        lambda m: m.request_ended("generate", 200, float("nan"), 1),
        lambda m: m.request_ended("generate", 200, 0.1, -1),
        lambda m: m.time_to_first_token("generate", -1e-9),
        lambda m: m.inter_token("generate", float("inf")),
        lambda m: m.sequence_ended(-1, None, None),
        lambda m: m.sequence_ended(0, -1, None),
        lambda m: m.sequence_ended(0, 0, float("nan")),
        lambda m: m.http_ended("/generate", 200, -1),
        lambda m: m.record_engine(stats(running=-1)),
        lambda m: m.record_engine(stats(held_pages=11)),
    ],
)
def test_impossible_observations_raise(observe: Any) -> None:
    with pytest.raises(ValueError):
        observe(Metrics("r1"))


def test_the_union_keeps_processes_apart() -> None:
    router, engine, dying = Metrics("router"), Metrics("engine-1"), Metrics('engine-2 "quoted"\n')
    router.failover()
    engine.record_engine(stats(generated_tokens=5))
    dying.record_engine(stats(generated_tokens=7))
    both = read(router, engine, dying)["llm_engine_generated_tokens_total"]
    assert sorted(both.values()) == [0, 5, 7]
    left = read(router, engine)["llm_engine_generated_tokens_total"]
    assert left == {(("replica", "engine-1"),): 5, (("replica", "router"),): 0}
    page = render([router.snapshot(), engine.snapshot()]).decode()
    assert page.count("# TYPE llm_batch_fill_ratio ") == 1
    assert "llm_failovers_total{" in page


def test_two_instances_share_nothing() -> None:
    one, other = Metrics("a"), Metrics("b")
    one.failover()
    assert value(read(other), "llm_failovers_total", replica="b") == 0


def test_ray_gets_the_same_series(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.util.metrics as ray_metrics

    sent: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}

    class Series:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name, self.tag_keys = name, tag_keys

        def _send(self, amount: float, tags: dict[str, str]) -> tuple[str, str, tuple[tuple[str, str], ...]]:
            assert set(tags) == set(self.tag_keys)
            return type(self).__name__, self.name, tuple(sorted(tags.items()))

    class Counter(Series):
        def inc(self, amount: float, tags: dict[str, str]) -> None:
            assert amount > 0, "Ray refuses to count nothing"
            key = self._send(amount, tags)
            sent[key] = sent.get(key, 0) + amount

    class Gauge(Series):
        def set(self, amount: float, tags: dict[str, str]) -> None:
            sent[self._send(amount, tags)] = amount

    monkeypatch.setattr(ray_metrics, "Counter", Counter)
    monkeypatch.setattr(ray_metrics, "Gauge", Gauge)
    metrics = Metrics("r1")
    exporter = RayExporter(metrics)
    exporter.push()
    for seconds in (0.1, 0.3):
        metrics.request_started()
        metrics.request_ended("generate", 200, seconds, 5)
        exporter.push()
    metrics.record_batch_fill_ratio(step(8))
    exporter.push()
    metrics.record_batch_fill_ratio(step(0))
    for key in [key for key in sent if key[0] == "Gauge"]:
        del sent[key]  # as Ray's worker does when it has told its agent
    exporter.push()
    ours = {(name, key): amount for name, series in read(metrics).items() for key, amount in series.items() if amount}
    assert {(name, key): amount for (_, name, key), amount in sent.items() if amount} == ours
    assert sent["Counter", "llm_tokens_generated_total", (("endpoint", "generate"), ("replica", "r1"))] == 10
    assert sent["Gauge", "llm_batch_fill_ratio", (("replica", "r1"),)] == 0


def test_ray_accepts_every_name() -> None:
    import ray.util.metrics as ray_metrics

    for family in Metrics("r1").families():
        for name in {sample.name for sample in family.samples}:
            ray_metrics.Gauge(name, family.documentation, ("replica",))
