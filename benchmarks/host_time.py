"""Host time of a decode step: the engine with a forward that does nothing, at several batch sizes.

Process time with one thread, a mean over the steps, as pages fill only now and then; the sampler runs on logits of a
small vocabulary, so that what is timed is the plan, the launch and the commit. "graph": as on CUDA, the inputs of a
graph are made and ids are read, but what is replayed in between is nothing.

    python benchmarks/host_time.py
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import date
from pathlib import Path
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # the backend for graphs takes a CPU

import torch

from engine import sampling
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
    with mock.patch.object(sampling, "has_triton", lambda device: graph):
        engine = ContinuousBatchingEngine(model, None, max_batch_size=rows, depth=depth)
    if graph:
        engine._runner.capture(lambda run: (run(), lambda: None))
    engine.set_token_sink(lambda step: None)
    for i in range(rows):
        ids = [i // VOCABULARY, i % VOCABULARY]
        request = GenerationRequest(prompt_ids=ids, max_new_tokens=steps + 20, seed=i, **params)
        engine.add_request(request, tag=i)
    while engine.step().generated < rows:
        pass
    start = time.process_time()
    for _ in range(steps):
        engine.step()
    return (time.process_time() - start) / steps * 1e3


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
    row = {rows: round(measure(rows, 1, args.steps, {"temperature": 1.0}, graph=True), 3) for rows in args.rows}
    figures["depth 1, graph"] = row
    print("depth 1, graph: " + ", ".join(f"{n} rows {ms:.3f} ms" for n, ms in row.items()), flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    report = {"date": date.today().isoformat(), "torch": torch.__version__, "host_ms_per_step": figures}
    args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
