"""llm-bench against a scripted server: what it counts is compared with what the server did."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy.stats
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.bench.cli import main
from app.bench.compare import compare
from app.bench.html import page
from app.bench.load import UNFINISHED, BenchError, Kind, Lengths, Load, Run, Sample, Target, read_mix
from app.bench.report import Objective, Report, Spread
from app.bench.search import find_rate

TOKENS_A_WORD, TOKENS_AROUND = 2, 3  # how the fake server counts a prompt
SHORT = Lengths(8, 8)
ONE_KIND = (Kind("all", SHORT, SHORT),)


class FakeServer:
    """Speaks OpenAI. `behave(n)` names what the n-th request meets, trial requests (one token asked) aside."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.behaved: Counter[str] = Counter()
        self.behave: Callable[[int], str] = lambda n: "ok"
        self.before: Callable[[int], Awaitable[None]] | None = None
        self.in_flight = self.most_in_flight = 0
        self._server = uvicorn.Server(
            uvicorn.Config(
                Starlette(
                    routes=[
                        Route(
                            "/v1/models", lambda request: JSONResponse({"data": [{"id": "first"}, {"id": "second"}]})
                        ),
                        Route("/v1/completions", self._answer, methods=["POST"]),
                        Route("/v1/chat/completions", self._answer, methods=["POST"]),
                    ]
                ),
                port=0,
                log_level="critical",
            )
        )

    def __enter__(self) -> FakeServer:
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        behaviour = "ok"
        if body["max_tokens"] > 1:
            n = len(self.bodies)
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            behaviour = self.behave(n)
            self.behaved[behaviour] += 1
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            try:
                if self.before:
                    await self.before(n)
            finally:
                self.in_flight -= 1
        if behaviour == "hang":
            await asyncio.sleep(3600)
        if behaviour.startswith("status "):
            return JSONResponse({"error": {"message": f"scripted {behaviour}"}}, int(behaviour.split()[1]))
        usage = {
            "prompt_tokens": TOKENS_A_WORD * len(prompt.split()) + TOKENS_AROUND,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 5},
        }
        if not body.get("stream"):
            if behaviour == "bad response":
                return Response(b"<html>", media_type="text/html")
            text: dict[str, Any] = {"message": {"content": "x"}} if chat else {"text": "x"}
            return JSONResponse({"choices": [text], "usage": usage})
        return StreamingResponse(self._events(body, chat, behaviour, usage), media_type="text/event-stream")

    async def _events(
        self, body: dict[str, Any], chat: bool, behaviour: str, usage: dict[str, int]
    ) -> AsyncIterator[bytes]:
        def event(data: object) -> bytes:
            return b"data: " + json.dumps(data).encode() + b"\n\n"

        if chat:
            yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for i in range(body["max_tokens"]):
            if i == 1:
                if behaviour == "broken stream":
                    yield b'data: {"cho'
                    await asyncio.sleep(0.01)
                    raise ConnectionAbortedError  # uvicorn then closes without the last chunk
                if behaviour == "error event":
                    yield event({"error": {"message": "scripted"}})
                    return
                if behaviour == "bad response":
                    yield b"data: {\n\n"
                    return
            piece = event({"choices": [{"delta": {"content": "é"}} if chat else {"text": "é"}], "usage": None})
            if behaviour == "crumbs":
                for byte in b": comment\r\n" + piece.replace(b"\n", b"\r\n"):
                    yield bytes([byte])
            elif behaviour == "merged":
                if i % 4 == 3:
                    yield piece
            else:
                yield piece
        if body["stream_options"]["include_usage"] and behaviour != "no usage":
            yield event({"choices": [], "usage": usage})
        if behaviour != "no [DONE]":
            yield b"data: [DONE]\n\n"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def closed(requests: int, concurrency: int = 1, **options: Any) -> Load:
    return Load(**({"mix": ONE_KIND, "requests": requests} | options), concurrency=concurrency)


def report_of(run: Run) -> Report:
    return Report.of(run, started=datetime.now(UTC), options={})


async def finished(target: Target, load: Load) -> Run:
    run = Run(target, load)
    await run.run()
    return run


async def one(target: Target, tokens: int = 8) -> Sample:
    sample = Sample(asked_tokens=tokens, scheduled=time.perf_counter())
    async with target.session() as session:
        await target.send(session, "a prompt", sample)
    return sample


KINDS = ("ok", "status 429", "broken stream", "ok", "error event", "bad response", "no [DONE]", "status 500", "hang")


