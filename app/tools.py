"""Tool calls and thinking: what a chat template's model writes for them, read from its text as it comes."""

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


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls: `opener`, then objects {"name", `arguments`} between what is `skipped`.

    closer: ends a call, and text may follow. at_start: a text that begins with an object is calls without an opener.
    """

    opener: str
    arguments: str
    skipped: str
    separator: str
    closer: str = ""
    at_start: bool = False

    def call_id(self) -> str:
        # Mistral's template takes ids of nine letters and digits only.
        return secrets.token_hex(5)[:9] if self is MISTRAL else f"call_{secrets.token_hex(12)}"


HERMES = ToolFormat("<tool_call>", "arguments", r"\s*", "\n", closer="</tool_call>")
LLAMA = ToolFormat("<|python_tag|>", "parameters", r"[\s;,]*", "; ", at_start=True)
MISTRAL = ToolFormat("[TOOL_CALLS]", "arguments", r"(?:[\s\],]|\[(?!$|T))*", ", ")

FORMATS = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL}


@dataclass(slots=True)
class CallDelta:
    """A piece of call `index`: its id and name first, then its arguments, a JSON text, bit by bit."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    def as_dict(self) -> dict[str, Any]:
        if self.id:
            function = {"name": self.name, "arguments": self.arguments}
            return {"index": self.index, "id": self.id, "type": "function", "function": function}
        return {"index": self.index, "function": {"arguments": self.arguments}}


@dataclass(slots=True)
class Delta:
    """What new text says."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __add__(self, other: Delta) -> Delta:
        return Delta(self.content + other.content, self.reasoning + other.reasoning, self.calls + other.calls)

    def as_dict(self) -> dict[str, Any]:
        """As the delta of a streamed choice."""
        named = {"reasoning_content": self.reasoning, "content": self.content}
        delta: dict[str, Any] = {name: text for name, text in named.items() if text}
        if self.calls:
            delta["tool_calls"] = [call.as_dict() for call in self.calls]
        return delta

    def message(self) -> dict[str, Any]:
        """As a whole message."""
        calls: list[dict[str, Any]] = []
        for piece in self.calls:
            if piece.id:
                calls.append({key: value for key, value in piece.as_dict().items() if key != "index"})
            else:
                calls[-1]["function"]["arguments"] += piece.arguments
        has_more = bool(calls or self.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if has_more else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if calls:
            message["tool_calls"] = calls
        return message


class OutputParser:
    """Splits one choice's text into reasoning, content and calls, holding back only what isn't decided yet.

    parallel: later calls count. opened: the prompt ends with the opener of a call.
    """

    def __init__(
        self, tool_format: ToolFormat | None, parallel: bool, thinks: bool, inside: bool, opened: bool
    ) -> None:
        self.called = 0
        self._format = tool_format
        self._parallel = parallel
        self._text = ""
        self._state = self._thinking if inside else self._before_thinking if thinks else self._after_thinking
        self._opened = opened
        self._scanner = _JsonScanner()
        self._final = False

    def push(self, text: str) -> Delta:
        """What this text adds."""
        self._text += text
        delta = Delta()
        while self._state(delta):
            pass
        if not self._parallel:
            delta.calls = [call for call in delta.calls if not call.index]
        return delta

    def finish_reason(self, ended: str) -> str:
        """OpenAI's reason, for the engine's."""
        return "tool_calls" if self.called and ended == "stop" else ended

    def flush(self) -> Delta:
        """What was held back: nothing follows."""
        self._final = True
        return self.push("")

    # Each state reads what it can from the front of the text, and says whether to go on with the next state.

    def _go(self, state: Any, skip: int = 0) -> bool:
        self._state, self._text = state, self._text[skip:]
        return True

    def _take_until(self, marker: str) -> tuple[str, bool]:
        """The text before the marker, or as much as can't begin one, and whether the marker is there."""
        end = self._text.find(marker)
        found = end >= 0
        if not found:
            end = len(self._text) if self._final else len(self._text) - _overlap(self._text, marker)
        taken, self._text = self._text[:end], self._text[end:]
        return taken, found

    def _before_thinking(self, delta: Delta) -> bool:
        text = self._text.lstrip()
        if text.startswith(THINK):
            return self._go(self._thinking, len(self._text) - len(text) + len(THINK))
        if THINK.startswith(text) and not self._final:
            return False
        return self._go(self._after_thinking)

    def _thinking(self, delta: Delta) -> bool:
        taken, found = self._take_until(THINK_END)
        delta.reasoning += taken
        return found and self._go(self._after_reasoning, len(THINK_END))

    def _after_reasoning(self, delta: Delta) -> bool:
        self._text = self._text.lstrip()
        return bool(self._text) and self._go(self._after_thinking)

    def _after_thinking(self, delta: Delta) -> bool:
        if self._format is None:
            return self._go(self._plain)
        if self._opened:
            return self._go(self._between_calls)
        if not self._format.at_start:
            return self._go(self._content)
        text = self._text.lstrip()
        if text.startswith("{"):
            return self._go(self._between_calls)
        return bool(text) and self._go(self._content)

    def _plain(self, delta: Delta) -> bool:
        delta.content += self._text
        self._text = ""
        return False

    def _content(self, delta: Delta) -> bool:
        assert self._format is not None
        taken, found = self._take_until(self._format.opener)
        kept = taken if self._final and not found else taken.rstrip()  # space before a call is no content
        delta.content += kept
        if found:
            return self._go(self._between_calls, len(self._format.opener))
        self._text = taken[len(kept) :] + self._text
        return False

    def _between_calls(self, delta: Delta) -> bool:
        assert self._format is not None
        text = re.sub(self._format.skipped, "", self._text, count=1)
        for marker, state in ((self._format.closer, self._content), (self._format.opener, self._between_calls)):
            if marker and text.startswith(marker):
                return self._go(state, len(self._text) - len(text) + len(marker))
            if marker and text and marker.startswith(text) and not self._final:
                return False
        if not text:
            return False
        if head := _OBJECT_HEAD.match(text) or _NAME_HEAD.match(text):
            name = json.loads(head[1], strict=False) if text[0] == "{" else head[1]
            delta.calls.append(CallDelta(self.called, self._format.call_id(), name))
            self.called += 1
            self._scanner = _JsonScanner()
            self._text = text[head.end() :]
            return self._go(self._arguments_in_object if text[0] == "{" else self._arguments)
        if text[0] == "{":
            return self._whole_object(text, delta)
        if _NAME_PART.fullmatch(text) and not self._final:
            return False
        return self._not_a_call(text, delta)

    def _whole_object(self, text: str, delta: Delta) -> bool:
        """A call whose arguments aren't where they are expected is read at its end."""
        assert self._format is not None
        end = _JsonScanner().end(text)
        if end is None:
            return self._not_a_call(text, delta) if self._final else False
        try:
            call = json.loads(text[:end])
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        except (ValueError, KeyError):
            return self._not_a_call(text, delta)
        if not isinstance(name, str):
            return self._not_a_call(text, delta)
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        delta.calls.append(CallDelta(self.called, self._format.call_id(), name, written))
        self.called += 1
        self._text = text
        return self._go(self._between_calls, end)

    def _not_a_call(self, text: str, delta: Delta) -> bool:
        assert self._format is not None
        if not self._format.at_start:
            delta.content += self._format.opener
        self._text = text
        return self._go(self._plain)

    def _arguments_in_object(self, delta: Delta) -> bool:
        return self._read_arguments(delta) and self._go(self._object_end)

    def _arguments(self, delta: Delta) -> bool:
        return self._read_arguments(delta) and self._go(self._between_calls)

    def _read_arguments(self, delta: Delta) -> bool:
        end = self._scanner.end(self._text)
        piece = self._text[:end]
        if piece:
            last = delta.calls[-1] if delta.calls else None
            if last is None:
                last = CallDelta(self.called - 1)
                delta.calls.append(last)
            last.arguments += piece
        self._text = "" if end is None else self._text[end:]
        return end is not None

    def _object_end(self, delta: Delta) -> bool:
        text = self._text.lstrip()
        if not text:
            return False
        self._text = text
        return self._go(self._between_calls, int(text.startswith("}")))


