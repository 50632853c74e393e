"""The answers, for the OpenAPI document. Nothing is built from these: the renderers write what they describe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length", "tool_calls", "abort"]
Logprob = Annotated[float, Field(le=0)]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class OpenAIErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(Answer):
    error: OpenAIErrorDetail


class NativeErrorDetail(Answer):
    code: str
    message: str
    details: dict[str, Any] | None
    request_id: str


class NativeError(Answer):
    error: NativeErrorDetail


class PromptTokensDetails(Answer):
    cached_tokens: Count


class Usage(Answer):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Answer):
    logprob: Logprob
    rank: Count
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TokenLogprob(Answer):
    token: str
    logprob: Logprob
    bytes: list[int]


class RankedTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[RankedTokenLogprob]
    refusal: None


class FunctionCall(Answer):
    name: str
    arguments: str


class ToolCallAnswer(Answer):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Answer):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[ToolCallAnswer] = []


class ChatChoice(Answer):
    index: Count
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = []


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[Count]


class CompletionChoice(Answer):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs = []


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: Count


class Deleted(Answer):
    id: str
    object: Literal["model"]
    deleted: Literal[True]


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Generated(Answer):
    request_id: str
    generated_text: str
    token_count: Count
    prompt_tokens: Count
    finish_reason: FinishReason
    stop_reason: str | int | None


class GeneratedBatch(Answer):
    results: list[Generated]


class Tokens(Answer):
    tokens: list[Count]
    count: Count
    max_model_len: Count


class Text(Answer):
    prompt: str


class ReplicaHealth(Answer):
    is_local: bool
    is_usable: bool
    silence: float
    step_age: float
    load: Count


class Health(Answer):
    status: Literal["ok", "unhealthy"]
    replicas: dict[str, ReplicaHealth]


class Ready(Answer):
    status: Literal["ready", "not ready"]
