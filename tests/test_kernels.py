"""Triton's kernels are compiled for Hopper as the models launch them, which needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "benchmarks/kernels.py"), "--output", str(tmp_path / "kernels.json")]
    done = subprocess.run(
        [*command, "--shapes", "8B", "135M", "--dtypes", "bfloat16"],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    kernels = json.loads((tmp_path / "kernels.json").read_text())["kernels"]
    sources = [ROOT / "engine/fused.py", ROOT / "engine/attention/paged_triton.py"]
    written = {
        line.removeprefix("def ").partition("(")[0]
        for source in sources
        for line in source.read_text().splitlines()
        if line.startswith("def ") and "_kernel(" in line
    }
    assert {kernel["kernel"] for kernel in kernels} == written and len(written) == 8
    for kernel in kernels:
        assert kernel["spilled_bytes"] == 0 and kernel["shared_bytes"] <= 227 * 1024
    assert {kernel["products"] for kernel in kernels if kernel["kernel"] == "attend_kernel"} == {"mma", "wgmma"}
