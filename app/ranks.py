"""The other ranks of a replica whose model is in several parts: Ray actors in the replica's own placement group.

They are the replica's: they end with its process, and it ends with the first of them.
"""

from __future__ import annotations

import socket
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.replica import engine_threads, load_options, set_thread_environment
from app.settings import ServingConfig


def bundles(config: ServingConfig, gpus: int) -> list[dict[str, float]]:
    """A replica's placement group: one for each rank, the replica's own being the first."""
    return [{"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}] * config.tensor_parallel_size


class RankActors:
    """Starts the ranks from 1 on. `address` is where they meet rank 0, which is the caller."""

    def __init__(self, config: ServingConfig) -> None:
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            self.address = f"{host}:{probe.getsockname()[1]}"
        resources = ray.get_runtime_context().get_assigned_resources()
        actor: Any = ray.remote(_Rank)
        self._lives = [
            actor.options(
                num_cpus=resources.get("CPU", 1),
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(get_current_placement_group(), rank),
            )
            .remote()
            .follow.remote(config, rank, self.address)
            for rank in range(1, config.tensor_parallel_size)
        ]

    def check(self) -> None:
        """Raises when one has ended."""
        ended, _ = ray.wait(self._lives, timeout=0)
        if ended:
            ray.get(ended)
            raise RuntimeError("a rank has ended")


class _Rank:
    def follow(self, config: ServingConfig, rank: int, address: str) -> None:
        set_thread_environment(engine_threads(config), config.omp_wait_policy)
        from engine.parallel import follow_at

        options = load_options(config)
        follow_at(rank, config.tensor_parallel_size, address, options.pop("device"), config.model, options)
