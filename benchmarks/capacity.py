"""A capacity model: requests a second, and the p99 of their latency, for a device's step time and a number of cores.

    python benchmarks/capacity.py --step-ms 0.86 --row-us 3.2 --token-us 6.2 --cores 16 --engines 2 --routers 4

It plays a Poisson stream of equal requests through the processes that a request passes, client, HAProxy, Router and
engine, in simulated time. A process does one thing at a time and needs a core for it; an engine's steps take its
process for the host's part and the device for the forward. CPU costs are those that benchmarks/exercise.py measured; a
task isn't interrupted once it has a core, and what a hop over a socket takes besides CPU is left out.

Without --step-ms: the exercise on one H200 with 16 cores, for the step times that RESULTS.md predicts.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "exercise.json"
COSTS = RESULTS.with_name("capacity.json")
H200 = {"1B": (0.86e-3, 3.2e-6, 6.2e-6), "8B": (4.21e-3, 17e-6, 27e-6)}
"""Seconds of a step, more for a row, more for a prompt's token: RESULTS.md, one H200."""
HOST_ROW = 1.5e-6
"""CPU seconds a row and step in the engine where the device samples (host_time.json)."""
STAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "one at a time": (256, {"rows": 1, "depth": 0}),
    "+ continuous batching": (256, {"depth": 0}),
    "+ prefix cache": (32, {"depth": 0}),
    "+ next step launched ahead": (32, {}),
    "+ 8 Routers": (32, {"routers": 8}),
    "+ 4 drafted tokens a step, 0.8 of which stand": (32, {"routers": 8, "gamma": 4, "acceptance": 0.8}),
    "without drafts, 2 engines": (32, {"routers": 8, "engines": 2}),
    "without drafts, 4 engines": (32, {"routers": 8, "engines": 4}),
}
"""Tokens of the prompt that are computed, and the service."""


@dataclass(frozen=True)
class Costs:
    """CPU seconds: a request in each process, a token in the Router, a step and a row of it in the engine. `idle` is
    what all processes burn without load, in cores."""

    client: float = 0.0
    proxy: float = 0.0
    router: float = 0.0
    router_token: float = 0.0
    engine: float = 0.0
    engine_step: float = 0.0
    engine_row: float = 0.0
    idle: float = 0.0


@dataclass(frozen=True)
class Service:
    """Seconds of a step on the device: `step`, a decoding `row`, a prompt's `token`. Engines share one device; each has
    `rows`. `depth` 1: the host's part of a step hides behind the step before. Drafts, where there are any: `gamma` of
    them a row and step, each standing with probability `acceptance`; such steps can't be launched ahead."""

    step: float
    row: float
    token: float
    cores: int = 2
    engines: int = 1
    routers: int = 1
    rows: int = 64
    depth: int = 1
    tokens_in_step: int = 2048
    client_is_here: bool = False
    gamma: int = 0
    acceptance: float = 0.0


@dataclass(frozen=True)
class Request:
    """Prompt tokens that aren't in the prefix cache, and tokens to generate."""

    prompt: int
    output: int


class Machine:
    """Simulated time, cores, and processes that do one thing at a time, first come first served."""

    def __init__(self, cores: int) -> None:
        self.now = 0.0
        self._free = cores
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._tasks: dict[Any, deque[tuple[float, Callable[[], None]]]] = {}
        self._ready: deque[Any] = deque()

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), call))

    def work(self, process: Any, seconds: float, then: Callable[[], None]) -> None:
        tasks = self._tasks.setdefault(process, deque())
        tasks.append((seconds, then))
        if len(tasks) == 1:  # the one at work stays first until it is done
            self._ready.append(process)
            self._dispatch()

    def _dispatch(self) -> None:
        while self._free and self._ready:
            process = self._ready.popleft()
            self._free -= 1
            self.at(self.now + self._tasks[process][0][0], lambda process=process: self._done(process))

    def _done(self, process: Any) -> None:
        self._free += 1
        _, then = self._tasks[process].popleft()
        if self._tasks[process]:
            self._ready.append(process)
        then()
        self._dispatch()

    def run(self) -> None:
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


