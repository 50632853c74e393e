"""Tokenizers, streamed text and stop strings, against transformers and against brute force."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from engine.schemas import SamplingParams
from engine.tokenization import (
    HuggingFaceTokenizer,
    IncrementalDetokenizer,
    SimpleCharacterTokenizer,
    TextStream,
    Tokenizer,
    load_tokenizer,
)
from tests.engine.made_tokenizers import CORPUS, byte_level_tokenizer, sentencepiece_tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
TEXT = st.text(
    st.sampled_from("abc the.\n\té漢字👩\u200d👧e\u0301🇩🇪 ") | st.characters(exclude_categories=["Cs"]), max_size=30
)
# Text with nothing in it that reads as a control token, or that is broken to begin with.
CLEAN = TEXT.filter(lambda text: BROKEN not in text and "<" not in text)
PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('no role ' + m['role']) }}{% endif %}[{{ m['role'] }}]{{ m['content'] }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}{% if mood is defined %}{{ mood }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]


def _unigram() -> PreTrainedTokenizerFast:
    fast = FastTokenizer(models.Unigram())
    fast.normalizer = normalizers.NFKC()
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    fast.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", eos_token="</s>")


def _words() -> PreTrainedTokenizerFast:
    fast = FastTokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "the": 2, "dog": 3, ".": 4}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", eos_token="<eos>")


MADE = {
    "byte_level": byte_level_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "unigram": _unigram,
    "words": _words,
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a made-up tokenizer by name; the byte-level one has a template and three EOS ids."""
    root = tmp_path_factory.mktemp("tokenizers")

    def make(name: str) -> Path:
        path = root / name
        if not path.exists():
            made = MADE[name]()
            if name == "byte_level":
                made.chat_template = TEMPLATE
            made.save_pretrained(path)
            if name == "byte_level":
                (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
                (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 3}))
        return path

    return make


@pytest.fixture(scope="session", params=[*MADE, "smollm2"])
def tokenizer(request: pytest.FixtureRequest, folder: Callable[[str], Path]) -> HuggingFaceTokenizer:
    return load_tokenizer(request.getfixturevalue("smollm2") if request.param == "smollm2" else folder(request.param))


@pytest.fixture(scope="session")
def byte_level(folder: Callable[[str], Path]) -> HuggingFaceTokenizer:
    return load_tokenizer(folder("byte_level"))


@pytest.fixture(scope="session")
def sentencepiece(folder: Callable[[str], Path]) -> HuggingFaceTokenizer:
    return load_tokenizer(folder("sentencepiece"))


