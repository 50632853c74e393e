"""A draft somewhere else changes speed, never text: whatever it says, and whether or when it says it."""

from __future__ import annotations

import random
import socket
import time
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from app.draft import DraftHost, DraftServer, SocketChannel
from engine import batch_engine, speculation
from engine.batch_engine import ContinuousBatchingEngine
from engine.models.decoder import DecoderModel
from engine.sampling import SamplingTable, Vocabulary
from engine.schemas import DraftAnswer, DraftMessage, GenerationRequest
from engine.sequence import SequenceTable
from engine.speculation import Drafter, Speculator

CONTEXT = 128
VOCABULARY = 100


def make(seed: int, layers: int = 2, context: int = CONTEXT) -> DecoderModel:
    torch.manual_seed(seed)
    model = DecoderModel(
        hidden_size=64, num_heads=8, num_kv_heads=2, vocab_size=VOCABULARY, max_seq_len=context, num_layers=layers
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


TARGET = make(0)
NEAR = make(0)
with torch.no_grad():
    for parameter in NEAR.parameters():
        parameter += torch.randn_like(parameter) * 0.01


def make_echo() -> DecoderModel:
    """A draft that knows nothing but the state of the target that it reads, and says again what that has chosen."""
    echo = DecoderModel.from_config(replace(TARGET.config, num_layers=1, target_hidden_size=64)).eval()
    with torch.no_grad():
        for part in (echo.model.embed_tokens, *echo.model.layers.modules()):
            if hasattr(part, "weight"):
                part.weight.zero_()
        echo.model.state_proj.weight.copy_(torch.eye(64))
        echo.lm_head.weight.copy_(TARGET.lm_head.weight)
    return echo


class Clock:
    """Passes when somebody looks, so that no machine is too slow."""

    ticks = 0
    monotonic = staticmethod(time.monotonic)

    def perf_counter(self) -> float:
        self.ticks += 1
        return self.ticks / 10_000


@pytest.fixture(autouse=True)
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "socket" not in request.node.name:  # a draft in another process answers in real time
        for module in (speculation, batch_engine):
            monkeypatch.setattr(module, "time", Clock())


DRAFTS = {"itself": TARGET, "near": NEAR, "random": make(1, layers=1), "echo": make_echo()}


def server(model: DecoderModel, rows: int = 32, pages: int | None = None, **options) -> DraftServer:
    table = SequenceTable(rows, model.max_seq_len, 1, torch.device("cpu"))
    sampling = SamplingTable(rows, torch.device("cpu"))
    vocabulary = Vocabulary(model.vocab_size, None)
    return DraftServer(Drafter(model, table, sampling, vocabulary, num_pages=pages, page_size=16), **options)


class Here:
    """A channel whose server works in the same thread; `rng` makes answers late, lost, repeated and out of order, and
    now and then loses the draft."""

    def __init__(self, draft: DraftServer, rng: random.Random | None = None, name: str = "engine") -> None:
        self.draft, self.rng, self.name = draft, rng, name
        self.messages: list[DraftMessage] = []
        self.answers: deque[DraftAnswer] = deque()
        self.old: list[DraftAnswer] = []
        self.broken = False
        self.target_hidden_size = draft.drafter.runner.model.target_hidden_size

    def send(self, message: DraftMessage) -> None:
        if self.rng and self.rng.random() < 0.02:
            raise ConnectionError
        if self.rng and self.rng.random() < 0.02:
            self.broken = True
            return
        self.messages.append(message)
        self.draft.put(self.name, message, 0.0)
        self._collect()

    def _collect(self) -> None:
        self.answers += [answer for name, answer in self.draft.answers() if name == self.name]
        busy = True
        while busy and (self.rng is None or self.rng.random() < 0.8):
            busy = self.draft.work()
            self.answers += [answer for name, answer in self.draft.answers() if name == self.name]

    def receive(self, timeout: float) -> DraftAnswer | None:
        if self.broken:
            self.broken = False
            self.draft.goodbye(self.name)
            self.answers.clear()
            raise ConnectionError
        if self.rng is None:
            return self.answers.popleft() if self.answers else None
        if self.old and self.rng.random() < 0.05:
            return self.rng.choice(self.old)
        if not self.answers:
            self._collect()
        if not self.answers or self.rng.random() < 0.4:
            return None
        if self.rng.random() < 0.2:
            self.answers.reverse()
        self.old.append(self.answers.popleft())
        return self.old[-1]


def requests(count: int, tokens: int = 30, seed: int = 0) -> list[GenerationRequest]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(30)]
    ways = (
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.3, "min_tokens": 1},
        {"temperature": 1.0, "top_k": 20, "logit_bias": {7: 2.0}, "logprobs": 2},
    )
    return [
        GenerationRequest(
            request_id=str(i),
            prompt_ids=shared[: rng.randrange(30)]
            + [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 40))],
            max_new_tokens=rng.randrange(1, tokens),
            seed=i,
            stop_token_ids=[5],
            **ways[i % 4],
        )
        for i in range(count)
    ]


