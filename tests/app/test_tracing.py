"""Traces, read back with OpenTelemetry's own in-memory exporter, and from what a collector gets over the wire."""

from __future__ import annotations

import http.server
import importlib.util
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from app.ingress import build_asgi_app
from app.replica import build_engine
from app.router import GenerationError, Router
from app.settings import ConfigError, ServingConfig, check_otlp
from app.tracing import make_tracer
from tests.app.edge import ScriptedRouter
from tests.app.fakes import TOKENIZER, LocalEngines
from tests.app.test_router import wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Traced:
    def __init__(self, client: httpx.AsyncClient, exporter: InMemorySpanExporter) -> None:
        self.client = client
        self._exporter = exporter

    def spans(self) -> Sequence[ReadableSpan]:
        spans = self._exporter.get_finished_spans()
        self._exporter.clear()
        return spans


@asynccontextmanager
async def traced(router: ScriptedRouter | Router) -> AsyncIterator[Traced]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = build_asgi_app(router, provider.get_tracer("test"))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield Traced(client, exporter)


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_and_its_phases(stream: bool) -> None:
    async with traced(ScriptedRouter()) as t:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x", "x-request-id": "r-1"}
        answer = await t.client.post("/generate", json={"prompt": "Hi", "stream": stream}, headers=headers)
        assert answer.status_code == 200
        queue, prefill, decode, request = t.spans()
    assert [span.name for span in (queue, prefill, decode, request)] == ["queue", "prefill", "decode", "POST /generate"]
    assert request.context is not None and request.parent is not None and request.attributes is not None
    assert {f"{span.context.trace_id:032x}" for span in (queue, prefill, decode, request) if span.context} == {TRACE}
    assert f"{request.parent.span_id:016x}" == PARENT
    assert request.context.trace_state.get("vendor") == "x"
    assert answer.headers["traceparent"] == f"00-{TRACE}-{request.context.span_id:016x}-01"
    assert answer.headers["tracestate"] == "vendor=x"
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["request_id"] == "r-1"
    for span, lasted in ((queue, 0.25), (prefill, 0.5), (decode, 1.0)):
        assert span.parent is not None and span.parent.span_id == request.context.span_id
        assert seconds(span) == pytest.approx(lasted, abs=1e-6)
    assert queue.end_time == prefill.start_time and prefill.end_time == decode.start_time
    assert queue.start_time is not None and request.start_time is not None
    assert queue.start_time >= request.start_time
    assert decode.attributes is not None
    assert decode.attributes["gen_ai.usage.output_tokens"] == 50
    assert decode.attributes["gen_ai.usage.input_tokens"] == 2
    assert decode.attributes["gen_ai.response.finish_reasons"] == ("length",)


async def test_every_sequence_has_its_own() -> None:
    async with traced(ScriptedRouter()) as t:
        await t.client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})
        spans = t.spans()
    decodes = {span.attributes["pilotfish.sequence"] for span in spans if span.name == "decode" and span.attributes}
    assert decodes == {0, 1, 2, 3}
    assert spans[-1].parent is None  # nobody sent a context: a trace of its own


async def test_phases_of_a_real_engine_lie_within_the_request() -> None:
    options = {"model": "dummy", "dtype": "float32", "num_threads": 1, "max_batch_size": 1}
    engines = LocalEngines(ServingConfig.from_options(options))
    engines.add("EngineReplica:1", build_engine(engines.config)[0])  # type: ignore[arg-type]
    router = Router(engines.config, engines, TOKENIZER)
    try:
        await wait_until(lambda: router.ready)
        async with traced(router) as t:
            body = {"prompt": ["Hello", "World"], "max_tokens": 100, "ignore_eos": True}
            assert (await t.client.post("/v1/completions", json=body)).status_code == 200
            *phases, request = t.spans()
    finally:
        await router.close()
        engines.close()
    assert sorted(span.name for span in phases) == ["decode", "decode", "prefill", "prefill", "queue", "queue"]
    for span in phases:
        assert request.start_time is not None and span.start_time is not None
        assert request.end_time is not None and span.end_time is not None
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time
    waits = sorted(seconds(span) for span in phases if span.name == "queue")
    assert waits[1] > min(seconds(span) for span in phases if span.name == "decode") / 2, "the second one had to wait"


async def test_failures_and_what_is_not_traced() -> None:
    async with traced(ScriptedRouter(lambda request: GenerationError("the replicas are gone", 503))) as t:
        answer = await t.client.post("/generate", json={"prompt": "Hi"}, headers={"traceparent": "00-nonsense"})
        assert answer.status_code == 503 and "traceparent" in answer.headers
        (span,) = t.spans()
        assert span.attributes is not None and span.attributes["http.response.status_code"] == 503
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "the replicas are gone")
        assert (await t.client.post("/generate", json={"prompt": ""})).status_code == 422
        (span,) = t.spans()
        assert span.status.status_code is StatusCode.UNSET  # the client's fault is no error of the server
        await t.client.get("/health")
        await t.client.post("/tokenize", json={"prompt": "Hi"})
        assert t.spans() == ()


def test_export_to_a_collector() -> None:
    received: list[ExportTraceServiceRequest] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        tracer = make_tracer(f"http://127.0.0.1:{server.server_port}/v1/traces", "Router:1")
        tracer.start_span("POST /generate").end()
        tracer.span_processor.force_flush()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()
    (resource,) = received[0].resource_spans
    names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("pilotfish", "Router:1")
    assert [span.name for span in resource.scope_spans[0].spans] == ["POST /generate"]


def test_without_the_extra_the_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"model": "dummy", "otlp_traces_endpoint": "http://collector:4318/v1/traces"}
    assert ServingConfig.from_options(options).otlp_traces_endpoint == options["otlp_traces_endpoint"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'pilotfish\[otel\]'"):
        check_otlp(ServingConfig.from_options(options))
