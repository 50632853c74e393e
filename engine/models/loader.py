"""Weights come in: a Hugging Face folder, a hub id or a GGUF file becomes a DecoderModel, or a user's own class."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from engine.attention import attention_for, imported
from engine.models.decoder import CausalLM, DecoderModel
from engine.models.gguf import GGUFCheckpoint
from engine.schemas import SamplingParams
from engine.tokenization import Tokenizer

if TYPE_CHECKING:
    from engine.parallel import Ranks

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
_HUB_UNUSED = ["consolidated*", "*/*"]  # the same weights in another form
_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class FolderCheckpoint:
    """A folder with config.json and safetensors, sharded or not, described like a GGUFCheckpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = _read_json(generation) if generation.exists() else {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, tuple[Path, str]] = {}  # file and dtype
        for file in self._files():
            with _open_weights(file) as weights:
                for name in weights.keys():  # noqa: SIM118, not a dict
                    header = weights.get_slice(name)
                    self.shapes[name] = tuple(header.get_shape())
                    self._stored[name] = file, header.get_dtype()
        named = str(self.config.get("dtype") or self.config.get("torch_dtype"))
        _, first = next(iter(self._stored.values()), (None, "F32"))
        self.dtype = DTYPES.get(named) or _STORED.get(first, torch.float32)

    def read(self, name: str) -> Tensor:
        file, stored = self._stored[name]
        if stored not in _STORED:
            raise ValueError(f"{self.path}: {name} is stored as {stored}; known: {', '.join(_STORED)}")
        with _open_weights(file) as weights:  # anew, so that no more of the file is mapped than what is in use
            tensor: Tensor = weights.get_tensor(name)
        return tensor

    def _files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            weight_map = _read_json(index).get("weight_map")
            names = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
            if not all(isinstance(name, str) and Path(name).name == name for name in names):
                raise ValueError(f"{index}: weight_map is not a table of tensors and files beside it")
            return [self.path / name for name in sorted({str(name) for name in names})]
        if (self.path / "model.safetensors").exists():
            return [self.path / "model.safetensors"]
        others = sorted(file.name for file in self.path.glob("*.bin"))
        hint = f"; {', '.join(others)} must be converted to safetensors first" if others else ""
        raise ValueError(f"{self.path}: there is no model.safetensors and no model.safetensors.index.json{hint}")


def load_model(
    path_or_id: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    attn_impl: str = "auto",
    mlp_impl: str = "mlp",
    revision: str | None = None,
    token: str | None = None,
    max_seq_len: int | None = None,
    model_class: type[CausalLM] | str = DecoderModel,
    ranks: Ranks | None = None,
) -> CausalLM:
    """The model of a Hugging Face folder, a hub id (with `revision` and `token`) or a .gguf file, in eval mode.

    `dtype` None keeps the checkpoint's (bf16 for GGUF). `max_seq_len` lowers the context. `model_class`, a CausalLM
    or its `package.module:name`, is made by its `from_checkpoint`. Tensors go from disk to the device one by one.
    ValueError names what is wrong: an architecture that isn't known, a quantised or mixture-of-experts checkpoint,
    tensors that are missing, unexpected or of another shape. With `ranks`, this process's part of it.
    """
    checkpoint = open_checkpoint(resolve_model(path_or_id, revision, token))
    target = checkpoint.dtype if dtype is None else as_dtype(dtype)
    if isinstance(model_class, str):
        model_class = imported("model_class", model_class)
    if not (isinstance(model_class, type) and issubclass(model_class, CausalLM)):
        raise ValueError(f"model_class {model_class!r} is not a subclass of engine.CausalLM")
    layers = checkpoint.config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(checkpoint.shapes):
        raise ValueError(f"{path_or_id}: {layers} layers, but only {len(checkpoint.shapes)} tensors")
    try:
        with torch.device("meta"):
            model = model_class.from_checkpoint(
                checkpoint.config,
                attn_impl=attention_for(attn_impl, device),
                mlp_impl=mlp_impl,
                max_seq_len=max_seq_len,
            )
    except (ValueError, RuntimeError, OverflowError) as error:  # the last two: sizes that no tensor can have
        raise ValueError(f"{path_or_id}: {error}") from None
    shapes, whole = checkpoint.shapes, None
    if ranks is not None:
        if type(model) is not DecoderModel:
            raise ValueError(f"{path_or_id}: a {type(model).__name__} can't be divided among ranks")
        whole = model.config
        with torch.device("meta"):
            model = DecoderModel.from_config(ranks.config(whole))
        shapes = {name: ranks.shape(name, shape, whole) for name, shape in shapes.items()}
    places: dict[Tensor, list[str]] = {}  # several where weights are tied
    for name, tensor in model.state_dict(keep_vars=True).items():
        places.setdefault(tensor, []).append(name)
    if problems := _problems(places, shapes):
        raise ValueError(f"{path_or_id}: {problems}")
    largest_first = sorted(places, key=Tensor.numel, reverse=True)  # its copies are gone when the others come
    for tensor in tqdm(largest_first, desc="Loading weights", unit="tensor", disable=None, leave=False):
        stored = next(name for name in places[tensor] if name in checkpoint.shapes)
        loaded = checkpoint.read(stored)
        if ranks is not None and whole is not None:
            loaded = ranks.part(stored, loaded, whole)
        loaded = loaded.to(device=device, dtype=target, copy=True)
        if isinstance(tensor, torch.nn.Parameter):
            loaded = torch.nn.Parameter(loaded)
        for name in places[tensor]:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, loaded)
    if unsaved := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ValueError(f"{path_or_id}: buffers that the checkpoint doesn't have: {_some(unsaved)}")
    model.generation_config = checkpoint.generation_config
    if ranks is not None and whole is not None and isinstance(model, DecoderModel):
        ranks.connect(model, whole.vocab_size)
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
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{path_or_id}: no such file or folder, and not available from the hub: {reason}") from error
    return Path(folder)


def open_checkpoint(path: Path) -> FolderCheckpoint | GGUFCheckpoint:
    """The folder or .gguf file as a checkpoint; only headers are read."""
    return FolderCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)


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


def check_tokenizer(model: CausalLM, tokenizer: Tokenizer) -> None:
    """Raises ValueError when the tokenizer can make ids for which the model has no row."""
    if tokenizer.vocab_size > model.vocab_size:
        sizes = f"{tokenizer.vocab_size} tokens, the model only {model.vocab_size}"
        raise ValueError(f"the tokenizer has {sizes}: they don't belong together")


def _problems(places: dict[Tensor, list[str]], found: dict[str, tuple[int, ...]]) -> str:
    """What is wrong with the tensors of a checkpoint, in words."""
    expected = {name: tuple(tensor.shape) for tensor, names in places.items() for name in names}
    missing = [names[0] for names in places.values() if not any(name in found for name in names)]
    unexpected = [key for key in found.keys() - expected.keys() if not key.endswith("rotary_emb.inv_freq")]
    misshapen = [
        f"{key} {list(found[key])} (expected {list(shape)})"
        for key, shape in expected.items()
        if found.get(key, shape) != shape
    ]
    problems = (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", misshapen))
    return "; ".join(f"tensors {what}: {_some(keys)}" for what, keys in problems if keys)


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