def run(asked: list[GenerationRequest], *, batch: int = 8, **options) -> tuple[ContinuousBatchingEngine, list[object]]:
    engine = ContinuousBatchingEngine(TARGET, None, max_batch_size=batch, **options)
    rng, arriving = random.Random(1), list(asked)
    while arriving or engine.scheduler.has_pending_work:
        if arriving and rng.random() < 0.5:
            engine.add_request(arriving.pop())
        engine.step()
        engine.pool.check()
    assert engine.stats().held_pages == 0
    results = [engine.result(request.request_id) for request in asked]
    return engine, [(r.token_ids, r.finish_reason, [e.token_id for e in r.logprobs or ()]) for r in results]


@pytest.fixture(scope="module")
def plain() -> list[object]:
    return run(requests(16, tokens=50))[1]


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize(
    ("gamma", "batch", "pages", "budget", "depth", "faults"),
    [
        (1, 1, None, 2048, 1, False),
        (3, 8, 36, 7, 0, True),
        (8, 32, 36, 64, 1, True),
        (None, 8, None, 2048, 1, True),
        (4, 32, None, 2048, 0, False),
    ],
)
def test_text_is_that_of_plain_decoding(
    plain, name, gamma, batch, pages, budget, depth, faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "_RETRY", 0)  # or a fast machine is through before a draft is looked for again
    # fewer rows and pages than there are sequences: some are turned away or lose theirs
    draft = server(DRAFTS[name], rows=6 if faults else 32, pages=20 if faults else None)
    engine, results = run(
        requests(16, tokens=50),
        batch=batch,
        num_pages=pages,
        page_size=4,
        max_batched_tokens=budget,
        depth=depth,
        speculation="draft",
        draft_channel=Here(draft, random.Random(gamma) if faults else None),
        gamma=gamma,
    )
    assert results == plain
    draft.drafter.pool.check()
    stats = engine.speculation_stats()
    if name == "itself":
        assert stats.drafted == stats.accepted
    if gamma and name != "random":
        assert stats.drafted > 0
    if pages:
        assert engine.stats().preemptions > 0


def fix_costs(engine: ContinuousBatchingEngine) -> Speculator:
    """A token more costs a tenth of a step, so that tests don't depend on the machine."""
    speculator = engine._speculator
    assert isinstance(speculator, Speculator)
    observe = Speculator.observe
    speculator.observe = lambda plan, seconds: observe(  # type: ignore[method-assign]
        speculator, plan, speculator._proposed + 1 + 0.1 * int(plan.counts.sum())
    )
    return speculator


def test_a_useless_draft_is_left_alone() -> None:
    """Auto: counted after the first 64 tokens of each sequence, in which it may be tried."""
    draft = server(make(1, layers=1, context=1024))
    channel = Here(draft)
    engine = ContinuousBatchingEngine(make(0, context=1024), None, speculation="draft", draft_channel=channel)
    fix_costs(engine)
    for i in range(8):
        engine.add_request(GenerationRequest(prompt_ids=[i + 1, 2, 3], max_new_tokens=600, temperature=1.0, seed=i))
    while engine.stats().generated_tokens < 64 * 8:
        engine.step()
    drafted, generated = engine.speculation_stats().drafted, engine.stats().generated_tokens
    forwards, messages = draft.forwards, len(channel.messages)
    while engine.scheduler.has_pending_work:
        engine.step()
    generated = engine.stats().generated_tokens - generated
    assert engine.speculation_stats().drafted - drafted <= 0.02 * generated
    trials = sum((message.gammas > 0).sum() for message in channel.messages[messages:])
    assert 0 < trials <= 8 * 600 / 128
    assert draft.forwards - forwards <= 5 * trials  # one to read, four tokens and nothing ahead


