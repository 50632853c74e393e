"""The GPU benchmark's dry run: its own code and ours, with torch, triton, transformers and what that brings alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.conftest import ROOT

PRESENT = {"numpy", "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "tqdm", "pyyaml", "jinja2"}


def absent() -> list[str]:
    """Import names of our other dependencies."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in needed}
    assert names > PRESENT
    return sorted(names - PRESENT)


def test_dry_run(tmp_path: Path) -> None:
    for name in absent():
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
    assert len(checks) == 10 and all(row["right"] for row in checks)
    measured = {row["engine"]: row for row in rows if "output_tok_s" in row}
    assert set(measured) == {"pilotfish", "pilotfish, speculating"}
    assert measured["pilotfish, speculating"]["accepted"] > 0
    assert any(row.get("kernels") for row in rows)
    assert "| tiny | tiny | pilotfish |" in (output / "summary.md").read_text()