def _chunks(data: st.DataObject, ids: Sequence[int]) -> list[Sequence[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[start:end] for start, end in pairwise([0, *cuts, len(ids)])]


def _stream(tokenizer: Tokenizer, prompt: Sequence[int], chunks: Sequence[Sequence[int]], skip: bool = True) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return "".join(detokenizer.push(chunk) for chunk in chunks) + detokenizer.flush()


def _any_ids(tokenizer: HuggingFaceTokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20)


def _reference(tokenizer: HuggingFaceTokenizer, ids: list[int], skip: bool = True) -> str:
    """What transformers says, but with broken runs of byte-fallback tokens read as UTF-8 instead of all U+FFFD."""
    text = tokenizer.hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    if BROKEN not in text or not isinstance(tokenizer.hf, LlamaTokenizer):
        return text
    if skip:
        ids = [token_id for token_id in ids if token_id not in tokenizer.hf.all_special_ids]
    data = b""
    for piece in tokenizer.hf.convert_ids_to_tokens(ids):
        data += bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") else piece.replace("▁", " ").encode()
    return data.decode("utf-8", "replace").removeprefix(" ")


def test_importing_loads_neither_transformers_nor_torch() -> None:
    code = (
        "import sys, engine.tokenization; sys.exit(bool({'torch', 'transformers', 'tokenizers'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# Text to ids and back


@PROPERTY
@given(text=TEXT, special=st.booleans())
def test_encode_gives_the_ids_of_transformers(tokenizer: HuggingFaceTokenizer, text: str, special: bool) -> None:
    assert tokenizer.encode(text, special) == tokenizer.hf(text, add_special_tokens=special).input_ids


def test_a_long_prompt_is_neither_cut_nor_padded(byte_level: HuggingFaceTokenizer, tmp_path: Path) -> None:
    byte_level.hf.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    saved = json.loads(file.read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    pad = {"direction": "Left", "pad_id": 1, "pad_type_id": 0, "pad_token": "<|end|>", "pad_to_multiple_of": None}
    saved["padding"] = {"strategy": {"Fixed": 99_999}, **pad}
    file.write_text(json.dumps(saved))
    text = "the dog " * 20_000
    assert load_tokenizer(tmp_path).encode(text, False) == byte_level.encode(text, False)
    assert byte_level.decode(byte_level.encode(text, False)) == text


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", b"bytes", None, 3])
def test_text_that_is_none_is_refused(byte_level: HuggingFaceTokenizer, text: str) -> None:
    for tokenizer in (byte_level, SimpleCharacterTokenizer()):
        with pytest.raises(ValueError, match="text"):
            tokenizer.encode(text)


def test_a_character_without_a_token_is_a_value_error(tmp_path: Path) -> None:
    fast = FastTokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="can't be tokenized"):
        load_tokenizer(tmp_path).encode("zebra")


@PROPERTY
@given(data=st.data(), skip=st.booleans())
def test_decode_gives_the_text_of_transformers(
    tokenizer: HuggingFaceTokenizer, data: st.DataObject, skip: bool
) -> None:
    wrong = tokenizer.hf.get_added_vocab().get("<äö>")  # the library decodes added tokens as if they were byte-level
    ids = [token_id for token_id in data.draw(_any_ids(tokenizer)) if token_id != wrong]
    assert tokenizer.decode(ids, skip) == _reference(tokenizer, ids, skip)


@PROPERTY
@given(text=CLEAN)
def test_text_survives_the_round_trip(
    byte_level: HuggingFaceTokenizer, sentencepiece: HuggingFaceTokenizer, text: str
) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text
    if "▁" not in text and not text.startswith(" "):  # the library's encoder takes the leading space for its own
        assert sentencepiece.decode(sentencepiece.encode(text)) == text


def test_an_added_token_is_its_own_text(byte_level: HuggingFaceTokenizer) -> None:
    text = "a<äö>b <tool call>"
    assert len(byte_level.encode(text, False)) < len(text)
    assert byte_level.decode(byte_level.encode(text)) == text


@pytest.mark.parametrize("bad", [-1, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_a_value_error(byte_level: HuggingFaceTokenizer, bad: int) -> None:
    for tokenizer in (byte_level, SimpleCharacterTokenizer()):
        healthy = IncrementalDetokenizer(tokenizer, [])
        sick = IncrementalDetokenizer(tokenizer, [])
        ids = tokenizer.encode("dog", False)
        for use in (lambda: tokenizer.decode([bad]), lambda: sick.push([*ids, bad]), lambda: sick.push([bad])):  # noqa: B023
            with pytest.raises(ValueError, match="outside the vocabulary"):
                use()
        assert healthy.push(ids) == sick.push(ids) == "dog"


def test_vocabulary_and_special_ids(byte_level: HuggingFaceTokenizer) -> None:
    assert byte_level.vocab_size == len(byte_level.hf)
    assert byte_level.decode([byte_level.vocab_size - 1]) == "<äö>"
    assert byte_level.eos_token_ids == {1, 2, 3}
    assert (byte_level.bos_token_id, byte_level.pad_token_id) == (0, 1)
    assert byte_level.special_token_ids == {0, 1, 2, 3}


def test_an_unsupported_decoder_is_refused_by_name(tmp_path: Path) -> None:
    fast = FastTokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}))
    fast.decoder = decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="WordPiece"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["missing", "empty", "missing.gguf"])
def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=name):
        load_tokenizer(tmp_path / name)


def test_a_gguf_file_gives_the_tokenizer_of_the_folder(smollm2: Path, smollm2_gguf: Path) -> None:
    of_file, of_folder = load_tokenizer(smollm2_gguf), load_tokenizer(smollm2)
    text = "".join(CORPUS) + "<|im_start|>  7"
    assert of_file.encode(text) == of_folder.encode(text)
    assert of_file.eos_token_ids == of_folder.eos_token_ids == {2}
    assert of_file.vocab_size == of_folder.vocab_size == 49152
    assert of_file.encode_chat(USER) == of_folder.encode_chat(USER)


