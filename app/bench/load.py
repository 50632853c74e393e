"""Load on an OpenAI-compatible server, and what every request saw.

Why not guidellm or aiperf underneath: on 2 cores guidellm 0.8.1 spends 10.7 CPU ms a request (32 in, 16 out, streamed),
this 0.7, and what it takes from the server shows: median TTFT 5 ms against 1. Both count TTFT from the real send, not
the scheduled one, and bring 29 packages, or 75 with older rich, orjson, psutil and prometheus-client than the server's.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import orjson

UNFINISHED = "unfinished"

# Common words that byte-pair vocabularies hold whole, so that a prompt has about as many tokens as words.
_COMMON = """
able act again all along also and any art away base beat below better blood board boat born both box brown build burn
buy call camp car cat catch cause cell chair change check child class clean coast color common cook cool corn cost cross
death design die doctor dog door double down dream dry earth east easy effect eight end enough enter equal expect eye
fact famous far farm fast feed few field figure fire first fish five flat floor flow flower follow foot forest four free
friend front fruit girl glass good great grow guess half happy hard head heart help hour house human ice idea inch job
jump keep kind king large last law lay lead least left less level lie light listen little live long many mark market
matter men metal middle milk mine miss modern month motion move much music must name near need never number offer oil
other own page party pass period person place plan point poor print pull put rate reach record red region reply rest
result right rise root round run salt sand school seat second see seed sense seven share sharp ship shore short since
sing six skill sky sleep small snow soil soon spread spring square stand state stone store street study such summer
system tall tell thick thin think third though time tiny total touch town track travel turn two until usual value view
visit voice walk wash watch water wave wear week well when which white why wife wind window winter word yes
"""
WORDS = _COMMON.split()


class BenchError(Exception):
    """The benchmark can't start; the text says why."""


class Lengths(NamedTuple):
    """Token counts drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`"128"` or `"16:64"`; ValueError otherwise."""
        low, _, high = text.partition(":")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"{text} is not a positive number or min:max")
        return lengths


@dataclass(frozen=True)
class Kind:
    """One kind of request of a mix: how often it comes, against the others, and how long it is.

    Its prompts are random words, the first `prefix_tokens` of them the same in all, or always `prompt`.
    """

    name: str
    input_tokens: Lengths
    output_tokens: Lengths
    weight: float = 1.0
    prefix_tokens: int = 0
    prompt: str | None = None

    @classmethod
    def parse(cls, line: str, number: int) -> Kind:
        """A line of a mix: a JSON object. ValueError says what is wrong with it."""
        given = orjson.loads(line)
        if not isinstance(given, dict):
            raise ValueError("not a JSON object")
        if unknown := given.keys() - {field.name for field in fields(cls)}:
            raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
        prompt = given.get("prompt")
        if (prompt is None) == ("input_tokens" not in given) or "output_tokens" not in given:
            raise ValueError("give output_tokens and one of input_tokens and prompt")
        kind = cls(
            str(given.get("name", number)),
            Lengths.parse(str(given.get("input_tokens", 1))),
            Lengths.parse(str(given["output_tokens"])),
            float(given.get("weight", 1)),
            int(given.get("prefix_tokens", 0)),
            None if prompt is None else str(prompt),
        )
        if not 0 < kind.weight < float("inf"):
            raise ValueError("weight must be above 0")
        if not 0 <= kind.prefix_tokens < kind.input_tokens.low:
            raise ValueError("prefix_tokens must lie below input_tokens")
        return kind


def read_mix(text: str) -> tuple[Kind, ...]:
    """The kinds of a mix, one a line. ValueError names the line."""
    kinds = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                kinds.append(Kind.parse(line, number))
            except (ValueError, TypeError) as error:
                raise ValueError(f"line {number}: {error}") from None
    if not kinds:
        raise ValueError("it holds no line")
    return tuple(kinds)