async def test_every_kind_of_failure_is_counted_as_the_server_made_it(server: FakeServer) -> None:
    server.behave = lambda n: KINDS[n * n % len(KINDS)] if n >= len(KINDS) else KINDS[n]
    run = await finished(Target(server.url, "m", timeout=5), closed(40, concurrency=8))
    report = report_of(run)
    assert sum(server.behaved.values()) == 40
    expected = {
        ("timeout" if kind == "hang" else kind): count for kind, count in server.behaved.items() if kind != "ok"
    }
    assert {failure.kind: failure.count for failure in report.failures} == expected
    assert (report.succeeded, report.failed, report.unfinished) == (server.behaved["ok"], sum(expected.values()), 0)
    assert "scripted status 429" in next(f.example for f in report.failures if f.kind == "status 429")
    assert report.e2e_ms and report.e2e_ms.n == report.succeeded


async def test_connections_refused_and_dropped_are_told_apart() -> None:
    with socket.socket() as bound:  # holds the port without listening
        bound.bind(("127.0.0.1", 0))
        assert (await one(Target(f"http://127.0.0.1:{bound.getsockname()[1]}", "m"))).error == "connect"
    dropper = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with dropper:
        port = dropper.sockets[0].getsockname()[1]
        assert (await one(Target(f"http://127.0.0.1:{port}", "m"))).error == "disconnected"


async def test_without_streaming_a_bad_body_is_a_failure(server: FakeServer) -> None:
    server.behave = lambda n: "bad response" if n % 2 else "ok"
    run = await finished(Target(server.url, "m", stream=False), closed(6))
    report = report_of(run)
    assert [(failure.kind, failure.count) for failure in report.failures] == [("bad response", 3)]
    assert report.ttft_ms is None and report.e2e_ms and report.output_tokens and report.output_tokens.mean == 8


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("behaviour", ["ok", "crumbs", "merged", "no usage"])
async def test_tokens_and_gaps(server: FakeServer, chat: bool, behaviour: str) -> None:
    server.behave = lambda n: behaviour
    sample = await one(Target(server.url, "m", chat=chat))
    assert sample.error is None, sample.detail
    assert sample.output_tokens == 8
    assert len(sample.gaps) == (1 if behaviour == "merged" else 7)  # an empty first delta of a chat is not a token
    assert sample.input_tokens == (None if behaviour == "no usage" else 2 * TOKENS_A_WORD + TOKENS_AROUND)
    assert sample.first and sample.last and sample.scheduled < sample.sent < sample.first <= sample.last <= sample.end
    assert sum(sample.gaps) == pytest.approx(sample.last - sample.first)


async def test_what_is_asked_for(server: FakeServer) -> None:
    target = Target(server.url + "/v1/", "m", "kéy", chat=True, ignore_eos=True, body={"temperature": 0.5, "top_k": 3})
    await one(target, tokens=5)
    body, headers = server.bodies[0], server.headers[0]
    assert body["messages"] == [{"role": "user", "content": "a prompt"}]
    expected = {"model": "m", "max_tokens": 5, "min_tokens": 5, "ignore_eos": True, "temperature": 0.5, "top_k": 3}
    assert expected.items() <= body.items()
    assert headers["authorization"].encode("latin-1").decode() == "Bearer kéy"
    assert "kéy" not in repr(target)


async def test_prompts_have_the_length_asked_for_as_the_server_counts(server: FakeServer) -> None:
    load = closed(30, 3, mix=(Kind("all", Lengths(21, 61), Lengths(2, 9)),), seed=5)
    run = await finished(Target(server.url, "m"), load)
    again = await finished(Target(server.url, "m"), load)
    asked = [
        Counter((body["prompt"], body["max_tokens"]) for body in part)
        for part in (server.bodies[:30], server.bodies[30:])
    ]
    assert asked[0] == asked[1] and len(asked[0]) == 30
    counts = [sample.input_tokens for sample in run.samples]
    assert all(count is not None and 20 <= count <= 62 for count in counts) and len(set(counts)) > 5
    assert {body["max_tokens"] for body in server.bodies} <= set(range(2, 10))
    assert all(sample.output_tokens == sample.asked_tokens for sample in run.samples + again.samples)


async def test_warm_up_is_sent_and_not_counted(server: FakeServer) -> None:
    server.behave = lambda n: "status 503" if n < 7 else "ok"
    report = report_of(await finished(Target(server.url, "m"), closed(5, warmup=7)))
    assert len(server.bodies) == 12
    assert (report.succeeded, report.failed, len(report.requests)) == (5, 0, 5)
    assert report.requests[0]["scheduled"] >= 0


