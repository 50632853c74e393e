"""The exercise: as many requests a second as keep p99 under 200 ms, against a naive server that serves one at a time.

    python benchmarks/exercise.py

`llm-serve` runs with a forward that sleeps for as long as an 8B model is predicted to take on an H200 (RESULTS.md), all
else being real, and `llm-bench --find-rate` looks for the rate; features are switched on one after the other. What the
processes cost is measured first, under closed loops, and given to capacity.py, whose predictions stand beside what was
found: the most that 64 clients get, and the rate that keeps the bound. Client and server share the cores, less what
others on the machine use in the meantime. Where that is much, --slower 4 makes the forward and the bound four times as
long, so that waiting for a core weighs a quarter; --no-search leaves the bound out: no p99 survives a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import sleeping_model
from capacity import RESULTS, Costs, Request, Service, best_rate, simulate
from scipy.optimize import nnls
from serving_cost import ROOT, TICKS, cpu_seconds, difference, machine, server

sys.path.insert(0, str(ROOT))

from app.bench.load import Kind, Lengths, Load, Run, Target  # noqa: E402
from app.bench.report import Report  # noqa: E402

STEP_MS, TOKEN_US, BOUND_MS = 4.2, 27.0, 200.0
KIND: dict[str, Any] = {"name": "chat", "input_tokens": 256, "prefix_tokens": 224, "output_tokens": 16}
SIMULATED = Service(STEP_MS / 1e3, TOKEN_US / 1e6, TOKEN_US / 1e6, client_is_here=True)  # at its own speed
BATCHED = ["--max-batch-size", "64"]
NO_CACHE = "--no-enable-prefix-cache"
CONFIGS = {
    "one at a time": (["--generation-backend", "eager", NO_CACHE], replace(SIMULATED, rows=1, depth=0), 256),
    "+ continuous batching": ([*BATCHED, "--depth", "0", NO_CACHE], replace(SIMULATED, depth=0), 256),
    "+ prefix cache": ([*BATCHED, "--depth", "0"], replace(SIMULATED, depth=0), 32),
    "+ next step launched ahead": (BATCHED, SIMULATED, 32),
}
"""Options of the server, the model's view of them, and prompt tokens that are computed."""
LOADS = ((2, 16, 100), (32, 16, 600), (32, 48, 300), (8, 4, 600))
"""Of the closed loops: clients, output tokens, requests."""


@contextmanager
def serving(options: list[str], slower: float = 1.0) -> Iterator[tuple[str, int, np.ndarray]]:
    """URL, process id, and (steps, tokens in them)."""
    with tempfile.TemporaryDirectory() as folder:
        common = ["--max-model-len", "512", "--max-queued-requests", "4096"]
        with server(slower * STEP_MS, [*common, *options], Path(folder), slower * TOKEN_US) as (url, pid):
            yield url, pid, sleeping_model.counts(Path(folder))


def closed_loop(url: str, clients: int, output: int, requests: int, part: int) -> Report:
    kind = Kind("chat", Lengths(256, 256), Lengths(output, output), prefix_tokens=224)
    load = Load((kind,), concurrency=clients, requests=requests, part=part)
    run = Run(Target(url, "sleeping", stream=False, ignore_eos=True), load)
    asyncio.run(run.run())
    report = Report.of(run, started=datetime.now(UTC), options={})
    if report.failed or not report.output_tokens or report.output_tokens.min != output:
        raise SystemExit(f"this measures nothing: {report.failures} {report.warnings}")
    return report


def calibrate(rounds: int) -> tuple[Costs, list[dict[str, Any]]]:
    """CPU costs by least squares over closed loops, and what they were fitted to."""
    rows = []
    with serving(BATCHED) as (url, pid, counts):
        closed_loop(url, 16, 16, 200, 0)
        time.sleep(3)
        before, begin = cpu_seconds(pid), time.monotonic()
        time.sleep(15)
        used = difference(cpu_seconds(pid), before)
        idle = {name: value / (time.monotonic() - begin) for name, value in used.items()}
        for number, (clients, output, requests) in enumerate(LOADS * rounds):
            before, begin, steps = cpu_seconds(pid), time.monotonic(), int(counts[0])
            report = closed_loop(url, clients, output, requests, number + 1)
            seconds = time.monotonic() - begin
            used = difference(cpu_seconds(pid), before)
            net = {name: value - idle.get(name, 0.0) * seconds for name, value in used.items()}
            row = {"clients": clients, "output": output, "requests": requests, "steps": int(counts[0]) - steps}
            row |= {"client": report.client_cpu_ms * requests / 1e3, "proxy": net["HAProxy"] + net["HAProxyManager"]}
            rows.append(row | {"router": net["Router"], "engine": net["EngineReplica"]})
            print({name: round(value, 3) for name, value in rows[-1].items()}, flush=True)

    def fit(process: str, *parts: str) -> list[float]:
        """Non-negative, each load weighing the same."""
        found = [{"request": r["requests"], "step": r["steps"], "token": r["requests"] * r["output"]} for r in rows]
        matrix = np.array([[f[part] / r[process] for part in parts] for f, r in zip(found, rows, strict=True)])
        return [float(value) for value in nnls(matrix, np.ones(len(rows)))[0]]

    router, router_token = fit("router", "request", "token")
    engine, engine_step, engine_row = fit("engine", "request", "step", "token")
    [client], [proxy] = fit("client", "request"), fit("proxy", "request")
    return Costs(client, proxy, router, router_token, engine, engine_step, engine_row, sum(idle.values())), rows