@dataclass(frozen=True)
class Load:
    """When requests are sent and how long they are.

    Open loop: `rate` requests a second, evenly spaced or as a Poisson process, whatever the server does. Closed loop:
    `concurrency` clients, each sending its next request when the last one ended. It ends after `requests` or
    `duration` seconds of sending, whichever comes first. The first `warmup` requests belong to neither and aren't
    counted. The same seed gives the same arrivals, lengths and prompts; another `part` of it the same arrivals and
    prefixes with other prompts, which no server has in its cache.
    """

    mix: tuple[Kind, ...]
    rate: float | None = None
    poisson: bool = True
    concurrency: int | None = None
    requests: int | None = None
    duration: float | None = None
    warmup: int = 0
    seed: int = 0
    part: int = 0

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("give either rate or concurrency")
        if self.requests is None and self.duration is None:
            raise ValueError("give requests, duration or both")
        if len({kind.name for kind in self.mix}) < len(self.mix):
            raise ValueError("two kinds of the mix have one name")

    def arrivals(self) -> Iterator[float]:
        """Send times of the open loop, in seconds from its start; endless."""
        assert self.rate is not None
        if not self.poisson:
            yield from (i / self.rate for i in itertools.count())
        rng = np.random.default_rng([self.seed, 0])
        at = 0.0
        while True:
            at += rng.exponential(1 / self.rate)
            yield at

    def prompts(self, words_for: Callable[[int], int]) -> Iterator[tuple[Kind, str, int]]:
        """Prompts with their kinds and the number of tokens to ask for; endless. `words_for` turns prompt tokens into
        words."""
        rng = np.random.default_rng([self.seed, 1, self.part])
        weights = np.array([kind.weight for kind in self.mix])
        bounds = np.cumsum(weights) / weights.sum()
        prefixes = {
            kind.name: np.random.default_rng([self.seed, 2, i]).integers(len(WORDS), size=kind.prefix_tokens)
            for i, kind in enumerate(self.mix)
        }
        while True:
            kind = self.mix[min(int(np.searchsorted(bounds, rng.random(), "right")), len(self.mix) - 1)]
            tokens = int(rng.integers(*kind.input_tokens, endpoint=True))
            output = int(rng.integers(*kind.output_tokens, endpoint=True))
            words = rng.integers(len(WORDS), size=words_for(tokens))
            if kind.prefix_tokens:
                prefix = prefixes[kind.name][: min(words_for(kind.prefix_tokens), len(words))]
                words[: len(prefix)] = prefix
            yield kind, kind.prompt if kind.prompt is not None else " ".join(WORDS[i] for i in words), output


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds of time.perf_counter; `gaps` lie between successive pieces of text.

    `input_tokens` is None where the server gave no usage; `output_tokens` then counts pieces of text.
    """

    asked_tokens: int
    scheduled: float
    kind: str = ""
    sent: float = 0.0
    first: float | None = None
    last: float | None = None
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None
    detail: str = ""

    def fail(self, error: str, detail: object = "") -> None:
        self.error, self.detail = error, str(detail)[:300]

    def text_at(self, now: float) -> None:
        if self.last is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now
        self.output_tokens += 1

    def count(self, usage: dict[str, Any] | None) -> None:
        if usage:
            self.input_tokens, self.output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


@dataclass(frozen=True)
class Target:
    """A server and how to ask it. A `base_url` without a path gets /v1; `body` adds to or overrides each request's."""

    base_url: str
    model: str = ""
    api_key: str = field(default="", repr=False)
    chat: bool = False
    stream: bool = True
    ignore_eos: bool = False
    timeout: float = 600.0
    body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"base URL {self.base_url!r} is not http(s)://host...")

    def url(self, path: str) -> str:
        base = self.base_url.rstrip("/")
        return f"{base}/{path}" if urlsplit(base).path else f"{base}/v1/{path}"

    def session(self) -> aiohttp.ClientSession:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=self.timeout, sock_connect=None),
        )

    async def first_model(self, session: aiohttp.ClientSession) -> str:
        """The first model the server lists; BenchError when it lists none."""
        try:
            async with session.get(self.url("models")) as response:
                text = await response.text()
                if response.status == 200:
                    return str(orjson.loads(text)["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchError(f"{self.url('models')}: {error}") from error
        except (ValueError, TypeError, LookupError):
            pass
        raise BenchError(f"{self.url('models')} lists no model (give --model): {response.status} {text[:300]}")

    async def send(self, session: aiohttp.ClientSession, prompt: str, sample: Sample) -> None:
        """Asks for `sample.asked_tokens` tokens and writes what happened into `sample`; raises on cancellation only."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": sample.asked_tokens, "temperature": 0}
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body |= {"ignore_eos": True, "min_tokens": sample.asked_tokens}
        data = orjson.dumps(body | self.body)
        url = self.url("chat/completions" if self.chat else "completions")
        response = None
        sample.sent = time.perf_counter()
        try:
            async with session.post(url, data=data) as response:
                if response.status != 200:
                    sample.fail(f"status {response.status}", await response.text(errors="replace"))
                elif self.stream:
                    await _read_stream(response, sample)
                else:
                    answer = orjson.loads(await response.read())
                    sample.count(answer["usage"])
        except TimeoutError:
            sample.fail("timeout", f"no end after {self.timeout:g} s")
        except aiohttp.ClientConnectorError as error:
            sample.fail("connect", error)
        except (aiohttp.ClientError, OSError) as error:
            sample.fail("broken stream" if response is not None else "disconnected", error)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            sample.fail("bad response", repr(error))
        finally:
            sample.end = time.perf_counter()


async def _read_stream(response: aiohttp.ClientResponse, sample: Sample) -> None:
    tail = b""
    done = False
    usage = None
    async for chunk in response.content.iter_any():
        now = time.perf_counter()
        *lines, tail = (tail + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                continue
            event = orjson.loads(data)
            if event.get("error"):
                sample.fail("error event", event["error"])
                return
            usage = event.get("usage") or usage
            if any(map(_has_text, event["choices"])):
                sample.text_at(now)
    sample.count(usage)
    if not done:
        sample.fail("no [DONE]", "the stream ended without it")


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))


class Run:
    """One benchmark run. `samples` holds the requests that ended after the warm-up, also after a cancellation."""

    def __init__(self, target: Target, load: Load) -> None:
        self.target, self.load = target, load
        self.samples: list[Sample] = []
        self.in_flight = self.failed = self.tokens = 0
        self.start = self.end = self.cpu_seconds = 0.0  # of what is measured: from the first send after the warm-up
        self._taken = 0
        self._prompts = load.prompts(lambda tokens: tokens)

    async def prepare(self, session: aiohttp.ClientSession) -> None:
        """Two requests of different lengths tell how the server counts a prompt's tokens; BenchError if they fail."""
        counts = []
        for words in (8, 40):
            sample = Sample(asked_tokens=1, scheduled=time.perf_counter())
            await self.target.send(session, " ".join(WORDS[:words]), sample)
            if sample.error:
                raise BenchError(f"a trial request failed: {sample.error}: {sample.detail}")
            counts.append(sample.input_tokens)
        short, long = counts
        if short is not None and long is not None and long > short:
            a_word = (long - short) / 32
            around = short - 8 * a_word
            self._prompts = self.load.prompts(lambda tokens: max(1, round((tokens - around) / a_word)))

    async def run(self) -> None:
        """Sends the load. When cancelled, requests in flight are recorded as unfinished."""
        async with self.target.session() as session:
            await self.prepare(session)
            try:
                async with asyncio.TaskGroup() as group:
                    if self.load.rate is not None:
                        await self._open_loop(session, group)
                    else:
                        for _ in range(self.load.concurrency or 0):
                            group.create_task(self._closed_loop(session))
            finally:
                self.end = time.perf_counter()
                self.cpu_seconds = time.process_time() - self.cpu_seconds

    async def _open_loop(self, session: aiohttp.ClientSession, group: asyncio.TaskGroup) -> None:
        origin = time.perf_counter()
        for offset in self.load.arrivals():
            at = origin + offset
            if not self._take(at):
                return
            await asyncio.sleep(at - time.perf_counter())
            while (early := at - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            group.create_task(self._one(session, at, self._taken > self.load.warmup))

    async def _closed_loop(self, session: aiohttp.ClientSession) -> None:
        while self._take(now := time.perf_counter()):
            await self._one(session, now, self._taken > self.load.warmup)

    def _take(self, now: float) -> bool:
        """Whether one more request starts at `now`."""
        load = self.load
        if self._taken == load.warmup:
            self.start, self.cpu_seconds = now, time.process_time()
        elif self._taken > load.warmup and (
            (load.requests is not None and self._taken >= load.warmup + load.requests)
            or (load.duration is not None and now >= self.start + load.duration)
        ):
            return False
        self._taken += 1
        return True

    async def _one(self, session: aiohttp.ClientSession, scheduled: float, measured: bool) -> None:
        kind, prompt, tokens = next(self._prompts)
        sample = Sample(asked_tokens=tokens, scheduled=scheduled, kind=kind.name)
        self.in_flight += 1
        try:
            await self.target.send(session, prompt, sample)
        except asyncio.CancelledError:
            sample.fail(UNFINISHED)
            raise
        finally:
            self.in_flight -= 1
            if measured:
                self.samples.append(sample)
                self.failed += sample.error is not None
                self.tokens += sample.output_tokens