@dataclass
class Device:
    free_at: float = 0.0
    busy: float = 0.0


@dataclass
class Engine:
    machine: Machine
    name: str
    service: Service
    costs: Costs
    request: Request
    device: Device
    random: random.Random
    waiting: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)
    running: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    in_flight: int = 0
    planning: bool = False

    def add(self, done: Callable[[], None]) -> None:
        self.waiting.append((self.request.prompt, done))
        self.plan()

    def plan(self) -> None:
        """Begins a step, unless one is being planned or enough are on their way."""
        service = self.service
        if self.planning or self.in_flight > (service.depth if not service.gamma else 0):
            return
        decoding = len(self.running)
        prompt_tokens, budget = 0, service.tokens_in_step - decoding * (1 + service.gamma)
        begun = []
        while self.waiting and budget > 0 and decoding + len(begun) < service.rows:
            left, done = self.waiting.popleft()
            taken = min(left, budget)
            prompt_tokens, budget = prompt_tokens + taken, budget - taken
            if taken < left:
                self.waiting.appendleft((left - taken, done))
            else:
                begun.append((self.request.output, done))
        if not decoding and not prompt_tokens:
            return
        rows = [(left - self._advance(), done) for left, done in self.running]
        rows += [(left - 1, done) for left, done in begun]
        self.running = [row for row in rows if row[0] > 0]
        finished = [done for left, done in rows if left <= 0]
        seconds = service.step + service.row * decoding * (1 + service.gamma) + service.token * prompt_tokens
        self.planning = True
        host = self.costs.engine_step + self.costs.engine_row * len(rows)
        self.machine.work(self.name, host, lambda: self._launch(seconds, finished))

    def _advance(self) -> int:
        tokens = 1
        while tokens <= self.service.gamma and self.random.random() < self.service.acceptance:
            tokens += 1
        return tokens

    def _launch(self, seconds: float, finished: list[Callable[[], None]]) -> None:
        self.planning = False
        self.in_flight += 1
        self.device.free_at = max(self.machine.now, self.device.free_at) + seconds
        self.device.busy += seconds
        self.machine.at(self.device.free_at, lambda: self._commit(finished))
        self.plan()

    def _commit(self, finished: list[Callable[[], None]]) -> None:
        self.in_flight -= 1
        for done in finished:
            done()
        self.plan()


def simulate(
    costs: Costs, service: Service, request: Request, rate: float, requests: int = 4000, seed: int = 0
) -> list[float]:
    """Seconds from each request's arrival to its answer, in the order in which they end."""
    share = 1 - costs.idle / service.cores
    names = ("client", "proxy", "router", "router_token", "engine", "engine_step", "engine_row")
    costs = replace(costs, **{name: getattr(costs, name) / share for name in names})
    machine, device, rng = Machine(service.cores), Device(), random.Random(seed)
    engines = [Engine(machine, f"engine {i}", service, costs, request, device, rng) for i in range(service.engines)]
    latencies: list[float] = []
    client = costs.client / 2 if service.client_is_here else 0.0
    router_back = costs.router / 2 + costs.router_token * request.output

    def arrive(number: int) -> None:
        begin = machine.now
        router, engine = f"router {number % service.routers}", engines[number % service.engines]
        there = [("client", client), ("proxy", costs.proxy / 2), (router, costs.router / 2)]
        there.append((engine.name, costs.engine / 2))
        back = [(engine.name, costs.engine / 2), (router, router_back)]
        back += [("proxy", costs.proxy / 2), ("client", client)]

        def along(path: list[tuple[str, float]], end: Callable[[], None]) -> None:
            if path:
                (process, seconds), *rest = path
                machine.work(process, seconds, lambda: along(rest, end))
            else:
                end()

        along(there, lambda: engine.add(lambda: along(back, lambda: latencies.append(machine.now - begin))))

    time = 0.0
    for number in range(requests):
        time += rng.expovariate(rate)
        machine.at(time, lambda number=number: arrive(number))
    machine.run()
    return latencies


