"""Tool calls and thinking: how a model's answer is written, by its chat template, and read as it comes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from app.errors import ApiError
from app.schemas import invalid
from engine.grammars import GrammarSpec
from engine.tokenization import Tokenizer

THINK, THINK_END = "<think>", "</think>"

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_CALL_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)|([\w.-]+)\s*(?:\[ARGS\])?(?=\{)'
)
_NAME_PART = re.compile(r"[\w.-]+\s*(?:\[A?R?G?S?\]?)?")
_JSON_PARTS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)|[{}\[\]]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls: `opener`, then objects {"name", `arguments`} with what is `skipped` between.

    closer: ends a call, and text may follow. at_start: a text that begins with an object is calls without an opener.
    """

    opener: str
    arguments: str
    skipped: str
    separator: str
    closer: str = ""
    at_start: bool = False


HERMES = ToolFormat("<tool_call>", "arguments", r"\s*", "\n", closer="</tool_call>")
LLAMA = ToolFormat("<|python_tag|>", "parameters", r"[\s;,]*", "; ", at_start=True)
MISTRAL = ToolFormat("[TOOL_CALLS]", "arguments", r"(?:[\s\],]|\[(?!$|T))*", ", ")

FORMATS = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL}


@dataclass(slots=True)
class Call:
    name: str
    arguments: str  # a JSON text
    id: str = ""


@dataclass(slots=True)
class Answer:
    """What a text says so far. Each part only grows as the text does."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        missing = None if self.calls or self.reasoning else ""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or missing}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [_shown(call.arguments, call) for call in self.calls]
        return message

    def finish_reason(self, ended: str) -> str:
        """OpenAI's reason, for the engine's."""
        return "tool_calls" if self.calls and ended == "stop" else ended


def _valid(text: str) -> str:
    r"""What a model wrote as \ud800 is no text: a lone surrogate can't be sent."""
    return text.encode("utf-8", "replace").decode()


