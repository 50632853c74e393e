"""A Router of a few lines for the HTTP tests: a scripted model behind the real application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai

from app.ingress import build_asgi_app
from app.metrics import Metrics
from app.router import GenerationError, TextChunk
from app.settings import ServingConfig
from engine.schemas import FinishReason, GenerationRequest, GenerationResult, TokenLogprobs
from engine.tokenization import SimpleCharacterTokenizer, TextStream

ANSWER = "The capital of France is Paris. It lies on the Seine."

Script = Callable[[GenerationRequest], str | Exception]


def logprob(token_id: int) -> float:
    return -token_id / 64


def position(token_id: int, top: int) -> TokenLogprobs:
    alternatives = [(token_id + i, logprob(token_id) - i) for i in range(top)]
    return TokenLogprobs(token_id, logprob(token_id), 1, alternatives)


class ScriptedGeneration:
    """Yields the script's text a token at a time, cut by the real owner of stop strings."""

    def __init__(self, router: ScriptedRouter, request: GenerationRequest, output: str) -> None:
        self.router = router
        self.request = request
        self.ids = router.tokenizer.encode(output)
        self.closed = False
        self.ended = False
        self.sent = time.monotonic()
        self._text = TextStream(router.tokenizer, request.prompt_ids or [], request)
        self._chunks = self._run()

    def __aiter__(self) -> AsyncIterator[TextChunk]:
        return self._chunks

    async def _run(self) -> AsyncIterator[TextChunk]:
        request, router = self.request, self.router
        kept: list[int] = []
        reason, stop_reason = FinishReason.STOP, None
        for token_id in self.ids:
            if router.gate is not None and len(kept) >= router.free_tokens:
                await router.gate.wait()
            if router.fail_after == len(kept):
                raise GenerationError("the replicas are gone", 503)
            delta = self._text.push([token_id])
            kept += delta.tokens
            logprobs = None if request.logprobs is None else [position(i, request.logprobs) for i in delta.tokens]
            yield TextChunk(delta.text, delta.tokens, logprobs)
            if delta.stop is not None:
                stop_reason = delta.stop
                break
            if len(kept) == request.max_new_tokens:
                reason = FinishReason.LENGTH
                break
        if rest := self._text.flush():
            yield TextChunk(rest, [], None if request.logprobs is None else [])
        prompt_ids = request.prompt_ids or []
        wanted = request.prompt_logprobs
        self.result = GenerationResult(
            request.request_id,
            self._text.text,
            kept,
            reason,
            len(prompt_ids),
            cached_tokens=len(prompt_ids) // 2,
            stop_reason=stop_reason,
            logprobs=None if request.logprobs is None else [position(i, request.logprobs) for i in kept],
            prompt_logprobs=None if wanted is None else [None, *(position(i, wanted) for i in prompt_ids[1:])],
            queue_seconds=0.25,
            prefill_seconds=0.5,
            decode_seconds=1.0,
        )
        self.ended = True

    async def collect(self) -> GenerationResult:
        async for _ in self:
            pass
        return self.result

    async def aclose(self) -> None:
        closed, self.closed = self.closed, True
        await asyncio.sleep(0.01)  # the way to the replica and back
        if not self.ended and not closed:
            self.router.aborted += 1


class ScriptedRouter:
    """What the ingress uses of app.router.Router.

    script: a request's whole output, or the exception that open raises. gate: generations stop after `free_tokens`
    until it is set. fail_after: they fail after this many tokens.
    """

    def __init__(self, script: Script | str = ANSWER, **options: Any) -> None:
        self.config = ServingConfig.from_options(
            {"model": "models/Tiny.gguf", "model_aliases": ["org/tiny"], **options}
        )
        self.tokenizer: Any = SimpleCharacterTokenizer()
        self.metrics = Metrics("router-1")
        self.max_model_len = 256
        self.sampling_defaults: dict[str, object] = {}
        self.adapters: dict[str, tuple[str, str]] = {}
        self.ready = True
        self.gate: asyncio.Event | None = None
        self.free_tokens = 0
        self.fail_after: int | None = None
        self.opened: list[ScriptedGeneration] = []
        self.aborted = 0
        self._script = (lambda request: script) if isinstance(script, str) else script

    @property
    def model_names(self) -> list[str]:
        return self.config.model_names()

    @property
    def requests(self) -> list[GenerationRequest]:
        return [generation.request for generation in self.opened]

    async def described(self) -> None:
        pass

    async def open(self, request: GenerationRequest, session: str | None = None) -> ScriptedGeneration:
        await asyncio.sleep(0)
        output = self._script(request)
        if isinstance(output, Exception):
            raise output
        generation = ScriptedGeneration(self, request, output)
        self.opened.append(generation)
        return generation

    async def alive(self) -> tuple[bool, dict[str, Any]]:
        return self.ready, {"replicas": {}}

    async def snapshot(self) -> list[bytes]:
        return [self.metrics.snapshot(), Metrics("engine-1").snapshot()]


def transport(router: ScriptedRouter) -> httpx.ASGITransport:
    return httpx.ASGITransport(build_asgi_app(router))  # type: ignore[arg-type]


@asynccontextmanager
async def http(router: ScriptedRouter, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=transport(router), base_url="http://test", **options) as client:
        yield client


@asynccontextmanager
async def openai_client(router: ScriptedRouter, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        httpx.AsyncClient(transport=transport(router)) as client,
        openai.AsyncOpenAI(api_key=key, base_url="http://test/v1", http_client=client, max_retries=0) as api,
    ):
        yield api


def events(body: str) -> list[tuple[str, str]]:
    """(event, data) of a server-sent stream in which every event has one data line."""
    found = []
    assert body.endswith("\n\n")
    for block in body[:-2].split("\n\n"):
        lines = block.split("\n")
        name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else "message"
        (data,) = lines
        assert data.startswith("data: ")
        found.append((name, data.removeprefix("data: ")))
    return found
