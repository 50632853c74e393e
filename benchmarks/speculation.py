"""What speculation costs where it can't help, and what it gives where it can.

    python -m benchmarks.speculation           # minutes; --quick for a trial

The first part decodes random prompts with a draft of random weights, left to `auto`, and with n-gram lookup: in the
engine's process, and in a process of its own on the same cores. The second has the demo model answer chats, extractive
ones and others, with n-gram lookup and, with `--draft`, with that draft. The third compares the simulator with the
engine.

Every round runs every way once, in random order; a ratio is that of a round, speculation over none, and what is told of
the rounds is the median and the range. `cpu` is the same ratio in CPU time of both processes, which others on the
machine disturb less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

from app.draft import DraftHost, DraftServer, SocketChannel
from benchmarks.speculation_simulator import Costs, ahead, synchronous
from benchmarks.step_cost import cpu_name
from engine.batch_engine import ContinuousBatchingEngine
from engine.models.decoder import CausalLM, DecoderModel
from engine.models.loader import load_model
from engine.sampling import SamplingTable, Vocabulary
from engine.schemas import DraftAnswer, GenerationRequest
from engine.sequence import SequenceTable
from engine.speculation import Drafter
from engine.tokenization import load_tokenizer

ROOT = Path(__file__).parents[1]
DRAFT = {"hidden_size": 192, "num_layers": 2, "num_heads": 3, "tie_word_embeddings": True}
WAYS = ("off", "ngram", "draft in process", "draft elsewhere")
PARTS = ("useless", "chats", "sleeping")
SMALL = 64  # vocabulary of the models that sleep
SOCKET_SECONDS = 0.001  # of a message and its answer
SLEEPERS = (  # acceptance, gamma; a drafted token and a round trip, in steps
    (0.5, 2, 0.1, 0.0),
    (0.8, 4, 0.05, 0.0),
    (0.8, 4, 0.2, 0.1),
    (0.9, 6, 0.1, 0.05),
    (0.95, 8, 0.05, 0.0),
    (1.0, 4, 0.1, 0.0),
)
TEXTS = (
    "The harbour of Vardo lies on the eastern tip of the country. In 1789 the merchant Anders Holm built a "
    "warehouse of stone there, and in 1803 his daughter Ingrid opened a school for the children of fishermen. The "
    "school had 24 pupils in its first year and 61 in 1810. It burned down in the winter of 1812, was rebuilt in "
    "brick, and stands today as the town's library.",
    "Dear Ms Okafor, thank you for your order 88213 of 4 March. The two desk lamps left our warehouse in Leeds on "
    "6 March and should reach you by Friday. The oak shelf is delayed: our supplier expects it on 19 March. If "
    "you would rather cancel the shelf, write to orders@brightroom.example or call 0113 496 0000 before noon on "
    "Thursday. Yours sincerely, Daniel Price.",
    "To make the dough, mix 500 grams of flour with 10 grams of salt and 7 grams of dry yeast. Add 320 "
    "millilitres of warm water and 2 spoons of olive oil, and knead it for ten minutes. Let it rest in a warm "
    "place until it has doubled in size, which takes about an hour. Roll it out, cover it with tomato sauce and "
    "cheese, and bake it at 250 degrees for nine minutes.",
)
EXTRACTIVE = (
    "Repeat the following text word for word:\n\n{}",
    "Extract every sentence that contains a number from this text:\n\n{}",
    "Which sentences of this text name a place or a date? Quote them:\n\n{}",
    "Correct the spelling of this text and print it again:\n\n{}",
)
OTHER = (
    "Write a short story about a lighthouse keeper and a whale.",
    "Explain to a child why the sky is blue.",
    "What should I think about before I buy a used bicycle?",
    "Give me five ideas for a birthday party in winter.",
    "How do I ask my manager for a day off?",
    "Write a Python function that counts the vowels in a string.",
    "What is the difference between weather and climate?",
    "Plan a week of simple dinners for two people.",
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--ways", nargs="+", default=list(WAYS[1:]), choices=WAYS[1:], help="of the first part")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the chats")
    parser.add_argument("--draft", help="a draft model for the chats")
    parser.add_argument("--chats", type=int, nargs="+", default=[1], help="chats at a time")
    parser.add_argument("--prompts", type=int, help="of a kind of chats at most")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--sleep", type=float, default=0.06, help="seconds of a forward of the target that sleeps")
    parser.add_argument("--quick", action="store_true", help="few, short rounds, to see that it runs")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "speculation.json")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.requests, args.output_tokens = 2, args.requests[:2], min(args.output_tokens, 64)
    return args


def random_draft(vocab_size: int, max_seq_len: int) -> DecoderModel:
    torch.manual_seed(0)
    return DecoderModel(vocab_size=vocab_size, max_seq_len=max_seq_len, **DRAFT).to(torch.bfloat16)


def drafter_of(model: DecoderModel, rows: int, max_seq_len: int) -> Drafter:
    device = model.device
    table = SequenceTable(rows, max_seq_len, 1, device)
    return Drafter(model, table, SamplingTable(rows, device), Vocabulary(model.vocab_size, None))


def draft_process(pipe: Connection, vocab_size: int, rows: int, max_seq_len: int) -> None:
    torch.set_num_threads(1)
    model = random_draft(vocab_size, max_seq_len).eval()
    host = DraftHost(DraftServer(drafter_of(model, rows, max_seq_len)), "127.0.0.1", vocab_size, {})
    pipe.send((host.address, host.key))
    pipe.recv()
    host.close()


@contextmanager
def draft_elsewhere(vocab_size: int, rows: int, max_seq_len: int) -> Iterator[tuple[SocketChannel, psutil.Process]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=draft_process, args=(theirs, vocab_size, rows, max_seq_len))
    process.start()
    channel = SocketChannel()
    try:
        address, key = ours.recv()
        channel.connect(address, key, "benchmark", vocab_size, 0)
        assert process.pid is not None
        yield channel, psutil.Process(process.pid)
    finally:
        channel.close()
        ours.send(None)
        process.join(timeout=30)


def drain(engine: ContinuousBatchingEngine, requests: list[GenerationRequest]) -> list[list[int]]:
    """Run requests to their ends; returns their tokens."""
    for request in requests:
        engine.add_request(request)
    while engine.scheduler.has_pending_work:
        engine.step()
    engine.pool.clear_cache()
    results = [engine.result(request.request_id) for request in requests]
    assert all(result is not None and result.error is None for result in results)
    return [result.token_ids for result in results if result is not None]


class Clock:
    """Wall and CPU seconds of this process and another."""

    def __init__(self, other: psutil.Process | None) -> None:
        self.other = other

    def __call__(self) -> tuple[float, float]:
        times = self.other.cpu_times() if self.other is not None else None
        return time.perf_counter(), time.process_time() + (times.user + times.system if times else 0.0)


def compare(
    engines: dict[str, ContinuousBatchingEngine],
    others: dict[str, psutil.Process],
    make: Callable[[], list[GenerationRequest]],
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """Paired runs; the first engine is what the others are compared with."""
    runs: dict[str, list[tuple[float, float, int]]] = {name: [] for name in engines}
    said: dict[str, list[list[int]]] = {name: [] for name in engines}
    before = {name: (engine.speculation_stats(), engine.stats()) for name, engine in engines.items()}
    for _ in range(rounds):
        requests = make()
        for name in random.sample(list(engines), len(engines)):
            fresh = [GenerationRequest(**request.model_dump(exclude={"request_id"})) for request in requests]
            clock = Clock(others.get(name))
            wall, cpu = clock()
            texts = drain(engines[name], fresh)
            after = clock()
            runs[name].append((after[0] - wall, after[1] - cpu, sum(map(len, texts))))
            said[name] += texts
    base = next(iter(engines))
    figures = {}
    for name, engine in engines.items():
        old, steps = before[name]
        now, generated = engine.speculation_stats(), engine.stats().generated_tokens - steps.generated_tokens
        drafted, accepted = now.drafted - old.drafted, now.accepted - old.accepted
        rates = [tokens / wall for wall, _, tokens in runs[name]]
        figure: dict[str, Any] = {
            "tokens_per_second": round(statistics.median(rates), 1),
            "tokens_a_step": round(generated / (engine.stats().steps - steps.steps), 2),
            "drafted_per_token": round(drafted / generated, 3),
            "acceptance": round(accepted / drafted, 3) if drafted else None,
        }
        if name != base:
            for key, i in (("ratio", 0), ("cpu", 1)):
                ratios = [
                    (ours[2] / ours[i]) / (plain[2] / plain[i])
                    for ours, plain in zip(runs[name], runs[base], strict=True)
                ]
                figure[key] = round(statistics.median(ratios), 3)
                figure[f"{key}_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
            same = [ours == plain for ours, plain in zip(said[name], said[base], strict=True)]
            figure["same_text"] = f"{sum(same)} of {len(same)}"
        figures[name] = figure
    return figures


def useless(args: argparse.Namespace, model: CausalLM) -> dict[str, Any]:
    """Random prompts, which nothing can foretell."""
    context = args.input_tokens + args.output_tokens
    rng = random.Random(0)

    def make(count: int) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                prompt_ids=[rng.randrange(10, 40000) for _ in range(args.input_tokens)],
                max_new_tokens=args.output_tokens,
                ignore_eos=True,
                temperature=1.0,
                seed=rng.getrandbits(32),
            )
            for _ in range(count)
        ]

    rows = max(args.requests)
    options: dict[str, Any] = {"max_batch_size": rows, "max_seq_len": context, "dtype": torch.bfloat16}
    figures = {}
    with draft_elsewhere(model.vocab_size, rows, context) as (channel, process):
        more: dict[str, dict[str, Any]] = {
            "off": {},
            "ngram": {"speculation": "ngram"},
            "draft in process": {"speculation": "draft", "draft_model": random_draft(model.vocab_size, context)},
            "draft elsewhere": {"speculation": "draft", "draft_channel": channel},
        }
        engines = {name: ContinuousBatchingEngine(model, None, **options, **more[name]) for name in ("off", *args.ways)}
        for engine in engines.values():
            drain(engine, make(rows))  # what a server has learned after its first requests
        for count in args.requests:
            figures[f"{count} requests"] = compare(
                engines, {"draft elsewhere": process}, partial(make, count), args.rounds
            )
            show(f"random prompts, {count} requests", figures[f"{count} requests"])
    return figures


def chats(args: argparse.Namespace, model: CausalLM) -> dict[str, Any]:
    """Greedy answers, `--chats` at a time."""
    tokenizer = load_tokenizer(args.model)
    options: dict[str, Any] = {"max_seq_len": 1024, "dtype": getattr(torch, args.dtype)}
    ways: dict[str, dict[str, Any]] = {"off": {}, "ngram": {"speculation": "ngram"}}
    if args.draft is not None:
        ways["draft"] = {"speculation": "draft", "draft_model": load_model(args.draft)}
    prompts = {
        "extractive": [ask.format(text) for ask in EXTRACTIVE for text in TEXTS[: 1 if args.quick else 3]],
        "other": list(OTHER[: 1 if args.quick else None]),
    }
    figures = {}
    for count, (kind, asks) in itertools.product(args.chats, prompts.items()):
        engines = {
            name: ContinuousBatchingEngine(model, tokenizer, max_batch_size=count, **options, **more)
            for name, more in ways.items()
        }

        def make(asks: list[str] = asks[: args.prompts]) -> list[GenerationRequest]:
            return [
                GenerationRequest(
                    prompt_ids=tokenizer.encode_chat([{"role": "user", "content": ask}]),
                    max_new_tokens=args.output_tokens,
                    temperature=0,
                )
                for ask in asks
            ]

        for engine in engines.values():
            drain(engine, make()[:count])
        figures[f"{kind}, {count} at a time"] = compare(engines, {}, make, args.rounds)
        show(f"chats, {kind}, {count} at a time", figures[f"{kind}, {count} at a time"])
    return figures


class SleepingModel(DecoderModel):
    """A forward takes `seconds`. The token at a place is the same whatever comes before, and for a draft it is what the
    target says with probability `acceptance`."""

    def __init__(self, seconds: float, max_seq_len: int, acceptance: float = 1.0) -> None:
        super().__init__(vocab_size=SMALL, hidden_size=32, num_layers=1, num_heads=1, max_seq_len=max_seq_len)
        self.seconds = seconds
        rng = np.random.default_rng(0)
        says = rng.integers(1, SMALL - 1, max_seq_len + 1)
        wrong = np.arange(len(says)) >= round(acceptance * len(says))
        says += rng.permutation(wrong)
        self.rows = torch.nn.functional.one_hot(torch.from_numpy(says), SMALL).float()

    def hidden_states(self, input_ids: torch.Tensor, batch: Any, pages: Any = None) -> torch.Tensor:
        time.sleep(self.seconds)
        return batch.positions

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.rows[hidden + 1]


class SlowChannel(SocketChannel):
    """A channel whose answers take `seconds` longer."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.coming: deque[tuple[float, DraftAnswer]] = deque()

    def receive(self, timeout: float) -> DraftAnswer | None:
        end = time.perf_counter() + timeout
        while True:
            now = time.perf_counter()
            due = self.coming[0][0] if self.coming else math.inf
            if due <= now:
                return self.coming.popleft()[1]
            if (answer := super().receive(max(min(end, due) - now, 0.0))) is not None:
                self.coming.append((time.perf_counter() + self.seconds, answer))
            elif due > end <= time.perf_counter():
                return None


