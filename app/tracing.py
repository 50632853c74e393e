"""OpenTelemetry traces (the extra `pilotfish[otel]`): one span a generating request, and in it one for each phase of
each of its sequences: queue, prefill, decode.

The standard OTEL_* environment variables say the rest: the service's name, the sampler, headers for the collector.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AnyValue
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import EXCHANGE, route_path
from engine.schemas import GenerationResult

if TYPE_CHECKING:
    from app.ingress import Exchange

_W3C = TraceContextTextMapPropagator()


def make_tracer(endpoint: str, instance: str) -> Tracer:
    """A tracer that exports to an OTLP/HTTP collector, in the background; `instance` is this process's name."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    name = os.environ.get("OTEL_SERVICE_NAME", "pilotfish")
    provider = TracerProvider(resource=Resource.create({"service.name": name, "service.instance.id": instance}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider.get_tracer("pilotfish")


class TracingMiddleware:
    """Traces the requests to `paths`. The request's `traceparent` and `tracestate` name the parent of its span (W3C
    Trace Context), and the response's `traceparent` the span."""

    def __init__(self, app: ASGIApp, tracer: Tracer, paths: Collection[str]) -> None:
        self.app = app
        self._tracer = tracer
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or (path := route_path(scope)) not in self._paths:
            await self.app(scope, receive, send)
            return
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {
            "http.request.method": "POST",
            "http.route": path,
            "request_id": carrier["x-request-id"],
        }
        span = self._tracer.start_span(f"POST {path}", _W3C.extract(carrier, Context()), SpanKind.SERVER, attributes)
        context = set_span_in_context(span, Context())

        async def send_with_context(message: Message) -> None:
            if message["type"] == "http.response.start":
                out: dict[str, str] = {}
                _W3C.inject(out, context)
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in out.items())]
            await send(message)

        try:
            await self.app(scope, receive, send_with_context)
        finally:
            exchange: Exchange = scope[EXCHANGE]
            span.set_attribute("http.response.status_code", exchange.status)
            if exchange.status >= 500:
                span.set_status(Status(StatusCode.ERROR, exchange.error))
            if exchange.choices is not None:
                for index, result in exchange.choices.ended.items():
                    self._phases(context, index, exchange.choices.sent[index], result)
            span.end()

    def _phases(self, context: Context, index: int, sent: float, result: GenerationResult) -> None:
        attributes: dict[str, AnyValue] = {
            "pilotfish.sequence": index,
            "pilotfish.attempt": result.attempt,
            "pilotfish.cached_tokens": result.cached_tokens,
            "gen_ai.usage.input_tokens": result.prompt_tokens,
            "gen_ai.usage.output_tokens": len(result.token_ids),
            "gen_ai.response.finish_reasons": [result.finish_reason.value],
        }
        start = sent - time.monotonic() + time.time()  # in this order a pause between the two makes it no earlier
        for name, seconds in (
            ("queue", result.queue_seconds),
            ("prefill", result.prefill_seconds),
            ("decode", result.decode_seconds),
        ):
            if seconds is not None:
                phase = self._tracer.start_span(name, context, attributes=attributes, start_time=int(start * 1e9))
                start += seconds
                phase.end(int(start * 1e9))
