"""Which replica takes a request: what a Router knows of prefix caches, and what it makes of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import numpy as np
import pytest

import app.placement
from app.placement import NEIGHBOUR_TOKENS, Placement, PrefixView
from app.replica import CacheChanges, EngineReplica, Pump, load_model
from app.router import Router
from app.settings import ServingConfig
from engine.batch_engine import ContinuousBatchingEngine
from engine.digests import extend_digests, root_digest, short_digests
from engine.schemas import GenerationRequest
from tests.app.fakes import TOKENIZER, LocalEngines
from tests.app.test_router import wait_until

PAGE = 16
BATCH = 4
CONFIG = ServingConfig(
    model="dummy", dtype="float32", max_model_len=512, max_batch_size=BATCH, page_size=PAGE, num_pages=64
)


class Replica:
    def __init__(self, name: str, load: int = 0, waiting_tokens: int = 0, free_pages: int = 1000) -> None:
        self.replica_id = name
        self.is_local = False
        self.load = load
        self.waiting_tokens = waiting_tokens
        self.free_pages = free_pages
        self.prefixes = PrefixView()

    def holds(self, prompt: list[int]) -> Replica:
        chain = [root_digest(None, None)]
        extend_digests(chain, np.array(prompt, dtype=np.int32), PAGE)
        self.prefixes.expect(short_digests(chain)[1:].tolist())
        return self


def request(ids: list[int], **fields: object) -> GenerationRequest:
    return GenerationRequest(prompt_ids=ids, **fields)  # type: ignore[arg-type]


PROMPT = list(range(3, 3 + 20 * PAGE))


def test_the_longest_cached_prefix_wins_until_its_replica_is_overloaded() -> None:
    placement = Placement(PAGE, BATCH)
    less, more, none = Replica("a").holds(PROMPT[:32]), Replica("b", load=1).holds(PROMPT[:192]), Replica("c")
    assert placement.choose([less, more, none], request(PROMPT)) is more
    full = Replica("d", load=BATCH).holds(PROMPT)
    assert placement.choose([less, full, none], request(PROMPT)) is less
    assert placement.choose([full, Replica("e", load=BATCH + 1)], request(PROMPT)) is full
    no_pages = Replica("f", free_pages=19).holds(PROMPT)
    assert placement.choose([no_pages, none], request(PROMPT)) is none
    busy = Replica("g", waiting_tokens=400).holds(PROMPT)
    assert placement.choose([busy, Replica("h")], request(PROMPT)).replica_id == "h"


def test_without_anything_cached_the_least_loaded_takes_it() -> None:
    placement = Placement(PAGE, BATCH)
    replicas = [Replica("a", load=2), Replica("b", load=1), Replica("c", load=3)]
    assert placement.choose(replicas, request([1, 2, 3])).replica_id == "b"
    chosen = {placement.choose([Replica("a"), Replica("b")], request([1, 2, 3])).replica_id for _ in range(64)}
    assert chosen == {"a", "b"}
    assert NEIGHBOUR_TOKENS > PAGE  # one cached page is not worth a neighbour


def test_of_those_that_nearly_tie_the_one_on_the_own_node_takes_it() -> None:
    placement, prompt = Placement(PAGE, BATCH), PROMPT[: 4 * PAGE]

    def chosen(near: Replica, far: Replica) -> str:
        near.is_local = True
        return placement.choose([far, near], request(prompt)).replica_id

    for _ in range(8):  # a tie is broken by chance
        assert chosen(Replica("near"), Replica("far")) == "near"
        assert chosen(Replica("near"), Replica("far").holds(PROMPT[:PAGE])) == "near"
        assert chosen(Replica("near"), Replica("far").holds(PROMPT[: 3 * PAGE])) == "far"
        assert chosen(Replica("near", load=1), Replica("far")) == "far"


def test_another_salt_shares_nothing() -> None:
    placement = Placement(PAGE, BATCH)
    a, b = Replica("a", load=1).holds(PROMPT), Replica("b")
    assert placement.choose([a, b], request(PROMPT)) is a
    assert placement.choose([a, Replica("b")], request(PROMPT, cache_salt="me")).replica_id == "b"


def test_prompts_on_their_way_count_as_cached() -> None:
    """n choices, and requests that come together with one prefix, are computed once."""
    placement = Placement(PAGE, 64)
    replicas = [Replica(name) for name in "abcd"]
    chosen = []
    for _ in range(4):
        chosen.append(placement.choose(replicas, request(PROMPT)))
        chosen[-1].load += 1
    assert len({id(each) for each in chosen}) == 1


def test_a_session_stays_and_moves_only_with_its_replica() -> None:
    replicas = [Replica(f"replica-{i}") for i in range(5)]
    first, second = Placement(PAGE, BATCH), Placement(PAGE, BATCH)  # two Routers
    names = [f"session {i}" for i in range(200)]
    homes = {name: first.choose(replicas, request([1]), name) for name in names}
    assert len({home.replica_id for home in homes.values()}) == 5
    rng = random.Random(0)
    for name, home in homes.items():
        assert second.choose(rng.sample(replicas, 5), request([7, 8]), name) is home
        left = second.choose(replicas[1:], request([1]), name)
        assert left is home or home is replicas[0]
    homes["session 1"].load = BATCH
    assert first.choose(replicas, request([1]), "session 1") is not homes["session 1"]


def test_one_replica_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.placement, "extend_digests", None)
    only = Replica("a", load=99, free_pages=0)
    assert Placement(PAGE, BATCH).choose([only], request(PROMPT), "session") is only


@pytest.fixture
def engine() -> Iterator[ContinuousBatchingEngine]:
    yield ContinuousBatchingEngine.from_serving_config(CONFIG, load_model(CONFIG, TOKENIZER), TOKENIZER)


def held(engine: ContinuousBatchingEngine) -> set[int]:
    assert engine.pool.index is not None
    return set(short_digests(list(engine.pool.index._by_digest)).tolist())


async def test_a_router_knows_what_the_engine_caches(engine: ContinuousBatchingEngine) -> None:
    """Through evictions, by a Router that was there from the start, one that came late and one that fetches seldom."""
    replica = EngineReplica(engine, CONFIG, {"max_model_len": 512, "page_size": PAGE})
    rng = random.Random(1)
    pumps, views, tags = {}, {}, iter(range(1000))
    sizes = []

    async def fetch(key: int) -> None:
        message = await anext(pumps[key])
        if message.cache is not None:
            views[key].update(message.cache)
            sizes.append(len(message.cache.came) + len(message.cache.left))

    async def attach(key: int) -> None:
        pumps[key], views[key] = replica.pump(key), PrefixView()
        await fetch(key)

    try:
        await attach(1)
        await attach(2)
        for i in range(40):
            if i == 20:
                await attach(3)
            prompt = [rng.randrange(3, 90)] * PAGE + rng.choices(range(3, 90), k=rng.randrange(0, 200))
            await replica.generate(request(prompt, max_new_tokens=rng.randrange(1, 40)), 1 << 40 | next(tags))
            for key in (1, 3) if i >= 20 else (1,):
                replica._pumps[key].beat()
                await fetch(key)
        for key in (1, 2, 3):
            replica._pumps[key].beat()
            await fetch(key)
            assert views[key]._held == held(engine)
        assert engine.pool.index is not None and len(engine.pool.index) <= 64  # there were evictions
        assert max(sizes) <= 2 * 64 + 64
    finally:
        for pump in pumps.values():
            await pump.aclose()
        replica.close()


def test_a_router_that_does_not_fetch_gets_all_instead_of_ever_more() -> None:
    kept = {bytes([i]) * 16: None for i in range(10)}
    pump = Pump(kept)
    assert pump.take(0, 0.0, (0, 0)).cache.whole  # type: ignore[union-attr]
    for i in range(500):
        pump.put_changes({i.to_bytes(16): True})
    assert pump.take(0, 0.0, (0, 0)).cache is None  # no heartbeat yet
    pump.beat()
    changes = pump.take(0, 0.0, (0, 0)).cache
    assert changes is not None and changes.whole and len(changes.came) == 10 and not len(changes.left)
    pump.beat()
    assert pump.take(0, 0.0, (0, 0)).cache is None


async def test_conversations_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three real engines behind two Routers, one a turn, compute what one cache would have left to compute."""
    monkeypatch.setattr(EngineReplica, "heartbeat_interval", 0.05)
    engines = LocalEngines(CONFIG)
    for name in "abc":
        engine = ContinuousBatchingEngine.from_serving_config(CONFIG, load_model(CONFIG, TOKENIZER), TOKENIZER)
        engines.add(name, engine)  # type: ignore[arg-type]
    routers: list[Router] = []
    for _ in range(2):
        routers.append(Router(CONFIG, engines, TOKENIZER))
        while sum(link.is_usable for link in routers[-1]._links.values()) < 3:
            await asyncio.sleep(0.01)
    rng = random.Random(0)
    histories = [rng.choices(range(3, 90), k=40) for _ in range(4)]
    least = 0
    try:
        for turn in range(6):
            opened = []
            for i, history in enumerate(histories):
                history += rng.choices(range(3, 90), k=20)
                least += 20 + (40 if turn == 0 else PAGE + 8)
                asked = request(list(history), max_new_tokens=8, ignore_eos=True, seed=i)
                opened.append(asyncio.create_task(routers[turn % 2].open(asked)))
            for history, generation in zip(histories, await asyncio.gather(*opened), strict=True):
                history += (await generation.collect()).token_ids
            await wait_until(
                lambda: all(  # every Router has heard
                    link.prefixes._held == held(engines.replicas[name].engine)
                    for router in routers
                    for name, link in router._links.items()
                )
            )
        stats = [replica.engine.stats() for replica in engines.replicas.values()]
        computed = sum(each.prompt_tokens - each.cached_tokens for each in stats)
        assert computed <= least < sum(each.prompt_tokens for each in stats) / 2
        assert all(each.prompt_tokens > 0 for each in stats)
    finally:
        for router in routers:
            await router.close()
        engines.close()


def test_what_a_replica_has_lost_is_not_expected_there() -> None:
    def pages(*digests: int) -> np.ndarray:
        return np.array(digests, dtype=np.int64)

    view = PrefixView()
    view.expect([1, 2, 3])
    assert view.overlap([1, 2, 3, 4]) == 3
    view.update(CacheChanges(pages(1, 2, 3), pages(), False))
    view.update(CacheChanges(pages(), pages(2, 3), False))
    assert view.overlap([1, 2, 3, 4]) == 1