def draft_seconds(model: SleepingModel, count: int = 40) -> float:
    """What a drafted token really takes: sleep lasts longer than told, and a forward has an overhead."""
    drafter, times = drafter_of(model, 1, 64), []
    drafter.table.uid[0] = 0
    for length in range(1, count):
        start = time.perf_counter()
        drafter.advance(np.array([0]), np.array([length]))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def run_engine(engine: ContinuousBatchingEngine, tokens: int, warm: int = 96) -> tuple[float, float]:
    """Tokens a second and a step of one request, after its first ones."""
    engine.add_request(GenerationRequest(prompt_ids=[1, 2, 3], max_new_tokens=tokens + warm, temperature=0))
    done, start, first, steps = 0, 0.0, 0, 0
    while engine.scheduler.has_pending_work:
        done += engine.step().generated
        steps += bool(start)
        if not start and done >= warm:
            start, first = time.perf_counter(), done
    return (done - first) / (time.perf_counter() - start), (done - first) / steps


def measure(mode: str, acceptance: float, gamma: int, sleeps: Costs, tokens: int) -> tuple[float, float]:
    """Tokens a second and a step of the engine."""
    context = tokens + 128
    target, draft = SleepingModel(sleeps.step, context), SleepingModel(sleeps.draft, context, acceptance)
    options: dict[str, Any] = {"max_batch_size": 1, "depth": 0, "enable_prefix_cache": False}
    if mode == "plain":
        return run_engine(ContinuousBatchingEngine(target, None, **options), tokens)
    options |= {"speculation": "draft", "gamma": gamma}
    if mode == "synchronous":
        return run_engine(ContinuousBatchingEngine(target, None, draft_model=draft, **options), tokens)
    host = DraftHost(DraftServer(drafter_of(draft, 1, context)), "127.0.0.1", SMALL, {})
    channel = SlowChannel(sleeps.round_trip)
    try:
        channel.connect(host.address, host.key, "check", SMALL, 0)
        return run_engine(ContinuousBatchingEngine(target, None, draft_channel=channel, **options), tokens)
    finally:
        channel.close()
        host.close()


