"""The bodies of /v1/chat/completions and /v1/completions, and the answers in OpenAI's words."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BaseModel, Field, TypeAdapter, WithJsonSchema, field_validator, model_validator

from app.errors import ApiError, error_body
from app.schemas import Body, GrammarFields, No, SamplingFields, usage
from app.tools import AnswerStream, OutputForm, ToolUse
from engine.schemas import MAX_LOGPROBS, ORIGINS, GenerationRequest, GenerationResult, TokenLogprobs
from engine.tokenization import IncrementalDetokenizer, Tokenizer

if TYPE_CHECKING:
    from app.router import TextChunk

MAX_CHOICES = 256
"""Sequences that one request may ask for: prompts times n."""

DONE = b"data: [DONE]\n\n"
_MIN_LOGPROB = -9999.0  # what OpenAI writes for a probability of 0, since JSON has no infinity

_OWN_TEMPLATE_ARGUMENTS = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})


_NOTHING: TypeAdapter[Any] = TypeAdapter(None)
_TEXT: TypeAdapter[Any] = TypeAdapter(str)
_INERT: Mapping[str, TypeAdapter[Any]] = {
    "metadata": TypeAdapter(dict[str, Any]),
    "prompt_cache_key": _TEXT,
    "safety_identifier": _TEXT,
    "service_tier": TypeAdapter(Literal["auto", "default"]),
    "store": TypeAdapter(No),
    "user": _TEXT,
}


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: No | None = None


class OpenAIBody(SamplingFields, GrammarFields):
    """What both routes share."""

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _stream_fields(self) -> OpenAIBody:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream", param="stream_options")
        if self.continuous_usage and not self.include_usage:
            name = "stream_options.continuous_usage_stats"
            raise ApiError(400, f"{name} needs include_usage", param=name)
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs can't be streamed", param="prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    index: int | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        arguments: Any = self.function.arguments
        with contextlib.suppress(ValueError):  # a call that was cut off is shown as it is
            arguments = orjson.loads(arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Function(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


Empty = Annotated[Any, WithJsonSchema({"enum": [None, "", [], {}]})]


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None

    @field_validator("content", mode="before", json_schema_input_type=str | list[TextPart] | None)
    @classmethod
    def _parts_are_text(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        texts = []
        for i, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise ValueError(f"part {i}: only parts of type 'text' are supported")
            text = part.get("text")
            if not isinstance(text, str):
                raise ValueError(f"part {i}: text must be a string")
            texts.append(text)
        return "\n".join(texts)

    @field_validator("function_call", "refusal", "audio", "annotations", mode="before", json_schema_input_type=Empty)
    @classmethod
    def _only_empty(cls, value: object) -> object:
        if value not in (None, "", [], {}):
            raise ValueError("is not supported")
        return value

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a {self.role} message has no tool_calls")
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        # Templates know no developer; None in one would be printed as "None".
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        for key in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, key)) is not None:
                message[key] = value
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class ChatCompletionRequest(OpenAIBody):
    inert: ClassVar[Mapping[str, TypeAdapter[Any]]] = {
        **_INERT,
        "audio": _NOTHING,
        "function_call": TypeAdapter(Literal["none", "auto"]),
        "functions": TypeAdapter(Annotated[list[Any], Field(max_length=0)]),
        "modalities": TypeAdapter(Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)]),
        "prediction": _NOTHING,
        "reasoning_effort": _NOTHING,
        "verbosity": _NOTHING,
        "web_search_options": _NOTHING,
    }

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: list[Tool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    return_token_origins: bool = Field(
        False, description=f"each chunk of a stream says who proposed its tokens: {', '.join(ORIGINS)}"
    )

    @model_validator(mode="after")
    def _consistent(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
        if self.return_token_origins and not self.stream:
            raise ApiError(400, "return_token_origins needs stream", param="return_token_origins")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one", param="max_completion_tokens")
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        if clash := sorted(_OWN_TEMPLATE_ARGUMENTS & self.chat_template_kwargs.keys()):
            raise ApiError(
                400, f"chat_template_kwargs can't set {', '.join(clash)}", param=f"chat_template_kwargs.{clash[0]}"
            )
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ApiError(400, "tools: two functions have the same name", param="tools")
        wanted = None if isinstance(self.tool_choice, str) else self.tool_choice.function.name
        if self.tool_choice == "required" and not names or wanted is not None and wanted not in names:
            raise ApiError(400, f"tool_choice: {wanted or 'a function'!r} is not in tools", param="tool_choice")
        return self

    def tool_use(self) -> ToolUse | None:
        """What the answer may and must call; None for nothing."""
        if not self.tools or self.tool_choice == "none":
            return None
        functions = [tool.function.model_dump(exclude_none=True) for tool in self.tools]
        if self.tool_choice == "auto":
            return ToolUse([], self.parallel_tool_calls)
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return ToolUse([function for function in functions if function["name"] == name], False)
        return ToolUse(functions, self.parallel_tool_calls)

    def template_arguments(self) -> dict[str, Any]:
        generation_prompt = self.add_generation_prompt
        tools = (
            {} if self.tool_use() is None else {"tools": [tool.model_dump(exclude_none=True) for tool in self.tools]}
        )
        return {
            **self.chat_template_kwargs,
            **tools,
            "add_generation_prompt": not self.continue_final_message
            if generation_prompt is None
            else generation_prompt,
            "continue_final_message": self.continue_final_message,
        }

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def public_names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"max_new_tokens": limit, "logprobs": "top_logprobs"}

    def output_fields(self) -> dict[str, Any]:
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return {"logprobs": logprobs, "prompt_logprobs": self.prompt_logprobs}


Prompt = str | list[int]
Prompts = (
    str
    | Annotated[list[int], Field(min_length=1)]
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1)]
)


class CompletionRequest(OpenAIBody):
    inert: ClassVar[Mapping[str, TypeAdapter[Any]]] = {**_INERT, "suffix": TypeAdapter(Literal[""])}
    public_names: ClassVar[dict[str, str]] = {"max_new_tokens": "max_tokens"}

    prompt: list[Prompt]
    max_tokens: int | None = Field(None, ge=0)
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @field_validator("prompt", mode="plain", json_schema_input_type=Prompts)
    @classmethod
    def _prompts(cls, value: object) -> list[Prompt]:
        """One prompt or many, each text or token ids. By hand: a union of four types explains itself badly."""
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if all(isinstance(item, str) for item in value):
                return list(value)
            if _is_ids(value):
                return [value]
            if all(isinstance(item, list) and item and _is_ids(item) for item in value):
                return list(value)
        raise ValueError("must be a text, a list of token ids, or a non-empty list of either")

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ApiError(400, "best_of is supported only when it equals n", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens 0 needs echo", param="max_tokens")
        if self.stream and self.echo and self.logprobs is not None:
            raise ApiError(400, "echo with logprobs can't be streamed", param="logprobs")
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise ApiError(400, f"prompts times n is above {MAX_CHOICES}", param="prompt")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        # The engine samples at least one token; `generates` says that it isn't shown.
        return 1 if self.max_tokens == 0 else self.max_tokens

    @property
    def generates(self) -> bool:
        return self.max_tokens != 0

    def output_fields(self) -> dict[str, Any]:
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        return {"logprobs": self.logprobs, "prompt_logprobs": prompt_logprobs}


def _is_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


Head = Mapping[str, Any]
"""Of an answer: id, created and model."""


class _Renderer:
    """What the two streams have in common: one JSON skeleton, made once, into which a chunk's text goes."""

    kind: str
    chunk_kind: str

    def __init__(self, body: OpenAIBody, tokenizer: Tokenizer, head: Head, prompt_tokens: int) -> None:
        self._body = body
        self._n = body.n
        self._tokenizer = tokenizer
        self._head = {"id": "", "object": self.kind, **head}
        self._include_usage = body.include_usage
        self._stream_head = orjson.dumps(self._head | {"object": self.chunk_kind})[:-1]
        self._tail = b',"usage":null}\n\n' if body.include_usage else b"}\n\n"
        self._continuous = body.continuous_usage
        self._prompt_tokens, self._completion_tokens = prompt_tokens, 0
        self._count(0)

    def _count(self, tokens: int) -> None:
        """With continuous_usage_stats each event says what the request has used so far, as vLLM's do."""
        if self._continuous:
            self._completion_tokens += tokens
            counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._completion_tokens}
            counts["total_tokens"] = sum(counts.values())
            self._tail = b',"usage":%b}\n\n' % orjson.dumps(counts)

    def _event(self, choice: bytes) -> bytes:
        return b'data: %b,"choices":[%b]%b' % (self._stream_head, choice, self._tail)

    def end(self, results: Sequence[GenerationResult]) -> bytes:
        if not self._include_usage:
            return DONE
        counts = orjson.dumps(usage(results, self._n))
        return b'data: %b,"choices":[],"usage":%b}\n\n%b' % (self._stream_head, counts, DONE)

    def error(self, error: ApiError, request_id: str) -> bytes:
        return b"data: %b\n\n" % orjson.dumps(error_body(error, "/v1", request_id))

    def _answer(self, choices: list[dict[str, Any]], results: Sequence[GenerationResult]) -> dict[str, Any]:
        return {**self._head, "choices": choices, "usage": usage(results, self._n)}

    def _prompt_logprobs(self, result: GenerationResult) -> list[dict[str, Any] | None]:
        """vLLM's shape: for each prompt token null or {id: {logprob, rank, decoded_token}}, the token's own first."""
        rows: list[dict[str, Any] | None] = []
        for position in result.prompt_logprobs or ():
            if position is None:
                rows.append(None)
                continue
            row: dict[str, Any] = {}
            ranked = [(position.token_id, position.logprob, position.rank)]
            ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(position.top, start=1)]
            for token_id, logprob, rank in ranked:
                text = _token_text(self._tokenizer.token_bytes(token_id))
                row.setdefault(
                    str(token_id), {"logprob": max(logprob, _MIN_LOGPROB), "rank": rank, "decoded_token": text}
                )
            rows.append(row)
        return rows