async def test_closed_loop_keeps_its_concurrency(server: FakeServer) -> None:
    barrier = asyncio.Barrier(6)

    async def wait_for_six(n: int) -> None:
        await barrier.wait()

    server.before = wait_for_six
    report = report_of(await finished(Target(server.url, "m"), closed(24, concurrency=6)))
    assert report.succeeded == 24 and server.most_in_flight == 6


async def test_open_loop_does_not_wait_for_answers(server: FakeServer) -> None:
    barrier = asyncio.Barrier(30)

    async def wait_for_all(n: int) -> None:
        await barrier.wait()

    server.before = wait_for_all
    load = Load(ONE_KIND, rate=300, requests=30)
    assert report_of(await finished(Target(server.url, "m"), load)).succeeded == 30


@pytest.mark.parametrize("who", ["server", "client"])
async def test_a_stall_shows_in_everything_scheduled_during_it(server: FakeServer, who: str) -> None:
    """At 100 a second a stall of 0.5 s delays the 25 requests scheduled in its first half by 0.25 s or more."""

    async def stall(n: int) -> None:
        if n == 20 and who == "server":
            time.sleep(0.5)  # the whole server stands
        elif n == 20:
            loop.call_soon_threadsafe(time.sleep, 0.5)  # the client's loop stands: it can't send

    loop = asyncio.get_running_loop()
    server.before = stall
    run = await finished(Target(server.url, "m"), Load(ONE_KIND, rate=100, poisson=False, requests=100))
    late = [sample for sample in run.samples if sample.end - sample.scheduled >= 0.25]
    assert len(late) >= 24
    report = report_of(run)
    assert report.e2e_ms and report.ttft_ms and report.late_ms
    assert report.e2e_ms.p90 >= 250 and report.ttft_ms.p90 >= 250
    if who == "client":
        assert report.late_ms.p90 >= 250
        assert [warning for warning in report.warnings if "the client" in warning]


async def test_numbers_equal_an_independent_count(server: FakeServer) -> None:
    run = await finished(Target(server.url, "m"), closed(37, 4))
    report = Report.model_validate_json(report_of(run).model_dump_json())
    ends = [1000 * (sample.end - sample.scheduled) for sample in run.samples]
    cuts = statistics.quantiles(ends, n=100, method="inclusive")
    spread = report.e2e_ms
    assert spread and (spread.n, spread.max, spread.min) == (37, max(ends), min(ends))
    assert [spread.p50, spread.p90, spread.p95, spread.p99] == pytest.approx([cuts[q - 1] for q in (50, 90, 95, 99)])
    assert [spread.p50, spread.p99] == pytest.approx(np.percentile(ends, [50, 99]))
    assert spread.mean == pytest.approx(statistics.fmean(ends))
    assert report.itl_ms and report.itl_ms.n == 37 * 7
    tpot = [1000 * (sample.last - sample.first) / 7 for sample in run.samples if sample.last and sample.first]
    assert report.tpot_ms and report.tpot_ms.mean == pytest.approx(statistics.fmean(tpot))
    seconds = max(sample.end for sample in run.samples) - min(sample.scheduled for sample in run.samples)
    assert report.seconds == pytest.approx(seconds)
    assert report.output_tokens_per_second == pytest.approx(37 * 8 / seconds)
    assert report.requests_per_second == pytest.approx(37 / seconds)
    assert report.client_cpu_ms > 0


def test_no_values_have_no_spread() -> None:
    assert Spread.of([None, None]) is None and Spread.of([]) is None


def test_arrivals() -> None:
    def times(count: int, **options: Any) -> np.ndarray:
        load = Load(ONE_KIND, requests=1, **options)
        return np.array(list(itertools.islice(load.arrivals(), count)))

    assert np.allclose(times(50, rate=8, poisson=False), np.arange(50) / 8)
    arrivals = times(20000, rate=50.0, seed=1)
    assert np.array_equal(arrivals, times(20000, rate=50.0, seed=1))
    assert not np.array_equal(arrivals, times(20000, rate=50.0, seed=2))
    gaps = np.diff(arrivals, prepend=0)
    assert abs(gaps.mean() - 1 / 50) < 4 / 50 / np.sqrt(len(gaps))  # the mean's standard error is mean / sqrt(n)
    assert scipy.stats.kstest(gaps, scipy.stats.expon(scale=1 / 50).cdf).pvalue > 1e-3


