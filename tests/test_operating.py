"""The documented queries in a real Prometheus, over series that app.metrics recorded; and that the dashboard and the
alerts use those queries and no others. Prometheus is Debian's (.ci/run fetches it); without it those tests skip."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.cli import free_ports
from app.metrics import Metrics, render
from engine.speculation import SpeculationStats
from tests.app.test_metrics import stats, step

ROOT = Path(__file__).parents[1]
START, STEP = 1_700_000_000, 30
MINUTE = 60 // STEP
CALM, BAD, OVER = 15, 38, 46
"""Minutes to ask at: everything is well until 20, not until 40, and then there is nothing any more."""

Labels = tuple[tuple[str, str], ...]
Vector = dict[Labels, float]
Ask = Callable[[str, int], Vector]


def documented() -> dict[str, str]:
    """Title -> query, of docs/operating.md."""
    blocks = re.findall(r"^```promql\n(.*?)^```", (ROOT / "docs" / "operating.md").read_text(), re.M | re.S)
    parts = [part.partition("\n") for block in blocks for part in re.split(r"^# ", block, flags=re.M)[1:]]
    queries = {title: " ".join(query.split()) for title, _, query in parts}
    assert len(queries) == len(parts), "two queries have one title"
    return queries


def recorded() -> Iterator[tuple[int, bytes]]:
    """(seconds, /metrics) of a Router and two engines."""
    router, engines = Metrics("Router:1"), [Metrics("EngineReplica:1"), Metrics("EngineReplica:2")]
    totals: dict[str, int] = {}

    def grow(**counts: int) -> dict[str, int]:
        for name, count in counts.items():
            totals[name] = totals.get(name, 0) + count
        return {name: totals[name] for name in counts}

    for i in range(40 * MINUTE):
        bad = i >= 20 * MINUTE
        ends = [(200, 20.0 if bad else 0.19)] * 24 + [(500, 1.0) if bad else (200, 0.19)] * 6 + [(429, 0.01)] * 60 * bad
        for status, seconds in ends:
            router.request_started()
            router.request_ended("chat_completions", status, seconds, 30 if status == 200 else None)
            router.http_ended("/v1/chat/completions", status, seconds)
            if status == 200:
                router.time_to_first_token("chat_completions", 8.0 if bad else 0.09)
                router.inter_token("chat_completions", 0.011)
        for _ in range(2 * bad):
            router.failover()
        for j, engine in enumerate(engines):
            counts = {"prompt_tokens": 1500, "cached_tokens": 600, "generated_tokens": 450, "aborted_requests": 6}
            counts |= {"preemptions": 30 * bad, "failed_requests": 6 * bad}
            ours = grow(**{f"{name} {j}": count for name, count in counts.items()})
            engine.record_batch_fill_ratio(step(16 if bad else 8 - 4 * j))
            waiting = 5 if bad and j == 0 else 0
            now = stats(running=4, waiting=waiting, held_pages=3, **{k.split()[0]: v for k, v in ours.items()})
            engine.record_engine(now)
            engine.sequence_ended(0.02, 0.06, 1.5)
            engine.record_speculation(SpeculationStats(100 * (i + 1), 60 * (i + 1), [], draft_up=True))
            engine.draft_round_trip(0.003)
        yield i * STEP, render([each.snapshot() for each in (router, *engines)])


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """`ask(query, minute)`: what Prometheus answers."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("Prometheus is not installed")
    folder = tmp_path_factory.mktemp("prometheus")
    lines = []
    for seconds, page in recorded():
        samples = [line for line in page.decode().splitlines() if not line.startswith("#")]
        lines += [f"{sample} {START + seconds}\n" for sample in samples]
    (folder / "recorded").write_text("".join(lines) + "# EOF\n")
    blocks = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(folder / "recorded"), str(folder / "data")]
    subprocess.run(blocks, check=True, capture_output=True)
    (folder / "prometheus.yml").write_text("")
    [port] = free_ports(1)
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            "--storage.tsdb.retention.time=100y",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

            def ask(query: str, minute: int) -> Vector:
                answer = client.get("/api/v1/query", params={"query": query, "time": START + 60 * minute}).json()
                assert answer["status"] == "success", answer
                vector = answer["data"]["result"]
                values = {tuple(sorted(each["metric"].items())): float(each["value"][1]) for each in vector}
                return {
                    labels: value for labels, value in values.items() if not math.isnan(value)
                }  # which draw nothing

            deadline = time.monotonic() + 60
            while True:
                try:
                    assert client.get("/-/ready").status_code == 200
                    break
                except (httpx.HTTPError, AssertionError):
                    assert server.poll() is None and time.monotonic() < deadline
                    time.sleep(0.05)
            yield ask
    finally:
        server.terminate()
        server.wait()


def label(**labels: str) -> Labels:
    return tuple(sorted(labels.items()))


ONE: Labels = ()
CHAT = label(endpoint="chat_completions")
ROUTE = label(route="/v1/chat/completions")
FIRST, SECOND = label(replica="EngineReplica:1"), label(replica="EngineReplica:2")


def named(name: str, labels: Labels) -> Labels:
    return tuple(sorted((*labels, ("__name__", name))))


def gauge(name: str, first: float, second: float) -> Vector:
    return {named(name, FIRST): first, named(name, SECOND): second}


