"""llm-bench: the command line."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
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

from app.bench.compare import render as render_comparison
from app.bench.html import page
from app.bench.load import BenchError, Kind, Lengths, Load, Run, Target, read_mix
from app.bench.report import LATENCIES, Objective, Report
from app.bench.search import LOWEST, find_rate


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


def _objective(text: str) -> Objective:
    given = {}
    for part in text.split(","):
        name, _, bound = part.partition("=")
        if name.strip() not in LATENCIES or not (value := _number(float, 0)(bound)):
            raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(LATENCIES)} with =MILLISECONDS")
        given[name.strip()] = value
    return Objective(**given)


def _bound(text: str) -> tuple[str, float]:
    given = _objective(text).model_dump(exclude_none=True)
    if len(given) != 1:
        raise argparse.ArgumentTypeError(f"{text!r}: one latency is bounded")
    return next(iter(given.items()))


def _mix(path: str) -> tuple[Kind, ...]:
    try:
        return read_mix(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None


def _report(path: str) -> tuple[str, Report]:
    try:
        return path, Report.model_validate_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {str(error).splitlines()[0]}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llm-bench",
        description="Load on any OpenAI-compatible server. Latencies are counted from the scheduled send time.",
        epilog='A line of a mix: {"name": "chat", "weight": 3, "input_tokens": "64:512", "prefix_tokens": 32, '
        '"output_tokens": 128}, prefix_tokens being shared by all of its kind; or with "prompt" in place of '
        "input_tokens. Ctrl-C ends the run and reports what there is. Exit code 1 if no request succeeded.",
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
    pace.add_argument(
        "--find-rate",
        type=_bound,
        metavar="LATENCY=MS",
        help="open loop at the highest rate that keeps the p99 of ttft, tpot or e2e at or below this, as e2e=200; each "
        "rate is tried with --requests requests, or more to fill 10 s",
    )
    pace.add_argument("--compare", type=_report, nargs=2, metavar="FILE", help="two reports: a base and a new one")
    add("--arrivals", choices=("poisson", "constant"), default="poisson", help="of --rate (default: %(default)s)")
    add("--requests", type=_number(int, 0), help="how many are measured (default: 100 if no --duration)")
    add("--duration", type=_number(float, 0), help="seconds of sending, after the warm-up")
    add("--warmup", type=_number(int, -1), default=0, help="requests sent first and not counted (default: %(default)s)")
    for name, what in (("--input-tokens", "prompt lengths"), ("--output-tokens", "tokens asked for")):
        add(name, type=_lengths, metavar="N|MIN:MAX", default=Lengths(128, 128), help=f"{what}, drawn evenly (128)")
    add("--mix", type=_mix, metavar="FILE", help="instead: kinds of requests, a JSON object a line, see below")
    add("--slo", type=_objective, metavar="LATENCY=MS,...", help="count who keeps these bounds, as ttft=200,tpot=30")
    add("--ignore-eos", action="store_true", help="answers of exactly that length (ignore_eos and min_tokens)")
    add("--body", type=_json_object, default={}, metavar="JSON", help='added to each request, as {"temperature": 0.7}')
    add("--timeout", type=_number(float, 0), default=600.0, help="seconds a request may take (default: %(default)g)")
    what = "of arrivals, lengths and prompts; a server may have cached those of an earlier run (default: %(default)s)"
    add("--seed", type=_number(int, -1), default=0, help=what)
    add("--output", type=Path, metavar="FILE", help="write the report there, as JSON")
    add("--html", type=Path, metavar="FILE", help="write the report, or the comparison, there with plots")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Exit code 0, 1 if it couldn't start or no request succeeded, 2 bad option, 130 Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(argv)
    for name in ("output", "html"):
        if (path := getattr(options, name)) and not path.parent.is_dir():
            parser.error(f"--{name}: there is no folder {path.parent}")
    if options.compare:
        (_, base), (_, new) = options.compare
        Console().print(render_comparison(base, new))
        if options.html:
            options.html.write_text(page(options.compare))
        return 0
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
            mix=options.mix or (Kind("all", options.input_tokens, options.output_tokens),),
            rate=1.0 if options.find_rate else options.rate,
            poisson=options.arrivals == "poisson",
            concurrency=options.concurrency,
            requests=options.requests,
            duration=options.duration,
            warmup=options.warmup,
            seed=options.seed,
        )
    except ValueError as error:
        parser.error(str(error))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # an overloaded open loop holds many connections
    silent = ("api_key", "output", "html", "compare", "slo")
    shown = {name: value for name, value in vars(options).items() if name not in silent}
    console = Console(stderr=True)
    common = (target, load, shown, console, options.slo)
    bench = _search(*common, *options.find_rate) if options.find_rate else benchmark(*common)
    try:
        report = uvloop.run(bench)
    except BenchError as error:
        print(f"llm-bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    Console().print(report.render())
    if options.output:
        options.output.write_text(report.model_dump_json(indent=1) + "\n")
    if options.html:
        options.html.write_text(page([(report.options["model"], report)]))
    return 130 if report.interrupted else int(not report.succeeded)


async def _search(
    target: Target,
    load: Load,
    options: dict[str, Any],
    console: Console,
    objective: Objective | None,
    name: str,
    bound_ms: float,
) -> Report:
    """`find_rate`, from the rate at which one request comes as the last one ends."""
    alone = await benchmark(target, replace(load, rate=None, concurrency=1, requests=10), options, console)

    parts = itertools.count(1)

    async def measure(rate: float) -> Report:
        requests = max(load.requests or 0, math.ceil(rate * (load.duration or 10.0)))
        tried = replace(load, rate=rate, requests=requests, duration=None, part=next(parts))
        report = await benchmark(target, tried, options | {"rate": rate}, console, objective)
        p99 = report.p99_ms[name]
        shown = "a failure" if p99 is None else f"{name} {p99:.1f} ms"
        console.print(f"{rate:.2f} requests/s: p99 {shown}", highlight=False)
        return report

    if alone.interrupted or not alone.succeeded:
        return alone
    spread = getattr(alone, f"{name}_ms")
    hopeless = spread is None or spread.p50 > bound_ms
    found = None if hopeless else await find_rate(measure, name, bound_ms, alone.requests_per_second)
    if found is None:
        tried = "" if hopeless else f" down to {LOWEST * alone.requests_per_second:.2g} requests/s"
        raise BenchError(f"no rate{tried} keeps the p99 of {name} at {bound_ms:g} ms")
    return found


async def benchmark(
    target: Target, load: Load, options: dict[str, Any], console: Console, objective: Objective | None = None
) -> Report:
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
    return Report.of(run, started=started, options=options, interrupted=task.cancelled(), objective=objective)


def _progress(run: Run) -> Text:
    seconds = max(time.perf_counter() - run.start, 1e-9) if run.start else 0.0
    ended = len(run.samples)
    rates = f" · {ended / seconds:.1f} requests/s · {run.tokens / seconds:.0f} tokens/s" if ended else ""
    return Text(f"{seconds:.0f} s · {ended} ended · {run.failed} failed · {run.in_flight} in flight{rates}")


if __name__ == "__main__":
    sys.exit(main())