async def test_duration_ends_the_sending(server: FakeServer) -> None:
    load = Load(ONE_KIND, rate=200, poisson=False, duration=0.25, warmup=10)
    run = await finished(Target(server.url, "m"), load)
    assert len(run.samples) == 50 and len(server.bodies) == 60
    assert (await finished(Target(server.url, "m"), closed(10**6, 2, duration=0.2))).samples


async def test_a_server_that_refuses_the_trial_ends_the_run(server: FakeServer) -> None:
    with pytest.raises(BenchError, match="trial request failed: status 404"):
        await finished(Target(server.url + "/elsewhere", "m"), closed(5))


async def test_a_cancelled_run_keeps_what_it_has(server: FakeServer) -> None:
    server.behave = lambda n: "hang" if n >= 6 else "ok"
    run = Run(Target(server.url, "m"), closed(100, 3))
    task = asyncio.create_task(run.run())
    while server.behaved["hang"] < 3:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert Counter(sample.error for sample in run.samples) == {None: 6, UNFINISHED: 3}
    report = report_of(run)
    assert (report.succeeded, report.failed, report.unfinished) == (6, 0, 3)


# --- without a server: samples as some server would have given them


def sample(scheduled: float, ttft: float = 0.1, e2e: float = 0.3, tokens: int = 5, **fields: Any) -> Sample:
    first, end = scheduled + ttft, scheduled + e2e
    times = {"sent": scheduled, "first": first, "last": end, "end": end}
    return Sample(tokens, scheduled, **{"kind": "all", **times, "input_tokens": 8, "output_tokens": tokens, **fields})


def run_of(samples: list[Sample], mix: tuple[Kind, ...] = ONE_KIND) -> Run:
    run = Run(Target("http://x", "m"), Load(mix, rate=1.0, requests=len(samples)))
    run.samples = samples
    return run


def test_goodput_counts_who_keeps_every_bound() -> None:
    samples = [
        sample(0.0),
        sample(1.0, ttft=0.25),
        sample(2.0, e2e=0.95),  # (0.95 - 0.1) / 4 tokens
        sample(3.0, error="status 500"),
        sample(4.0, tokens=1),  # has no time per output token
        sample(5.0),
        sample(6.0, error=UNFINISHED),
        sample(9.0, e2e=1.0, ttft=0.2),
    ]
    report = Report.of(run_of(samples), started=datetime.now(UTC), options={}, objective=Objective(ttft=200, tpot=201))
    assert report.seconds == 10.0
    assert report.goodput == pytest.approx(3 / 10) and report.goodput_share == pytest.approx(3 / 7)
    plain = report_of(run_of(samples))
    assert plain.goodput == pytest.approx(6 / 10), "without bounds all that succeeded"
    tight = Report.of(run_of(samples), started=datetime.now(UTC), options={}, objective=Objective(e2e=300.5))
    assert tight.goodput == pytest.approx(4 / 10)


def test_high_percentiles_and_failures() -> None:
    samples = [sample(i, e2e=(i + 1) / 1000, ttft=0) for i in range(2000)]
    report = report_of(run_of(samples))
    assert report.e2e_ms and report.e2e_ms.p999 == pytest.approx(np.percentile(np.arange(1, 2001), 99.9))
    assert report.p99_ms["e2e"] == pytest.approx(report.e2e_ms.p99)
    for failed, p99 in ((20, 2000), (21, None)):  # a failure is a request that takes forever
        for each in samples[:failed]:
            each.error = "timeout"
        found = report_of(run_of(samples)).p99_ms["e2e"]
        assert (found is None) == (p99 is None) and (p99 is None or found == pytest.approx(p99, rel=0.011))


MIX = """
{"name": "chat", "weight": 3, "input_tokens": "40:60", "prefix_tokens": 30, "output_tokens": 4}

{"name": "fixed", "prompt": "Say this", "output_tokens": "2:3"}
"""


