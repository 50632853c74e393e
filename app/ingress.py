"""HTTP: routes, bodies and streams. What a request means is the schemas' business, where it runs the Router's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.auth import (
    INNER_DEADLINE_HEADER,
    INNER_SESSION_HEADER,
    PRIORITY,
    REQUEST_ID,
    AuthMiddleware,
    HeadersMiddleware,
)
from app.errors import EXCHANGE, ApiError, route_path, send_bytes, send_error, send_json
from app.logs import log_access
from app.metrics import CONTENT_TYPE, Metrics, render
from app.openapi import document
from app.playground import Page, pages
from app.router import GenerationError, Overloaded, Router, TextChunk, TextGeneration, Unavailable
from app.schemas import Renderer, SamplingFields, build_request, choice_seed, parse
from app.schemas.native import (
    MAX_NEW_TOKENS,
    BatchGenerateBody,
    BatchRenderer,
    DetokenizeBody,
    GenerateBody,
    GenerateRenderer,
    LoadAdapterBody,
    NativeBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from app.schemas.openai import (
    ChatCompletionRequest,
    ChatRenderer,
    CompletionRenderer,
    CompletionRequest,
    model_card,
)
from app.tools import output_form
from engine.schemas import GenerationRequest, GenerationResult

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

COMPLETION_TOKENS = 16
NATIVE_TOKENS = 50
BODY_SECONDS = 30.0
"""A body that takes longer to arrive gets 408."""

WRITE_SECONDS = 30.0
"""A client that takes nothing of its answer for so long is cut off."""

DRAINED_LIMITS = 4
"""Up to so many times the limit, a body is read to its end before it gets 413."""

LONG_TEXT = 16_384
"""Characters beyond which tokenizing leaves the event loop for a thread."""

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_CLIENT_LEFT = 499

_ENDPOINT_NAMES = {
    "/generate": "generate",
    "/batch_generate": "batch_generate",
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
}

Handler = Callable[["Call"], Awaitable[None]]
T = TypeVar("T")


def build_asgi_app(router: Router, tracer: Tracer | None = None) -> Starlette:
    """The HTTP application over a Router. It adds no state of its own but metrics (`router.metrics`)."""
    shown = pages()
    ingress = Ingress(router, shown)
    routes = [
        _route("/v1/chat/completions", "POST", ingress.chat_completions),
        _route("/v1/completions", "POST", ingress.completions),
        _route("/v1/models", "GET", ingress.models),
        _route("/v1/models/{model_id:path}", "GET", ingress.model),
        _route("/v1/load_lora_adapter", "POST", ingress.load_adapter),
        _route("/v1/unload_lora_adapter", "POST", ingress.unload_adapter),
        _route("/generate", "POST", ingress.generate),
        _route("/batch_generate", "POST", ingress.batch_generate),
        _route("/tokenize", "POST", ingress.tokenize),
        _route("/detokenize", "POST", ingress.detokenize),
        _route("/health", "GET", ingress.health),
        _route("/ready", "GET", ingress.is_ready),
        _route("/metrics", "GET", ingress.metrics_page),
        _route("/openapi.json", "GET", ingress.openapi),
        *(_route(path, "GET", ingress.page) for path in shown),
    ]
    tracing = []
    if tracer is not None:
        from app.tracing import TracingMiddleware

        tracing = [Middleware(TracingMiddleware, tracer, frozenset(_ENDPOINT_NAMES))]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(HeadersMiddleware),
            *tracing,
            Middleware(ExchangeMiddleware, router.metrics, frozenset(route.path for route in routes), shown),
            Middleware(AuthMiddleware, keys=router.config.keys()),
        ],
        exception_handlers={HTTPException: _starlette_error},
    )
    app.router.redirect_slashes = False
    return app


class ClientGone(Exception):
    """The client has closed the connection: there is nobody to answer."""


@dataclass(slots=True)
class Exchange:
    """What a request has come to so far, for its log line and its metrics."""

    request_id: str
    started: float
    status: int = 0
    tokens: int | None = None
    error: str | None = None
    choices: Choices | None = None


@dataclass(slots=True)
class Call:
    """One HTTP request on its way through a handler."""

    scope: Scope
    receive: Receive
    send: Send
    exchange: Exchange

    def header(self, wanted: bytes) -> str | None:
        return next((value.decode("latin-1") for name, value in self.scope["headers"] if name == wanted), None)


class _Endpoint:
    """A handler as an ASGI application; Starlette takes functions for something else."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(Call(scope, receive, send, scope[EXCHANGE]))