class Late(Here):
    """Most looks for an answer find none."""

    looks = 0

    def receive(self, timeout: float) -> DraftAnswer | None:
        self.looks += 1
        return super().receive(timeout) if self.looks % 8 == 0 else None


def test_a_draft_that_is_always_late_stops_also_for_new_sequences() -> None:
    draft = server(make(1, layers=1))
    engine = ContinuousBatchingEngine(
        TARGET, None, max_batch_size=4, speculation="draft", draft_channel=Late(draft), enable_prefix_cache=False
    )
    fix_costs(engine)
    forwards = []
    for batch in range(4):
        before = draft.forwards
        for i in range(4):
            engine.add_request(GenerationRequest(prompt_ids=[i + 1, 2, 3], max_new_tokens=60, seed=4 * batch + i))
        while engine.scheduler.has_pending_work:
            engine.step()
        forwards.append(draft.forwards - before)
    assert engine.speculation_stats().drafted == 0
    assert sum(forwards[2:]) < 0.1 * sum(forwards[:2])


def test_a_draft_that_gets_good_is_used_again() -> None:
    draft = server(make(0, context=1024))
    engine = ContinuousBatchingEngine(make(0, context=1024), None, speculation="draft", draft_channel=Here(draft))
    speculator = fix_costs(engine)
    speculator._usual = 0.0
    speculator._met = 1  # the one that starts with hope has been
    engine.add_request(GenerationRequest(prompt_ids=[1, 2, 3], max_new_tokens=600, temperature=1.0, seed=1))
    while engine.scheduler.has_pending_work:
        engine.step()
    assert engine.stats().steps < 350


def test_a_price_once_paid_is_not_believed_for_ever() -> None:
    """A slow minute of the machine, and then a good draft again."""
    draft = server(make(0, context=1024))
    engine = ContinuousBatchingEngine(
        make(0, context=1024), None, max_batch_size=4, speculation="draft", draft_channel=Here(draft)
    )
    speculator = fix_costs(engine)
    speculator._propose_seconds, speculator._proposals = 30.0, 100
    for _ in range(3):
        speculator._verifying.observe(1, 30.0)
    for i in range(4):
        engine.add_request(GenerationRequest(prompt_ids=[i + 1, 2, 3], max_new_tokens=900, temperature=1.0, seed=i))
    while engine.scheduler.has_pending_work:
        engine.step()
    assert engine.stats().steps < 700


def test_a_draft_that_is_too_slow_is_left_alone() -> None:
    """It is as good as can be, but its answers come when their tokens are known."""

    class Late(Here):
        steps = 0  # of the engine

        def send(self, message: DraftMessage) -> None:
            self.sent = self.steps
            super().send(message)

        def receive(self, timeout: float) -> DraftAnswer | None:
            return super().receive(timeout) if self.steps > self.sent + 20 else None

    channel = Late(server(make(0, context=1024)))
    engine = ContinuousBatchingEngine(make(0, context=1024), None, speculation="draft", draft_channel=channel)
    fix_costs(engine)
    engine.add_request(GenerationRequest(prompt_ids=[1, 2, 3], max_new_tokens=600, temperature=1.0, seed=1))
    while engine.scheduler.has_pending_work:
        engine.step()
        channel.steps += 1
    assert channel.draft.forwards < 600 / 4
    assert engine.speculation_stats().draft_up