def _shown(arguments: str, call: Call | None) -> dict[str, Any]:
    if call is None:
        return {"function": {"arguments": arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What an answer must call (any of `forced`, if there are any), and whether it may call several."""

    forced: Sequence[Mapping[str, Any]]
    parallel: bool


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How a model's answer is written. thinks: it may begin with <think>; inside: the prompt did so already."""

    tool_format: ToolFormat | None = None
    tools: ToolUse = ToolUse((), True)
    thinks: bool = False
    inside: bool = False

    @property
    def parses(self) -> bool:
        return self.tool_format is not None or self.thinks

    @property
    def _opened(self) -> bool:
        # A special token is in no grammar: the prompt ends with it instead.
        return self.tool_format is MISTRAL and bool(self.tools.forced)

    @property
    def shows_special_tokens(self) -> dict[str, bool]:
        return {"skip_special_tokens": False} if self.tool_format is MISTRAL else {}

    def after_prompt(self, tokenizer: Tokenizer, ids: list[int]) -> tuple[OutputForm, list[int]]:
        """The form of the answer to a rendered chat, and the prompt as it should be."""
        inside = self.thinks and tokenizer.decode(ids[-8:], skip_special_tokens=False).rstrip().endswith(THINK)
        suffix = tokenizer.encode(MISTRAL.opener, add_special_tokens=False) if self._opened else []
        return replace(self, inside=inside), ids + suffix

    def read(self, text: str, final: bool) -> Answer:
        """What a text says, or if it isn't the final one, what can be told of it for sure."""
        answer = Answer()
        text = self._read_thinking(text, final, answer)
        if self.tool_format is None:
            answer.content = text
            return answer
        opener, closer = self.tool_format.opener, self.tool_format.closer
        calling = self._opened or (self.tool_format.at_start and text.lstrip().startswith("{"))
        lead = "" if calling else opener
        while text:
            if not calling:
                before, found, text = text.partition(opener)
                sure = before if final else before[: len(before) - _overlap(before, opener)]
                answer.content += sure if final and not found else sure.rstrip()  # space before a call is no content
                calling = bool(found)
                continue
            text = re.sub(self.tool_format.skipped, "", text, count=1)
            if text.startswith(opener):
                text = text.removeprefix(opener)
            elif closer and text.startswith(closer):
                text, calling = text.removeprefix(closer), False
            elif not text or not final and (opener.startswith(text) or closer.startswith(text)):
                break
            elif (rest := self._read_call(text, final, answer)) is not None:
                text = rest
            else:
                answer.content += lead + text
                break
        if not self.tools.parallel:
            del answer.calls[1:]
        return answer

    def _read_thinking(self, text: str, final: bool, answer: Answer) -> str:
        """The text after the reasoning."""
        start = text.lstrip()
        if not self.inside and not (self.thinks and start.startswith(THINK)):
            return "" if self.thinks and THINK.startswith(start) and not final else text
        thought, found, rest = (text if self.inside else start.removeprefix(THINK)).partition(THINK_END)
        answer.reasoning = thought if found or final else thought[: len(thought) - _overlap(thought, THINK_END)]
        return rest.lstrip()

    def _read_call(self, text: str, final: bool, answer: Answer) -> str | None:
        """The text after the call that it begins with; empty while that isn't decided, None if it is no call."""
        if head := _CALL_HEAD.match(text):
            end = _object_end(text, head.end())
            arguments = text[head.end() : end]
            if not head[1]:
                answer.calls.append(Call(head[2], arguments))
                return text[end:] if end else ""
            try:
                answer.calls.append(Call(_valid(json.loads(head[1], strict=False)), arguments))
            except ValueError:
                return None
            return re.sub(r"\s*\}?", "", text[end:], count=1) if end else ""
        end = _object_end(text, 0) if text[0] == "{" else None
        if end is None:
            return "" if not final and (text[0] == "{" or _NAME_PART.fullmatch(text)) else None
        try:
            call = json.loads(text[:end])
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        except (ValueError, KeyError, RecursionError):
            return None
        answer.calls.append(Call(_valid(str(name)), _valid(written)))
        return text[end:]

    def grammar(self, given: GrammarSpec | None) -> GrammarSpec | None:
        """The grammar of the whole answer, for one of its content."""
        form = None
        if self.tool_format is not None and self.tools.forced:
            if given is not None:
                raise ApiError(400, "a grammar and a tool_choice that forces a call exclude each other", param="tools")
            form = _calls_format(self.tool_format, self.tools)
        elif given is not None and self.inside:
            form = _content_format(given)
        if form is None:
            return given
        if self.inside:
            thinking = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": THINK_END}
            form = _sequence(thinking, _constant("\n\n"), form)
        return GrammarSpec(kind="structural_tag", text=json.dumps(form, ensure_ascii=False))

    def whole(self, text: str) -> Answer:
        """What a complete text says."""
        return AnswerStream(self).finish(text)[1]


class AnswerStream:
    """One choice's answer in OpenAI's deltas."""

    def __init__(self, form: OutputForm) -> None:
        self._form = form
        self._text = ""
        self._shown = Answer()
        # Mistral's template takes ids of nine letters and digits only.
        self._id_prefix, self._id_length = ("", 9) if form.tool_format is MISTRAL else ("call_", 24)

    def push(self, text: str) -> dict[str, Any]:
        """What this text adds."""
        self._text += text
        return self._advance(final=False)

    def finish(self, text: str = "") -> tuple[dict[str, Any], Answer]:
        """What was held back, and all."""
        self._text += text
        return self._advance(final=True), self._shown

    def _advance(self, final: bool) -> dict[str, Any]:
        old, new = self._shown, self._form.read(self._text, final)
        delta: dict[str, Any] = {}
        if reasoning := new.reasoning[len(old.reasoning) :]:
            delta["reasoning_content"] = reasoning
        if content := new.content[len(old.content) :]:
            delta["content"] = content
        calls = []
        for i, call in enumerate(new.calls):
            known = old.calls[i] if i < len(old.calls) else None
            call.id = known.id if known else self._id_prefix + secrets.token_hex(12)[: self._id_length]
            if known is None:
                calls.append({"index": i, **_shown(call.arguments, call)})
            elif arguments := call.arguments[len(known.arguments) :]:
                calls.append({"index": i, **_shown(arguments, None)})
        if calls:
            delta["tool_calls"] = calls
        self._shown = new
        return delta


def _object_end(text: str, start: int) -> int | None:
    """Where the JSON object that begins at `start` ends."""
    depth = 0
    for part in _JSON_PARTS.finditer(text, start):
        depth += (part[0] in "{[") - (part[0] in "}]")
        if depth == 0:
            return part.end()
    return None


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of the text that could begin the marker."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)


def output_form(tokenizer: Tokenizer, parser: str, tools: ToolUse | None) -> OutputForm:
    """The form of answers, by the chat template, or for tools by `parser` unless that is auto."""
    thinks = THINK_END in tokenizer.chat_template
    if tools is None:
        return OutputForm(thinks=thinks)
    if parser != "auto":
        return OutputForm(FORMATS[parser], tools, thinks)
    for tool_format, mark in ((MISTRAL, MISTRAL.opener), (HERMES, HERMES.opener), (LLAMA, "ipython")):
        if mark in tokenizer.chat_template:
            return OutputForm(tool_format, tools, thinks)
    message = "the model's chat template has no form for tool calls: tools are not supported"
    raise ApiError(400, message, param="tools")


# xgrammar's structural formats


def _calls_format(tool_format: ToolFormat, tools: ToolUse) -> dict[str, Any]:
    tags = []
    for function in tools.forced:
        name, schema = function["name"], function.get("parameters") or _NO_ARGUMENTS
        try:
            GrammarSpec(kind="json_schema", text=json.dumps(schema))
        except ValidationError as error:
            raise ApiError(400, f"tools: {name}: {invalid(error, 400).message}", param="tools") from None
        begin, end = f'{{"name": {json.dumps(name)}, "{tool_format.arguments}": ', "}"
        if tool_format.closer:
            begin, end = f"{tool_format.opener}\n{begin}", f"{end}\n{tool_format.closer}"
        tags.append({"type": "tag", "begin": begin, "content": _json(schema), "end": end})
    calls = {"type": "tags_with_separator", "tags": tags, "separator": tool_format.separator, "at_least_one": True}
    calls["stop_after_first"] = not tools.parallel
    return _sequence(_constant("["), calls, _constant("]")) if tool_format is MISTRAL else calls


def _content_format(spec: GrammarSpec) -> dict[str, Any]:
    if spec.kind == "choice":
        return {"type": "or", "elements": [_constant(word) for word in json.loads(spec.text)]}
    if spec.kind == "regex":
        return {"type": "regex", "pattern": spec.text}
    if spec.kind == "grammar":
        return {"type": "grammar", "grammar": spec.text}
    return _json(json.loads(spec.text) if spec.text else {"type": "object"})


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _constant(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}