def _route(path: str, method: str, handler: Handler) -> Route:
    return Route(path, _Endpoint(handler), methods=[method])


async def _starlette_error(request: Request, error: Exception) -> NoReturn:
    assert isinstance(error, HTTPException)
    path = route_path(request.scope)
    message = {404: f"no such path: {path[:200]}", 405: f"{request.method[:20]} is not allowed here"}
    raise ApiError(error.status_code, message.get(error.status_code, error.detail), headers=error.headers)


class ExchangeMiddleware:
    """Around everything that answers: errors become envelopes, and each request a log line and its metrics."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str], shown: Mapping[str, Page]) -> None:
        self.app = app
        self._metrics = metrics
        self._routes = routes
        self._pages = shown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = next(value for name, value in scope["headers"] if name == REQUEST_ID).decode()
        exchange = scope[EXCHANGE] = Exchange(request_id, time.perf_counter())
        endpoint = _ENDPOINT_NAMES.get(route_path(scope)) if scope["method"] == "POST" else None
        if endpoint is not None:
            self._metrics.request_started()

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await send(message)
            except TimeoutError:
                raise ClientGone from None

        try:
            await self._answer(scope, receive, observed, exchange)
        except BaseException:
            exchange.status = _CLIENT_LEFT  # cancelled by the server, which does so when the client has left
            raise
        finally:
            self._ended(scope, exchange, endpoint)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        try:
            await self.app(scope, receive, send)
        except ClientGone:
            exchange.status = _CLIENT_LEFT
        except ApiError as error:
            exchange.error = error.message
            page = self._pages.get(route_path(scope)) if error.status == 401 and scope["method"] == "GET" else None
            if page is not None and any(n == b"accept" and b"text/html" in v for n, v in scope["headers"]):
                # A browser sends no key with an address: the page, which has no data in it, asks for the key.
                await page.send(send, 401, error.headers)
            else:
                await send_error(send, error, scope, exchange.request_id)
        except Exception:
            logger.exception("request %s failed", exchange.request_id)
            exchange.error = "internal error"
            if exchange.status:
                exchange.status = 500
            else:
                await send_error(send, ApiError(500, "internal error"), scope, exchange.request_id)

    def _ended(self, scope: Scope, exchange: Exchange, endpoint: str | None) -> None:
        seconds = time.perf_counter() - exchange.started
        path = route_path(scope)
        if endpoint is not None:
            self._metrics.request_ended(endpoint, exchange.status, seconds, exchange.tokens)
        route = path if path in self._routes else "/v1/models/{id}" if path.startswith("/v1/models/") else "other"
        self._metrics.http_ended(route, exchange.status, seconds)
        log_access(
            exchange.request_id, scope["method"], path, exchange.status, seconds, exchange.tokens, exchange.error
        )


def _once_described(handler: Callable[[Ingress, Call], Awaitable[None]]) -> Callable[[Ingress, Call], Awaitable[None]]:
    """A handler whose answer depends on what the replicas say of the model."""

    @functools.wraps(handler)
    async def waiting(ingress: Ingress, call: Call) -> None:
        with _failures():
            await ingress.router.described()
        await handler(ingress, call)

    return waiting


class Ingress:
    """The handlers, one a route."""

    def __init__(self, router: Router, shown: Mapping[str, Page]) -> None:
        self.router = router
        self._pages = shown
        self._created = int(time.time())

    # --- OpenAI's routes

    @_once_described
    async def chat_completions(self, call: Call) -> None:
        body = parse(ChatCompletionRequest, await self._json(call), 400)
        model = self._model(body.model)
        tokenizer = self.router.tokenizer
        form = output_form(tokenizer, self.router.config.tool_call_parser, body.tool_use())
        ids = await self._chat_ids([m.for_template() for m in body.messages], body.template_arguments())
        form, ids = form.after_prompt(tokenizer, ids)
        limit = self._limit(len(ids), body.max_new_tokens, None, body.public_names["max_new_tokens"])
        answer_id = f"chatcmpl-{call.exchange.request_id}"
        fields = {**body.output_fields(), "prompt_ids": ids, "max_new_tokens": limit, **self._limits(call, body)}
        fields |= {"grammar": form.grammar(body.grammar(400)), "adapter": self._adapter(model)}
        requests = self._choices(body, answer_id, [fields | form.shows_special_tokens])
        renderer = ChatRenderer(form, body, tokenizer, _head(answer_id, model), len(ids))
        await self._run(call, requests, renderer, body.stream)

    @_once_described
    async def completions(self, call: Call) -> None:
        body = parse(CompletionRequest, await self._json(call), 400)
        model = self._model(body.model)
        common = {**body.output_fields(), **self._limits(call, body), "adapter": self._adapter(model)}
        common["grammar"] = body.grammar(400)
        fields = []
        for i, prompt in enumerate(body.prompt):
            ids = await self._text_ids(prompt) if isinstance(prompt, str) else prompt
            if not ids:
                raise ApiError(400, "prompt is empty", param="prompt")
            self._check_ids(ids, f"prompt.{i}" if len(body.prompt) > 1 else "prompt", 400)
            limit = self._limit(len(ids), body.max_new_tokens, COMPLETION_TOKENS, "max_tokens")
            fields.append({**common, "prompt_ids": ids, "max_new_tokens": limit})
        answer_id = f"cmpl-{call.exchange.request_id}"
        requests = self._choices(body, answer_id, fields)
        tokenizer = self.router.tokenizer
        texts: list[str] = []
        if body.echo:
            for prompt in body.prompt:
                text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, requests[0].skip_special_tokens)
                texts += [text] * body.n
        renderer = CompletionRenderer(body, tokenizer, _head(answer_id, model), requests, texts)
        await self._run(call, requests, renderer, body.stream)

    @_once_described
    async def models(self, call: Call) -> None:
        cards = [model_card(name, self._created, self.router.max_model_len) for name in self.router.model_names]
        await send_json(call.send, {"object": "list", "data": cards})

    @_once_described
    async def model(self, call: Call) -> None:
        name = self._model(call.scope["path_params"]["model_id"])
        await send_json(call.send, model_card(name, self._created, self.router.max_model_len))

    @_once_described
    async def load_adapter(self, call: Call) -> None:
        """The route and the body are vLLM's."""
        body = parse(LoadAdapterBody, await self._json(call), 400)
        self._operators_only(call)
        try:
            await self.router.load_adapter(body.lora_name, body.lora_path)
        except ValueError as error:
            raise ApiError(400, str(getattr(error, "cause", error)), param="lora_path") from None
        except Unavailable as error:
            raise ApiError(503, str(error)) from None
        await send_json(call.send, model_card(body.lora_name, self._created, self.router.max_model_len))

    @_once_described
    async def unload_adapter(self, call: Call) -> None:
        body = parse(UnloadAdapterBody, await self._json(call), 400)
        self._operators_only(call)
        if self._adapter(self._model(body.lora_name)) is None:
            raise ApiError(400, f"{body.lora_name} is not an adapter", param="lora_name")
        try:
            await self.router.unload_adapter(body.lora_name)
        except Unavailable as error:
            raise ApiError(503, str(error)) from None
        await send_json(call.send, {"id": body.lora_name, "object": "model", "deleted": True})

    # --- native routes

    @_once_described
    async def generate(self, call: Call) -> None:
        body = parse(GenerateBody, await self._json(call), 422)
        request = await self._native_request(call, body, body.prompt, body.request_id or call.exchange.request_id)
        await self._run(call, [request], GenerateRenderer(request), body.stream)

    @_once_described
    async def batch_generate(self, call: Call) -> None:
        body = parse(BatchGenerateBody, await self._json(call), 422)
        batch_id = call.exchange.request_id
        requests = [
            await self._native_request(call, body, prompt, f"{batch_id}-{i}") for i, prompt in enumerate(body.prompts)
        ]
        await self._run(call, requests, BatchRenderer(requests), False)

    @_once_described
    async def tokenize(self, call: Call) -> None:
        body = parse(TokenizeBody, await self._json(call), 422)
        if body.messages is not None:
            arguments = {"add_generation_prompt": body.add_generation_prompt}
            ids = await self._chat_ids([m.for_template() for m in body.messages], arguments)
        else:
            ids = await self._text_ids(body.prompt or "", body.add_special_tokens)
        await send_json(call.send, {"tokens": ids, "count": len(ids), "max_model_len": self.router.max_model_len})

    async def detokenize(self, call: Call) -> None:
        body = parse(DetokenizeBody, await self._json(call), 422)
        self._check_ids(body.tokens, "tokens", 422)
        await send_json(call.send, {"prompt": self.router.tokenizer.decode(body.tokens, body.skip_special_tokens)})

    # --- operators' routes

    async def health(self, call: Call) -> None:
        alive, details = await self.router.alive()
        await send_json(call.send, {"status": "ok" if alive else "unhealthy", **details}, 200 if alive else 503)

    async def is_ready(self, call: Call) -> None:
        ready = self.router.ready
        await send_json(call.send, {"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def metrics_page(self, call: Call) -> None:
        await send_bytes(call.send, render(await self.router.snapshot()), CONTENT_TYPE)

    async def openapi(self, call: Call) -> None:
        await send_json(call.send, document(self.router.config.api_key is not None))

    async def page(self, call: Call) -> None:
        await self._pages[route_path(call.scope)].send(call.send)

    # --- from a body to requests

    async def _json(self, call: Call) -> object:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                data = await _read_body(call, self.router.config.max_body_bytes)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None

    def _model(self, name: str | None) -> str:
        names = self.router.model_names
        if name is None:
            return names[0]
        if name not in names:
            raise ApiError(404, f"no such model: {name[:200]}", param="model", code="model_not_found")
        return name

    def _adapter(self, model: str) -> str | None:
        return model if model in self.router.adapters else None

    def _operators_only(self, call: Call) -> None:
        if call.scope.get(PRIORITY) is not None:
            raise ApiError(403, "adapters are changed with the operator's key", code="invalid_api_key")

    async def _text_ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return await _off_loop(len(text), self.router.tokenizer.encode, text, add_special_tokens)

    async def _chat_ids(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> list[int]:
        size = sum(len(message["content"]) for message in messages)
        return await _off_loop(size, self.router.tokenizer.encode_chat, messages, **arguments)

    def _check_ids(self, ids: Sequence[int], param: str, status: int) -> None:
        size = self.router.tokenizer.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            raise ApiError(status, f"{param}: token ids must lie in 0..{size - 1}", param=param)

    def _limit(self, prompt_tokens: int, wanted: int | None, default: int | None, param: str) -> int:
        """max_new_tokens: what is wanted, else the default, or as much of it as the context has room for."""
        room = self.router.max_model_len - prompt_tokens
        if room < 1 or (wanted is not None and wanted > room):
            asked = f" and {param} is {wanted}" if wanted is not None else ""
            raise ApiError(
                400,
                f"the context is {self.router.max_model_len} tokens, but the prompt has {prompt_tokens}{asked}",
                param=param if room >= 1 else None,
                code="context_length_exceeded",
            )
        return wanted if wanted is not None else min(room, default or room)

    def _limits(self, call: Call, body: SamplingFields) -> dict[str, float]:
        """The client's own deadline, by field or by header, the earlier one; the best priority that its key gives."""
        limits: dict[str, float] = {}
        if (best := call.scope.get(PRIORITY)) is not None:
            limits["priority"] = best if body.priority is None else max(best, body.priority)
        given = [] if body.timeout is None else [body.timeout]
        if (value := call.header(INNER_DEADLINE_HEADER)) is not None:
            try:
                given.append(float(value))
            except ValueError:
                raise ApiError(400, "x-request-timeout-seconds is not a number") from None
        if given and not 0 < min(given) <= max(given) < float("inf"):
            raise ApiError(400, "a timeout must be a positive number of seconds", param="timeout")
        if given and min(given) < self.router.config.request_timeout:
            limits["timeout"] = min(given)
        return limits

    def _choices(
        self, body: ChatCompletionRequest | CompletionRequest, answer_id: str, fields: Sequence[dict[str, Any]]
    ) -> list[GenerationRequest]:
        sampling = {**self.router.sampling_defaults, **body.sampling()}
        requests: list[GenerationRequest] = []
        for extra in fields:
            for i in range(body.n):
                given = {**sampling, **extra, "seed": choice_seed(body.seed, i)}
                request_id = f"{answer_id}-{len(requests)}"
                requests.append(build_request(400, body.public_names, request_id=request_id, **given))
        return requests

    async def _native_request(self, call: Call, body: NativeBody, prompt: str, request_id: str) -> GenerationRequest:
        ids = await self._text_ids(prompt)
        limit = self._limit(len(ids), body.max_new_tokens, min(NATIVE_TOKENS, MAX_NEW_TOKENS), "max_new_tokens")
        fields = {**body.sampling(), "grammar": body.grammar(422), **self._limits(call, body)}
        return build_request(422, request_id=request_id, prompt_ids=ids, max_new_tokens=limit, **fields)

    # --- from requests to an answer

    async def _run(self, call: Call, requests: list[GenerationRequest], renderer: Renderer, stream: bool) -> None:
        """Runs the sequences of one HTTP request and writes the answer. However it ends, none is left behind."""
        choices = Choices(self.router, requests, call.header(INNER_SESSION_HEADER), stream)
        call.exchange.choices = choices
        try:
            # The last message is sent outside: a server calls the end of the response a disconnect.
            async with _CancelledByDisconnect(call.receive):
                if stream:
                    last = await self._stream(call, choices, renderer)
                else:
                    await choices.collect()
            if stream:
                await call.send({"type": "http.response.body", "body": last})
            else:
                await send_json(call.send, renderer.body(choices.results))
        finally:
            if choices.admitted:
                call.exchange.tokens = choices.tokens
            await choices.aclose()

    async def _stream(self, call: Call, choices: Choices, renderer: Renderer) -> bytes:
        """Writes the stream but for its end, which is returned."""
        exchange, send, metrics = call.exchange, call.send, self.router.metrics
        endpoint = _ENDPOINT_NAMES[route_path(call.scope)]
        async with contextlib.aclosing(choices.chunks()) as chunks:
            # Nothing goes out before the first token: until then a failure has a status of its own.
            index, chunk = await anext(chunks)
            last = time.perf_counter()
            metrics.time_to_first_token(endpoint, last - exchange.started)
            await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
            pending = renderer.start()
            running = len(choices.requests)
            try:
                while True:
                    if chunk is not None:
                        pending += renderer.chunk(index, chunk)
                    else:
                        pending += renderer.finish(index, choices.ended[index])
                        running -= 1
                        if not running:
                            break
                    if pending:
                        await send({"type": "http.response.body", "body": pending, "more_body": True})
                        pending = b""
                    index, chunk = await anext(chunks)
                    if chunk is not None and chunk.token_ids:
                        now = time.perf_counter()
                        metrics.inter_token(endpoint, (now - last) / len(chunk.token_ids))
                        last = now
                pending += renderer.end(choices.results)
            except ApiError as error:
                exchange.status, exchange.error = error.status, error.message
                pending += renderer.error(error, exchange.request_id)
            return pending


class Choices:
    """The sequences of one HTTP request: opened together, read together, closed together. Failures are ApiErrors."""

    def __init__(self, router: Router, requests: list[GenerationRequest], session: str | None, stream: bool) -> None:
        self.requests = requests
        self._stream = stream
        self._session = session
        self.ended: dict[int, GenerationResult] = {}
        self.sent: dict[int, float] = {}  # time.monotonic() of the last attempt of those
        self.admitted = False
        self._router = router
        self._running: dict[int, TextGeneration] = {}
        self._tokens = [0] * len(requests)

    @property
    def results(self) -> list[GenerationResult]:
        """In the order of the requests, all of which have ended."""
        return [self.ended[i] for i in range(len(self.requests))]

    @property
    def tokens(self) -> int:
        """Sampled tokens of the sequences that have ended, and those read from the others."""
        return sum(self._tokens)

    async def collect(self) -> None:
        """Runs all to their ends."""
        async for _ in self.chunks():
            pass

    async def chunks(self) -> AsyncGenerator[tuple[int, TextChunk | None], None]:
        """(index, chunk) as they come, if they are to be streamed, and (index, None) when a sequence has ended."""
        if len(self.requests) == 1:
            async for item in self._chunks(0):
                yield item
            return
        queue: asyncio.Queue[tuple[int, TextChunk | None] | Exception] = asyncio.Queue(2 * len(self.requests))

        async def pump(index: int) -> None:
            try:
                async for item in self._chunks(index):
                    await queue.put(item)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(pump(i)) for i in range(len(self.requests))]
        running = len(tasks)
        try:
            while running:
                got = await queue.get()
                if isinstance(got, Exception):
                    raise got
                running -= got[1] is None
                yield got
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def aclose(self) -> None:
        """Aborts what still runs."""
        if not self._running:
            return
        running = [generation.aclose() for generation in self._running.values()]
        # Shielded: a client that leaves cancels twice, through the server and through the watcher.
        for failure in await asyncio.shield(asyncio.gather(*running, return_exceptions=True)):
            if isinstance(failure, Exception):
                logger.error("a generation could not be closed", exc_info=failure)

    async def _chunks(self, index: int) -> AsyncGenerator[tuple[int, TextChunk | None], None]:
        with _failures():
            generation = self._running[index] = await self._router.open(self.requests[index], self._session)
            self.admitted = True
            if self._stream:
                async for chunk in generation:
                    self._tokens[index] += len(chunk.token_ids)
                    yield index, chunk
            self.ended[index] = await generation.collect()
            self.sent[index] = self._running.pop(index).sent
            self._tokens[index] = len(self.ended[index].token_ids)
        yield index, None


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """What the Router and its generations raise, as ApiErrors."""
    try:
        yield
    except Overloaded as error:
        headers = {"Retry-After": str(error.retry_after)}
        raise ApiError(429, str(error), code="queue_full", headers=headers) from None
    except Unavailable as error:
        raise ApiError(503, str(error)) from None
    except GenerationError as error:
        raise ApiError(error.status, str(error)) from None
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    except Exception:
        logger.exception("a generation failed")
        raise ApiError(500, "internal error") from None


class _CancelledByDisconnect:
    """Cancels the block when the client leaves, and turns that into ClientGone."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._watcher.cancel()
        if self._gone and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientGone from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()


async def _read_body(call: Call, limit: int) -> bytes:
    """The request's body; 413 if it is larger than `limit`.

    Up to a few times the limit is read and dropped first: who is still sending when the connection closes may not see
    the answer.
    """
    drained = DRAINED_LIMITS * limit
    for name, value in call.scope["headers"]:
        if name == b"content-length" and value.isdigit() and (len(value) > 18 or int(value) > drained):
            raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await call.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        size += len(message.get("body", b""))
        if size <= limit:
            parts.append(message.get("body", b""))
        elif size > drained or not message.get("more_body", False):
            raise _too_large(limit)
        if not message.get("more_body", False):
            return b"".join(parts)


def _head(answer_id: str, model: str) -> dict[str, Any]:
    return {"id": answer_id, "created": int(time.time()), "model": model}


def _too_large(limit: int) -> ApiError:
    # What is left of the body would be read as the next request.
    return ApiError(413, f"the body is larger than {limit} bytes", headers={"Connection": "close"})


async def _off_loop(size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls a function of text: here, or, when there is much text, in a thread that doesn't hold up other requests."""
    try:
        if size <= LONG_TEXT:
            return function(*args, **kwargs)
        return await asyncio.to_thread(function, *args, **kwargs)
    except ValueError as error:
        raise ApiError(400, str(error)) from None