def test_engines_share_a_draft_and_leave_it() -> None:
    """Two engines in one batch; one that leaves, or is silent for a lease, takes only its own sequences along."""
    draft = server(TARGET)
    engines = [
        ContinuousBatchingEngine(TARGET, None, speculation="draft", draft_channel=Here(draft, name=name), gamma=2)
        for name in ("a", "b")
    ]
    for i, engine in enumerate(engines):
        for j in range(3):
            engine.add_request(GenerationRequest(prompt_ids=[i + 1, j + 5], max_new_tokens=50, seed=j))
    for _ in range(5):
        for engine in engines:
            engine.step()
    assert draft.sequences == 6
    draft.goodbye("a")
    assert draft.sequences == 3
    draft.expire(now=59.0)
    assert draft.sequences == 3
    for engine in engines:
        while engine.scheduler.has_pending_work:
            engine.step()
        stats = engine.speculation_stats()
        assert stats.drafted == stats.accepted > 0
    draft.expire(now=61.0)
    assert draft.sequences == draft.drafter.pool.held_pages == 0


@pytest.mark.parametrize("elsewhere", [False, True])
def test_states_of_the_target_reach_the_draft(elsewhere: bool) -> None:
    """The first token of each proposal is the last known one, said again; where no state is read it would be 0."""
    options: dict[str, Any] = (
        {"draft_channel": Here(server(make_echo()))} if elsewhere else {"draft_model": make_echo()}
    )
    engine = ContinuousBatchingEngine(TARGET, None, max_batch_size=4, speculation="draft", gamma=3, **options)
    speculator, table = fix_costs(engine), engine.table
    propose, said = speculator.proposer.propose, []

    def watched(rows: np.ndarray, gammas: np.ndarray, worth: np.ndarray) -> np.ndarray:
        drafts = propose(rows, gammas, worth)
        said.extend(zip(drafts[:, 0].tolist(), table.tokens[rows, table.known[rows] - 1].tolist(), strict=True))
        return drafts

    speculator.proposer.propose = watched  # type: ignore[method-assign]
    for i in range(6):
        engine.add_request(GenerationRequest(prompt_ids=[3 + i] * (i + 1), max_new_tokens=40, temperature=0))
    while engine.scheduler.has_pending_work:
        engine.step()
    # one elsewhere is seldom there in time, and then goes on from what it has said itself
    assert all(first == last or (elsewhere and not first) for first, last in said if first >= 0)
    assert sum(first > 0 for first, _ in said) > (10 if elsewhere else 100)


def test_a_draft_of_another_target_is_refused() -> None:
    other = DecoderModel.from_config(replace(TARGET.config, target_hidden_size=32))
    with pytest.raises(ValueError, match="hidden states of 32, not the target's of 64"):
        ContinuousBatchingEngine(TARGET, None, speculation="draft", draft_model=other)
    host = DraftHost(server(TARGET), "127.0.0.1", VOCABULARY, {"target_hidden_size": 32})
    try:
        with pytest.raises(ValueError, match="hidden states of 32, not the target's of 64"):
            SocketChannel().connect(host.address, host.key, "engine", VOCABULARY, 64)
    finally:
        host.close()


def test_going_on_ahead_makes_answers_ready() -> None:
    """The draft knows the next proposal before it is asked, if all of the last one stood."""
    engine = ContinuousBatchingEngine(TARGET, None, speculation="draft", draft_channel=Here(server(TARGET)), gamma=4)
    engine.add_request(GenerationRequest(prompt_ids=[1, 2, 3], max_new_tokens=101, seed=1))
    while engine.scheduler.has_pending_work:
        engine.step()
    stats = engine.speculation_stats()
    assert stats.ready >= 0.9 * stats.drafted / 4


class Slow(SocketChannel):
    """Waits for every answer, as a test must not depend on how fast the machine is."""

    def receive(self, timeout: float) -> DraftAnswer | None:
        deadline = time.monotonic() + 10
        while self._sent is not None and time.monotonic() < deadline:
            if (answer := super().receive(0.05)) is not None:
                return answer
        return super().receive(0.0)


