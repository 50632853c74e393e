"""The engine's laws under every schedule: exact tokens, pages that add up, one end a request."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import os
import random
import threading
from collections import Counter
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from engine import batch_engine
from engine.attention import ATTENTION
from engine.batch_engine import ContinuousBatchingEngine, StepStats
from engine.models.decoder import DecoderModel
from engine.scheduler import StepPlan
from engine.schemas import FinishReason, GenerationRequest, GenerationResult, QueueFull, StepTokens
from engine.sequence import Sequence
from engine.tokenization import SimpleCharacterTokenizer
from tests.engine.oracle import Reference, tiny_model

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
CONTEXT = 48
TOKENIZER = SimpleCharacterTokenizer(60)  # the model's 64 ids end with four that must never be sampled
BASES = [random.Random(seed).choices(range(3, 60), k=30) for seed in (1, 2)]

REFERENCES = {
    window: Reference(tiny_model(window_size=window, max_seq_len=CONTEXT), TOKENIZER) for window in (None, 1, 5, 20)
}


def near(model: DecoderModel) -> DecoderModel:
    """A draft that is right often, not always."""
    draft = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=noise)
    return draft


def attend_by(model: DecoderModel, attn_impl: str) -> DecoderModel:
    model.attention = ATTENTION.create(attn_impl)
    for layer in model.model.layers:
        layer.self_attn.backend = model.attention
    return model


DRAFTS = {window: near(reference.model) for window, reference in REFERENCES.items()}


class Flaky:
    """A copy of a model whose forward raises when told to."""

    def __init__(self, model: DecoderModel) -> None:
        self.model = copy.deepcopy(model)
        self.armed = False
        forward = self.model.hidden_states

        def hidden_states(*args: Any, **kwargs: Any) -> torch.Tensor:
            if self.armed:
                self.armed = False
                raise RuntimeError("injected")
            return forward(*args, **kwargs)

        self.model.hidden_states = hidden_states  # type: ignore[method-assign]


class Clock:
    now = 1000.0
    ticks = 0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        self.ticks += 1
        return self.ticks / 1000


PLAIN: dict[str, Any] = {"temperature": 0.0}
FEATURES = st.sampled_from(
    [
        PLAIN,
        PLAIN,
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5, "logprobs": 3},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02, "ignore_eos": True},
        {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.4},
        {"temperature": 0.0, "frequency_penalty": 1.5, "logprobs": 0, "prompt_logprobs": 2},
        {"temperature": 1.0, "logit_bias": {5: 3.0, 9: -100.0}, "bad_words": ["A", "BC"]},
        {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": [7, 20, 33]},
        {"temperature": 0.0, "stop": ["X", "Q!"], "include_stop_str_in_output": False},
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    prefix = draw(st.sampled_from(BASES))[: draw(st.sampled_from([0, 3, 8, 16, 17, 25, 30]))]
    suffix = draw(st.lists(st.integers(3, 59), min_size=1, max_size=10))
    features = draw(FEATURES)
    return features | {
        "prompt_ids": prefix + suffix,
        "max_new_tokens": max(features.get("min_tokens", 1), draw(st.sampled_from([3, 1, 6, 12, 20]))),
        "seed": draw(st.integers(-3, 3)),
        "priority": draw(st.sampled_from([0, 0, -1, 2])),
        "cache_salt": draw(st.sampled_from([None, None, "a"])),
        "timeout": draw(st.sampled_from([None, None, None, 1.0, 3.0])),
    }


class EngineLaws(RuleBasedStateMachine):
    attn_impl = "mha"
    least_page_size = 1
    sound = False  # started, and no check has failed
    seen: Counter[str]  # what the schedules of all examples came to

    @initialize(
        window=st.sampled_from([None, 1, 5, 20]),
        page_size=st.one_of(st.sampled_from([1, 16, CONTEXT]), st.integers(1, CONTEXT)),
        room=st.sampled_from([1.0, 0.7, 1.0, 1.3, 0.4, 2.0]),
        rows=st.sampled_from([4, 2, 1, 6]),
        budget=st.sampled_from([1, 2, 7, 16, 64, 2048]),
        depth=st.integers(0, 1),
        prefix_cache=st.booleans(),
        queue=st.sampled_from([None, None, 2]),
        speculation=st.sampled_from(["off", "ngram", "draft"]),
        gamma=st.sampled_from([1, 3, 6]),
    )
    def start(
        self,
        window: int | None,
        page_size: int,
        room: float,
        rows: int,
        budget: int,
        depth: int,
        prefix_cache: bool,
        queue: int | None,
        speculation: str,
        gamma: int,
    ) -> None:
        self.clock = Clock()
        mock.patch.object(batch_engine, "time", self.clock).start()
        self.reference = REFERENCES[window]
        page_size = max(page_size, self.least_page_size)
        self.flaky = Flaky(self.reference.model)
        attend_by(self.flaky.model, self.attn_impl)
        self.page_size, self.window, self.queue = page_size, window, queue
        self.engine = ContinuousBatchingEngine(
            self.flaky.model,
            TOKENIZER,
            max_batch_size=rows,
            page_size=page_size,
            num_pages=max(1, round(-(-CONTEXT // page_size) * room)),
            max_batched_tokens=budget,
            depth=depth,
            enable_prefix_cache=prefix_cache,
            max_queued_requests=queue,
            speculation=speculation,
            draft_model=attend_by(copy.deepcopy(DRAFTS[window]), self.attn_impl) if speculation == "draft" else None,
            gamma=None if speculation == "off" else gamma,
        )
        self.engine.set_token_sink(self.take)
        self.requests: dict[str, GenerationRequest] = {}
        self.live: dict[str, int | None] = {}  # id -> its tag
        self.results: dict[str, GenerationResult] = {}
        self.streams: dict[int, list[int]] = {}
        self.overdue: dict[str, set[FinishReason]] = {}  # must have ended when the next step has
        self.steps = 0
        self.failed = 0
        self.overdue_at: dict[str, float] = {}
        self.sound = True

    def take(self, step: StepTokens) -> None:
        assert len(step.tags) == len(set(step.tags.tolist())) and step.counts.sum() == len(step.tokens)
        ends = list(itertools.accumulate(step.counts.tolist()))
        for tag, end, count in zip(step.tags.tolist(), ends, step.counts.tolist(), strict=True):
            self.streams[tag] += step.tokens[end - count : end].tolist()
        for tag, result in step.finished:
            assert self.live[result.request_id] == tag
            assert self.streams.pop(tag) == result.token_ids[len(self.requests[result.request_id].output_ids) :]
            self.ended(result)

    def ended(self, result: GenerationResult) -> None:
        tag = self.live.pop(result.request_id)  # KeyError: it has ended before
        self.results[result.request_id] = result
        reasons = self.overdue.pop(result.request_id, set())
        if result.finish_reason in (FinishReason.ABORT, FinishReason.DEADLINE):
            assert result.finish_reason in reasons
        assert (result.finish_reason is FinishReason.ERROR) == (result.error is not None)
        self.reference.check(self.requests[result.request_id], result, read=tag is None)

    def add(self, fields: dict[str, Any], tagged: bool) -> None:
        request = GenerationRequest(request_id=str(len(self.requests)), **fields)
        assert request.prompt_ids is not None
        tag = len(self.requests) if tagged and not request.stop else None
        limit = len(request.prompt_ids) + request.max_new_tokens
        pages = -(-(limit - 1) // self.page_size)
        if self.window is not None:
            pages = min(pages, -(-self.window // self.page_size) + 1)
        done = len(request.output_ids) == request.max_new_tokens
        self.requests[request.request_id] = request
        try:
            self.engine.add_request(request, tag=tag)
        except QueueFull:
            assert self.queue is not None and self.engine.scheduler.num_waiting >= self.queue
            return
        except ValueError as error:
            assert limit > CONTEXT or (pages > self.engine.pool.num_pages and not done), error
            return
        assert limit <= CONTEXT and (pages <= self.engine.pool.num_pages or done)
        self.live[request.request_id] = tag
        if tag is not None:
            self.streams[tag] = []
        if request.timeout is not None:
            self.overdue_at[request.request_id] = self.clock.now + request.timeout

    def check(self) -> None:
        pool = self.engine.pool
        pool.check()
        stats = self.engine.stats()
        assert stats.free_pages + stats.cached_pages + stats.held_pages == pool.num_pages
        assert stats.running + stats.waiting == sum(1 for id in self.live if id not in self.unread())

    def unread(self) -> set[str]:
        """Requests that ended without a step: they had all their tokens when they came."""
        return {id for id in self.live if len(self.requests[id].output_ids) == self.requests[id].max_new_tokens}

    def step(self) -> None:
        self.sound = False
        for id, at in self.overdue_at.items():
            if at <= self.clock.now and id in self.live:
                self.overdue.setdefault(id, set()).add(FinishReason.DEADLINE)
        armed, before = self.flaky.armed, len(self.results)
        stats = self.engine.step()
        self.steps += 1
        for id in [id for id, tag in self.live.items() if tag is None]:
            result = self.engine.result(id)
            if result is not None:
                assert self.engine.result(id) is None
                self.ended(result)
        assert not self.overdue, f"{self.overdue} outlived the step planned after their abort"
        new = list(self.results.values())[before:]
        errors = [result for result in new if result.finish_reason is FinishReason.ERROR]
        assert all(result.error == "RuntimeError: injected" for result in errors)
        if armed and not self.flaky.armed:
            assert len(errors) <= stats.scheduled <= len(new)
        else:
            assert not errors
        self.failed += len(errors)
        self.check()
        self.sound = True

    @rule(fields=requests(), tagged=st.booleans())
    def arrive(self, fields: dict[str, Any], tagged: bool) -> None:
        self.add(fields, tagged)

    @rule(fields=requests(), count=st.sampled_from([4, 3, 2, 6]))
    def arrive_together(self, fields: dict[str, Any], count: int) -> None:
        for i in range(count):
            prompt_ids = [*fields["prompt_ids"][i // 3 :], 3 + i]
            self.add(
                fields | {"prompt_ids": prompt_ids, "max_new_tokens": 14 + i, "priority": i % 3}, tagged=bool(i % 2)
            )

    @rule(count=st.integers(1, 10))
    def advance(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.live)))
        if self.engine.abort(id):
            self.overdue.setdefault(id, set()).add(FinishReason.ABORT)
        else:
            assert id in self.unread()

    @precondition(lambda self: self.live or self.results)
    @rule()
    def misuse(self) -> None:
        for id in list(self.results)[-1:]:
            assert not self.engine.abort(id)
        for id in [id for id in self.live if id not in self.unread()][:1]:
            with pytest.raises((ValueError, QueueFull), match="live already|the bound is"):
                self.engine.add_request(GenerationRequest(request_id=id, prompt_ids=[5], max_new_tokens=1))
        for fields in ({"prompt_ids": [60]}, {"prompt_ids": [5], "logit_bias": {60: 1.0}}):
            with pytest.raises(ValueError, match="id 60 is outside the vocabulary of 60"):
                self.engine.add_request(GenerationRequest(max_new_tokens=1, **fields))

    @rule(seconds=st.sampled_from([0.4, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: not self.flaky.armed)
    @rule()
    def break_a_forward(self) -> None:
        self.flaky.armed = True

    @precondition(lambda self: any(len(result.token_ids) for result in self.results.values()))
    @rule(data=st.data(), tagged=st.booleans())
    def resume(self, data: st.DataObject, tagged: bool) -> None:
        """Any request, from any of its tokens on: the state in which a dead replica left it."""
        id = data.draw(st.sampled_from([id for id, result in self.results.items() if result.token_ids]))
        request, tokens = self.requests[id], self.results[id].token_ids
        if not request.stop:  # a stop string may lie in output_ids: its text is the resumed reader's
            output_ids = tokens[: data.draw(st.integers(0, len(tokens)))]
            fields = request.model_dump(exclude={"request_id", "output_ids", "prompt"})
            self.add(fields | {"output_ids": output_ids, "timeout": None}, tagged)

    def teardown(self) -> None:
        try:
            if not self.sound:
                return
            self.flaky.armed = False
            work = sum(len(self.requests[id].prompt_ids or ()) + self.requests[id].max_new_tokens for id in self.live)
            last = self.steps + 20 + 20 * work
            while self.engine.scheduler.has_pending_work:
                self.step()
                assert self.steps < last, "it doesn't drain"
            self.step()
            self.step()
            assert not self.live and not self.streams
            stats = self.engine.stats()
            assert stats.running == stats.waiting == stats.held_pages == 0
            reasons = [result.finish_reason for result in self.results.values()]
            assert stats.finished_requests == len(reasons)
            assert stats.failed_requests == reasons.count(FinishReason.ERROR) == self.failed
            assert stats.aborted_requests == reasons.count(FinishReason.ABORT) + reasons.count(FinishReason.DEADLINE)
            assert stats.generated_tokens == sum(
                len(result.token_ids) - len(self.requests[id].output_ids) for id, result in self.results.items()
            )
            assert not self.engine.wait_for_work(0)
            self.seen.update(str(reason) for reason in reasons)
            speculated = self.engine.speculation_stats()
            self.seen.update(preemptions=stats.preemptions, cached=stats.cached_tokens)
            self.seen.update(drafted=speculated.drafted, accepted=speculated.accepted)
        finally:
            mock.patch.stopall()


class TritonLaws(EngineLaws):
    """In Triton's interpreter, which takes a second for a step: only in the long run. test_triton.py has the short."""

    attn_impl = "triton"
    least_page_size = 16


