"""Tokenizers inside GGUF files: made-up ones, written by the gguf library, read here, against the ones written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from engine.tokenization import load_tokenizer
from tests.engine.made_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

# The patterns that the makers of the models published.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "naïve 東京 don't DON'T 1234567 42\n\n  x = 3.14  # ok",
    "the dog, again and again!  ",
    "<|end|>Hi<|stop|> <tool call>",
    "cafe\u0301 zebra",
    "",
]
TYPES = gguf.TokenType
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"


def like(pre: str) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer with the pre-tokenizer of that family, and a word that no merge makes."""
    made = byte_level_tokenizer()
    state = json.loads(made.backend_tokenizer.to_str())
    vocab = state["model"]["vocab"] | {"Ġzebra": len(state["model"]["vocab"])}
    merges = [tuple(merge) for merge in state["model"]["merges"]]
    fast = FastTokenizer(BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    fast.add_special_tokens([name for name in made.get_vocab() if name.startswith("<|")])
    fast.add_tokens([AddedToken(name, normalized=False) for name in ("<tool call>", "<äö>")])
    digits = {"llama-bpe": "{1,3}", "qwen2": ""}.get(pre)
    if digits is None:
        fast.pre_tokenizer = made.backend_tokenizer.pre_tokenizer
    else:
        split = pre_tokenizers.Split(Regex(PATTERN % digits), "isolated")
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.pre_tokenizer = pre_tokenizers.Sequence([split, rest])
    if pre == "qwen2":
        fast.normalizer = normalizers.NFC()
    fast.decoder = made.backend_tokenizer.decoder
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<|begin|>", eos_token="<|end|>")


def write(path: Path, made: Any, kind: str, change: Callable[[gguf.GGUFWriter], None]) -> Path:
    """The made tokenizer as llama.cpp's converter writes it."""
    vocab = made.get_vocab()
    names = sorted(vocab, key=vocab.__getitem__)
    added = made.added_tokens_decoder
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(names)
    types = []
    for name in names:
        token = added.get(vocab[name])
        plain = TYPES.BYTE if name.startswith("<0x") else TYPES.NORMAL
        types.append(plain if token is None else TYPES.CONTROL if token.special else TYPES.USER_DEFINED)
    writer.add_token_types(types)
    if kind == "gpt2":
        merges = json.loads(made.backend_tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(merge) for merge in merges])
    else:
        writer.add_token_scores([-float(i) for i in range(len(names))])
    writer.add_bos_token_id(made.bos_token_id)
    writer.add_eos_token_id(made.eos_token_id)
    writer.add_chat_template(TEMPLATE)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("pre", ["default", "llama-bpe", "qwen2"])
def test_byte_level(pre: str, add_bos: bool | None, tmp_path: Path) -> None:
    made = like(pre)

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre(pre)
        writer.add_eot_token_id(2)
        writer.add_eom_token_id(3)
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)

    tokenizer = load_tokenizer(write(tmp_path / "made.gguf", made, "gpt2", change))
    has_bos = pre == "llama-bpe" if add_bos is None else add_bos  # llama.cpp's default for this family is to add it
    for text in TEXTS:
        expected = made(text, add_special_tokens=False).input_ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert tokenizer.encode(text) == [0] * has_bos + expected
        normal = made.backend_tokenizer.normalizer.normalize_str(text) if pre == "qwen2" else text
        assert tokenizer.decode(expected, skip_special_tokens=False) == normal
    # the template writes BOS, and only the template
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert chat == [0, *made("Hi", add_special_tokens=False).input_ids, 1]
    assert tokenizer.eos_token_ids == {1, 2, 3} and tokenizer.bos_token_id == 0
    assert tokenizer.vocab_size == len(made)


@pytest.mark.parametrize("add_bos", [None, False])
def test_sentencepiece(add_bos: bool | None, tmp_path: Path) -> None:
    made = sentencepiece_tokenizer()

    def change(writer: gguf.GGUFWriter) -> None:
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)

    tokenizer = load_tokenizer(write(tmp_path / "made.gguf", made, "llama", change))
    for text in TEXTS[:2]:
        ids = tokenizer.encode(text)
        assert (ids[0] == made.bos_token_id) == (add_bos is None)
        assert tokenizer.decode(ids) == text
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert chat.count(made.bos_token_id) == 1
    assert tokenizer.eos_token_ids == {made.eos_token_id} and tokenizer.vocab_size == len(made)


def test_a_broken_vocabulary_is_one_error(tmp_path: Path) -> None:
    for change in (
        lambda writer: writer.kv_data[-1].pop("tokenizer.ggml.tokens"),
        lambda writer: writer.kv_data[-1].pop("tokenizer.ggml.merges"),
        lambda writer: writer.add_string("tokenizer.ggml.pre", "dagger"),
    ):
        path = write(tmp_path / "made.gguf", like("default"), "gpt2", change)
        with pytest.raises(ValueError, match=r"no tokenizer can be loaded from '.*made\.gguf'"):
            load_tokenizer(path)