# Characters


def test_character_tokenizer() -> None:
    tokenizer = SimpleCharacterTokenizer()
    text = "Hello, world!\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text)
    assert max(tokenizer.encode("".join(map(chr, range(32, 127))))) < tokenizer.vocab_size
    assert tokenizer.decode(tokenizer.encode("a漢")) == "a" + BROKEN
    assert tokenizer.decode([0, *tokenizer.encode("a"), *tokenizer.eos_token_ids]) == "a"
    assert tokenizer.decode([0, 1], skip_special_tokens=False) == "<pad><eos>"


@pytest.mark.parametrize("size", [4, 98, 99, 256, 60_000])
def test_character_tokenizer_of_a_size(size: int) -> None:
    tokenizer = SimpleCharacterTokenizer(size)
    assert tokenizer.vocab_size == size
    ids = list(range(3, size))
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


@pytest.mark.parametrize("vocab", ["", 3, -1, 10**9, "a\ud800"])
def test_character_tokenizer_refuses_a_bad_vocabulary(vocab: str | int) -> None:
    with pytest.raises(ValueError, match="vocab"):
        SimpleCharacterTokenizer(vocab)


def test_character_tokenizer_of_given_characters() -> None:
    tokenizer = SimpleCharacterTokenizer("abba漢")
    assert tokenizer.vocab_size == 6
    assert tokenizer.decode(tokenizer.encode("漢ab")) == "漢ab"


# Chat


def test_chat_template_is_that_of_transformers(smollm2: Path, byte_level: HuggingFaceTokenizer) -> None:
    chat = [*USER, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "東京?"}]
    for tokenizer in (byte_level, load_tokenizer(smollm2)):
        for options in ({}, {"add_generation_prompt": False}):
            expected = tokenizer.hf.apply_chat_template(chat, **{"add_generation_prompt": True, **options})
            assert tokenizer.encode_chat(chat, **options) == expected.input_ids
        opened = {"add_generation_prompt": False, "continue_final_message": True}
        assert tokenizer.apply_chat_template(chat[:2], **opened).endswith("Hello")


def test_chat_has_one_bos(byte_level: HuggingFaceTokenizer) -> None:
    assert byte_level.encode("Hi")[0] == byte_level.bos_token_id
    assert byte_level.encode_chat(USER).count(0) == 1