@pytest.mark.timeout(0 if LONG else 900)
@pytest.mark.parametrize(
    ("laws", "share"),
    [(EngineLaws, 1.0), pytest.param(TritonLaws, 0.02, marks=pytest.mark.skipif(not LONG, reason="takes an hour"))],
)
def test_laws(laws: type[EngineLaws], share: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="engine.batch_engine")  # the injected errors
    laws.seen = Counter()
    run_state_machine_as_test(
        laws,
        settings=settings(
            max_examples=round(share * (1500 if LONG else 150)),
            stateful_step_count=60 if LONG else 30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=not LONG,
            database=None,
            report_multiple_bugs=False,
        ),
    )
    for reference in REFERENCES.values():
        reference.check_rate()
    if share < 1:
        return
    for thing in ("preemptions", "cached", "drafted", "accepted", "stop", "length", "abort", "deadline", "error"):
        assert laws.seen[thing], laws.seen


def make_engine(flaky: Flaky, **options: Any) -> ContinuousBatchingEngine:
    return ContinuousBatchingEngine(flaky.model, TOKENIZER, **({"max_batch_size": 4, "page_size": 4} | options))


def request(i: int, **fields: Any) -> GenerationRequest:
    prompt = random.Random(i).choices(range(3, 60), k=5 + i % 7)
    return GenerationRequest(
        **({"request_id": str(i), "prompt_ids": prompt, "max_new_tokens": 10, "temperature": 0.0} | fields)
    )


