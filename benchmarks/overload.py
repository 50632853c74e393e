"""What happens when more requests come than can be served: goodput, latency of the admitted, and how sheds feel.

    python benchmarks/overload.py

The Router and two replicas with real engines, without Ray, over a model that sleeps. Capacity is what a closed loop of
as many clients as there are rows gets; then requests come in an open loop, whether or not earlier ones were answered,
at multiples of it. Goodput counts requests that came to their end, latencies are from arrival to that end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

from local_engines import TOKENIZER, LocalEngines

from app.router import Overloaded, Router
from app.settings import ServingConfig
from engine.schemas import GenerationRequest

REPLICAS, ROWS, QUEUE, QUEUED_TOKENS = 2, 8, 16, 2000
STEP, TOKEN = 0.015, 0.00002  # seconds
PROMPT, OUTPUT = 64, 16


def request(rng: random.Random) -> GenerationRequest:
    prompt_ids = TOKENIZER.encode("".join(rng.choices("abcdefghij", k=PROMPT)))
    return GenerationRequest(prompt_ids=prompt_ids, max_new_tokens=OUTPUT, ignore_eos=True, temperature=0.0)


def percentile(values: list[float], share: float) -> float | None:
    return round(sorted(values)[int(len(values) * share)], 4) if values else None


async def capacity(router: Router, seconds: float) -> float:
    """Requests a second of a closed loop."""
    done = 0
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        nonlocal done
        rng = random.Random(number)
        while time.perf_counter() < end:
            await (await router.open(request(rng))).collect()
            done += 1

    begin = time.perf_counter()
    await asyncio.gather(*map(client, range(REPLICAS * ROWS)))
    return done / (time.perf_counter() - begin)


async def open_loop(router: Router, engines: LocalEngines, rate: float, seconds: float) -> dict[str, Any]:
    rng = random.Random(int(rate))
    latencies: list[float] = []
    sheds: list[float] = []
    waits: list[float] = []
    ends: list[float] = []
    waiting = waiting_tokens = 0
    begin = time.perf_counter()

    async def client() -> None:
        arrival = time.perf_counter()
        try:
            await (await router.open(request(rng))).collect()
        except Overloaded as error:
            sheds.append(time.perf_counter() - arrival)
            waits.append(error.retry_after)
        else:
            ends.append(time.perf_counter() - begin)
            latencies.append(ends[-1] + begin - arrival)

    async def watch() -> None:
        nonlocal waiting, waiting_tokens
        while True:
            for replica in engines.replicas.values():
                waiting = max(waiting, replica.engine.scheduler.num_waiting)
                waiting_tokens = max(waiting_tokens, replica.engine.backlog()[0])
            await asyncio.sleep(0.002)

    watcher = asyncio.create_task(watch())
    tasks = []
    due = begin
    while due < begin + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(client()))
        due += rng.expovariate(rate)
    await asyncio.gather(*tasks)
    watcher.cancel()
    return {
        "offered": len(tasks),
        "admitted": len(latencies),
        "shed": len(sheds),
        "goodput": round(sum(end <= seconds for end in ends) / seconds, 1),
        "latency_p50": percentile(latencies, 0.5),
        "latency_p99": percentile(latencies, 0.99),
        "shed_p50": percentile(sheds, 0.5),
        "shed_p99": percentile(sheds, 0.99),
        "retry_after_p50": percentile(waits, 0.5),
        "retry_after_max": max(waits, default=None),
        "most_waiting_at_a_replica": waiting,
        "most_tokens_waiting_at_a_replica": waiting_tokens,
    }


async def measure(seconds: float) -> dict[str, Any]:
    config = ServingConfig(
        model="dummy",
        dtype="float32",
        max_batch_size=ROWS,
        max_model_len=2048,
        page_size=16,
        max_queued_requests=QUEUE,
        max_queued_tokens=QUEUED_TOKENS,
    )
    engines = LocalEngines(config, REPLICAS, STEP, TOKEN)
    router = Router(config, engines, TOKENIZER)
    try:
        while sum(link.is_usable for link in router._links.values()) < REPLICAS or not router.ready:
            await asyncio.sleep(0.01)
        await capacity(router, 1.0)
        most = await capacity(router, seconds / 2)
        figures: dict[str, Any] = {
            "replicas": REPLICAS,
            "rows": ROWS,
            "max_queued_requests": QUEUE,
            "max_queued_tokens": QUEUED_TOKENS,
            "seconds": seconds,
            "capacity": round(most, 1),
        }
        for times in (0.5, 1.0, 2.0, 3.0):
            row = await open_loop(router, engines, times * most, seconds)
            figures[f"{times:g}x"] = row | {"goodput_of_capacity": round(row["goodput"] / most, 3)}
            print(f"{times:g} x {most:.1f}/s: {figures[f'{times:g}x']}", flush=True)
    finally:
        await router.close()
        await engines.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "overload.json")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.seconds))
    arguments.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
