"""What serving costs beyond the forward: CPU milliseconds per request, by process.

    python benchmarks/serving_cost.py

Starts `llm-serve` with a model whose forward only sleeps, so that the CPU time left is the serving tier's own: HTTP,
scheduling, sampling, tokens on their way. llm-bench sends 32 tokens and asks for 16, streamed and not. CPU time is read
from /proc for every process of the server; what those burn without load is measured first and shown apart. Where others
share the cores, all of it grows, the client's too: compare the client's figure before comparing two runs.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import sleeping_model  # noqa: E402

from app.cli import free_ports  # noqa: E402

TICKS = os.sysconf("SC_CLK_TCK")
NAMES = (  # of processes, by their command line
    (r"ray::ServeReplica:\w+:(\w+)", r"\1"),
    (r"ray::ServeController", "Serve controller"),
    (r"ray::(\w+)", r"\1"),
    (r"/haproxy ", "HAProxy"),
    (r"/raylet ", "raylet"),
    (r"/gcs_server ", "GCS"),
    (r"/log_monitor\.py", "log monitor"),
    (r"/monitor\.py", "autoscaler monitor"),
    (r"/dashboard\.py", "dashboard"),
    (r"/llm-serve ", "llm-serve"),
)


# --- the server


@contextmanager
def server(step_ms: float, options: list[str], folder: Path, token_us: float = 0.0) -> Iterator[tuple[str, int]]:
    """The base URL and process id of a running server of a model that sleeps, which lies in `folder` (see
    sleeping_model.counts); it is drained afterwards."""
    [port] = free_ports(1)
    command = [Path(sys.executable).with_name("llm-serve"), "--served-model-name", "sleeping", "--port", str(port)]
    command += [*sleeping_model.options(folder, step_ms, token_us), *options]
    log = folder / "log"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        with suppress(OSError):
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
            return True
        return False

    for _ in range(3):  # Ray gives itself 30 s to start, which isn't always enough on a busy machine
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None and not ready():
            time.sleep(0.1)
        if process.poll() is None:
            break
    else:
        raise SystemExit(f"the server ended with status {process.returncode}:\n{log.read_text()[-3000:]}")
    try:
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


# --- CPU time


def stat(pid: int) -> list[str]:
    """/proc/<pid>/stat from its third field on; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def processes(root: int) -> dict[int, str]:
    """Process ids and names of `root` and all that descend from it."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := stat(int(folder.name)):
            children[int(fields[1])].append(int(folder.name))
    found, todo = {}, [root]
    while todo:
        pid = todo.pop()
        todo += children[pid]
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        found[pid] = name_of(command)
    return found


def name_of(command: str) -> str:
    for pattern, name in NAMES:
        if match := re.search(pattern, command):
            return match.expand(name)
    return Path(command.split(" ")[0]).name


def cpu_seconds(root: int) -> dict[str, float]:
    """User and system time so far of `root` and its descendants, by name."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for pid, name in processes(root).items():
        if fields := stat(pid):
            seconds[name] += (int(fields[11]) + int(fields[12])) / TICKS
    return dict(seconds)


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before.get(name, 0.0) for name in after}


# --- the measurement


def load(url: str, requests: int, concurrency: int, stream: bool) -> Any:
    from app.bench.load import Kind, Lengths, Load, Run, Target
    from app.bench.report import Report

    target = Target(url, "sleeping", stream=stream, ignore_eos=True)
    kind = Kind("all", Lengths(32, 32), Lengths(16, 16))
    run = Run(target, Load((kind,), concurrency=concurrency, requests=requests))
    asyncio.run(run.run())
    report = Report.of(run, started=datetime.now(UTC), options={})
    if report.failed or not report.output_tokens or report.output_tokens.min != 16:
        raise SystemExit(f"this measures nothing: {report.failures} {report.warnings}")
    return report


