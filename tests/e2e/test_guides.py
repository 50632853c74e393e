"""The guides' commands for a running server, as printed but for fewer requests, less time and this server's address."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.bench.report import Report
from tests.e2e.conftest import ROOT, Server, llm_serve
from tests.test_docs import commands

SHORTER = {"--requests": ["--requests", "12"], "--duration": ["--duration", "2"], "--find-rate": ["--duration", "1"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with llm_serve() as server:
        yield server


def run(command: str, folder: Path, *more: str) -> str:
    scripts = sysconfig.get_path("scripts")
    done = subprocess.run(
        [*shlex.split(command), *more],
        cwd=folder,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_llm_bench(server: Server, tmp_path: Path) -> None:
    printed = [command for _, command in commands() if command.startswith("llm-bench")]
    kinds = ("--rate", "--concurrency", "--find-rate", "--compare")
    assert [next(kind for kind in kinds if kind in command) for command in printed] == list(kinds)
    *loads, compare = printed
    for command in loads:
        shorter = [word for name, words in SHORTER.items() if name in command for word in words]
        run(command, tmp_path, "--base-url", server.url, "--output-tokens", "8", *shorter)
    assert Report.model_validate_json((tmp_path / "new.json").read_bytes()).succeeded == 12
    shutil.copy(tmp_path / "new.json", tmp_path / "base.json")
    run(compare, tmp_path)
    assert (tmp_path / "new.html").stat().st_size > 10_000 and (tmp_path / "compared.html").stat().st_size > 1000


def test_programs_that_need_no_server() -> None:
    """Whose figures are tested elsewhere: that they run as printed."""
    [capacity] = [command for _, command in commands() if command.startswith("python benchmarks/capacity.py --")]
    assert "requests/s" in run(capacity, ROOT)
    [more] = [command for _, command in commands() if command == "llm-serve --help"]
    assert "--speculation" in run(more, ROOT)
