"""Prompt tokens that are computed, and time to the first token, by the way in which a Router chooses replicas.

    python benchmarks/placement.py

Two workloads: conversations, each turn of which brings all turns before it, and users who share a few system prompts.
The Router, the replicas and their engines are the real ones, without Ray; a forward sleeps for as long as a model of
about 1B parameters would take. `one cache` is what a single replica with all the traffic would compute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from local_engines import TOKENIZER, LocalEngines

import app.placement
from app.placement import Placement
from app.router import Router
from app.settings import ServingConfig
from engine.schemas import GenerationRequest

REPLICAS = 4
STEP, TOKEN = 0.004, 0.00005  # seconds


class PowerOfTwo(Placement):
    """The less loaded one of two at random, as Serve itself does."""

    def choose(self, candidates: Sequence[Any], request: GenerationRequest, session: str | None = None) -> Any:
        return min(random.sample(candidates, min(2, len(candidates))), key=lambda each: each.load)


async def ask(router: Router, prompt: str, tokens: int, firsts: list[float], session: str | None = None) -> str:
    begin = time.perf_counter()
    request = GenerationRequest(
        prompt_ids=TOKENIZER.encode(prompt), max_new_tokens=tokens, temperature=0.0, ignore_eos=True
    )
    generation = await router.open(request, session)
    firsts.append(time.perf_counter() - begin)
    return (await generation.collect()).text


def text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=length))


async def conversations(router: Router, firsts: list[float], sessions: bool) -> None:
    """8 conversations of 10 turns: 64 tokens in, 32 out, a pause for thought between them."""

    async def talk(number: int) -> None:
        rng = random.Random(number)
        history = text(rng, 64)
        for _ in range(10):
            history += text(rng, 64)
            history += await ask(router, history, 32, firsts, str(number) if sessions else None)
            await asyncio.sleep(rng.uniform(0, 0.3))

    await asyncio.gather(*map(talk, range(8)))


async def system_prompts(router: Router, firsts: list[float], sessions: bool) -> None:
    """96 users with 64 tokens of their own after one of 6 system prompts of 512, one every 30 ms."""
    rng = random.Random(0)
    shared = [text(rng, 512) for _ in range(6)]
    users = []
    for i in range(96):
        prompt = rng.choice(shared) + text(rng, 64)
        users.append(asyncio.create_task(ask(router, prompt, 32, firsts, str(i) if sessions else None)))
        await asyncio.sleep(0.03)
    await asyncio.gather(*users)


async def measure(workload: Any, policy: str, replicas: int = REPLICAS) -> dict[str, float]:
    config = ServingConfig(model="dummy", dtype="float32", max_batch_size=16, max_model_len=2048, page_size=16)
    engines = LocalEngines(config, replicas, STEP, TOKEN)
    router = Router(config, engines, TOKENIZER)
    try:
        while sum(link.is_usable for link in router._links.values()) < replicas or not router.ready:
            await asyncio.sleep(0.01)
        if policy == "power of two":
            router._placement = PowerOfTwo(16, 16)
        firsts: list[float] = []
        await workload(router, firsts, policy == "session")
    finally:
        await router.close()
        await engines.close()
    firsts.sort()
    return {
        "prompt_tokens": engines.stats("prompt_tokens"),
        "computed_tokens": engines.stats("prompt_tokens") - engines.stats("cached_tokens"),
        "ttft_p50_ms": round(1e3 * statistics.median(firsts), 1),
        "ttft_p99_ms": round(1e3 * firsts[int(len(firsts) * 0.99)], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neighbour-tokens", type=int, nargs="*", help="values of app.placement.NEIGHBOUR_TOKENS")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "placement.json")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"replicas": REPLICAS, "step_seconds": STEP, "token_seconds": TOKEN}
    for workload in (conversations, system_prompts):
        figures = results[workload.__name__] = {"one cache": asyncio.run(measure(workload, "prefix", 1))}
        for policy in ("power of two", "session", "prefix"):
            figures[policy] = asyncio.run(measure(workload, policy))
        for value in arguments.neighbour_tokens or []:
            app.placement.NEIGHBOUR_TOKENS = value
            figures[f"prefix, {value} a neighbour"] = asyncio.run(measure(workload, "prefix"))
        for name, row in figures.items():
            print(f"{workload.__name__:15s} {name:28s} {row}", flush=True)
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
