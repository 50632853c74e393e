"""Weights come in: a Hugging Face folder, a hub id or a GGUF file becomes a DecoderModel.

A family of models is a row of data in `FAMILIES`; there is one decoder for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from engine.models.decoder import DecoderConfig, DecoderModel
from engine.models.gguf import GGUFCheckpoint
from engine.schemas import SamplingParams
from engine.tokenization import Tokenizer


class Family(NamedTuple):
    """What Hugging Face's implementation of a model type does; a string names the config key that decides."""

    architecture: str
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: str = "none"  # none; all: every layer has it; some: those that `layer_types` calls sliding


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "attention_bias", "attention_bias", "mlp_bias"),
    "mistral": Family("MistralForCausalLM", window="all"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, window="some"),
    "qwen3": Family("Qwen3ForCausalLM", "attention_bias", "attention_bias", qk_norm=True, window="some"),
}

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The engine's table of tokens grows with the context, so that a mistaken one would take the memory.
MAX_CONTEXT = 1 << 22
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
_HUB_UNUSED = ["consolidated*", "*/*"]  # the same weights in another form
_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Checkpoint(Protocol):
    """Weights and what describes them, in Hugging Face's terms, wherever they come from."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype

    def read(self, name: str) -> Tensor:
        """The tensor of that name, on the CPU. ValueError when it isn't stored as plain numbers."""
        ...


