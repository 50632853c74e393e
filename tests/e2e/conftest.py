"""One Ray for all end-to-end tests, apart from any other Ray on the machine; each test deploys what it needs on it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.cli import free_ports

ROOT = Path(__file__).parents[2]
LLM_SERVE = Path(sysconfig.get_path("scripts")) / "llm-serve"


class Cluster:
    """A Ray with Serve, driven through `tests.e2e.driver`. `url` is where applications answer."""

    def __init__(self, **options: Any) -> None:
        self.folder = tempfile.mkdtemp(prefix="pilotfish-", dir="/tmp")
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._log = open(os.path.join(self.folder, "driver.log"), "w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.driver"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        try:
            self.call("start", folder=self.folder, port=port, **options)
        except BaseException:
            self.close()
            raise

    def processes(self, name: str) -> list[psutil.Process]:
        """Those of Ray's below the driver with this in their command line."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def call(self, name: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"the driver has died:\n{self._log.read()[-4000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """The driver ends with its input, and with it Ray."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Deployed:
    """A running application."""

    cluster: Cluster
    options: dict[str, Any]

    @property
    def url(self) -> str:
        return self.cluster.url

    def snapshots(self) -> list[dict[str, Any]]:
        """`EngineReplica.snapshot` of every replica."""
        deadline = time.monotonic() + 60
        while True:
            try:
                snapshots: list[dict[str, Any]] = self.cluster.call("snapshots")
                return snapshots
            except RuntimeError:  # one was lost, and not all have heard of it
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def pids(self) -> list[int]:
        return [snapshot["pid"] for snapshot in self.snapshots()]

    def replicas(self) -> dict[str, Any]:
        """What the Router knows of each replica."""
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
            replicas: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=30).json()["replicas"]
            return replicas
        return {}

    def scale(self, replicas: int) -> None:
        """Changes the number of engines and nothing else; returns at once."""
        self.cluster.call("scale", options=self.options, engines=replicas)


def wait_until(
    condition: Callable[[], object],
    timeout: float = 300.0,
    describe: Callable[[], str] = lambda: "it didn't come to pass",
) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(describe())
        time.sleep(0.05)


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready", timeout=30).status_code == 200
    return False


class Server:
    """A running llm-serve, of the dummy model unless the flags say otherwise."""

    def __init__(self, port: int, *flags: str, folder: Path = ROOT, **environment: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [str(LLM_SERVE), "--model", "dummy", "--dtype", "float32", *flags, "--port", str(port)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_ready(self) -> None:
        def over() -> bool:
            return any(line.startswith("llm-serve: ready") for line in self.lines) or self.process.poll() is not None

        wait_until(over, describe=lambda: "\n".join(self.lines))
        assert self.process.poll() is None, "\n".join(self.lines)

    def tree(self) -> list[psutil.Process]:
        """The process and all that it started."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def end(self) -> None:
        processes = self.tree() if self.process.poll() is None else []
        self.process.terminate()
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)
        psutil.wait_procs(processes, timeout=120)


def listening(processes: list[psutil.Process]) -> list[tuple[psutil.Process, str, int]]:
    """Every TCP port that these processes listen on: (process, address, port)."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.append((process, connection.laddr.ip, connection.laddr.port))
    return found


@contextlib.contextmanager
def llm_serve(*flags: str, folder: Path = ROOT, **environment: str) -> Iterator[Server]:
    """`llm-serve`, ready for requests."""
    [port] = free_ports(1)
    server = Server(port, *flags, folder=folder, **environment)
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def deploy(cluster: Cluster) -> Iterator[Callable[..., Deployed]]:
    """`deploy(num_replicas=2, ...)`: the application with these options, ready for requests."""

    def start(**options: Any) -> Deployed:
        app = Deployed(cluster, {"model": "dummy", "dtype": "float32", "num_replicas": 1, **options})
        cluster.call("deploy", options=app.options, wait=True)
        wait_until(lambda: _is_ready(app))
        return app

    yield start
    cluster.call("delete")


def _is_ready(app: Deployed) -> bool:
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):  # HAProxy's own page: it knows no Router yet
        health = httpx.get(f"{app.url}/health", timeout=30)
        usable = [replica["is_usable"] for replica in health.json()["replicas"].values()]
        return health.status_code == 200 and usable == [True] * app.options["num_replicas"]
    return False
