"""Ray's side of the end-to-end tests: a process of its own, because Ray reads its environment when it is imported.

Reads one JSON command a line, [name, arguments], and answers each with a line {"result": ...} or {"error": ...}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

APP = "test"


class Driver:
    def __init__(self) -> None:
        self.handle: Any = None
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def start(self, folder: str, port: int) -> None:
        from app.cli import local_environment

        os.environ.update(local_environment(Path(folder), {}))
        os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "1"
        import ray
        from ray import serve

        ray.init(
            address="local",
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=str(Path(folder) / "ray"),
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})

    def deploy(self, options: dict[str, Any], wait: bool) -> None:
        from ray.serve.api import _run

        from app.main import build

        _run(build(options), name=APP, route_prefix="/", _blocking=wait)

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