_OBJECT_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAME_PART = re.compile(r"[\w.-]+\s*(?:\[A?R?G?S?\]?)?\s*")
_NAME_HEAD = re.compile(r"([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")


class _JsonScanner:
    """Finds where a JSON object ends in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def end(self, text: str) -> int | None:
        """The length of what belongs to the object, None if it is the whole piece and the object goes on."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of the text that could begin the marker."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)


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

    def parser(self) -> OutputParser:
        return OutputParser(self.tool_format, self.tools.parallel, self.thinks, self.inside, self._opened)

    def grammar(self, given: GrammarSpec | None) -> GrammarSpec | None:
        """The grammar of the whole answer, for one of its content."""
        form = None
        if self.tool_format is not None and self.tools.forced:
            if given is not None:
                raise ApiError(400, "a grammar and a tool_choice that forces a call exclude each other", param="tools")
            form = _call_format(self.tool_format, self.tools)
        elif given is not None and self.inside:
            form = _content_format(given)
        if form is None:
            return given
        if self.inside:
            thinking = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": THINK_END}
            form = _sequence(thinking, _text("\n\n"), form)
        return GrammarSpec(kind="structural_tag", text=json.dumps(form, ensure_ascii=False))


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


def _call_format(tool_format: ToolFormat, tools: ToolUse) -> dict[str, Any]:
    """xgrammar's structural format for a call of any of the functions, or for several."""
    tags = []
    for function in tools.forced:
        schema = function.get("parameters") or _NO_ARGUMENTS
        try:
            GrammarSpec(kind="json_schema", text=json.dumps(schema))
        except ValidationError as error:
            name = function["name"]
            raise ApiError(400, f"tools: {name}: {invalid(error, 400).message}", param="tools") from None
        begin = f'{{"name": {json.dumps(function["name"])}, "{tool_format.arguments}": '
        end = "}"
        if tool_format is HERMES:
            begin, end = f"{HERMES.opener}\n{begin}", f"{end}\n{HERMES.closer}"
        tags.append({"type": "tag", "begin": begin, "content": _json_format(schema), "end": end})
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": tool_format.separator,
        "at_least_one": True,
        "stop_after_first": not tools.parallel,
    }
    return _sequence(_text("["), calls, _text("]")) if tool_format is MISTRAL else calls


def _content_format(spec: GrammarSpec) -> dict[str, Any]:
    if spec.kind in ("json_schema", "json_object"):
        return _json_format(json.loads(spec.text) if spec.text else {"type": "object"})
    if spec.kind == "choice":
        return {"type": "or", "elements": [_text(word) for word in json.loads(spec.text)]}
    if spec.kind == "regex":
        return {"type": "regex", "pattern": spec.text}
    return {"type": "grammar", "grammar": spec.text}


def _json_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}
