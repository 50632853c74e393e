"""llm-bench: the command line."""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import uvloop
from rich.console import Console
from rich.live import Live
from rich.text import Text

from app.bench.load import BenchError, Lengths, Load, Run, Target
from app.bench.report import Report


def _number(kind: Callable[[str], Any], low: float) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not low < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a number above {low:g}")
        return value

    parse.__name__ = "number"
    return parse


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a positive number nor min:max") from None


def _json_object(text: str) -> dict[str, Any]:
    value = orjson.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llm-bench",
        description="Load on any OpenAI-compatible server. Latencies are counted from the scheduled send time.",
        epilog="Ctrl-C ends the run and reports what there is. Exit code 1 if no request succeeded.",
    )
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="/v1 is added if it has no path (default: %(default)s)")
    add("--model", default="", help="default: the first that the server lists")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="default: $OPENAI_API_KEY")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="default: %(default)s")
    add("--no-stream", dest="stream", action="store_false", help="ask for the whole answer at once")
    pace = parser.add_mutually_exclusive_group(required=True)
    pace.add_argument("--rate", type=_number(float, 0), help="open loop: requests a second, whatever the server does")
    pace.add_argument("--concurrency", type=_number(int, 0), help="closed loop: requests in flight at once")
    add("--arrivals", choices=("poisson", "constant"), default="poisson", help="of --rate (default: %(default)s)")
    add("--requests", type=_number(int, 0), help="how many are measured (default: 100 if no --duration)")
    add("--duration", type=_number(float, 0), help="seconds of sending, after the warm-up")
    add("--warmup", type=_number(int, -1), default=0, help="requests sent first and not counted (default: %(default)s)")
    for name, what in (("--input-tokens", "prompt lengths"), ("--output-tokens", "tokens asked for")):
        add(name, type=_lengths, metavar="N|MIN:MAX", default=Lengths(128, 128), help=f"{what}, drawn evenly (128)")
    add("--ignore-eos", action="store_true", help="answers of exactly that length (ignore_eos and min_tokens)")
    add("--body", type=_json_object, default={}, metavar="JSON", help='added to each request, as {"temperature": 0.7}')
    add("--timeout", type=_number(float, 0), default=600.0, help="seconds a request may take (default: %(default)g)")
    add("--seed", type=_number(int, -1), default=0, help="of arrivals, lengths and prompts (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="write the report there, as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Exit code 0, 1 if it couldn't start or no request succeeded, 2 bad option, 130 Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.requests is None and options.duration is None:
        options.requests = 100
    try:
        target = Target(
            base_url=options.base_url,
            model=options.model,
            api_key=options.api_key,
            chat=options.endpoint == "chat",
            stream=options.stream,
            ignore_eos=options.ignore_eos,
            timeout=options.timeout,
            body=options.body,
        )
        load = Load(
            input_tokens=options.input_tokens,
            output_tokens=options.output_tokens,
            rate=options.rate,
            poisson=options.arrivals == "poisson",
            concurrency=options.concurrency,
            requests=options.requests,
            duration=options.duration,
            warmup=options.warmup,
            seed=options.seed,
        )
    except ValueError as error:
        parser.error(str(error))
    if options.output and not options.output.parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # an overloaded open loop holds many connections
    shown = {name: value for name, value in vars(options).items() if name not in ("api_key", "output")}
    try:
        report = uvloop.run(benchmark(target, load, shown, Console(stderr=True)))
    except BenchError as error:
        print(f"llm-bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    Console().print(report.render())
    if options.output:
        options.output.write_text(report.model_dump_json(indent=1) + "\n")
    return 130 if report.interrupted else int(not report.succeeded)


async def benchmark(target: Target, load: Load, options: dict[str, Any], console: Console) -> Report:
    """One run with a progress line on `console`; SIGINT and SIGTERM end it early. BenchError if it can't start."""
    if not target.model:
        async with target.session() as session:
            target = replace(target, model=await target.first_model(session))
    run = Run(target, load)
    started = datetime.now(UTC)
    task = asyncio.create_task(run.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while not task.done():
            await asyncio.wait({task}, timeout=0.5)
            live.update(_progress(run), refresh=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)
    if not task.cancelled():
        task.result()
    options = options | {"model": target.model}
    return Report.of(run, started=started, options=options, interrupted=task.cancelled())


def _progress(run: Run) -> Text:
    seconds = max(time.perf_counter() - run.start, 1e-9) if run.start else 0.0
    ended = len(run.samples)
    rates = f" · {ended / seconds:.1f} requests/s · {run.tokens / seconds:.0f} tokens/s" if ended else ""
    return Text(f"{seconds:.0f} s · {ended} ended · {run.failed} failed · {run.in_flight} in flight{rates}")


if __name__ == "__main__":
    sys.exit(main())
