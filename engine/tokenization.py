"""Tokenizers, text from a stream of tokens, and stop strings.

A stream needs the exact bytes of each token: a library's `decode` gives text for a whole list, in which half a
character is already U+FFFD. Everything here therefore stands on `Tokenizer.token_bytes`: `decode` joins the bytes
and reads them as UTF-8, the incremental detokenizer feeds the same bytes to an incremental UTF-8 reader, so streamed
and whole text are the same by construction, at a cost per token that doesn't grow with the text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.schemas import SamplingParams

if TYPE_CHECKING:
    from tokenizers.decoders import Decoder

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """What the engine and the app need of a tokenizer. Every method raises ValueError on bad input.

    vocab_size: one above the highest id that may be sampled, added tokens included; a model may have more logits.
    special_token_ids: what text doesn't show under `skip_special_tokens`.
    pad_token_id: may be an EOS id at the same time (it is in many chat models), and then it may be sampled.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    special_token_ids: frozenset[int]
    bos_token_id: int | None
    pad_token_id: int | None
    has_chat_template: bool
    chat_template: str = ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of any text. Without truncation: the caller knows the context's length."""
        ...

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:
        """The UTF-8 bytes that a token adds to a text, or (`first`) starts a text with; half a character is fine."""
        ...

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        skipped = self.special_token_ids if skip_special_tokens else ()
        shown = [token_id for token_id in ids if token_id not in skipped]
        pieces = [self.token_bytes(token_id, first=i == 0) for i, token_id in enumerate(shown)]
        return b"".join(pieces).decode("utf-8", "replace")

    def encode_chat(self, messages: Sequence[Message], **kwargs: Any) -> list[int]:
        """Ids of the rendered chat; the keywords are those of `apply_chat_template`."""
        # A template writes the special tokens itself, BOS included: adding the tokenizer's own would double it.
        text = self.apply_chat_template(messages, **kwargs)
        return self.encode(text, add_special_tokens=not self.has_chat_template)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The chat as text. Without a template: a line `role: content` a message, then `assistant:`."""
        _check_chat(messages, add_generation_prompt, continue_final_message)
        refused = [name for name, value in {"tools": tools, **kwargs}.items() if value is not None]
        if refused:
            raise ValueError(f"this model has no chat template, so {', '.join(refused)} can't be rendered")
        lines = []
        for i, message in enumerate(messages):
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise ValueError(f"messages[{i}]: this model has no chat template, role and content must be text")
            lines.append(f"{role}: {content}\n")
        text = "".join(lines)
        if continue_final_message:
            return text[:-1]
        return text + "assistant:" if add_generation_prompt else text


class SimpleCharacterTokenizer(Tokenizer):
    """One id a character, no dependencies and no files: for tests and trials.

    `vocab` is the characters, or the wanted vocab_size (at least 4): printable ASCII first, then Unicode in order.
    Id 0 is the pad, 1 the EOS, 2 stands for every unknown character; characters start at 3. There is no BOS.
    """

    pad_token_id = 0
    eos_token_ids = frozenset({1})
    special_token_ids = frozenset({0, 1})
    bos_token_id = None
    has_chat_template = False

    def __init__(self, vocab: str | int | None = None) -> None:
        printable = [*(chr(code) for code in range(32, 127)), "\n", "\t", "\r"]
        if isinstance(vocab, int):
            beyond = (chr(code) for code in count(0xA1) if not 0xD800 <= code < 0xE000)
            if not 4 <= vocab <= 100_000:
                raise ValueError(f"vocab {vocab}: the vocabulary size must be 4 to 100000")
            characters = list(islice(chain(printable, beyond), vocab - 3))
        else:
            characters = printable if vocab is None else list(dict.fromkeys(vocab))
        if not characters:
            raise ValueError("vocab has no characters")
        self._ids = {character: i for i, character in enumerate(characters, start=3)}
        try:
            self._bytes = [text.encode() for text in ("<pad>", "<eos>", "\N{REPLACEMENT CHARACTER}", *characters)]
        except UnicodeEncodeError as error:
            raise ValueError(f"vocab: {error}") from None
        self.vocab_size = len(self._bytes)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _check_text(text)
        return [self._ids.get(character, 2) for character in text]

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:
        _check_id(token_id, self.vocab_size)
        return self._bytes[token_id]


class HuggingFaceTokenizer(Tokenizer):
    """A fast tokenizer of transformers: a folder, a hub id or a .gguf file. `hf` is the library's own object.

    EOS ids are all that the tokenizer, generation_config.json and config.json (or the GGUF's header) name.
    Byte-level and SentencePiece-like decoders are supported, which is all that Llama-shaped models use; another one
    is refused by name. Text is not "cleaned up": spaces before punctuation stay where the model put them. Where a
    run of byte-fallback tokens isn't UTF-8, only its broken bytes become U+FFFD (the library replaces the whole run,
    which can't be streamed).

    Raises ValueError: no fast tokenizer at `path`, or one with an unsupported decoder.
    """

    def __init__(self, path: str | Path, revision: str | None = None) -> None:
        load = _load_gguf if str(path).endswith(".gguf") else _load_pretrained
        try:
            self.hf, eos = load(str(path), revision)
        except Exception as error:  # the library raises whatever a broken or missing file makes it run into
            raise ValueError(f"no tokenizer can be loaded from {str(path)!r}: {error}") from error
        if not getattr(self.hf, "is_fast", False):
            raise ValueError(f"{str(path)!r} has no fast tokenizer (tokenizer.json)")
        self._backend = self.hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._pieces = _PieceDecoder(self._backend.decoder)
        self._added = self._backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.special_token_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.bos_token_id: int | None = self.hf.bos_token_id
        self.pad_token_id: int | None = self.hf.pad_token_id
        self.eos_token_ids = frozenset(eos | _ids(self.hf.eos_token_id))
        self.has_chat_template = bool(self.hf.chat_template)
        # a model may have several, by name: all that it may write counts
        named = self.hf.chat_template
        self.chat_template = "".join(named.values()) if isinstance(named, dict) else named or ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _check_text(text)
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # a vocabulary without an unknown token raises a bare Exception
            raise ValueError(f"the text can't be tokenized: {error}") from error
        return ids

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:
        known = None if first else self._bytes.get(token_id)
        if known is None:
            _check_id(token_id, self.vocab_size)
            piece = self._backend.id_to_token(token_id)
            known = b"" if piece is None else self._pieces(piece, first, added=token_id in self._added)
            if not first:
                self._bytes[token_id] = known
        return known

    def apply_chat_template(self, messages: Sequence[Message], **kwargs: Any) -> str:
        """The chat as text, by the model's own template, which transformers runs in a sandbox.

        `kwargs` are those of Tokenizer and further variables of the template. ValueError: the template's own complaint,
        a message it can't render, or a keyword that would be transformers' and not the template's.
        """
        if not self.has_chat_template:
            return super().apply_chat_template(messages, **kwargs)
        options = {"add_generation_prompt": True, "continue_final_message": False, "tools": None, **kwargs}
        _check_chat(messages, options["add_generation_prompt"], options["continue_final_message"])
        reserved = {"chat_template", "tokenize", "return_dict", "conversation", "tokenizer_kwargs", "kwargs"}
        if refused := sorted(reserved & kwargs.keys()):
            raise ValueError(f"not a variable of the chat template: {', '.join(refused)}")
        try:
            text = self.hf.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # a template is a program: on odd messages it can raise anything
            raise ValueError(f"the chat template refused the messages: {error}") from error
        return str(text)


def load_tokenizer(path: str | Path, revision: str | None = None) -> HuggingFaceTokenizer:
    """The tokenizer of a model folder, a hub id or a .gguf file."""
    return HuggingFaceTokenizer(path, revision)


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens, as soon as its characters are complete.

    The deltas, with that of `flush`, add up to what the tokens add to the text of the prompt: no part of the prompt,
    and a leading space only if it isn't the start of the text. U+FFFD stands for bytes the model really broke. A
    character that the prompt began and the output completes belongs to the output. ValueError: an id outside the
    vocabulary; nothing of that push is kept.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id in self._skipped:
                continue
            self._first = False
            tail = tokenizer.token_bytes(int(token_id)) + tail
            if len(tail) >= 4:  # the longest character
                break
        self._utf8.decode(tail)
        self._owes_prompt = bool(self._utf8.getstate()[0])

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete, possibly empty."""
        data, first = b"", self._first
        for token_id in ids:
            if token_id not in self._skipped:
                data += self._token_bytes(token_id, first)
                first = False
        self._first = first
        return self._read(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the last character is incomplete, else nothing."""
        return self._read(b"", final=True)

    def _read(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if text and self._owes_prompt:
            self._owes_prompt = False
            text = text.removeprefix("\N{REPLACEMENT CHARACTER}")  # the half character was the prompt's
        return text


@dataclass(slots=True)
class TextDelta:
    """What a push added: text to show and the tokens that count; the stop string, once the stream has found one."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    stop: str | None = None


class TextStream:
    """The text of one request's output, cut at its stop strings: the only place that knows them.

    The cut is at the first token that completes a stop string, the earliest start winning within that token; the
    rest is dropped. Tokens before the `min_tokens`-th complete none. Held back is only a tail that could begin a stop
    string, until it doesn't or until `flush`. `output_ids` resumes a stream: its state is that after these tokens,
    whose text counts as shown already.

    `text` is what has been shown, `token_ids` the output tokens that count (the one that completed the stop
    included), `stop` the stop string found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        output_ids: Sequence[int] = (),
    ) -> None:
        self.token_ids: list[int] = []
        self.stop: str | None = None
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._begun = dict.fromkeys(params.stop, 0)  # how much of each stop string the text so far ends with
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._shown: list[str] = []
        self._held = ""
        self._flushed = False
        self.push(output_ids)

    @property
    def text(self) -> str:
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    @property
    def finished(self) -> bool:
        """A stop string was found, or the stream was flushed: further tokens are dropped."""
        return self.stop is not None or self._flushed

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Takes new tokens. ValueError: an id outside the vocabulary."""
        if self.finished:
            return TextDelta(stop=self.stop)
        ids = [int(token_id) for token_id in token_ids]
        if not self._begun:
            shown = self._detokenizer.push(ids)
            self.token_ids += ids
            return TextDelta(self._show(shown), ids)
        shown, counted = "", 0
        for token_id in ids:
            text = self._detokenizer.push((token_id,))
            self.token_ids.append(token_id)
            counted += 1
            if text:
                shown += self._cut(text)
            if self.stop is not None:
                break
        return TextDelta(self._show(shown), ids[:counted], self.stop)

    def flush(self) -> str:
        """Ends the stream without a stop: the text that was held back. A half character at the end is U+FFFD."""
        if self.finished:
            return ""
        self._flushed = True
        rest = self._cut(self._detokenizer.flush())
        return self._show(rest if self.stop is not None else rest + self._held)

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text

    def _cut(self, text: str) -> str:
        """What of the held tail and the new text can be shown; sets `stop` when one is complete."""
        found = []
        for stop, begun in self._begun.items():
            seen = stop[:begun] + text
            if (at := seen.find(stop)) >= 0:
                start = len(self._held) - begun + at
                found.append((start, start + len(stop), stop))
            at = max(len(seen) - len(stop) + 1, 0)
            while not stop.startswith(seen[at:]):  # as often as characters came or what was begun got shorter
                at += 1
            self._begun[stop] = len(seen) - at
        text = self._held + text
        if found and len(self.token_ids) >= self._min_tokens:
            start, end, self.stop = min(found)
            return text[: end if self._include_stop else start]
        shown = len(text) - max(self._begun.values(), default=0)
        self._held = text[shown:]
        return text[:shown]


class _PieceDecoder:
    """Bytes of one vocabulary piece, after the steps of a decoder of the `tokenizers` library."""

    _BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

    def __init__(self, decoder: Decoder | None) -> None:
        self._steps: list[tuple[str, str, str]] = []
        self._joint = b"" if decoder else b" "  # without a decoder the library joins pieces with spaces
        self._strip = b""
        self._alphabet = _byte_level_alphabet()
        fused = False
        for step in _flatten(json.loads(decoder.__getstate__())) if decoder else ():
            kind = step["type"]
            if kind == "Replace" and "String" in step["pattern"]:
                self._steps.append((kind, step["pattern"]["String"], step["content"]))
            elif kind == "Metaspace":
                self._steps.append((kind, step["replacement"], " " if step["prepend_scheme"] == "never" else ""))
            elif kind in ("ByteFallback", "ByteLevel"):
                self._steps.append((kind, "", ""))
                fused = fused or kind == "ByteLevel"
            elif kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused and step["start"] <= 1 and step["stop"] == 0:
                self._strip = step["content"].encode() if step["start"] else b""
            else:
                raise ValueError(f"the tokenizer's decoder step {json.dumps(step)} isn't supported")

    def __call__(self, piece: str, first: bool, added: bool) -> bytes:
        data: bytes | None = None
        for kind, old, new in self._steps:
            if data is not None:
                break
            if kind == "Replace":
                piece = piece.replace(old, new)
            elif kind == "Metaspace":
                piece = piece.replace(old, new if first else " ")
            elif kind == "ByteFallback":
                if byte := self._BYTE.fullmatch(piece):
                    data = bytes([int(byte[1], 16)])
            elif not added and all(character in self._alphabet for character in piece):
                data = bytes(self._alphabet[character] for character in piece)
        data = piece.encode() if data is None else data
        return data.removeprefix(self._strip) if first else self._joint + data


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    return [inner for part in step["decoders"] for inner in _flatten(part)] if step["type"] == "Sequence" else [step]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: the printable ones stand for themselves."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(moved)}


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text isn't valid Unicode: lone surrogate at position {error.start}") from None


def _check_id(token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise ValueError(f"token id {token_id} is outside the vocabulary of {vocab_size}")


def _check_chat(messages: Sequence[Message], add_generation_prompt: bool, continue_final_message: bool) -> None:
    if isinstance(messages, (str, Mapping)) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError("messages must be a list of objects")
    if not messages:
        raise ValueError("messages is empty")
    if add_generation_prompt and continue_final_message:
        raise ValueError("add_generation_prompt and continue_final_message exclude each other")


def _ids(value: int | list[int] | None) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def _load_pretrained(path: str, revision: str | None) -> tuple[Any, set[int]]:
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    eos: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            eos |= _ids(json.loads(Path(file).read_text(encoding="utf-8")).get("eos_token_id"))
    return tokenizer, eos


def _load_gguf(path: str, revision: str | None) -> tuple[Any, set[int]]:
    from engine.models.gguf import gguf_tokenizer, read_header

    metadata = read_header(Path(path))[0]
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return gguf_tokenizer(Path(path)), {metadata[key] for key in keys if key in metadata}