def measure(url: str, pid: int, idle: dict[str, float], options: argparse.Namespace, stream: bool) -> dict[str, Any]:
    """One round. CPU milliseconds per request by process, what it burns when idle taken off."""
    before, begin = cpu_seconds(pid), time.monotonic()
    report = load(url, options.requests, options.concurrency, stream)
    seconds = time.monotonic() - begin
    used = difference(cpu_seconds(pid), before)
    net = {name: 1000 * (value - idle.get(name, 0.0) * seconds) / options.requests for name, value in used.items()}
    return {
        "net_ms": net,
        "net_total_ms": sum(net.values()),
        "gross_total_ms": 1000 * sum(used.values()) / options.requests,
        "client_ms": report.client_cpu_ms,
        "requests_per_second": report.requests_per_second,
        "input_tokens": report.input_tokens.mean,
        "ttft_ms": report.ttft_ms and report.ttft_ms.model_dump(),
        "e2e_ms": report.e2e_ms.model_dump(),
    }


def table(rounds: dict[str, list[dict[str, Any]]], idle: dict[str, float], options: argparse.Namespace) -> Any:
    from rich.table import Table

    def shown(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"

    out = Table(title=f"CPU ms per request beyond the forward: median of {options.rounds} rounds (range)")
    for column in ("process", *rounds, "idle, ms/s"):
        out.add_column(column, justify="left" if column == "process" else "right")
    names = {name for mode in rounds.values() for each in mode for name in each["net_ms"]}
    cost = {
        n: max(statistics.median([e["net_ms"].get(n, 0.0) for e in mode]) for mode in rounds.values()) for n in names
    }
    shares = [(name, [name]) for name in sorted(names, key=lambda name: -cost[name]) if cost[name] >= 0.05]
    for label, group in [*shares, ("others", [name for name in names if cost[name] < 0.05])]:
        cells = [shown([sum(each["net_ms"].get(n, 0.0) for n in group) for each in mode]) for mode in rounds.values()]
        out.add_row(label, *cells, f"{1000 * sum(idle.get(name, 0.0) for name in group):.1f}")
    out.add_section()
    rows = (("server, net of idle", "net_total_ms"), ("server, all", "gross_total_ms"), ("client", "client_ms"))
    for name, key in (*rows, ("requests/s", "requests_per_second")):
        idle_cell = f"{1000 * sum(idle.values()):.1f}" if key == "gross_total_ms" else ""
        out.add_row(name, *(shown([each[key] for each in mode]) for mode in rounds.values()), idle_cell)
    return out


def machine() -> dict[str, Any]:
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = {name: importlib.metadata.version(name) for name in ("ray", "torch", "starlette", "aiohttp")}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "cpu": model.group(1) if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit.strip(),
        "load_average_before": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--step-ms", type=float, default=20.0, help="what a forward sleeps (default: %(default)g)")
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=1000, help="a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--idle-seconds", type=float, default=15.0, help="default: %(default)g")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "serving_cost.json")
    options = parser.parse_args()
    from rich.console import Console

    about = machine()
    serve_options = ["--max-batch-size", str(options.concurrency)]
    rounds: dict[str, list[dict[str, Any]]] = {"not streamed": [], "streamed": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        server(options.step_ms, serve_options, Path(folder)) as (url, pid),
    ):
        for stream in (False, True):
            load(url, 200, options.concurrency, stream)
        time.sleep(3)
        before = cpu_seconds(pid)
        time.sleep(options.idle_seconds)
        used = difference(cpu_seconds(pid), before)
        idle = {name: value / options.idle_seconds for name, value in used.items()}
        for number in range(options.rounds):
            for mode, stream in (("not streamed", False), ("streamed", True)):
                rounds[mode].append(measure(url, pid, idle, options, stream))
                print(
                    f"round {number + 1}, {mode}: {rounds[mode][-1]['net_total_ms']:.2f} CPU ms a request", flush=True
                )
    Console().print(table(rounds, idle, options))
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/serving_cost.py", *sys.argv[1:]]),
        "machine": about,
        "step_ms": options.step_ms,
        "concurrency": options.concurrency,
        "requests": options.requests,
        "idle_cpu_ms_per_second": {name: 1000 * value for name, value in idle.items()},
        "rounds": rounds,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
