"""The OpenAPI 3.1 document of the HTTP API, made of the pydantic models that check the bodies."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app.schemas import Body, SamplingFields
from app.schemas import answers as a
from app.schemas.native import (
    BatchGenerateBody,
    DetokenizeBody,
    GenerateBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from app.schemas.openai import ChatCompletionRequest, CompletionRequest
from engine.schemas import GenerationRequest

JSON, EVENTS, HTML, PROMETHEUS = "application/json", "text/event-stream", "text/html", "text/plain"


@dataclass(frozen=True)
class Operation:
    """One route, a POST if it has a body; the model or the media type of its answer, and its own error statuses."""

    path: str
    summary: str
    answer: type[BaseModel] | str
    body: type[Body] | None = None
    errors: tuple[int, ...] = ()
    streams: bool = False
    public: bool = False


_BODY = (400, 408, 413)
_GENERATES = (*_BODY, 429, 500, 503, 504)
OPERATIONS = (
    Operation(
        "/v1/chat/completions", "Continue a chat", a.ChatCompletion, ChatCompletionRequest, (404, *_GENERATES), True
    ),
    Operation("/v1/completions", "Continue a text", a.Completion, CompletionRequest, (404, *_GENERATES), True),
    Operation("/v1/models", "The models' names", a.ModelList, errors=(503,)),
    Operation("/v1/models/{model_id}", "One model", a.ModelCard, errors=(404, 503)),
    Operation("/v1/load_lora_adapter", "Serve an adapter", a.ModelCard, LoadAdapterBody, (403, *_BODY, 503)),
    Operation("/v1/unload_lora_adapter", "Drop an adapter", a.Deleted, UnloadAdapterBody, (403, 404, *_BODY, 503)),
    Operation("/generate", "Continue a text", a.Generated, GenerateBody, (*_GENERATES, 422), True),
    Operation("/batch_generate", "Continue texts", a.GeneratedBatch, BatchGenerateBody, (*_GENERATES, 422)),
    Operation("/tokenize", "A text or a chat as token ids", a.Tokens, TokenizeBody, (*_BODY, 422, 503)),
    Operation("/detokenize", "Token ids as text", a.Text, DetokenizeBody, (*_BODY, 422)),
    Operation("/health", "Whether an engine is stepping; 503: none is", a.Health, public=True),
    Operation("/ready", "Whether a request would find a replica; 503: no", a.Ready, public=True),
    Operation("/metrics", "All processes' metrics, for Prometheus", PROMETHEUS),
    Operation("/openapi.json", "This document", JSON),
    Operation("/", "The playground: a chat", HTML),
    Operation("/live", "The playground: the live state", HTML),
)


def document(has_key: bool) -> dict[str, Any]:
    """The document of a server that wants a key, or doesn't."""
    models = {
        model for operation in OPERATIONS for model in (operation.answer, operation.body) if not isinstance(model, str)
    }
    models |= {a.OpenAIError, a.NativeError}
    pairs = [(model, "validation") for model in models if model is not None]
    _, definitions = models_json_schema(pairs, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = definitions["$defs"]
    for operation in OPERATIONS:
        if operation.body is not None:
            _as_parsed(schemas[operation.body.__name__], operation.body)
    paths = {each.path: {"post" if each.body else "get": _described(each, has_key)} for each in OPERATIONS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pilotfish", "version": importlib.metadata.version("pilotfish")},
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


def _as_parsed(schema: dict[str, Any], body: type[Body]) -> None:
    """A body's schema as `parse` and the engine see it: fields that ask for nothing, null for absence, bounds."""
    properties = schema["properties"]
    bounds = GenerationRequest.model_json_schema(by_alias=False, ref_template="#/components/schemas/{model}")
    for name in SamplingFields.model_fields.keys() & properties.keys():
        given = dict(bounds["properties"][name])
        if name == "timeout":
            continue
        if name == "stop":
            limit = properties["stop"].get("maxItems", given["maxItems"])
            given = {"anyOf": [given["items"], {**given, "maxItems": limit}]}
        given.pop("default", None)
        properties[name] = given
    properties |= {name: adapter.json_schema() for name, adapter in body.inert.items()}
    required = schema.get("required", [])
    for name, given in properties.items():
        if name not in required and given.get("type") != "null" and {"type": "null"} not in given.get("anyOf", []):
            shown = {key: given.pop(key) for key in ("title", "description", "default") if key in given}
            properties[name] = {"anyOf": [given, {"type": "null"}], **shown}


def _described(operation: Operation, has_key: bool) -> dict[str, Any]:
    locked = has_key and not operation.public
    native = not operation.path.startswith("/v1/")
    content: dict[str, Any] = {}
    if isinstance(operation.answer, str):
        content[operation.answer] = {"schema": {"type": "object" if operation.answer == JSON else "string"}}
    else:
        content[JSON] = _reference(operation.answer)
    if operation.streams:
        names = ["message", "done", "error"] if native else ["message"]
        event = {"type": "object", "properties": {"event": {"enum": names}, "data": {"type": "string"}}}
        content[EVENTS] = {"schema": {**event, "description": "each server-sent event, when `stream` is true"}}
    responses: dict[str, dict[str, Any]] = {"200": {"description": "OK", "content": content, "headers": _headers()}}
    if operation.public:
        responses["503"] = {**responses["200"], "description": "Service Unavailable"}
    for status in sorted({*operation.errors, *((401, 403) if locked else ()), 414, 431}):
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {JSON: _reference(a.NativeError if native else a.OpenAIError)},
            "headers": _headers(status),
        }
    if locked and operation.answer == HTML:
        responses["401"]["content"] |= content
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    described["security"] = [{"bearer": []}, {"key": []}] if locked else []
    if "{model_id}" in operation.path:
        described["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: _reference(operation.body)}}
    return described


def _headers(status: int = 200) -> dict[str, Any]:
    text: dict[str, Any] = {"schema": {"type": "string"}}
    headers = {"X-Request-ID": {**text, "required": True}}
    if status == 401:
        headers["WWW-Authenticate"] = {**text, "required": True}
    if status == 429:
        headers["Retry-After"] = {"required": True, "schema": {"type": "integer", "minimum": 1}}
    return headers


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