def sleeping(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Speed-ups foretold by the simulator and measured with the engine, whose models only sleep."""
    tokens, rows = 100 if args.quick else 600, []
    for acceptance, gamma, draft, round_trip in SLEEPERS[: 2 if args.quick else None]:
        sleeps = Costs(args.sleep, draft * args.sleep, round_trip * args.sleep)
        plain, _ = measure("plain", acceptance, gamma, sleeps, tokens // 6)
        costs = Costs(1 / plain, draft_seconds(SleepingModel(sleeps.draft, 64)))
        for mode in ("synchronous", "ahead"):
            if mode == "ahead":
                costs = replace(costs, round_trip=sleeps.round_trip + SOCKET_SECONDS)
            foretold = {"synchronous": synchronous, "ahead": ahead}[mode](acceptance, gamma, costs) / plain
            measured, tokens_a_step = measure(mode, acceptance, gamma, sleeps, tokens)
            row: dict[str, Any] = {
                "mode": mode,
                "acceptance": acceptance,
                "gamma": gamma,
                "draft": costs.draft * plain,
                "round trip": costs.round_trip * plain,
                "tokens a step": tokens_a_step,
                "foretold": foretold,
                "measured": measured / plain,
                "error": foretold / (measured / plain) - 1,
            }
            rows.append({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    table = Table(*rows[0], title="speed-ups with models that sleep")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=150).print(table)
    errors = [abs(row["error"]) for row in rows]
    print(f"error: {statistics.mean(errors):.1%} on average, {max(errors):.1%} at most")
    return rows


def show(title: str, figures: dict[str, dict[str, Any]]) -> None:
    keys = ("tokens_per_second", "ratio", "ratio_range", "cpu", "cpu_range", "tokens_a_step", "drafted_per_token")
    keys += ("acceptance", "same_text")
    table = Table("", *keys, title=title)
    for name, figure in figures.items():
        table.add_row(name, *(str(figure.get(key, "")) for key in keys))
    Console(width=150).print(table)


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    model = load_model(args.model)
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": {"processor": cpu_name(), "cores": os.cpu_count(), "threads": args.threads},
        "load": [round(psutil.getloadavg()[0], 1)],
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "workload": {
            "model": Path(args.model).name,
            "dtype": "bfloat16",
            "input_tokens": args.input_tokens,
            "output_tokens": args.output_tokens,
            "rounds": args.rounds,
            "draft": DRAFT,
        },
    }
    if "useless" in args.parts:
        report["useless"] = useless(args, model)
    if "chats" in args.parts:
        report["chats"] = chats(args, model)
    if "sleeping" in args.parts:
        report["sleeping"] = sleeping(args)
    report["load"].append(round(psutil.getloadavg()[0], 1))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
