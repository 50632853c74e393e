"""llm-bench against a scripted server: what it counts is compared with what the server did."""

from __future__ import annotations

import asyncio
import itertools
import json
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

import numpy as np
import pytest
import scipy.stats
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.bench.cli import main
from app.bench.load import UNFINISHED, BenchError, Lengths, Load, Run, Sample, Target
from app.bench.report import Report, Spread

TOKENS_A_WORD, TOKENS_AROUND = 2, 3  # how the fake server counts a prompt
SHORT = Lengths(8, 8)


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
    return Load(
        **({"input_tokens": SHORT, "output_tokens": SHORT, "requests": requests} | options), concurrency=concurrency
    )


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
    load = closed(30, 3, input_tokens=Lengths(21, 61), output_tokens=Lengths(2, 9), seed=5)
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
    load = Load(SHORT, SHORT, rate=300, requests=30)
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
    run = await finished(Target(server.url, "m"), Load(SHORT, SHORT, rate=100, poisson=False, requests=100))
    late = [sample for sample in run.samples if sample.end - sample.scheduled >= 0.25]
    assert len(late) >= 24
    report = report_of(run)
    assert report.e2e_ms and report.ttft_ms and report.late_ms
    assert report.e2e_ms.p90 >= 250 and report.ttft_ms.p90 >= 250
    if who == "client":
        assert report.late_ms.p90 >= 250


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
        load = Load(SHORT, SHORT, requests=1, **options)
        return np.array(list(itertools.islice(load.arrivals(), count)))

    assert np.allclose(times(50, rate=8, poisson=False), np.arange(50) / 8)
    arrivals = times(20000, rate=50.0, seed=1)
    assert np.array_equal(arrivals, times(20000, rate=50.0, seed=1))
    assert not np.array_equal(arrivals, times(20000, rate=50.0, seed=2))
    gaps = np.diff(arrivals, prepend=0)
    assert abs(gaps.mean() - 1 / 50) < 4 / 50 / np.sqrt(len(gaps))  # the mean's standard error is mean / sqrt(n)
    assert scipy.stats.kstest(gaps, scipy.stats.expon(scale=1 / 50).cdf).pvalue > 1e-3


async def test_duration_ends_the_sending(server: FakeServer) -> None:
    load = Load(SHORT, SHORT, rate=200, poisson=False, duration=0.25, warmup=10)
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


def test_command_line(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    options = ["--base-url", server.url, "--api-key", "secret-key", "--output-tokens", "8", "--output", str(file)]
    server.behave = lambda n: "no usage" if n == 3 else "ok"
    assert main([*options, "--concurrency", "2", "--requests", "9", "--ignore-eos"]) == 0
    shown = capsys.readouterr().out
    assert "9 requests succeeded" in shown and "time to first token" in shown and "without usage" in shown
    report = Report.model_validate_json(file.read_text())
    assert Report.model_validate_json(report.model_dump_json()) == report
    assert report.succeeded == 9 and len(report.requests) == 9 and not report.interrupted
    assert report.options["model"] == "first" and report.options["concurrency"] == 2
    assert "secret-key" not in file.read_text() + shown
    server.behave = lambda n: "status 500"
    assert main([*options, "--rate", "500", "--requests", "4"]) == 1
    assert "status 500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--rate --concurrency is required"),
        (["--rate", "1", "--concurrency", "1"], "not allowed with"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "1", "--input-tokens", "9:3"], "--input-tokens"),
        (["--rate", "1", "--body", "[1]"], "--body"),
        (["--rate", "1", "--base-url", "localhost:8000"], "base URL"),
        (["--rate", "1", "--output", "/no/such/folder/x.json"], "no folder"),
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