# Title -> what it is while all is well. A quantile lies at its share of the bucket that all observations are in.
EXPECTED: dict[str, Vector] = {
    "Requests a second, by endpoint and status": {label(endpoint="chat_completions", status="200"): 1.0},
    "Requests in progress": {ONE: 0.0},
    "HTTP requests a second, by route": {ROUTE: 1.0},
    "Share of HTTP requests that fail, probes and scrapes aside": {ONE: 0.0},
    "Refusals a second, for full queues": {ONE: 0.0},
    "Output tokens a second": {ONE: 30.0},
    "Prompt tokens a second": {ONE: 100.0},
    "Output tokens of a request, median by endpoint": {CHAT: 24.0},
    "Request duration, p99 by endpoint": {CHAT: 0.19975},
    "HTTP duration, p99 by route": {ROUTE: 0.19975},
    "Time to first token, p99": {ONE: 0.09975},
    "Inter-token latency, p99": {ONE: 0.01495},
    "Wait in the engine's queue, p99": {ONE: 0.02485},
    "Prefill, p99": {ONE: 0.07475},
    "Decode, mean": {ONE: 1.5},
    "Engines that report": {ONE: 2.0},
    "Sequences running": {ONE: 8.0},
    "Sequences waiting": {ONE: 0.0},
    "Batch fill, by engine": gauge("llm_batch_fill_ratio", 0.5, 0.25),
    "KV cache in use, by engine": gauge("llm_kv_cache_usage_ratio", 0.3, 0.3),
    "Prompt tokens found in the prefix cache, share of": {ONE: 0.4},
    "Saturated: engines with a queue while all are nearly full": {},
    "Preemptions a second": {ONE: 0.0},
    "Sequences aborted, a second": {ONE: 0.4},
    "Sequences that fail, a second": {ONE: 0.0},
    "Attempts lost with their replica, in 15 minutes": {ONE: 0.0},
    "Nothing reports": {},
    "No engine reports": {},
    "Proposed tokens that stand, share of": {ONE: 0.6},
    "Round trip to the draft process, p99": {ONE: 0.004975},
    "Engines whose draft process answers": {ONE: 2.0},
}
# What of it is otherwise when it isn't.
TROUBLE: dict[str, Vector] = {
    "Requests a second, by endpoint and status": {
        label(endpoint="chat_completions", status="200"): 0.8,
        label(endpoint="chat_completions", status="429"): 2.0,
        label(endpoint="chat_completions", status="500"): 0.2,
    },
    "Share of HTTP requests that fail, probes and scrapes aside": {ONE: 0.2 / 3},
    "Refusals a second, for full queues": {ONE: 2.0},
    "Time to first token, p99": {ONE: 9.95},
    "Sequences waiting": {ONE: 5.0},
    "Saturated: engines with a queue while all are nearly full": {named("llm_requests_waiting", FIRST): 5.0},
    "Preemptions a second": {ONE: 2.0},
    "Sequences that fail, a second": {ONE: 0.4},
    "Attempts lost with their replica, in 15 minutes": {ONE: 60.0},
}
UNRECORDED = {"Prompt tokens found in the prefix cache in the last minute, share by engine"}  # goes by the real clock


def test_every_documented_query_gives_what_it_says(ask: Ask) -> None:
    queries = documented()
    assert EXPECTED.keys() == queries.keys() - UNRECORDED
    for title, expected in EXPECTED.items():
        assert ask(queries[title], CALM) == pytest.approx(expected, rel=1e-6), title
    for title, expected in TROUBLE.items():
        assert ask(queries[title], BAD) == pytest.approx(expected, rel=1e-6), title
    for title in UNRECORDED:
        assert len(ask(queries[title], CALM)) == 2
    assert ask(queries["Nothing reports"], OVER) == {ONE: 1.0}
    assert list(ask(queries["No engine reports"], OVER).values()) == [1.0]


def test_saturation_needs_on(ask: Ask) -> None:
    """Without it the two sides have no labels in common, and the alert would never fire."""
    query = documented()["Saturated: engines with a queue while all are nearly full"]
    assert "and on()" in query
    assert ask(query.replace(" on()", ""), BAD) == {}


def rules() -> list[dict[str, Any]]:
    documents = yaml.safe_load_all((ROOT / "k8s" / "monitoring.yaml").read_text())
    (groups,) = [document["spec"]["groups"] for document in documents if document["kind"] == "PrometheusRule"]
    return [rule for group in groups for rule in group["rules"]]


def test_alerts_are_documented_queries_and_fire_when_they_should(ask: Ask) -> None:
    queries = set(documented().values())
    for rule in rules():
        query = " ".join(rule["expr"].split())
        assert {query, re.sub(r" > [\d.]+$", "", query)} & queries, rule["alert"]
        assert ask(query, CALM) == {}, rule["alert"]
        assert ask(query, OVER if "absent" in query else BAD), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"} and rule["labels"]["severity"]


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "pilotfish", "rules": rules()}]}))
    run = subprocess.run(["promtool", "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((ROOT / "k8s" / "dashboard.json").read_text())
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource"]
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_panels_are_documented_queries_of_series_that_exist() -> None:
    queries = documented()
    shown = {panel["title"]: target["expr"] for panel in panels() for target in panel["targets"]}
    assert shown == {title: query for title, query in queries.items() if not query.startswith("absent(")}
    exist = {sample.name for family in Metrics("").families() for sample in family.samples}
    exist |= {name for family in Metrics("").families() for name in family_names(family.name, family.type)}
    for title, query in queries.items():
        names = set(re.findall(r"\bllm_\w+", query))
        assert names and names <= exist, title


def family_names(name: str, kind: str) -> list[str]:
    endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    return [name + ending for ending in endings.get(kind, [""])]


def test_panels_draw_something_and_lie_apart(ask: Ask) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        (target,) = panel["targets"]
        assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        minute = BAD if "Saturated" in panel["title"] else CALM
        legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        drawn = ask(target["expr"], minute)
        assert drawn, panel["title"]
        for labels in drawn:
            assert legend <= {name for name, _ in labels}, panel["title"]
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & taken
        taken |= cells
