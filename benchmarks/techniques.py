"""What each technique costs and gives, against the same work without it.

    python benchmarks/techniques.py

A small random decoder in fp32 (the demo model for speculation), one thread. Latency is CPU time of the process, so that
others on the machine matter little; memory is that of keys and values; quality is whether the greedy tokens are the
same, which they are by law where a technique doesn't change the model.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from engine.batch_engine import ContinuousBatchingEngine, StepStats
from engine.models.decoder import DecoderModel, create_decoder_kv_caches
from engine.models.loader import load_model
from engine.schemas import GenerationRequest
from engine.tokenization import load_tokenizer

ROOT = Path(__file__).parents[1]
CONTEXT = 1024
EXTRACT = (
    "Copy the following text word for word.\n\nThe lighthouse at Cape Morrow was built in 1871 by the brothers Anton "
    "and Emil Varga. It is 42 metres high and painted white with two red bands. Its lamp turns once in twelve seconds "
    "and can be seen from 23 nautical miles away. Since 1988 no keeper has lived there."
)

Row = tuple[str, str, str, str, str]  # technique, latency, memory, quality, note; without -> with


def decoder(**config: Any) -> DecoderModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_layers": 6, "num_heads": 8}
    model = DecoderModel(**(shape | {"num_kv_heads": 2, "max_seq_len": CONTEXT} | config)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def start(engine: ContinuousBatchingEngine, prompts: Iterable[list[int]], counts: Iterable[int]) -> list[str]:
    return [
        engine.add_request(GenerationRequest(prompt_ids=ids, max_new_tokens=count, temperature=0, ignore_eos=True))
        for ids, count in zip(prompts, counts, strict=True)
    ]


def steps(engine: ContinuousBatchingEngine) -> Iterator[tuple[StepStats, float]]:
    """Each step until there is nothing to do, and its CPU milliseconds."""
    while engine.scheduler.has_pending_work:
        begin = time.process_time()
        stats = engine.step()
        yield stats, (time.process_time() - begin) * 1e3


def tokens(engine: ContinuousBatchingEngine, ids: list[str]) -> list[list[int]]:
    results = [engine.result(request_id) for request_id in ids]
    return [result.token_ids for result in results if result is not None]


def kv_bytes(engine: ContinuousBatchingEngine, held: float) -> float:
    """MB of so many pages."""
    return held * engine.pool.kv[:, :, 0].nbytes / 1e6


def same(a: Any, b: Any) -> str:
    return "same tokens" if a == b else "OTHER TOKENS"


def kv_cache() -> Row:
    model, count = decoder(), 48
    ids = torch.tensor([prompt(128, 0)])
    outputs, costs, sizes = [], [], []
    for cached in (False, True):
        caches = create_decoder_kv_caches(model, 1, 256) if cached else None
        begin, given, fed = time.process_time(), ids, ids
        for _ in range(count):
            logits = model(fed, kv_caches=caches, use_cache=True)[0] if cached else model(given)
            fed = logits[:, -1:].argmax(-1)
            given = torch.cat((given, fed), 1)
        costs.append((time.process_time() - begin) * 1e3 / count)
        outputs.append(given.tolist())
        sizes.append(sum(k.nbytes + v.nbytes for k, v in (c.pages for c in caches)) / 1e6 if caches else 0.0)
    return (
        "KV cache",
        f"{costs[0]:.1f} -> {costs[1]:.1f} ms a token after 128",
        f"0 -> {sizes[1]:.1f} MB",
        same(*outputs),
        "",
    )


def decode_cost(model: DecoderModel, live: int, count: int) -> tuple[float, float]:
    """CPU ms of a decode step of 4 rows after `live` tokens, and MB of keys and values held."""
    engine = ContinuousBatchingEngine(model, None, max_batch_size=4, depth=0, enable_prefix_cache=False)
    start(engine, [prompt(live, i) for i in range(4)], [count] * 4)
    costs, held = [], 0.0
    for stats, cost in steps(engine):
        if stats.tokens == stats.generated == 4:
            costs.append(cost)
            held = max(held, engine.pool.held_pages)
    return float(np.median(costs)), kv_bytes(engine, held)


def gqa() -> Row:
    (a, x), (b, y) = (decode_cost(decoder(num_kv_heads=n), 512, 12) for n in (8, 2))
    return "GQA, 8 -> 2 KV heads", f"{a:.1f} -> {b:.1f} ms a step", f"{x:.1f} -> {y:.1f} MB", "is trained so", "4 x 512"


def window() -> Row:
    (a, x), (b, y) = (decode_cost(decoder(window_size=w), 900, 12) for w in (None, 128))
    return "window of 128", f"{a:.1f} -> {b:.1f} ms a step", f"{x:.1f} -> {y:.1f} MB", "is trained so", "4 x 900"


def continuous_batching() -> Row:
    model = decoder()
    rng = random.Random(1)
    prompts, counts = [prompt(24, i) for i in range(32)], [rng.choice((4, 8, 16, 96)) for _ in range(32)]
    outputs, costs = [], []
    for waves in (range(0, 32, 8), (0,)):
        engine = ContinuousBatchingEngine(model, None, max_batch_size=8, depth=0)
        begin, ids, done = time.process_time(), [], 0
        for first in waves:
            last = first + 8 if len(waves) > 1 else 32
            ids += start(engine, prompts[first:last], counts[first:last])
            done += len(list(steps(engine)))
        costs.append(((time.process_time() - begin) * 1e3, done))
        outputs.append(tokens(engine, ids))
    (a, n), (b, m) = costs
    return "continuous batching", f"{a:.0f} -> {b:.0f} ms for 32, {n} -> {m} steps", "", same(*outputs), "over static"


def paging() -> list[Row]:
    """Live over reserved bytes of keys and values, the mean over the steps of a run."""
    model, found = decoder(), []
    rng = random.Random(2)
    prompts, counts = [prompt(rng.randrange(8, 200), i) for i in range(24)], [rng.randrange(4, 48) for _ in range(24)]
    outputs = []
    for page_size in (CONTEXT, 16):
        engine = ContinuousBatchingEngine(
            model, None, max_batch_size=8, depth=0, page_size=page_size, enable_prefix_cache=False
        )
        ids, shares, peak = start(engine, prompts, counts), [], 0
        for _ in steps(engine):
            running = [s for s in engine.table.sequences if s is not None]
            if running:
                live = sum(int(engine.table.known[s.row]) for s in running)
                reserved = engine.pool.held_pages * page_size
                shares.append((live / (8 * CONTEXT), live / reserved))
                peak = max(peak, engine.pool.held_pages)
        outputs.append(tokens(engine, ids))
        found.append((np.mean(shares, 0), kv_bytes(engine, peak)))
    (naive, slot), (_, paged) = found[0][0], found[1][0]
    whole, part = found[0][1], found[1][1]
    shares = f"live/reserved {slot:.0%} -> {paged:.0%}, {whole:.1f} -> {part:.1f} MB"
    return [
        ("slots for what runs", "", f"live/reserved {naive:.0%} -> {slot:.0%}", "same tokens", "over 8 whole contexts"),
        ("pages of 16", "", shares, same(*outputs), "over slots"),
    ]


def prefix_cache() -> Row:
    model, shared = decoder(), prompt(400, 9)
    outputs, costs = [], []
    for cached in (False, True):
        engine = ContinuousBatchingEngine(model, None, max_batch_size=8, depth=0, enable_prefix_cache=cached)
        begin, ids = time.process_time(), []
        for i in range(8):
            ids += start(engine, [shared + prompt(8, i)], [4])
            list(steps(engine))
        costs.append(((time.process_time() - begin) * 1e3 / 8, engine.stats().computed_tokens))
        outputs.append(tokens(engine, ids))
    (a, n), (b, m) = costs
    return (
        "prefix cache",
        f"{a:.0f} -> {b:.0f} ms a request, {n} -> {m} tokens run",
        "",
        same(*outputs),
        "400 shared of 408",
    )


def chunked_prefill() -> Row:
    model, outputs, worst = decoder(), [], []
    for budget in (2048, 64):
        engine = ContinuousBatchingEngine(model, None, max_batch_size=8, depth=0, max_batched_tokens=budget)
        ids = start(engine, [prompt(16, i) for i in range(4)], [40] * 4)
        while engine.step().generated < 4:
            pass
        ids += start(engine, [prompt(960, 9)], [2])
        worst.append(max(cost for _, cost in steps(engine)))
        outputs.append(tokens(engine, ids))
    a, b = worst
    return (
        "chunked prefill, 64 tokens",
        f"{a:.0f} -> {b:.0f} ms, longest wait between tokens",
        "",
        same(*outputs),
        "prompt of 960",
    )


def speculation(folder: str) -> Row:
    tokenizer, outputs, costs = load_tokenizer(folder), [], []
    ids = tokenizer.encode_chat([{"role": "user", "content": EXTRACT}])
    for gamma in (None, 4):
        options: dict[str, Any] = {} if gamma is None else {"speculation": "ngram", "gamma": gamma}
        engine = ContinuousBatchingEngine(
            load_model(folder), tokenizer, max_seq_len=512, max_batch_size=1, dtype=torch.float32, depth=0, **options
        )
        request = start(engine, [ids], [64])
        engine.step()
        spent = [cost for _, cost in steps(engine)]
        costs.append((sum(spent) / 63, 63 / len(spent)))
        outputs.append(tokens(engine, request))
    (a, _), (b, rate) = costs
    return (
        "speculation, n-gram, gamma 4",
        f"{a:.0f} -> {b:.0f} ms a token, {rate:.1f} a step",
        "",
        same(*outputs),
        "extractive",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "techniques.json")
    args = parser.parse_args()
    measures: list[Callable[[], Any]] = [kv_cache, gqa, window, continuous_batching, paging, prefix_cache]
    measures += [chunked_prefill, partial(speculation, args.model)]
    torch.set_num_threads(1)
    rows: list[Row] = []
    for measure in measures:
        with torch.inference_mode():
            found = measure()
        rows += found if isinstance(found, list) else [found]
        print(rows[-1], flush=True)
    names = ("technique", "latency", "memory", "quality", "note")
    table = Table(*names, title="without -> with")
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "date": date.today().isoformat(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rows": [dict(zip(names, row, strict=True)) for row in rows],
    }
    args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
