"""Host time of a decode step: the engine with a forward that does nothing, at several batch sizes.

Process time with one thread, the median of the steps; the sampler runs on logits of a small vocabulary, so that what
is timed is the plan, the launch and the commit. "graph": the inputs of a CUDA graph are made, and a stand-in for it is
replayed.

    python benchmarks/host_time.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from datetime import date
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # the backend for graphs takes a CPU

import torch

from engine.batch_engine import ContinuousBatchingEngine
from engine.models.decoder import DecoderModel
from engine.schemas import GenerationRequest

VOCABULARY = 64


class NoForward(DecoderModel):
    def hidden_states(self, input_ids, batch, pages=None):
        if batch.token_pages is None:
            self.attention.plan(batch, None)  # what every step plans stays
        return torch.zeros(len(input_ids), 1)

    def logits(self, hidden):
        return torch.zeros(len(hidden), VOCABULARY)


def measure(rows: int, depth: int, steps: int, params: dict[str, float], graph: bool = False) -> float:
    """Milliseconds a step."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_layers": 1, "num_heads": 4, "max_seq_len": 1024}
    model = NoForward(**shape, attn_impl="triton" if graph else "mha")
    engine = ContinuousBatchingEngine(model, None, max_batch_size=rows, depth=depth)
    if graph:
        engine._runner.capture(lambda run: (run(), lambda: None))
    engine.set_token_sink(lambda step: None)
    for i in range(rows):
        request = GenerationRequest(prompt_ids=[i // VOCABULARY, i % VOCABULARY], max_new_tokens=steps + 20, seed=i, **params)
        engine.add_request(request, tag=i)
    while engine.step().generated < rows:
        pass
    times = []
    for _ in range(steps):
        start = time.process_time()
        engine.step()
        times.append(time.process_time() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    results = Path(__file__).parent / "results" / "host_time.json"
    parser.add_argument("--output", type=Path, default=results)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for name, params in (("greedy", {"temperature": 0.0}), ("temperature 1", {"temperature": 1.0})):
        for depth in (0, 1):
            row = {rows: round(measure(rows, depth, args.steps, params), 3) for rows in args.rows}
            figures[f"{name}, depth {depth}"] = row
            print(f"{name}, depth {depth}: " + ", ".join(f"{n} rows {ms:.3f} ms" for n, ms in row.items()), flush=True)
    row = {rows: round(measure(rows, 1, args.steps, {"temperature": 0.0}, graph=True), 3) for rows in args.rows}
    figures["greedy, depth 1, graph"] = row
    print("greedy, depth 1, graph: " + ", ".join(f"{n} rows {ms:.3f} ms" for n, ms in row.items()), flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    report = {"date": date.today().isoformat(), "torch": torch.__version__, "host_ms_per_step": figures}
    args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
