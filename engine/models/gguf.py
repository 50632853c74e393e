"""GGUF files read as Hugging Face checkpoints: the metadata becomes a config, tensors get its names and row order."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from engine.models.decoder import DecoderConfig
from engine.models.layers import rope_frequencies

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"  # not a weight: the divisors of Llama 3's rope scaling, see `_llama3_scaling`

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SLICE = 1 << 23  # elements dequantised at a time
# A header beyond these is a broken one, refused before it can take memory.
_MAX_ENTRIES, _MAX_STRING, _MAX_ARRAY, _MAX_DIMS = 1 << 16, 1 << 24, 1 << 20, 4

# How the vocabulary's `tokenizer.ggml.pre` splits text; transformers rebuilds these from the file, and not others.
_TIKTOKEN = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # add BOS by default, and take a word they know as it is
_QWEN = {"qwen2", "deepseek-r1-qwen"}
_PRE_TOKENIZERS = {None, "default", "gpt-2", "smollm", *_TIKTOKEN, *_QWEN}


class _TensorInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]  # slowest dimension first, as torch has it
    kind: gguf.GGMLQuantizationType
    start: int  # bytes from the beginning of the file
    size: int


class GGUFCheckpoint:
    """A GGUF file of version 2 or 3 (little endian), of the llama, qwen2 or qwen3 architecture.

    `config` and `generation_config` have the form of the Hugging Face files of those names; `shapes` maps Hugging
    Face tensor names to shapes. Raises ValueError for a file that is broken or of a kind that isn't supported, after
    reading no more than its header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, tensors = read_header(path)
        self._raw = {info.name: info for info in tensors}
        self._tensors = {_hugging_face_name(info.name, path): info for info in tensors if info.name != _ROPE_FREQS}
        self.shapes = {name: info.shape for name, info in self._tensors.items()}
        self.config = self._config()
        self.generation_config = {"eos_token_id": self.config["eos_token_id"]}

    dtype = torch.bfloat16  # what a quantised file becomes when nobody asks for another

    def read(self, name: str) -> Tensor:
        """The tensor of that Hugging Face name, dequantised to fp32."""
        tensor = self._dequantize(self._tensors[name])
        if self.config["model_type"] in ("llama", "mistral") and re.search(r"self_attn\.[qk]_proj\.", name):
            # Files of this architecture have the rows of a head interleaved, for a rotation of neighbouring pairs.
            tensor = tensor.unflatten(0, (-1, self.config["head_dim"] // 2, 2)).transpose(1, 2).flatten(0, 2)
        return tensor

    def _dequantize(self, info: _TensorInfo) -> Tensor:
        """Slice by slice, as the library's arithmetic takes several times the memory of its result."""
        *rows, width = info.shape
        count, row_bytes = math.prod(rows), info.size // math.prod(rows)
        result = np.empty((count, width), np.float32)
        try:
            with open(self.path, "rb") as file:
                file.seek(info.start)
                for start in range(0, count, step := max(1, _SLICE // width)):
                    part = result[start : start + step]
                    data = np.fromfile(file, np.uint8, len(part) * row_bytes).reshape(-1, row_bytes)
                    part[:] = gguf.dequantize(data, info.kind)
        except NotImplementedError:
            raise ValueError(f"{self.path}: tensor {info.name} has type {info.kind.name}, not supported") from None
        return torch.from_numpy(result).reshape(info.shape)

    def _get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(key, default)
        if value is default and default is not None:
            return value
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{self.path}: {key} is {str(value)[:80]}, expected {kind.__name__}")
        return value

    def _config(self) -> dict[str, Any]:
        architecture = self._get("general.architecture", str)
        if architecture not in ARCHITECTURES:
            raise ValueError(
                f"{self.path}: GGUF architecture {architecture!r} is not supported; known: {', '.join(ARCHITECTURES)}"
            )

        def number(key: str, default: int | None = None) -> int:
            value = int(self._get(f"{architecture}.{key}", int, default))
            if value >> 31:
                raise ValueError(f"{self.path}: {architecture}.{key} is {value}")
            return value

        if number("expert_count", 0):
            raise ValueError(f"{self.path}: mixture-of-experts models are not supported")
        if "model.embed_tokens.weight" not in self.shapes:
            raise ValueError(f"{self.path}: tensor token_embd.weight is missing")
        heads, hidden = number("attention.head_count"), number("embedding_length")
        head_dim = number("attention.key_length", number("rope.dimension_count", hidden // max(heads, 1)))
        for key in ("rope.dimension_count", "attention.value_length"):
            if number(key, head_dim) != head_dim:
                raise ValueError(f"{self.path}: {architecture}.{key} {number(key)} is not the head's {head_dim}")
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"{self.path}: head dimension {head_dim} is not an even number")
        config = {
            "architectures": [ARCHITECTURES[architecture]],
            "model_type": architecture,
            "vocab_size": self.shapes["model.embed_tokens.weight"][0],
            "hidden_size": hidden,
            "intermediate_size": number("feed_forward_length"),
            "num_hidden_layers": number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": number("context_length"),
            "rms_norm_eps": self._get(f"{architecture}.attention.layer_norm_rms_epsilon", float),
            "rope_parameters": self._rope(architecture, head_dim),
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "hidden_act": "silu",
            "attention_bias": architecture != "qwen2" and "model.layers.0.self_attn.q_proj.bias" in self.shapes,
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._eos_token_ids(),
            "pad_token_id": self.metadata.get("tokenizer.ggml.padding_token_id"),
        }
        if architecture == "llama" and f"{architecture}.attention.sliding_window" in self.metadata:
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
            config["sliding_window"] = number("attention.sliding_window")
        return config

    def _eos_token_ids(self) -> list[int]:
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = [self._get(f"tokenizer.ggml.{key}", int) for key in keys if f"tokenizer.ggml.{key}" in self.metadata]
        return list(dict.fromkeys(ids))

    def _rope(self, architecture: str, head_dim: int) -> dict[str, Any]:
        theta = self._get(f"{architecture}.rope.freq_base", float, 10000.0)
        prefix = f"{architecture}.rope.scaling"
        kind = self.metadata.get(f"{prefix}.type", "none")
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        if kind in ("linear", "yarn"):
            rope |= {"rope_type": kind, "factor": self._get(f"{prefix}.factor", float)}
        elif kind != "none":
            raise ValueError(f"{self.path}: rope scaling {kind!r} is not supported; known: none, linear, yarn")
        if kind == "yarn":
            rope["original_max_position_embeddings"] = self._get(f"{prefix}.original_context_length", int)
            if self.metadata.get(f"{prefix}.attn_factor", 1.0) != 1.0:
                raise ValueError(f"{self.path}: {prefix}.attn_factor is not supported")
        if _ROPE_FREQS in self._raw:
            if kind != "none":
                raise ValueError(f"{self.path}: {_ROPE_FREQS} together with rope scaling {kind!r} is not supported")
            rope |= self._llama3_scaling(head_dim, theta)
        return rope

    def _llama3_scaling(self, head_dim: int, theta: float) -> dict[str, Any]:
        """The parameters of Llama 3's scaling, of which the file has only the resulting divisors [head_dim / 2]."""
        divisors = self._dequantize(self._raw[_ROPE_FREQS])
        scaling = {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if divisors.shape != (head_dim // 2,):
            raise ValueError(f"{self.path}: {_ROPE_FREQS} has shape {list(divisors.shape)}, expected [{head_dim // 2}]")
        shape: dict[str, Any] = {"hidden_size": head_dim, "num_heads": 1, "rope_theta": theta}
        plain, _ = rope_frequencies(DecoderConfig(**shape))
        scaled, _ = rope_frequencies(DecoderConfig(**shape, rope_scaling=scaling))
        if not torch.allclose(divisors, plain / scaled, rtol=1e-3):
            raise ValueError(
                f"{self.path}: {_ROPE_FREQS} is not the rope scaling of Llama 3, and no other is supported"
            )
        return scaling


def read_header(path: Path) -> tuple[dict[str, Any], list[_TensorInfo]]:
    """Metadata and tensors of a GGUF file, checked against its size. Raises ValueError for a broken file.

    The library's GGUFReader isn't used for this: it believes every count in the file.
    """
    if path.stat().st_size < 24:
        raise ValueError(f"{path} is not a GGUF file: it is {path.stat().st_size} bytes long")
    return _Header(np.memmap(path, np.uint8, "r"), path).parse()


class _Header:
    """A bounds-checked cursor over the header of a GGUF file.

    The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """

    def __init__(self, data: np.ndarray, path: Path) -> None:
        self.data, self.path, self.position = data.data, path, 0

    def parse(self) -> tuple[dict[str, Any], list[_TensorInfo]]:
        magic, version = bytes(self._take(4)), self._number("I")
        if magic != b"GGUF":
            raise self._error(f"not a GGUF file, it starts with {magic!r}")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version} is not supported; known: 2, 3 (little endian)")
        tensor_count, metadata_count = self._number("Q"), self._number("Q")
        for what, count in (("tensors", tensor_count), ("metadata entries", metadata_count)):
            if count > _MAX_ENTRIES:
                raise self._error(f"broken header, it claims {count} {what}")
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self._string()
            if key in metadata:
                raise self._error(f"broken header, {key[:80]!r} is there twice")
            metadata[key] = self._value(self._number("I"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._error(f"broken header, general.alignment is {str(alignment)[:80]}")
        tensors = [self._tensor_info() for _ in range(tensor_count)]
        if len({info.name for info in tensors}) < tensor_count:
            raise self._error("broken header, a tensor is there twice")
        base = math.ceil(self.position / alignment) * alignment
        return metadata, [self._located(info, base) for info in tensors]

    def _tensor_info(self) -> _TensorInfo:
        name, dims = self._string(), self._number("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self._error(f"broken header, tensor {name[:80]!r} claims {dims} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dims)]))
        code, offset = self._number("I"), self._number("Q")
        try:
            kind = gguf.GGMLQuantizationType(code)
        except ValueError:
            raise self._error(f"tensor {name[:80]!r} has the unknown type {code}") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block or 0 in shape:
            raise self._error(f"broken header, tensor {name[:80]!r} of type {kind.name} has shape {shape}")
        return _TensorInfo(name, shape, kind, offset, math.prod(shape) // block * block_bytes)

    def _located(self, info: _TensorInfo, base: int) -> _TensorInfo:
        start = base + info.start
        if start + info.size > len(self.data):
            raise self._error(
                f"truncated or broken, tensor {info.name[:80]!r} ends at byte {start + info.size} of {len(self.data)}"
            )
        return info._replace(start=start)

    def _value(self, code: int) -> Any:
        if code == _STRING:
            return self._string()
        if code != _ARRAY:
            return self._scalars(code, 1)[0]
        item, count = self._number("I"), self._number("Q")
        if count > _MAX_ARRAY:
            raise self._error(f"broken header, it claims an array of {count} items")
        return [self._string() for _ in range(count)] if item == _STRING else self._scalars(item, count)

    def _scalars(self, code: int, count: int) -> list[Any]:
        if code not in _SCALARS:
            raise self._error(f"broken header, metadata of the unknown type {code}")
        form = f"<{count}{_SCALARS[code]}"
        values = struct.unpack(form, self._take(struct.calcsize(form)))
        # 1e-05 is stored in fp32: its shortest decimal is what was meant, not its expansion in fp64.
        return [float(str(np.float32(value))) for value in values] if _SCALARS[code] == "f" else list(values)

    def _string(self) -> str:
        length = self._number("Q")
        if length > _MAX_STRING:
            raise self._error(f"broken header, it claims a string of {length} bytes")
        try:
            return str(self._take(length), "utf-8")
        except UnicodeDecodeError:
            raise self._error("broken header, a string is not UTF-8") from None

    def _number(self, form: str) -> int:
        return int(struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0])

    def _take(self, size: int) -> memoryview:
        if size > len(self.data) - self.position:
            raise self._error("truncated, it ends inside its header")
        self.position += size
        return self.data[self.position - size : self.position]

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{self.path}: {what}")


def _hugging_face_name(name: str, path: Path) -> str:
    match = re.fullmatch(r"(blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[3] not in _NAMES:
        raise ValueError(f"{path}: unexpected tensor {name[:80]!r}")
    block, layer, part, leaf = match.groups()
    return f"model.layers.{int(layer)}.{_NAMES[part]}.{leaf}" if block else f"{_NAMES[part]}.{leaf}"


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer inside a GGUF file, with its chat template, as transformers' fast tokenizer.

    Raises ValueError that names the file's pre-tokenizer when it is one that can't be rebuilt from the file.
    """
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    metadata = read_header(path)[0]
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(f"{path}: pre-tokenizer {pre!r} is not supported; name another tokenizer's folder or hub id")
    tiktoken = pre in _TIKTOKEN
    options = {"add_bos_token": True} if tiktoken and "tokenizer.ggml.add_bos_token" not in metadata else {}
    made = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **options)
    # transformers leaves things out, spells some tokens otherwise, and adds <|endoftext|> where the file has none
    names, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    state = json.loads(made.backend_tokenizer.to_str())
    state["model"]["vocab"] = {name: i for i, name in enumerate(names)}
    added = {token["id"]: token for token in state["added_tokens"] if token["id"] < len(names)}
    for i, (name, kind) in enumerate(zip(names, kinds, strict=False)):
        if kind == gguf.TokenType.USER_DEFINED:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
            added.setdefault(i, {"id": i, "content": name, **flags})
    state["added_tokens"] = [added[i] for i in sorted(added)]
    if tiktoken:
        state["model"]["ignore_merges"] = True
    if pre in _QWEN:
        state["normalizer"] = {"type": "NFC"}
    tokenizer = Tokenizer.from_str(json.dumps(state))
    if pre == "smollm":  # digits stand alone: "  7" is two spaces and a digit
        digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=made.chat_template, **made.special_tokens_map
    )