def drain(engine: ContinuousBatchingEngine) -> None:
    while engine.scheduler.has_pending_work:
        engine.step()
    engine.step()
    engine.pool.check()
    assert engine.pool.held_pages == engine.stats().running == 0


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("at", range(5))
def test_a_forward_that_raises(depth: int, at: int, caplog: pytest.LogCaptureFixture) -> None:
    """Its whole batch ends with its error, and nobody else."""
    flaky = Flaky(REFERENCES[None].model)
    engine = make_engine(flaky, depth=depth)
    for i in range(7):
        engine.add_request(request(i))
    for _ in range(at):
        engine.step()
    flaky.armed = True
    assert engine.step().scheduled == 4
    drain(engine)
    results = [engine.result(str(i)) for i in range(7)]
    errors = [result is not None and result.error for result in results]
    assert errors == ["RuntimeError: injected"] * 4 + [None] * 3
    for i, result in enumerate(results):
        assert result is not None
        assert result.finish_reason is (FinishReason.ERROR if i < 4 else FinishReason.LENGTH)
        REFERENCES[None].check(request(i), result)
    assert "a forward of 4 sequences failed" in caplog.text


@pytest.mark.parametrize("depth", (0, 1))
def test_steppers_take_turns(depth: int) -> None:
    flaky = Flaky(REFERENCES[None].model)
    runs: list[int] = []
    engine = make_engine(flaky, depth=depth)
    launch = engine._runner_or_raise().launch

    def count(plan: StepPlan) -> Any:
        assert len(set(plan.uids.tolist())) == len(plan.uids)
        runs.extend(plan.uids[plan.samples].tolist())
        return launch(plan)

    with mock.patch.object(engine._runner_or_raise(), "launch", count):
        ids = [engine.add_request(request(i)) for i in range(12)]

        def work() -> None:
            while engine.scheduler.has_pending_work:
                engine.step()

        async def work_async() -> None:
            while engine.scheduler.has_pending_work:
                await asyncio.gather(engine.step_async(), engine.step_async())

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        asyncio.run(work_async())
        for thread in threads:
            thread.join()
    drain(engine)
    assert Counter(runs) == dict.fromkeys(range(12), 10)
    for id in ids:
        result = engine.result(id)
        assert result is not None and len(result.token_ids) == 10
        REFERENCES[None].check(request(int(id)), result)