class ChatRenderer(_Renderer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    _body: ChatCompletionRequest

    def __init__(
        self, form: OutputForm, body: ChatCompletionRequest, tokenizer: Tokenizer, head: Head, prompt_tokens: int
    ) -> None:
        super().__init__(body, tokenizer, head, prompt_tokens)
        self._form = form
        self._streams = [AnswerStream(form) for _ in range(body.n)] if form.parses and body.stream else []

    def body(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        choices = []
        for i, result in enumerate(results):
            said = self._form.whole(result.text)
            choices.append(
                {
                    "index": i,
                    "message": said.message(),
                    "logprobs": self._logprobs_of(result.logprobs or []) if self._body.logprobs else None,
                    "finish_reason": said.finish_reason(result.finish_reason),
                    "stop_reason": result.stop_reason,
                }
            )
        answer = self._answer(choices, results)
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs(results[0])
        return answer

    def start(self) -> bytes:
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return b"".join(self._event(choice % i) for i in range(self._n))

    def chunk(self, index: int, chunk: TextChunk) -> bytes:
        self._count(len(chunk.token_ids))
        delta = self._streams[index].push(chunk.text) if self._streams else {"content": chunk.text}
        more: dict[str, Any] = {}
        if self._body.return_token_origins and chunk.token_ids:
            more["token_origins"] = [ORIGINS[i] for i in chunk.origins.ljust(len(chunk.token_ids), b"\0")]
        if not any(delta.values()) and not chunk.logprobs and not more:
            return b""
        return self._delta_event(index, delta, chunk.logprobs or [], more)

    def _delta_event(
        self, index: int, delta: dict[str, Any], logprobs: Sequence[TokenLogprobs], more: Mapping[str, Any] = {}
    ) -> bytes:
        shown = self._logprobs_of(logprobs) if self._body.logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": None}
        return self._event(orjson.dumps({**choice, **more}))

    def finish(self, index: int, result: GenerationResult) -> bytes:
        held, finish_reason = b"", result.finish_reason.value
        if self._streams:
            delta, answer = self._streams[index].finish()
            held = self._delta_event(index, delta, []) if delta else b""
            finish_reason = answer.finish_reason(finish_reason)
        return held + self._event(
            b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b","stop_reason":%b}'
            % (index, finish_reason.encode(), orjson.dumps(result.stop_reason))
        )

    def _logprobs_of(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        entry = self._logprob_entry
        return {
            "content": [
                entry(position.token_id, position.logprob)
                | {"top_logprobs": [entry(token_id, logprob) for token_id, logprob in position.top]}
                for position in positions
            ],
            "refusal": None,
        }

    def _logprob_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": _token_text(data), "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(data)}


class CompletionRenderer(_Renderer):
    """`requests` are the request's sequences in order; `prompts` are their prompts' texts, for echo."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    _body: CompletionRequest

    def __init__(
        self,
        body: CompletionRequest,
        tokenizer: Tokenizer,
        head: Head,
        requests: Sequence[GenerationRequest],
        prompts: Sequence[str],
    ) -> None:
        super().__init__(body, tokenizer, head, sum(len(request.prompt_ids or ()) for request in requests[:: body.n]))
        self._requests = requests
        self._echo = list(prompts) if body.echo else None
        self._offsets = [self._offsets_after_prompt(i) for i in range(len(requests))] if body.stream else []

    def body(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        shown = []
        for i, result in enumerate(results):
            text = result.text if self._body.generates else ""
            entry = {
                "index": i,
                "text": text if self._echo is None else self._echo[i] + text,
                "logprobs": None if self._body.logprobs is None else self._logprobs_of(i, result),
                "finish_reason": result.finish_reason,
                "stop_reason": result.stop_reason,
            }
            if self._body.prompt_logprobs is not None:
                entry["prompt_logprobs"] = self._prompt_logprobs(result)
            shown.append(entry)
        return self._answer(shown, self._counted(results))

    def start(self) -> bytes:
        if self._echo is None:
            return b""
        return b"".join(self._text_event(i, text, b"null") for i, text in enumerate(self._echo))

    def chunk(self, index: int, chunk: TextChunk) -> bytes:
        if not self._body.generates:
            return b""
        self._count(len(chunk.token_ids))
        if self._body.logprobs is None:
            return self._text_event(index, chunk.text, b"null") if chunk.text else b""
        if not chunk.text and not chunk.logprobs:
            return b""
        columns = _LogprobColumns(self._tokenizer)
        for position in chunk.logprobs or ():
            columns.add(self._offsets[index].next(position.token_id), position.token_id, position)
        return self._text_event(index, chunk.text, orjson.dumps(columns.as_dict()))

    def finish(self, index: int, result: GenerationResult) -> bytes:
        return self._event(
            b'{"index":%d,"text":"","logprobs":null,"finish_reason":"%b","stop_reason":%b}'
            % (index, result.finish_reason.value.encode(), orjson.dumps(result.stop_reason))
        )

    def end(self, results: Sequence[GenerationResult]) -> bytes:
        return super().end(self._counted(results))

    def _counted(self, results: Sequence[GenerationResult]) -> Sequence[GenerationResult]:
        return results if self._body.generates else [replace(result, token_ids=[]) for result in results]

    def _text_event(self, index: int, text: str, logprobs: bytes) -> bytes:
        return self._event(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}' % (index, orjson.dumps(text), logprobs)
        )

    def _offsets_after_prompt(self, index: int) -> _TextOffsets:
        request = self._requests[index]
        start = 0 if self._echo is None else len(self._echo[index])
        return _TextOffsets(self._tokenizer, request.prompt_ids or [], request.skip_special_tokens, start)

    def _logprobs_of(self, index: int, result: GenerationResult) -> dict[str, Any]:
        columns = _LogprobColumns(self._tokenizer)
        if self._echo is not None:
            request = self._requests[index]
            prompt_ids = request.prompt_ids or []
            offsets = _TextOffsets(self._tokenizer, [], request.skip_special_tokens, 0)
            for token_id, position in zip(prompt_ids, result.prompt_logprobs or (), strict=True):
                columns.add(offsets.next(token_id), token_id, position)
        if self._body.generates:
            offsets = self._offsets_after_prompt(index)
            for position in result.logprobs or ():
                columns.add(offsets.next(position.token_id), position.token_id, position)
        return columns.as_dict()


class _TextOffsets:
    """Where in the text each token begins, in characters; a token that starts inside a character begins with it."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool, start: int) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special)
        self._offset = start

    def next(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._detokenizer.push((token_id,)))
        return offset


class _LogprobColumns:
    """OpenAI's legacy log-probabilities: four parallel lists."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add(self, offset: int, token_id: int, position: TokenLogprobs | None) -> None:
        text = self._text(token_id)
        if position is None:  # the first token of a prompt
            self._rows.append((text, None, None, offset))
            return
        logprob = max(position.logprob, _MIN_LOGPROB)
        top: dict[str, float] = {}
        for other, value in position.top:
            top.setdefault(self._text(other), max(value, _MIN_LOGPROB))
        top.setdefault(text, logprob)  # the token itself is always there
        self._rows.append((text, logprob, top, offset))

    def as_dict(self) -> dict[str, Any]:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[column] for row in self._rows] for column, name in enumerate(names)}

    def _text(self, token_id: int) -> str:
        return _token_text(self._tokenizer.token_bytes(token_id))


def _token_text(data: bytes) -> str:
    """A token's text; for a part of a character its bytes, written as OpenAI writes them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def model_card(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "pilotfish",
        "max_model_len": max_model_len,
    }