def test_over_a_socket() -> None:
    host = DraftHost(server(TARGET), "127.0.0.1", VOCABULARY, {"model": "x"})
    try:
        channel = Slow()
        channel.silence = 60.0
        times: list[float] = []
        channel.on_round_trip = times.append
        engine = ContinuousBatchingEngine(TARGET, None, speculation="draft", draft_channel=channel, gamma=4)
        with pytest.raises(ConnectionError):
            channel.connect(host.address, b"another key", "engine", VOCABULARY, 64)
        with pytest.raises(ValueError, match="vocabulary of 100 is not the target's 99"):
            channel.connect(host.address, host.key, "engine", 99, 64)
        with socket.create_connection(host.address):  # one that says nothing keeps nobody out
            channel.connect(host.address, host.key, "engine", VOCABULARY, 64)
        assert channel.description == {"model": "x"}
        engine.add_request(GenerationRequest(request_id="r", prompt_ids=[1, 2, 3], max_new_tokens=60, seed=1))
        for _ in range(6):
            engine.step()
        stats = engine.speculation_stats()
        assert stats.draft_up and stats.drafted > 0 and len(times) > 3
        time.sleep(1.2)
        assert channel.up  # idle, not silent
    finally:
        host.close()
    while engine.scheduler.has_pending_work:  # without its draft it goes on
        engine.step()
    assert not engine.speculation_stats().draft_up and not channel.up
    assert engine.speculation_stats().draft_losses == 1
    plain = ContinuousBatchingEngine(TARGET, None)
    plain.add_request(GenerationRequest(request_id="r", prompt_ids=[1, 2, 3], max_new_tokens=60, seed=1))
    while plain.scheduler.has_pending_work:
        plain.step()
    result, expected = engine.result("r"), plain.result("r")
    assert result is not None and expected is not None and result.token_ids == expected.token_ids


def test_who_listens_and_says_nothing_is_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.draft._HANDSHAKE", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ConnectionError, match="no draft at"):
        SocketChannel().connect(silent.getsockname(), b"key", "engine", VOCABULARY, 64)


def test_a_draft_that_hangs_is_hardly_waited_for() -> None:
    """SIGSTOP, as the engine sees it: its messages go nowhere, and it doesn't wait for their answers."""

    class Hung(Here):
        waits = 0
        hangs = False

        def send(self, message: DraftMessage) -> None:
            if self.hangs:
                self.messages.append(message)
            else:
                super().send(message)

        def receive(self, timeout: float) -> DraftAnswer | None:
            self.waits += timeout > 0
            return super().receive(timeout)

    channel = Hung(server(TARGET))
    engine = ContinuousBatchingEngine(TARGET, None, speculation="draft", draft_channel=channel, gamma=4)
    engine.add_request(GenerationRequest(prompt_ids=[1, 2, 3], max_new_tokens=100, seed=1))
    for _ in range(5):
        engine.step()
    channel.hangs, waits, messages = True, channel.waits, len(channel.messages)
    for _ in range(20):
        engine.step()
    assert channel.waits - waits <= 2 and len(channel.messages) - messages == 2
    drafted = engine.speculation_stats().drafted
    channel.hangs = False
    for message in channel.messages[messages:]:  # it reads what has come meanwhile
        channel.draft.put(channel.name, message, 0.0)
    channel._collect()
    while engine.scheduler.has_pending_work:
        engine.step()
    stats = engine.speculation_stats()
    assert stats.drafted == stats.accepted > drafted


def test_what_a_draft_refuses() -> None:
    small = make(1, layers=1)
    table = SequenceTable(2, CONTEXT + 1, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="context of 128 is below the target's 129"):
        Drafter(small, table, SamplingTable(2, torch.device("cpu")), Vocabulary(VOCABULARY, None))
    with pytest.raises(ValueError, match="vocabulary of 100 is below the target's 101"):
        Drafter(small, table, SamplingTable(2, torch.device("cpu")), Vocabulary(101, None))


def test_a_draft_with_less_context_serves_what_it_can() -> None:
    draft = server(make(0, context=64))
    engine = ContinuousBatchingEngine(TARGET, None, speculation="draft", draft_channel=Here(draft), gamma=4)
    engine.add_request(GenerationRequest(prompt_ids=[1, 2, 3], max_new_tokens=120, seed=1))
    engine.add_request(GenerationRequest(prompt_ids=np.arange(3, 80).tolist(), max_new_tokens=20, seed=1))
    while engine.scheduler.has_pending_work:
        engine.step()
    stats = engine.speculation_stats()
    assert stats.drafted == stats.accepted and 20 < stats.drafted < 64
