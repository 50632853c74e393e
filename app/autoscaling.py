"""How many engine replicas a load wants: Serve's controller asks, and applies bounds and delays to the answer."""

from __future__ import annotations

import math
from typing import Any

TARGET = 0.75
"""How full replicas should be on average."""


def pressure(running: int, waiting: int, max_batch_size: int, held_pages: int, total_pages: int) -> float:
    """How many replicas the load of one would fill: the fuller of its rows and its KV pages, and what waits by what it
    runs at once, be it rows or pages that are short."""
    return max(running / max_batch_size, held_pages / total_pages) + waiting / (running or max_batch_size)


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy, from `EngineReplica.record_autoscaling_stats` averaged over time."""
    pressures = (context.aggregated_metrics or {}).get("pressure", {})
    if len(pressures) < context.current_num_replicas:  # some have not reported yet
        return context.target_num_replicas, {}
    return math.ceil(sum(pressures.values()) / TARGET), {}