def test_an_observer_that_raises_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(Flaky(REFERENCES[None].model))
    seen: list[StepStats] = []

    def observe(stats: StepStats) -> None:
        seen.append(stats)
        raise KeyError("observer")

    engine.set_step_observer(observe)
    for i in range(6):
        engine.add_request(request(i))
    engine.abort("5")
    drain(engine)
    engine.step()
    engine.set_step_observer(None)
    engine.step()
    assert seen[-1].scheduled == seen[-1].tokens == seen[-1].total_active_slots == 0
    assert caplog.text.count("the step observer failed") == len(seen)
    stats = engine.stats()
    assert sum(step.finished for step in seen) == stats.finished_requests == 6
    assert sum(step.generated for step in seen) == stats.generated_tokens == 50
    assert sum(step.tokens for step in seen) == stats.computed_tokens
    for i in range(5):
        result = engine.result(str(i))
        assert result is not None
        REFERENCES[None].check(request(i), result)


def test_a_request_that_came_with_all_its_tokens() -> None:
    engine = make_engine(Flaky(REFERENCES[None].model), max_batch_size=1)
    done = request(1, output_ids=REFERENCES[None].generate(request(1)))
    engine.add_request(request(0))
    engine.add_request(request(2))
    engine.add_request(done)
    assert engine.stats().waiting == 2
    result = engine.result("1")
    assert result is not None and result.finish_reason is FinishReason.LENGTH
    assert result.token_ids == done.output_ids and result.text == TOKENIZER.decode(done.output_ids)
    drain(engine)
    assert all(engine.result(id) is not None for id in "02")
    with pytest.raises(ValueError, match="output_ids: 11 tokens are more than max_new_tokens 10"):
        engine.add_request(request(3, output_ids=[5] * 11))


