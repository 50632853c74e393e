"""What a decode step costs as a function of batch, live tokens and context limit.

    python benchmarks/step_cost.py

The model has the shape of SmolLM2-135M and random weights. Every figure is CPU time of the process on one thread, a
mean over the steps of a run and the best of the rounds, so that others on the machine matter little; read the ratios.
A step should cost what its live tokens cost: not more under a larger max_seq_len, nor beside a long neighbour. The
file beside the JSON's has three plots.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from engine.batch_engine import ContinuousBatchingEngine
from engine.models.decoder import DecoderModel
from engine.schemas import GenerationRequest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from app.bench.html import Chart  # noqa: E402

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "tie_word_embeddings": True,
}
LONG = 8192
PLOTS = {
    "rows of 32 tokens": [
        (1, "1 row of 32 tokens, max_seq_len 8192"),
        *((rows, f"{rows} rows of 32 tokens") for rows in (4, 16, 31, 64)),
    ],
    "live tokens of 4 rows": [(4 * tokens, f"4 rows of {tokens} tokens") for tokens in (32, 512, 4096)],
    "max_seq_len, at 32 live tokens": [(n, f"1 row of 32 tokens, max_seq_len {n}") for n in (512, 2048, LONG)],
}
"""By what is on the x axis: its value, and the case."""
STYLE = """<style>
svg { background: white; font: 12px sans-serif } .x { text-anchor: middle } .y { text-anchor: end }
.grid { stroke: #ddd } .line { fill: none; stroke: #0b5a8a; stroke-width: 2 }
</style>"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--steps", type=int, default=8, help="decode steps of a run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "step_cost.json")
    return parser.parse_args()


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(SHAPE["vocab_size"]) for _ in range(length)]


def add(engine: ContinuousBatchingEngine, prompts: Sequence[list[int]], count: int) -> None:
    for ids in prompts:
        engine.add_request(GenerationRequest(prompt_ids=ids, max_new_tokens=count, ignore_eos=True, temperature=0.0))


def drain(engine: ContinuousBatchingEngine) -> None:
    while engine.scheduler.has_pending_work:
        engine.step()


def step_ms(engine: ContinuousBatchingEngine, prompts: Sequence[list[int]], steps: int) -> float:
    """CPU milliseconds of a decode step after prompts that are in the prefix cache."""
    add(engine, prompts, steps + 1)
    assert engine.step().generated == len(prompts)
    start = time.process_time()
    for _ in range(steps):
        stats = engine.step()
        assert stats.generated == stats.tokens == len(prompts)
    elapsed = time.process_time() - start
    drain(engine)
    return elapsed / steps * 1000


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    model = DecoderModel(**SHAPE, max_seq_len=LONG).to(dtype)

    def engine(max_seq_len: int, page_size: int | None = None, tokens: int = 1024) -> ContinuousBatchingEngine:
        size = page_size or model.attention.default_page_size
        return ContinuousBatchingEngine(
            model,
            None,
            max_batch_size=64,
            max_seq_len=max_seq_len,
            dtype=dtype,
            page_size=page_size,
            num_pages=max(tokens // size, 1),
            depth=0,
        )

    large = engine(LONG, tokens=6 * LONG)  # prompts fill half; the rest is for outputs, which stay cached too
    cases: dict[str, tuple[ContinuousBatchingEngine, list[int]]] = {
        "1 row of 32 tokens, max_seq_len 512": (engine(512), [32]),
        "1 row of 32 tokens, max_seq_len 2048": (engine(2048), [32]),
        "1 row of 32 tokens, max_seq_len 8192": (large, [32]),
        "1 row of 32 tokens, a page of 512": (engine(512, 512), [32]),
        "1 row of 32 tokens, a page of 8192": (engine(LONG, LONG), [32]),
        "4 rows of 32 tokens": (large, [32] * 4),
        "4 rows of 512 tokens": (large, [512] * 4),
        "4 rows of 4096 tokens": (large, [4096] * 4),
        "16 rows of 32 tokens": (large, [32] * 16),
        "64 rows of 32 tokens": (large, [32] * 64),
        "31 rows of 32 tokens": (large, [32] * 31),
        "1 row of 8192 tokens": (large, [LONG - 2]),
        "31 rows of 32 tokens and 1 of 8192": (large, [32] * 31 + [LONG - 2]),
    }
    runs = {
        name: (which, [prompt(tokens - args.steps, seed) for seed, tokens in enumerate(live_tokens)])
        for name, (which, live_tokens) in cases.items()
    }
    for which, prompts in runs.values():
        add(which, prompts, 1)
        drain(which)
    best: dict[str, float] = {}
    for number in range(args.rounds):
        for name, (which, prompts) in runs.items():
            best[name] = min(best.get(name, float("inf")), step_ms(which, prompts, args.steps))
        print(f"round {number + 1} of {args.rounds}", flush=True)
    apart = best["31 rows of 32 tokens"] + best["1 row of 8192 tokens"]
    one = best["1 row of 32 tokens, max_seq_len 8192"]
    ratios = {
        "max_seq_len 8192 over 512, at 32 tokens": one / best["1 row of 32 tokens, max_seq_len 512"],
        "a page of 8192 over one of 512, at 32 tokens": best["1 row of 32 tokens, a page of 8192"]
        / best["1 row of 32 tokens, a page of 512"],
        "4 rows, 512 tokens over 32": best["4 rows of 512 tokens"] / best["4 rows of 32 tokens"],
        "4 rows, 4096 tokens over 32": best["4 rows of 4096 tokens"] / best["4 rows of 32 tokens"],
        "32 tokens, 4 rows over 1": best["4 rows of 32 tokens"] / one,
        "32 tokens, 16 rows over 1": best["16 rows of 32 tokens"] / one,
        "32 tokens, 64 rows over 1": best["64 rows of 32 tokens"] / one,
        "31 short rows beside a long one, over the two apart": best["31 rows of 32 tokens and 1 of 8192"] / apart,
    }
    for title, figures, form in (("CPU ms a decode step", best, "{:.1f}"), ("ratios", ratios, "{:.2f}")):
        table = Table(title, "")
        for name, value in figures.items():
            table.add_row(name, form.format(value))
        Console().print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "date": date.today().isoformat(),
        "machine": {"processor": cpu_name(), "threads": 1},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "dtype": args.dtype,
        "shape": SHAPE,
        "cpu_ms_a_step": best,
        "ratios": ratios,
    }
    args.output.write_text(json.dumps(report, indent=2) + "\n")
    args.output.with_suffix(".svg").write_text(plots(best))


def plots(cpu_ms: Mapping[str, float]) -> str:
    """One SVG of all PLOTS, side by side."""
    charts = [
        Chart("A decode step", x, "CPU ms", [("", [(value, cpu_ms[case]) for value, case in points])]).svg()
        for x, points in PLOTS.items()
    ]
    placed = (
        chart.replace("<svg", f'<svg x="{560 * i}" width="560" height="260"', 1) for i, chart in enumerate(charts)
    )
    size = f'width="{560 * len(charts)}" height="260"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{STYLE}{"".join(placed)}</svg>\n'


def cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