async def test_a_mix_is_sent_as_it_is_written(server: FakeServer) -> None:
    mix = read_mix(MIX)
    run = await finished(Target(server.url, "m"), closed(400, 4, mix=mix, seed=3))
    report = report_of(run)
    chats = [body for body in server.bodies if body["max_tokens"] == 4]
    others = [body for body in server.bodies if body["max_tokens"] != 4]
    assert scipy.stats.binomtest(len(chats), 400, 0.75).pvalue > 1e-3
    assert {body["prompt"] for body in others} == {"Say this"} and {body["max_tokens"] for body in others} == {2, 3}
    prefixes = {tuple(body["prompt"].split()[:14]) for body in chats}
    assert len(prefixes) == 1 and len({body["prompt"] for body in chats}) == len(chats)
    chat, fixed = report.kinds
    assert (chat.name, chat.succeeded, fixed.succeeded) == ("chat", len(chats), len(others))
    assert chat.input_tokens and 39 <= chat.input_tokens.min < chat.input_tokens.max <= 61
    assert fixed.input_tokens and fixed.input_tokens.max == 2 * TOKENS_A_WORD + TOKENS_AROUND


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no line"),
        ("[]", "line 1: not a JSON object"),
        ('{"output_tokens": 1}', "line 1: give output_tokens and one of"),
        ('{"prompt": "x"}', "line 1"),
        ('\n{"prompt": "x", "output_tokens": 1, "wieght": 2}', "line 2: unknown field 'wieght'"),
        ('{"prompt": "x", "output_tokens": 1, "weight": 0}', "weight"),
        ('{"input_tokens": 5, "prefix_tokens": 5, "output_tokens": 1}', "prefix_tokens"),
        ('{"input_tokens": "9:3", "output_tokens": 1}', "9:3"),
    ],
)
def test_a_bad_mix_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_mix(text)


def test_kinds_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="one name"):
        Load(ONE_KIND + ONE_KIND, rate=1.0, requests=1)


def queue(rate: float, service: float, requests: int = 400) -> Report:
    """A server that takes `service` seconds for each request, one at a time, in a simulated time."""
    free = 0.0
    samples = []
    for at in itertools.islice(Load(ONE_KIND, rate=rate, requests=1, seed=9).arrivals(), requests):
        free = max(free, at) + service
        samples.append(sample(at, ttft=free - at, e2e=free - at))
    return report_of(run_of(samples))


async def test_find_rate() -> None:
    """Against a queue: what it finds is kept, and a little more isn't."""
    tried = []

    async def measure(rate: float) -> Report:
        tried.append(rate)
        return queue(rate, service=0.02)

    for bound in (50.0, 200.0):
        for start in (0.3, 20.0, 100.0):
            tried.clear()
            found = await find_rate(measure, "e2e", bound, start)
            assert found is not None and found.p99_ms["e2e"] is not None and found.p99_ms["e2e"] <= bound
            assert [probe.rate for probe in found.search] == tried
            best = max(probe.rate for probe in found.search if probe.is_kept)
            missed = min(probe.rate for probe in found.search if not probe.is_kept)
            assert best < missed <= 1.05 * best and best < 50
            assert found.requests_per_second == queue(best, 0.02).requests_per_second
            p99 = queue(missed, 0.02).p99_ms["e2e"]
            assert p99 is not None and p99 > bound
    assert await find_rate(measure, "e2e", 19.0, 10.0) is None, "one request alone takes longer"


