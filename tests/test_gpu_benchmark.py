"""The GPU benchmark's dry run: its own code and ours, where nothing but torch, triton, numpy and pydantic is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

ABSENT = ("ray", "starlette", "xgrammar", "gguf", "orjson", "uvloop", "aiohttp", "pydantic_settings", "rich", "vllm")


def test_dry_run(tmp_path: Path) -> None:
    for name in ABSENT:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not there')\n")
    output = tmp_path / "output"
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks/gpu.py"),
            "--dry-run",
            "--engines",
            "pilotfish",
            "--output",
            str(output),
        ],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + (output / "pilotfish-tiny.log").read_text()
    rows = [json.loads(line) for line in (output / "rows.jsonl").read_text().splitlines()]
    checks = [row for row in rows if "check" in row]
    assert len(checks) == 7 and all(row["right"] for row in checks)
    measured = {row["engine"]: row for row in rows if "output_tok_s" in row}
    assert set(measured) == {"pilotfish", "pilotfish, speculating"}
    assert measured["pilotfish, speculating"]["accepted"] > 0
    assert any(row.get("kernels") for row in rows)
    assert "| tiny | tiny | pilotfish |" in (output / "summary.md").read_text()