@pytest.mark.parametrize("depth", (0, 1))
def test_unloading_ends_every_request(depth: int) -> None:
    engine = make_engine(Flaky(REFERENCES[None].model), depth=depth)
    told: dict[int, GenerationResult] = {}
    engine.set_token_sink(lambda step: told.update(step.finished))
    for i in range(6):
        engine.add_request(request(i), tag=i if i % 2 else None)
    for _ in range(3):
        engine.step()
    engine.unload_model()
    results = [told[i] if i % 2 else engine.result(str(i)) for i in range(6)]
    assert all(result is not None and result.error == "the model was unloaded" for result in results)
    assert not engine.scheduler.has_pending_work and engine.pool.kv.numel() == 0
    for call in (engine.step, lambda: engine.add_request(request(9))):
        with pytest.raises(ValueError, match="the model was unloaded"):
            call()


def test_nobody_starves() -> None:
    """A low priority waits out the aging time, and no longer, however many of a higher one keep coming."""
    clock = Clock()
    with mock.patch.object(batch_engine, "time", clock):
        engine = make_engine(Flaky(REFERENCES[None].model), max_batch_size=1, aging_seconds=10.0)
        engine.add_request(request(0, priority=2, max_new_tokens=2))
        for i in range(1, 200):
            clock.now += 0.5
            engine.add_request(request(i, priority=0, max_new_tokens=2))
            engine.step()
            engine.step()
            if engine.result("0") is not None:
                break
        assert 40 <= i <= 60  # 20 seconds, and those that were before it


def test_finished_requests_leave_the_queue_and_the_deadlines() -> None:
    gc.collect()
    earlier = sum(type(thing) is Sequence for thing in gc.get_objects())
    engine = make_engine(Flaky(REFERENCES[None].model), max_batch_size=1)
    engine.add_request(request(0, max_new_tokens=30))
    engine.step()
    for i in range(1, 300):
        engine.add_request(request(i, timeout=600.0))
        engine.abort(str(i))
    engine.step()
    assert engine.stats().waiting == 0
    gc.collect()
    assert sum(type(thing) is Sequence for thing in gc.get_objects()) < earlier + 4


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_a_sequence_without_a_possible_token_fails_alone(depth: int, temperature: float) -> None:
    """Logits that are not numbers end in an error, and leave neighbours and the next owners of the pages alone."""
    model = DecoderModel(vocab_size=16, hidden_size=32, num_layers=1, num_heads=2, max_seq_len=64).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    engine = ContinuousBatchingEngine(model, None, depth=depth, max_batch_size=4)
    prompts = {"good": [1, 2, 3], "nan": [1, 7], "after": [2, 3]}
    for name, prompt in prompts.items():
        engine.add_request(
            GenerationRequest(
                request_id=name,
                prompt_ids=prompt,
                max_new_tokens=8,
                temperature=temperature,
                seed=1,
                logprobs=1,
                logit_bias={7: -100.0},
            )
        )
    while engine.scheduler.has_pending_work:
        engine.step()
    results = {name: engine.result(name) for name in prompts}
    assert results["nan"].finish_reason is FinishReason.ERROR and "not numbers" in results["nan"].error
    assert results["nan"].token_ids == []
    for name in ("good", "after"):
        assert (len(results[name].token_ids), results[name].finish_reason) == (8, FinishReason.LENGTH)
    assert engine.stats().held_pages == 0
