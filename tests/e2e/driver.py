"""Ray's side of the end-to-end tests: a process of its own, because Ray reads its environment when it is imported.

Reads one JSON command a line, [name, arguments], and answers each with a line {"result": ...} or {"error": ...}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

APP = "test"


class Driver:
    def __init__(self) -> None:
        self.handle: Any = None
        self.cluster: Any = None
        self.version = 0
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def start(self, folder: str, port: int, nodes: int = 0) -> None:
        """Starts Ray: one node, or a head for the proxy and so many others."""
        from app.cli import local_environment

        os.environ.update(local_environment(Path(folder), {}))
        for who in ("REPLICA", "HANDLE"):
            os.environ[f"RAY_SERVE_{who}_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "1"
        import ray
        from ray import serve

        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        temp_dir = str(Path(folder) / "ray")
        if nodes:
            from ray.cluster_utils import Cluster

            ray._private.utils.write_ray_address = lambda *args, **kwargs: None  # it would be any Ray's on the machine
            ray._private.utils.get_dashboard_dependency_error = lambda: ImportError("agents start faster without")
            self.cluster = Cluster()
            self._start_node(num_cpus=0, resources={"head": 1000}, include_dashboard=False, temp_dir=temp_dir)
            for _ in range(nodes):
                self.add_node()
            ray.init(address=self.cluster.address, **quiet)
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            return
        ray.init(address="local", num_cpus=16, include_dashboard=False, _temp_dir=temp_dir, **quiet)
        serve.start(http_options={"host": "127.0.0.1", "port": port})

    def deploy(self, options: dict[str, Any], wait: bool, routers: str = "head") -> None:
        """routers: which nodes they are on, where there are several: the `head`, or any `other`."""
        from app.main import build

        app = build(options)
        if self.cluster is not None:
            where = {"num_cpus": 0, "resources": {routers: 1}}
            app = type(app)(app._bound_deployment.options(ray_actor_options=where))
        self.version += 1
        self._run(app, wait)

    def scale(self, options: dict[str, Any], engines: int) -> None:
        """What another number under `deployments:` does in a config: the version stays. Returns at once."""
        from app.main import build

        app = build(options)
        [engine] = [each for each in _deployments(app) if each.name == "EngineReplica"]
        engine._deployment_config.num_replicas = engines
        self._run(app, wait=False)

    def _run(self, app: Any, wait: bool) -> None:
        from ray.serve.api import _run

        for deployment in _deployments(app):
            deployment._version = str(self.version)  # Serve's own would be a new one each time
        _run(app, name=APP, route_prefix="/", _blocking=wait)

    def nodes(self) -> list[str]:
        """Names of all but the head."""
        return [node.unique_id for node in self.cluster.worker_nodes]

    def node_of(self, pid: int) -> str:
        """The name of the node that a process of a replica belongs to."""
        raylet = psutil.Process(pid).ppid()
        nodes = self.cluster.worker_nodes
        return next(node.unique_id for node in nodes if node.all_processes["raylet"][0].process.pid == raylet)

    def lose_node(self, node: str) -> None:
        self.cluster.remove_node(self._node(node), allow_graceful=False)

    def drain_node(self, node: str, notice: float) -> None:
        """Ray is told that the node will be lost in so many seconds."""
        import ray

        preemption, deadline = 2, int((time.time() + notice) * 1000)
        gcs = ray._raylet.GcsClient(address=self.cluster.address)
        accepted, why = gcs.drain_node(self._node(node).node_id, preemption, "it is wanted elsewhere", deadline)
        if not accepted:
            raise RuntimeError(why)

    def _node(self, name: str) -> Any:
        return next(node for node in self.cluster.worker_nodes if node.unique_id == name)

    def add_node(self) -> None:
        """Room for three engines or drafts."""
        self._start_node(num_cpus=3, resources={"other": 1000})

    def _start_node(self, **options: Any) -> None:
        for _ in range(3):  # Ray gives a node 15 seconds for its agents, which a busy machine may exceed
            with contextlib.suppress(Exception):
                self.cluster.add_node(**options)
                return
        self.cluster.add_node(**options)

    def delete(self) -> None:
        from ray import serve

        serve.delete(APP)
        self.handle = None

    def metrics_address(self) -> str:
        """Of Ray's own exporter."""
        import ray

        (node,) = ray.nodes()
        return f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"

    def snapshots(self) -> list[dict[str, Any]]:
        """`EngineReplica.snapshot` of every replica, without its metrics."""
        from ray.serve.handle import DeploymentHandle

        async def ask() -> list[dict[str, Any]]:
            handle = self.handle = self.handle or DeploymentHandle("EngineReplica", APP)
            return await handle.broadcast("snapshot").results_async(timeout_s=30)

        answers = asyncio.run_coroutine_threadsafe(ask(), self.loop).result()
        return [{name: value for name, value in answer.items() if name != "metrics"} for answer in answers]


def _deployments(app: Any) -> Iterator[Any]:
    """An application's deployments: the ingress, and what is bound to it."""
    yield app._bound_deployment
    for argument in app._bound_deployment.init_args:
        if isinstance(argument, type(app)):
            yield from _deployments(argument)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    driver = Driver()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"result": getattr(driver, name)(**arguments)}
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer, default=int), file=answers, flush=True)  # counters may be NumPy integers


if __name__ == "__main__":
    main()
