"""The native routes: /generate, /batch_generate, /tokenize, /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import orjson
from pydantic import Field, StringConstraints, model_validator

from app.errors import ApiError, error_body
from app.schemas import Body, GrammarFields, No, SamplingFields
from app.schemas.openai import ChatMessage
from engine.schemas import GenerationRequest, GenerationResult

if TYPE_CHECKING:
    from app.router import TextChunk

MAX_PROMPT_CHARS = 256_000
MAX_NEW_TOKENS = 4096

PromptText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_PROMPT_CHARS)]
NewTokens = Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)]


class NativeBody(SamplingFields, GrammarFields):
    max_new_tokens: NewTokens | None = None
    stop: list[str] | None = Field(None, max_length=4)


class GenerateBody(NativeBody):
    request_id: str | None = Field(None, min_length=1, max_length=256)
    prompt: PromptText
    stream: bool = False


class BatchGenerateBody(NativeBody):
    prompts: list[PromptText] = Field(min_length=1, max_length=32)
    stream: No = False


class TokenizeBody(Body):
    """A text, or the messages of a chat as the chat route would render them."""

    prompt: str | None = Field(None, max_length=MAX_PROMPT_CHARS)
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        return self


class LoadAdapterBody(Body):
    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1, max_length=4096)


class UnloadAdapterBody(Body):
    lora_name: str = Field(min_length=1, max_length=200)


class DetokenizeBody(Body):
    tokens: list[int] = Field(max_length=MAX_PROMPT_CHARS)
    skip_special_tokens: bool = False


def answer(request: GenerationRequest, result: GenerationResult) -> dict[str, Any]:
    return {"request_id": request.request_id, "generated_text": result.text, **_end(result)}


def _end(result: GenerationResult) -> dict[str, Any]:
    return {
        "token_count": len(result.token_ids),
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
    }


class GenerateRenderer:
    """One answer. Streamed: a `data:` line {"text"} for each chunk, then an event `done` or `error`."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request

    def body(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        return answer(self._request, results[0])

    def start(self) -> bytes:
        return b""

    def chunk(self, index: int, chunk: TextChunk) -> bytes:
        return b'data: {"text":%b}\n\n' % orjson.dumps(chunk.text) if chunk.text else b""

    def finish(self, index: int, result: GenerationResult) -> bytes:
        return b""

    def end(self, results: Sequence[GenerationResult]) -> bytes:
        done = {"request_id": self._request.request_id, **_end(results[0])}
        return b"event: done\ndata: %b\n\n" % orjson.dumps(done)

    def error(self, error: ApiError, request_id: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % orjson.dumps(error_body(error, "/generate", request_id))


class BatchRenderer(GenerateRenderer):
    """The answers to several prompts, in their order."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        super().__init__(requests[0])
        self._requests = requests

    def body(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        pairs = zip(self._requests, results, strict=True)
        return {"results": [answer(request, result) for request, result in pairs]}