def busy_seconds() -> float:
    """CPU time that all processes of this machine have used."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / TICKS


def watch(pid: int) -> Callable[[float], float]:
    """Called later, with the CPU seconds of the client: the cores that others have used since."""
    begin, ours, everything = time.monotonic(), cpu_seconds(pid), busy_seconds()

    def others(client: float) -> float:
        used = sum(difference(cpu_seconds(pid), ours).values()) + client
        return (busy_seconds() - everything - used) / (time.monotonic() - begin)

    return others


def find(options: list[str], requests: int, slower: float, search: bool) -> dict[str, Any]:
    """The most that 64 clients get, and the rate that llm-bench finds; the cores that others used meanwhile."""
    with serving(options, slower) as (url, pid, counts), tempfile.TemporaryDirectory() as folder:
        closed_loop(url, 4, 16, 40, 0)
        others = watch(pid)
        report = closed_loop(url, 64, 16, 4 * requests, 1000)
        found: dict[str, Any] = {"saturated": report.requests_per_second}
        found["others_cores"] = others(4 * requests * report.client_cpu_ms / 1e3)
        if not search:
            return found
        mix, output = Path(folder) / "mix", Path(folder) / "report.json"
        mix.write_text(json.dumps(KIND))
        command = [Path(sys.executable).with_name("llm-bench"), "--base-url", url, "--mix", mix, "--output", output]
        command += ["--find-rate", f"e2e={slower * BOUND_MS:g}", "--requests", str(requests)]
        before, others, client = counts.copy(), watch(pid), resource.getrusage(resource.RUSAGE_CHILDREN)
        run = subprocess.run([*command, "--no-stream", "--ignore-eos"])
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        found["search_others_cores"] = others(now.ru_utime + now.ru_stime - client.ru_utime - client.ru_stime)
        if run.returncode:
            return found | {"rate": 0.0}  # none is low enough
        report = Report.model_validate_json(output.read_bytes())
        steps, tokens = (counts - before).tolist()
    assert report.e2e_ms and report.cached_tokens
    return found | {
        "rate": max(probe.rate for probe in report.search if probe.is_kept),
        "p50_ms": report.e2e_ms.p50,
        "p99_ms": report.e2e_ms.p99,
        "cached_tokens": report.cached_tokens.mean,
        "tokens_a_step": tokens / steps,
        "search": [probe.model_dump() for probe in report.search],
    }


def predict(
    costs: Costs, measured: dict[str, Any], service: Service, prompt: int, requests: int, slower: float
) -> dict[str, float]:
    """The same, by the capacity model, with the cores that others left."""

    def left(others: float) -> Costs:
        return replace(costs, idle=min(costs.idle + others, 0.9 * service.cores))

    times = {name: slower * getattr(service, name) for name in ("step", "row", "token")}
    service, request = replace(service, **times), Request(prompt, KIND["output_tokens"])
    together = simulate(left(measured["others_cores"]), service, request, 1e6, 1000)
    costs = left(measured.get("search_others_cores", 0.0))
    requests = max(requests, round(10 * measured.get("rate", 0.0)))  # as llm-bench does
    rate = best_rate(costs, service, request, slower * BOUND_MS / 1e3, requests)
    p50, p99 = np.percentile(simulate(costs, service, request, rate), (50, 99)) * 1e3 if rate else (0.0, 0.0)
    return {"saturated": 1000 / max(together), "rate": rate, "p50_ms": float(p50), "p99_ms": float(p99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="of the calibration (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=300, help="a rate, at least (default: %(default)s)")
    parser.add_argument("--slower", type=float, default=1.0, help="times, forward and bound (default: %(default)g)")
    parser.add_argument("--no-search", dest="search", action="store_false", help="measure saturation only")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    about = machine()
    costs, loads = calibrate(given.rounds)
    print(costs, flush=True)
    rows: dict[str, Any] = {}
    for name, (options, service, prompt) in CONFIGS.items():
        requests = given.requests if service.rows > 1 else given.requests // 6
        measured = find(options, requests, given.slower, given.search)
        predicted = predict(costs, measured, service, prompt, requests, given.slower)
        rows[name] = {"options": options, "predicted": predicted, "measured": measured}
        print(name, {key: rows[name][key] for key in ("predicted", "measured")}, flush=True)
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python", "benchmarks/exercise.py", *sys.argv[1:]]),
            "machine": about,
            "forward": {"step_ms": STEP_MS, "token_us": TOKEN_US, "slower": given.slower},
            "request": KIND,
            "p99_ms": BOUND_MS,
            "costs": asdict(costs),
            "closed_loops": loads,
            "configurations": rows,
        }
        given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