def test_a_search_sends_no_prompt_twice(server: FakeServer, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """What a server cached at one rate would make the next one look better."""
    mix, file = tmp_path / "mix", tmp_path / "report.json"
    mix.write_text('{"input_tokens": 64, "prefix_tokens": 32, "output_tokens": 8}')
    server.behave = lambda n: "ok" if n < 40 else "status 500"
    options = ["--base-url", server.url, "--mix", str(mix), "--output", str(file)]
    assert main([*options, "--find-rate", "e2e=600000", "--requests", "10", "--duration", "0.001"]) == 0
    report = Report.model_validate_json(file.read_text())
    assert {probe.is_kept for probe in report.search} == {True, False}
    prompts = [body["prompt"] for body in server.bodies]
    assert len(prompts) > 60 and len(set(prompts)) == len(prompts)
    assert len({" ".join(prompt.split()[:14]) for prompt in prompts}) == 1, "but for the prefix"
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


def test_comparison() -> None:
    rng = np.random.default_rng(1)

    def run(scale: float) -> Report:
        return report_of(run_of([sample(i, e2e=scale * value) for i, value in enumerate(rng.gamma(9, 0.1, 500))]))

    base, same, slower = run(1.0), run(1.0), run(1.2)
    alike = {each.name: each for each in compare(base, same)}
    differing = {each.name: each for each in compare(base, slower)}
    assert not alike["e2e p50, ms"].is_clear and differing["e2e p50, ms"].is_clear
    found = differing["e2e p50, ms"]
    assert found.low is not None and found.high is not None and found.low < 1.2 < found.high
    assert base.e2e_ms and found.base == pytest.approx(base.e2e_ms.p50, rel=1e-6)
    assert differing["requests/s"].low is None


def test_html_report() -> None:
    runs = [("a <b>", queue(40, 0.02)), ("c", queue(30, 0.02))]
    single, both = page(runs[:1]), page(runs)
    for text in (single, both):
        assert not re.search(r"https?://|<script|src=|<link|@import|url\(", text)
        assert "a &lt;b&gt;" in text and "<b>" not in text
        assert "NaN" not in text and "nan" not in re.findall(r"<svg.*?</svg>", text, re.S)
        for svg in re.findall(r"<svg.*?</svg>", text, re.S):
            root = ElementTree.fromstring(svg)
            assert root.attrib["aria-label"]
            for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", svg):
                assert 0 <= float(x) <= 560 and 0 <= float(y) <= 260
    assert single.count("<svg") == 6 and both.count('class="line s1"') == single.count('class="line s0"') == 5
    assert "Compared" in both and "Compared" not in single


def test_command_line(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # nothing is wrapped
    file = tmp_path / "report.json"
    options = ["--base-url", server.url, "--api-key", "secret-key", "--output-tokens", "8", "--output", str(file)]
    server.behave = lambda n: "no usage" if n == 3 else "ok"
    assert main([*options, "--concurrency", "2", "--requests", "9", "--ignore-eos"]) == 0
    shown = capsys.readouterr().out
    assert "9 requests succeeded" in shown and "time to first token" in shown and "without usage" in shown
    assert "of them cached" in shown
    report = Report.model_validate_json(file.read_text())
    assert Report.model_validate_json(report.model_dump_json()) == report
    assert report.cached_tokens and (report.cached_tokens.n, report.cached_tokens.max) == (8, 5)
    assert report.succeeded == 9 and len(report.requests) == 9 and not report.interrupted
    assert report.options["model"] == "first" and report.options["concurrency"] == 2
    assert "secret-key" not in file.read_text() + shown
    server.behave = lambda n: "status 500"
    assert main([*options, "--rate", "500", "--requests", "4"]) == 1
    assert "status 500" in capsys.readouterr().out
    server.behave = lambda n: "ok"
    base, html = file.with_name("base.json"), file.with_name("report.html")
    common = ["--base-url", server.url, "--output-tokens", "8", "--output", str(base), "--html", str(html)]
    assert main([*common, "--rate", "200", "--requests", "20", "--slo", "ttft=60000,e2e=60000"]) == 0
    assert "Goodput" in capsys.readouterr().out and "100.0 % kept" in " ".join(html.read_text().split())
    assert main([*common[:4], "--find-rate", "e2e=0.000001", "--requests", "3", "--duration", "0.01"]) == 1
    assert "no rate keeps" in capsys.readouterr().err
    assert main(["--compare", str(base), str(base), "--html", str(html)]) == 0
    assert "1.000" in capsys.readouterr().out and "Compared" in html.read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--rate --concurrency --find-rate --compare is required"),
        (["--rate", "1", "--concurrency", "1"], "not allowed with"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "1", "--input-tokens", "9:3"], "--input-tokens"),
        (["--rate", "1", "--body", "[1]"], "--body"),
        (["--rate", "1", "--base-url", "localhost:8000"], "base URL"),
        (["--rate", "1", "--output", "/no/such/folder/x.json"], "no folder"),
        (["--rate", "1", "--html", "/no/such/folder/x.html"], "no folder"),
        (["--rate", "1", "--slo", "itl=5"], "--slo"),
        (["--rate", "1", "--slo", "ttft=0"], "--slo"),
        (["--find-rate", "ttft=5,e2e=9"], "one latency"),
        (["--rate", "1", "--mix", "/no/such/file"], "--mix"),
        (["--compare", "pyproject.toml", "README.md"], "--compare"),
    ],
)
def test_bad_options_are_refused(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(options)
    assert exit.value.code == 2 and says in capsys.readouterr().err


def test_ctrl_c_gives_the_report_so_far(server: FakeServer, tmp_path: Path) -> None:
    server.behave = lambda n: "hang" if n >= 5 else "ok"
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "app.bench.cli", "--base-url", server.url, "--concurrency", "2", "--output", file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while server.behaved["hang"] < 2 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        shown = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "2 unfinished" in shown
    report = Report.model_validate_json(file.read_text())
    assert report.interrupted and (report.succeeded, report.unfinished) == (5, 2)