def best_rate(
    costs: Costs, service: Service, request: Request, bound: float, requests: int = 4000, precision: float = 0.02
) -> float:
    """The highest rate whose p99 is at most `bound` seconds in most runs of so many requests, or of 10 s if these are
    more; 0 for none."""

    def is_kept(rate: float) -> bool:
        count = max(requests, round(10 * rate))
        runs = (simulate(costs, service, request, rate, count, seed) for seed in range(-(-4000 // count)))
        return float(np.median([np.percentile(run, 99) for run in runs])) <= bound

    kept, missed = 0.0, 1.0
    while is_kept(missed):
        kept, missed = missed, 2 * missed
    while missed > max(kept * (1 + precision), 0.1):
        middle = (kept + missed) / 2
        kept, missed = (middle, missed) if is_kept(middle) else (kept, middle)
    return kept


def exercise_on_h200(costs: Costs) -> dict[str, dict[str, float]]:
    """The highest rates, by model and stage, of 16 tokens within 200 ms on 16 cores. Drafts cost nothing here."""
    found: dict[str, dict[str, float]] = {}
    for model, times in H200.items():
        found[model] = {}
        for stage, (prompt, options) in STAGES.items():
            service = replace(Service(*times, cores=16, rows=256), **options)
            found[model][stage] = best_rate(costs, service, Request(prompt, 16), 0.2, precision=0.05)
            print(f"{model:5} {stage:48} {found[model][stage]:8.1f} requests/s", flush=True)
    return found


def measured_costs(file: Path) -> Costs:
    """Those of a service whose device samples."""
    return replace(Costs(**json.loads(file.read_text())["costs"]), engine_row=HOST_ROW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--step-ms", type=float, help="of a step on the device")
    add("--row-us", type=float, default=0.0, help="more for each decoding row")
    add("--token-us", type=float, default=0.0, help="more for each token of a prompt")
    add("--prompt", type=int, default=32, help="tokens that aren't in the prefix cache (default: %(default)s)")
    add("--output", type=int, default=16, help="tokens generated (default: %(default)s)")
    add("--p99-ms", type=float, default=200.0, help="bound on the whole answer (default: %(default)g)")
    for name, default in (("cores", 16), ("engines", 1), ("routers", 1), ("rows", 256), ("depth", 1), ("gamma", 0)):
        add(f"--{name}", type=int, default=default, help="default: %(default)s")
    add("--costs", type=Path, default=COSTS, help="file whose `costs` are used (default: results/capacity.json)")
    add("--acceptance", type=float, default=0.8, help="of a drafted token, with --gamma (default: %(default)g)")
    given = parser.parse_args()
    if given.step_ms is None:
        costs = measured_costs(given.costs)
        result = {"costs": asdict(costs), "requests_per_second": exercise_on_h200(costs)}
        COSTS.write_text(json.dumps(result, indent=1) + "\n")
        return
    service = Service(
        given.step_ms / 1e3,
        given.row_us / 1e6,
        given.token_us / 1e6,
        **{name: getattr(given, name) for name in ("cores", "engines", "routers", "rows", "depth", "gamma")},
        acceptance=given.acceptance,
    )
    request, costs = Request(given.prompt, given.output), measured_costs(given.costs)
    rate = best_rate(costs, service, request, given.p99_ms / 1e3)
    print(f"{rate:.0f} requests/s within {given.p99_ms:g} ms")
    for share in (0.5, 0.8, 1.0) if rate else ():
        p50, p99 = np.percentile(simulate(costs, service, request, share * rate), (50, 99)) * 1e3
        print(f"{share * rate:8.0f} requests/s: p50 {p50:.0f} ms, p99 {p99:.0f} ms")


if __name__ == "__main__":
    main()
