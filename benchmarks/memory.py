"""Memory that loading takes: the peak of the resident set over what is resident once the model is there.

Each case loads in a process of its own, which resets the kernel's high-water mark (Linux) once everything is imported.
Cases: the demo model from its folder and from GGUF, and a random model of Llama 3.2 1B's shape written for the purpose.
"engine" adds the engine, which packs the weights in half precision. Figures in brackets leave out what the process took
before it loaded.

    python benchmarks/memory.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table

from engine.batch_engine import ContinuousBatchingEngine
from engine.models.decoder import DecoderModel
from engine.models.loader import load_model
from engine.models.publisher import save_pretrained

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "models" / "SmolLM2-135M-Instruct"
ONE_BILLION = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_layers": 16,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "max_seq_len": 8192,
    "tie_word_embeddings": True,
}


def resident() -> tuple[int, int]:
    """Peak and current resident set in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) << 10, int(status["VmRSS"].split()[0]) << 10


def measure(path: str, dtype: str, engine: bool) -> None:
    """In the child: prints the resident set before, at the peak and after."""
    import transformers

    transformers.CONFIG_MAPPING["llama"]  # imported when it is first asked for
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()[1]
    model = load_model(path, dtype=dtype)
    if engine:
        running = ContinuousBatchingEngine(model, None, max_batch_size=1, max_seq_len=64)
        assert running.stats().total_pages
    else:
        assert sum(float(p.detach().flatten()[::1024].float().sum()) for p in model.parameters()) != 0  # all resident
    peak, after = resident()
    print(json.dumps({"before": before, "peak": peak, "after": after}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", default=["SmolLM2-135M", "SmolLM2-135M Q4_1", "1B"])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "memory.json")
    args = parser.parse_args()
    if args.measure:
        path, dtype, stage = args.measure
        return measure(path, dtype, stage == "engine")
    table = Table("model", "dtype", "", "before", "peak", "after", "peak / after")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        large = DecoderModel(**ONE_BILLION).to(torch.bfloat16)  # type: ignore[arg-type]
        save_pretrained(large, folder, max_shard_size="1GB")
        del large
        models = {"SmolLM2-135M": str(DEMO), "SmolLM2-135M Q4_1": f"{DEMO}.Q4_1.gguf", "1B": folder}
        for name, path in ((name, models[name]) for name in args.models):
            for dtype, stage in (("bfloat16", "load"), ("float32", "load"), ("bfloat16", "engine")):
                command = [sys.executable, __file__, "--measure", path, dtype, stage]
                environment = os.environ | {"PYTHONPATH": str(ROOT)}
                output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                row = json.loads(output)
                net = (row["peak"] - row["before"]) / (row["after"] - row["before"])
                row["ratio"] = round(row["peak"] / row["after"], 3)
                row["net_ratio"] = round(net, 3)
                results[f"{name}, {dtype}, {stage}"] = row
                sizes = [f"{row[key] / 2**20:.0f} MiB" for key in ("before", "peak", "after")]
                table.add_row(name, dtype, stage, *sizes, f"{row['ratio']:.2f} ({net:.2f})")
                print(name, dtype, stage, row, flush=True)
    Console().print(table)
    report = {
        "date": date.today().isoformat(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "resident_bytes": results,
    }
    args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