def test_chat_template_variables(byte_level: HuggingFaceTokenizer) -> None:
    text = byte_level.apply_chat_template(USER, tools=[{"type": "function"}], mood=" glad")
    assert text == "<|begin|>[user]Hi<|end|>1 tools glad[assistant]"
    with pytest.raises(ValueError, match="chat_template"):
        byte_level.apply_chat_template(USER, chat_template="{{ 1 }}")


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([{"role": "system", "content": "x"}], "no role system"),
        ([{"content": "x"}], "chat template"),
        ([{"role": "user", "content": 3}, {"role": 1}], "chat template"),
        ([], "empty"),
        (["Hi"], "list of objects"),
        ([USER], "list of objects"),
        ("Hi", "list of objects"),
        ({"role": "user"}, "list of objects"),
    ],
)
def test_chat_that_cannot_be_rendered_is_a_value_error(
    byte_level: HuggingFaceTokenizer, messages: list, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        byte_level.encode_chat(messages)


def test_chat_options_that_exclude_each_other(byte_level: HuggingFaceTokenizer) -> None:
    for tokenizer in (byte_level, SimpleCharacterTokenizer()):
        with pytest.raises(ValueError, match="exclude"):
            tokenizer.apply_chat_template(USER, continue_final_message=True)


def test_chat_template_is_sandboxed(byte_level: HuggingFaceTokenizer, tmp_path: Path) -> None:
    byte_level.hf.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.append(1) }}{{ ''.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="chat template"):
        load_tokenizer(tmp_path).apply_chat_template(USER)


def test_chat_without_a_template_is_plain_text(sentencepiece: HuggingFaceTokenizer) -> None:
    chat = [*USER, {"role": "assistant", "content": "Hel"}]
    for tokenizer in (sentencepiece, SimpleCharacterTokenizer()):
        assert not tokenizer.has_chat_template
        assert tokenizer.apply_chat_template(USER) == "user: Hi\nassistant:"
        assert tokenizer.apply_chat_template(USER, add_generation_prompt=False) == "user: Hi\n"
        opened = tokenizer.apply_chat_template(chat, add_generation_prompt=False, continue_final_message=True)
        assert opened == "user: Hi\nassistant: Hel"
        for bad in ({"tools": [{}]}, {"mood": 1}):
            with pytest.raises(ValueError, match="no chat template"):
                tokenizer.apply_chat_template(USER, **bad)
        with pytest.raises(ValueError, match=r"messages\[0\]"):
            tokenizer.apply_chat_template([{"role": "user", "content": [{}]}])
    assert sentencepiece.encode_chat(USER) == sentencepiece.hf("user: Hi\nassistant:").input_ids
    assert sentencepiece.encode_chat(USER)[0] == sentencepiece.bos_token_id


# Streams


@PROPERTY
@given(data=st.data(), prompt=CLEAN, skip=st.booleans())
def test_a_stream_adds_up_to_the_text_of_the_whole(
    tokenizer: HuggingFaceTokenizer, data: st.DataObject, prompt: str, skip: bool
) -> None:
    prompt_ids, ids = tokenizer.encode(prompt), data.draw(_any_ids(tokenizer))
    before, whole = tokenizer.decode(prompt_ids, skip), tokenizer.decode(prompt_ids + ids, skip)
    assert whole.startswith(before)
    assert _stream(tokenizer, prompt_ids, _chunks(data, ids), skip) == whole[len(before) :]


@PROPERTY
@given(data=st.data(), prompt=CLEAN, text=CLEAN)
def test_a_stream_of_text_is_that_text_and_never_broken(
    tokenizer: HuggingFaceTokenizer, data: st.DataObject, prompt: str, text: str
) -> None:
    prompt_ids = tokenizer.encode(prompt)
    ids = tokenizer.encode(prompt + " " + text)
    if ids[: len(prompt_ids)] != prompt_ids:
        prompt_ids = []
    ids = ids[len(prompt_ids) :]
    whole = _reference(tokenizer, prompt_ids + ids)
    expected = whole[len(_reference(tokenizer, prompt_ids)) :]
    assume(BROKEN not in whole)  # SmolLM2's vocabulary lacks some bytes
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
    shown = ""
    for chunk in _chunks(data, ids):
        shown += detokenizer.push(chunk)
        assert expected.startswith(shown)
    assert shown == expected
    assert detokenizer.flush() == ""


def test_broken_bytes_are_broken_only_where_they_are(
    byte_level: HuggingFaceTokenizer, sentencepiece: HuggingFaceTokenizer
) -> None:
    for tokenizer, name in ((byte_level, "ä½ł"), (sentencepiece, None)):
        byte_ids = {}
        for byte in (0xE4, 0xBD, 0xA0, 0xFF, 0x41):
            text = f"<0x{byte:02X}>" if name is None else {0xE4: "ä", 0xBD: "½", 0xA0: "ł", 0xFF: "ÿ", 0x41: "A"}[byte]
            byte_ids[byte] = tokenizer.hf.convert_tokens_to_ids(text)

        def run(*bytes_: int, t: Tokenizer = tokenizer, ids: dict[int, int] = byte_ids) -> list[str]:
            detokenizer = IncrementalDetokenizer(t, t.encode("dog"))
            return [*(detokenizer.push([ids[byte]]) for byte in bytes_), detokenizer.flush()]

        assert run(0xE4, 0xBD, 0xA0) == ["", "", "你", ""]
        assert run(0xE4, 0xBD) == ["", "", BROKEN]
        assert run(0xE4, 0x41) == ["", BROKEN + "A", ""]
        assert run(0xE4, 0xBD, 0xA0, 0xFF, 0x41) == ["", "", "你", BROKEN, "A", ""]
        assert run(*[0xFF] * 9) == [BROKEN] * 9 + [""]


def test_a_character_that_the_prompt_began(byte_level: HuggingFaceTokenizer) -> None:
    first, *rest = byte_level.encode("你", False)
    assert rest
    for before in ([], byte_level.encode("dog", False)):
        assert _stream(byte_level, [*before, first], [rest]) == "你"
        assert _stream(byte_level, [*before, first], [byte_level.encode("A", False)]) == "A"
        assert _stream(byte_level, [*before, first], []) == ""


def test_leading_space_depends_on_the_context(sentencepiece: HuggingFaceTokenizer) -> None:
    ids = sentencepiece.encode("the dog", False)
    assert _stream(sentencepiece, [], [ids]) == "the dog"
    assert _stream(sentencepiece, [sentencepiece.bos_token_id], [ids]) == "the dog"
    assert _stream(sentencepiece, sentencepiece.encode("fox"), [ids]) == " the dog"


def test_work_per_token_is_constant(byte_level: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = HuggingFaceTokenizer.token_bytes
    monkeypatch.setattr(
        HuggingFaceTokenizer, "token_bytes", lambda self, *a, **k: (calls.append(1), real(self, *a, **k))[1]
    )
    ids = byte_level.encode("the dog jumps " * 400, False)
    stream = TextStream(byte_level, ids, SamplingParams(stop=["zebra"]))
    assert len(calls) <= 4
    for token_id in ids:
        stream.push([token_id])
    assert len(calls) <= len(ids) + 4


# Stop strings


def _brute(texts: list[str], stops: Sequence[str], min_tokens: int, include: bool) -> tuple[str, int, str | None]:
    """Text, tokens and stop, by looking at the whole text after every token; `texts[n]` is that after n tokens."""
    for n in range(max(1, min_tokens), len(texts)):
        found = [
            (start, start + len(stop), stop)
            for stop in stops
            for start in range(len(texts[n]))
            if texts[n].startswith(stop, start) and start + len(stop) > len(texts[n - 1])
        ]
        if found:
            start, end, stop = min(found)
            return texts[n][: end if include else start], n, stop
    return texts[-1], len(texts) - 1, None


def _run(stream: TextStream, chunks: Sequence[Sequence[int]]) -> tuple[str, int, str | None]:
    text, tokens = "", 0
    for chunk in chunks:
        delta = stream.push(chunk)
        text += delta.text
        tokens += len(delta.tokens)
        assert delta.stop == stream.stop
    text += stream.flush()
    assert stream.finished and stream.push([5]).tokens == [] and stream.flush() == ""
    assert len(stream.token_ids) == tokens and stream.text == text
    return text, tokens, stream.stop


STOPS = st.lists(st.text("ab ", min_size=1, max_size=5), max_size=4)


@settings(PROPERTY, max_examples=600)
@given(data=st.data(), text=st.text("ab ", max_size=30), stops=STOPS, minimum=st.integers(0, 12), include=st.booleans())
def test_stops_are_those_of_brute_force(
    data: st.DataObject, text: str, stops: list[str], minimum: int, include: bool
) -> None:
    tokenizer = SimpleCharacterTokenizer()
    params = SamplingParams(stop=stops, min_tokens=minimum, include_stop_str_in_output=include)
    ids = tokenizer.encode(text)
    expected = _brute([text[:n] for n in range(len(text) + 1)], stops, minimum, include)
    stream = TextStream(tokenizer, tokenizer.encode("ab a"), params)
    assert _run(stream, _chunks(data, ids)) == expected
    assert stream.token_ids == ids[: expected[1]]


@settings(PROPERTY, max_examples=300)
@given(data=st.data(), minimum=st.integers(0, 5), include=st.booleans())
def test_stops_in_tokens_of_several_characters(
    tokenizer: HuggingFaceTokenizer, data: st.DataObject, minimum: int, include: bool
) -> None:
    text = data.draw(CLEAN | st.sampled_from(CORPUS))
    prompt = tokenizer.encode("dog")
    ids = tokenizer.encode(text, False)
    whole = _reference(tokenizer, prompt + ids)
    assume(BROKEN not in whole)
    cuts = st.tuples(st.integers(0, len(whole)), st.integers(1, 6)).map(lambda cut: whole[cut[0] : cut[0] + cut[1]])
    stops = data.draw(st.lists(cuts.filter(bool) | TEXT.filter(bool), max_size=4)) if whole else []
    before = len(_reference(tokenizer, prompt))
    texts = [_reference(tokenizer, prompt + ids[:n]).rstrip(BROKEN)[before:] for n in range(len(ids) + 1)]
    params = SamplingParams(stop=stops, min_tokens=minimum, include_stop_str_in_output=include)
    assert _run(TextStream(tokenizer, prompt, params), _chunks(data, ids)) == _brute(texts, stops, minimum, include)


@PROPERTY
@given(data=st.data(), stops=STOPS, minimum=st.integers(0, 5), include=st.booleans())
def test_a_resumed_stream_goes_on_where_it_was(
    byte_level: HuggingFaceTokenizer, data: st.DataObject, stops: list[str], minimum: int, include: bool
) -> None:
    params = SamplingParams(stop=stops, min_tokens=minimum, include_stop_str_in_output=include)
    ids = data.draw(_any_ids(byte_level) | st.text("ab ", max_size=20).map(lambda text: byte_level.encode(text, False)))
    cut = data.draw(st.integers(0, len(ids)))
    whole, resumed = TextStream(byte_level, [], params), TextStream(byte_level, [], params, output_ids=ids[:cut])
    whole.push(ids[:cut])
    assert (resumed.text, resumed.token_ids, resumed.stop) == (whole.text, whole.token_ids, whole.stop)
    assert resumed.push(ids[cut:]) == whole.push(ids[cut:])
    assert resumed.flush() == whole.flush()
    assert (resumed.text, resumed.token_ids, resumed.stop) == (whole.text, whole.token_ids, whole.stop)


def _deltas(text: str, **params: object) -> list[str]:
    tokenizer = SimpleCharacterTokenizer()
    stream = TextStream(tokenizer, [], SamplingParams(**params))
    return [*(stream.push([token_id]).text for token_id in tokenizer.encode(text)), stream.flush()]


def test_only_a_tail_that_could_begin_a_stop_is_held_back() -> None:
    assert _deltas("abcabX", stop="abX") == ["", "", "abc", "", "", "", ""]
    assert _deltas("aab", stop="abX") == ["", "a", "", "ab"]
    assert _deltas("xyz", stop="abX") == ["x", "y", "z", ""]
    assert _deltas("ab", stop=[]) == ["a", "b", ""]


def test_the_earliest_start_wins_within_a_token(byte_level: HuggingFaceTokenizer) -> None:
    (token_id,) = byte_level.encode(" over", False)
    text = " over"
    stream = TextStream(byte_level, [], SamplingParams(stop=[text[2:4], text[1:4], text[3]]))
    delta = stream.push([token_id])
    assert (delta.text, delta.stop, delta.tokens) == (text[:1], text[1:4], [token_id])


def test_broken_bytes_at_the_end_can_complete_a_stop(byte_level: HuggingFaceTokenizer) -> None:
    half = byte_level.encode("你", False)[:1]
    stream = TextStream(byte_level, [], SamplingParams(stop=["a" + BROKEN]))
    delta = stream.push([*byte_level.encode("bba", False), *half])
    assert delta.text == "bb" and delta.stop is None
    assert stream.flush() == "" and stream.stop == "a" + BROKEN and stream.text == "bb"


def test_special_tokens_are_shown_if_asked(byte_level: HuggingFaceTokenizer) -> None:
    for skip, expected in ((True, ""), (False, "<|stop|>")):
        stream = TextStream(byte_level, [], SamplingParams(skip_special_tokens=skip))
        assert stream.push([2]).text == expected


def test_ids_from_arrays_become_ints() -> None:
    for stops in ([], ["zz"]):
        stream = TextStream(SimpleCharacterTokenizer(), [], SamplingParams(stop=stops))
        delta = stream.push(np.array([70, 71], dtype=np.int32))
        assert [type(token_id) for token_id in delta.tokens + stream.token_ids] == [int] * 4


def test_many_long_stops_cost_a_constant_a_character() -> None:
    """The worst case of a naive search: 16 stops of 512 characters that nearly match all the time."""
    tokenizer = SimpleCharacterTokenizer()
    stops = ["a" * 511 + chr(98 + i) for i in range(16)]
    stream = TextStream(tokenizer, [], SamplingParams(stop=stops))
    text = "a" * 3000
    shown = "".join(stream.push([token_id]).text for token_id in tokenizer.encode(text))
    assert len(shown) == 3000 - 511
    assert stream.push(tokenizer.encode("q")).stop == stops[15]
