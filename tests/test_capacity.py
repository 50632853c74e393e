"""The capacity model against what queueing theory and arithmetic say of cases that they can solve."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "capacity.py"


@pytest.fixture(scope="module")
def capacity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("capacity", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["capacity"] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_one_at_a_time_is_an_m_d_1_queue(capacity: ModuleType) -> None:
    """Mean time in the system, Pollaczek and Khinchine: d + rho d / (2 (1 - rho))."""
    service = capacity.Service(step=0.004, row=0.0, token=0.001, cores=8, rows=1, depth=0)
    busy = 0.004 + 4 * 0.001 + 2 * 0.004  # a prompt of 4 tokens with the first token, and two more
    for load in (0.3, 0.6, 0.8):
        found = capacity.simulate(capacity.Costs(), service, capacity.Request(4, 3), load / busy, 15_000)
        assert np.mean(found) == pytest.approx(busy + load * busy / (2 * (1 - load)), rel=0.1)
        assert min(found) == pytest.approx(busy)


def test_cores_and_processes_bound_the_rate(capacity: ModuleType) -> None:
    """Far beyond what it can do, a service ends as many requests a second as its scarcest part allows."""

    def most(costs: object, service: object, output: int = 1) -> float:
        latencies = capacity.simulate(costs, service, capacity.Request(1, output), 1e6, 2000)
        return len(latencies) / max(latencies)

    costs = capacity.Costs(proxy=0.001, router=0.004, engine=0.003)
    device = capacity.Service(step=1e-6, row=0.0, token=0.0, cores=64, rows=4096)
    assert most(costs, device) == pytest.approx(1 / 0.004, rel=0.02)  # the Router
    assert most(costs, replace(device, routers=4)) == pytest.approx(1 / 0.003, rel=0.02)  # the engine
    assert most(costs, replace(device, routers=8, engines=8)) == pytest.approx(1 / 0.001, rel=0.02)  # HAProxy
    assert most(costs, replace(device, routers=8, engines=8, cores=2)) == pytest.approx(2 / 0.008, rel=0.1)
    idle = replace(costs, idle=0.5)
    assert most(idle, replace(device, routers=8, engines=8, cores=2)) == pytest.approx(1.5 / 0.008, rel=0.1)


def test_what_features_do_to_a_step(capacity: ModuleType) -> None:
    costs, request = capacity.Costs(engine_step=0.003), capacity.Request(1, 101)
    service = capacity.Service(step=0.005, row=0.0, token=0.0, cores=8, depth=0)

    def alone(service: object) -> float:
        return float(np.median(capacity.simulate(costs, service, request, 0.01, 50)))

    assert alone(service) == pytest.approx(101 * 0.008)
    assert alone(replace(service, depth=1)) == pytest.approx(0.003 + 101 * 0.005)  # the host's part is hidden
    assert alone(replace(service, gamma=3, acceptance=1.0)) == pytest.approx(26 * 0.008)  # four tokens a step
    mean = (1 - 0.5**4) / (1 - 0.5)
    assert alone(replace(service, gamma=3, acceptance=0.5)) == pytest.approx((1 + 100 / mean) * 0.008, rel=0.1)


def test_the_rate_found_is_the_highest(capacity: ModuleType) -> None:
    service, request = capacity.Service(step=0.01, row=0.0, token=0.0, cores=8, rows=1, depth=0), capacity.Request(1, 1)
    rate = capacity.best_rate(capacity.Costs(), service, request, 0.05)

    def p99(rate: float) -> float:
        return float(np.percentile(capacity.simulate(capacity.Costs(), service, request, rate), 99))

    assert p99(rate) <= 0.05 < p99(1.05 * rate)
    assert capacity.best_rate(capacity.Costs(), service, request, 0.009) == 0
