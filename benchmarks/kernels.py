"""Compiles every Triton kernel for a GPU that needn't be there, as the models launch them, and says what each takes.

    python benchmarks/kernels.py                   # for sm_90; the table goes to results/kernels.json

The launches are real, on CPU tensors; what would run is compiled and left at that. Registers a thread, bytes of stack
and local memory (0: nothing is spilled) are cuobjdump's, shared memory a program is Triton's.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine import fused
from engine.attention import PackedBatch
from engine.attention.paged_triton import TritonAttention

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
PAGE = TritonAttention.default_page_size
# heads, KV heads, head_dim, hidden size, intermediate size, vocabulary
SHAPES = {
    "135M": (9, 3, 64, 576, 1536, 49152),
    "1B": (32, 8, 64, 2048, 8192, 128256),
    "8B": (32, 8, 128, 4096, 14336, 128256),
    "wide": (16, 8, 256, 2048, 8192, 32768),
}


class Absent:
    """The part of a Triton driver that compiling asks."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextmanager
def compiling(capability: int) -> Iterator[dict[str, Any]]:
    """Launches inside only compile; yields the compiled kernels by their cubins' hash."""
    found: dict[str, Any] = {}
    run = JITFunction.run

    def only_compile(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.setdefault(kernel.hash, kernel)

    triton.runtime.driver.set_active(Absent(capability))
    with mock.patch.object(JITFunction, "run", only_compile):
        yield found


def launch_all(shape: str, dtype: torch.dtype) -> None:
    """What a model of the shape launches in graphs of 1 and of 256 tokens, and in a step with a prompt."""
    heads, kv_heads, dim, hidden, intermediate, vocab = SHAPES[shape]
    attention = TritonAttention()
    k_pages, v_pages = torch.zeros(2, 256, PAGE, kv_heads, dim, dtype=dtype)
    none = np.empty(0, np.int64)
    batches = []
    for tokens in (1, 256):
        inputs = torch.zeros(3 + 128, tokens, dtype=torch.int32)
        batches.append(
            PackedBatch(inputs[1].long(), none, none, slot_mapping=inputs[2], page_size=PAGE, token_pages=inputs[3:])
        )
    table = np.zeros((2, 64), dtype=np.int32)
    batches.append(PackedBatch.paged(table, PAGE, np.array([500, 0]), np.array([1, 700]), CPU))
    for batch in batches:
        tokens = len(batch.positions)
        packed = torch.zeros(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        q, k, v = (
            part.unflatten(-1, (-1, dim)) for part in packed.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        )
        angles = torch.zeros(2, tokens, 1, dim)
        assert batch.slot_mapping is not None
        q = attention.append(q, k, v, angles[0], angles[1], (k_pages, v_pages), batch.slot_mapping)
        attention.attend(q, k_pages, v_pages, attention.plan(batch, None))
    x, weight = torch.zeros(8, hidden), torch.zeros(hidden)
    for delta in (None, x.to(dtype)):
        fused.add_rms_norm(x, delta, weight, 1e-5, dtype)
    fused.silu_mul(torch.zeros(8, 2 * intermediate, dtype=dtype))
    row_ids = torch.zeros(8, dtype=torch.int64)
    one = torch.ones(8)
    fused.choose(torch.zeros(8, vocab, dtype=dtype), row_ids, row_ids, one, row_ids, (row_ids, one, one), -2)


def resources(kernel: Any) -> dict[str, Any]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        text = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    ptx = kernel.asm["ptx"]
    return {
        "kernel": kernel.metadata.name,
        "warps": kernel.metadata.num_warps,
        "registers": used["REG"],
        "spilled_bytes": used["STACK"] + used["LOCAL"],
        "shared_bytes": kernel.metadata.shared,
        "products": "wgmma" if "wgmma" in ptx else "mma" if "mma.sync" in ptx else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "kernels.json")
    args = parser.parse_args()
    rows, seen = [], set()
    with compiling(args.capability) as found:
        for shape in args.shapes:
            for dtype in args.dtypes:
                launch_all(shape, getattr(torch, dtype))
                for key in [key for key in found if key not in seen]:
                    seen.add(key)
                    rows.append({"shape": shape, "dtype": dtype} | resources(found[key]))
                    print(json.dumps(rows[-1]), flush=True)
    report = {"triton": triton.__version__, "target": f"sm_{args.capability}", "kernels": rows}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