class FolderCheckpoint:
    """A folder with config.json and safetensors, sharded or not. Tensors are read one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = _read_json(generation) if generation.exists() else {}
        shards = [_open_weights(path / name) for name in self._file_names()]
        self._files = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118, not a dict
        headers = {name: shard.get_slice(name) for name, shard in self._files.items()}
        self.shapes = {name: tuple(header.get_shape()) for name, header in headers.items()}
        self._stored = {name: header.get_dtype() for name, header in headers.items()}
        named = str(self.config.get("dtype") or self.config.get("torch_dtype"))
        self.dtype = DTYPES.get(named) or _STORED.get(next(iter(self._stored.values()), "F32"), torch.float32)

    def read(self, name: str) -> Tensor:
        if self._stored[name] not in _STORED:
            raise ValueError(f"{self.path}: {name} is stored as {self._stored[name]}; known: {', '.join(_STORED)}")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def _file_names(self) -> list[str]:
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            weight_map = _read_json(index).get("weight_map")
            names = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
            if not all(isinstance(name, str) and Path(name).name == name for name in names):
                raise ValueError(f"{index}: weight_map is not a table of tensors and files beside it")
            return sorted({str(name) for name in names})
        if (self.path / "model.safetensors").exists():
            return ["model.safetensors"]
        others = sorted(file.name for file in self.path.glob("*.bin"))
        hint = f"; {', '.join(others)} must be converted to safetensors first" if others else ""
        raise ValueError(f"{self.path}: there is no model.safetensors and no model.safetensors.index.json{hint}")


def load_model(
    path_or_id: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    attn_impl: str = "mha",
    mlp_impl: str = "mlp",
    revision: str | None = None,
    token: str | None = None,
    max_seq_len: int | None = None,
) -> DecoderModel:
    """The model of a Hugging Face folder, a hub id (with `revision` and `token`) or a .gguf file, in eval mode.

    `dtype` None keeps the checkpoint's (bf16 for GGUF). `max_seq_len` lowers the context. Tensors go from disk to
    the device one by one. ValueError names what is wrong: an architecture that isn't known, a quantised or
    mixture-of-experts checkpoint, tensors that are missing, unexpected or of another shape.
    """
    checkpoint = open_checkpoint(resolve_model(path_or_id, revision, token))
    config = decoder_config(checkpoint.config, str(path_or_id), max_seq_len)
    config.attn_impl, config.mlp_impl = attn_impl, mlp_impl
    target = checkpoint.dtype if dtype is None else as_dtype(dtype)
    if config.num_layers > len(checkpoint.shapes):
        raise ValueError(f"{path_or_id}: {config.num_layers} layers, but only {len(checkpoint.shapes)} tensors")
    try:
        with torch.device("meta"):
            model = DecoderModel.from_config(config)
    except (RuntimeError, OverflowError) as error:  # sizes that no tensor can have
        raise ValueError(f"{path_or_id}: {error}") from None
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    _check_tensors(str(path_or_id), expected, checkpoint.shapes, config.tie_word_embeddings)
    for name in tqdm(expected, desc="Loading weights", unit="tensor", disable=None, leave=False):
        module, _, leaf = name.rpartition(".")
        weight = checkpoint.read(name).to(device=device, dtype=target)
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(weight))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.get_parameter("model.embed_tokens.weight")
    return model.eval()


def resolve_model(path_or_id: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """The folder or .gguf file of a model; a hub id is downloaded, with progress, unless it is cached already."""
    path = Path(path_or_id).expanduser()
    if path.exists():
        if revision is not None:
            raise ValueError(f"revision {revision!r} is for hub models; {path_or_id} is a path")
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(
            str(path_or_id), revision=revision, token=token, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_UNUSED
        )
    except HFValidationError:
        raise ValueError(f"{path_or_id}: no such file or folder, and not a hub id") from None
    except OSError as error:  # all of the hub's and the network's own
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path_or_id}: no such file or folder, and not available from the hub: {reason}") from error
    return Path(folder)


def open_checkpoint(path: Path) -> Checkpoint:
    """The folder or .gguf file as a checkpoint; only headers are read."""
    return FolderCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)


def decoder_config(config: dict[str, Any], name: str = "config.json", max_seq_len: int | None = None) -> DecoderConfig:
    """DecoderConfig of the contents of a config.json, in the form of transformers 4 or 5.

    Raises ValueError, beginning with `name`, for a model that the decoder can't express.
    """
    from transformers import CONFIG_MAPPING

    def refuse(what: str) -> ValueError:
        return ValueError(f"{name}: {what}")

    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    if any("expert" in key and isinstance(value, int) and value > 1 for key, value in config.items()):
        raise refuse(f"mixture-of-experts models are not supported ({model_type})")
    family = FAMILIES.get(str(model_type))
    if family is None or (architectures and family.architecture not in architectures):
        known = ", ".join(family.architecture for family in FAMILIES.values())
        raise refuse(
            f"architecture {', '.join(map(str, architectures)) or model_type} is not supported; known: {known}"
        )
    if (quantisation := config.get("quantization_config") or config.get("compression_config")) is not None:
        method = quantisation.get("quant_method", "?") if isinstance(quantisation, dict) else quantisation
        raise refuse(f"quantised checkpoints are not supported ({method})")
    try:  # transformers knows each family's defaults, and both forms of the rope keys
        full = CONFIG_MAPPING[model_type].from_dict(config)
    except Exception as error:
        raise refuse(str(error)) from error
    if full.hidden_act not in ("silu", "swish"):
        raise refuse(f"hidden_act {full.hidden_act!r} is not supported; known: silu")
    rope = dict(full.rope_parameters)
    theta = rope.pop("rope_theta")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise refuse("partial_rotary_factor is not supported")
    context = full.max_position_embeddings if max_seq_len is None else max_seq_len
    if context > full.max_position_embeddings:
        raise refuse(f"max_seq_len {context} is above the model's context of {full.max_position_embeddings}")
    if context > MAX_CONTEXT:
        raise refuse(f"a context of {context} tokens is above {MAX_CONTEXT}: lower it with max_seq_len")
    if rope["rope_type"] == "yarn":
        rope.setdefault("original_max_position_embeddings", full.max_position_embeddings)

    def switch(value: bool | str) -> bool:
        return value if isinstance(value, bool) else bool(getattr(full, value, False))

    window, window_layers = None, None
    if family.window != "none":
        window = full.sliding_window
    if family.window == "some":
        window_layers = tuple(i for i, kind in enumerate(full.layer_types) if kind == "sliding_attention")
        window = window if window_layers else None
    try:
        return DecoderConfig(
            vocab_size=full.vocab_size,
            hidden_size=full.hidden_size,
            num_layers=full.num_hidden_layers,
            num_heads=full.num_attention_heads,
            num_kv_heads=full.num_key_value_heads,
            head_dim=getattr(full, "head_dim", None) or 0,
            intermediate_size=full.intermediate_size,
            max_seq_len=context,
            window_size=window,
            window_layers=window_layers if window else None,
            rms_norm_eps=full.rms_norm_eps,
            rope_theta=theta,
            rope_scaling=None if rope["rope_type"] == "default" else rope,
            tie_word_embeddings=full.tie_word_embeddings,
            qkv_bias=switch(family.qkv_bias),
            attention_out_bias=switch(family.out_bias),
            mlp_bias=switch(family.mlp_bias),
            qk_norm=family.qk_norm,
            model_type=str(model_type),
        )
    except ValueError as error:
        raise refuse(str(error)) from None


def load_generation_defaults(path: Path) -> dict[str, Any]:
    """What the model's makers recommend: `eos_token_ids`, and the sampling parameters that they set.

    From generation_config.json of the folder (its EOS from config.json where it has none) or the GGUF's header. The
    keys are those of SamplingParams. Raises ValueError for values that can't be used.
    """
    checkpoint = open_checkpoint(path)
    generation = checkpoint.generation_config
    eos = generation.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{path}: eos_token_id is {eos!r}, expected token ids")
    sampling = {key: generation[key] for key in _SAMPLING_DEFAULTS if generation.get(key) is not None}
    if sampling.get("top_k") == 0:  # transformers' way to say no limit
        del sampling["top_k"]
    try:
        SamplingParams(**sampling)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: generation_config {first['loc'][0]}: {first['msg']}") from None
    return {"eos_token_ids": ids, **sampling}


def check_tokenizer(model: DecoderModel, tokenizer: Tokenizer) -> None:
    """Raises ValueError when the tokenizer can make ids for which the model has no row."""
    if tokenizer.vocab_size > model.vocab_size:
        sizes = f"{tokenizer.vocab_size} tokens, the model only {model.vocab_size}"
        raise ValueError(f"the tokenizer has {sizes}: they don't belong together")


def _check_tensors(
    name: str, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], tied: bool
) -> None:
    missing = expected.keys() - found.keys()
    unexpected = [
        key
        for key in found.keys() - expected.keys()
        if not key.endswith("rotary_emb.inv_freq") and not (tied and key == "lm_head.weight")
    ]
    misshapen = [
        f"{key} {list(found[key])} (expected {list(shape)})"
        for key, shape in expected.items()
        if found.get(key, shape) != shape
    ]
    problems = (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", misshapen))
    if texts := [f"tensors {what}: {_some(keys)}" for what, keys in problems if keys]:
        raise ValueError(f"{name}: {'; '.join(texts)}")


def _some(names: Iterable[str], limit: int = 5) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype by its name. ValueError lists those that weights can have."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise ValueError(f"dtype {dtype} is not supported; known: {', '.join(DTYPES)}")
    return found


def _open_weights(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} can't be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content
