"""Low-rank adapters (LoRA, Hu et al. 2021): read from PEFT folders, merged, or several at once beside the base weights.

A linear y = x W^T gets y + s (x A^T) B^T with A [r, in], B [out, r]. Several adapters are mixed in one batch by token:
each adapter's product runs over its own tokens only, and a batch without any runs the base's linears and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine.attention import to_device
from engine.models.decoder import DecoderModel
from engine.models.layers import PackedLinear

_TARGETS = {  # a linear of the decoder: its block in a layer, and the linear that holds it once packed
    "q_proj": ("self_attn", "qkv_proj"),
    "k_proj": ("self_attn", "qkv_proj"),
    "v_proj": ("self_attn", "qkv_proj"),
    "o_proj": ("self_attn", "o_proj"),
    "gate_proj": ("mlp", "gate_up_proj"),
    "up_proj": ("mlp", "gate_up_proj"),
    "down_proj": ("mlp", "down_proj"),
}
_KEY = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(\w+)\.(\w+)\.lora_(A|B)\.weight")


@dataclass(slots=True, eq=False)
class Adapter:
    """Weights of one adapter: (layer, target) -> A [r, in] and B [out, r], with the scale in B.

    `key` is the name and a digest of the weights: what was computed under one key is never taken for another's.
    """

    name: str
    path: str
    key: str
    weights: dict[tuple[int, str], tuple[Tensor, Tensor]]
    nbytes: int


def load_adapter(path: str | Path, model: DecoderModel, name: str | None = None) -> Adapter:
    """Read a PEFT folder (adapter_config.json, adapter_model.safetensors), in the model's dtype and on its device.

    Raises ValueError for what it asks of the model that isn't supported or doesn't fit, naming it.
    """
    folder = Path(path)
    name = name or folder.name
    weights_file = folder / "adapter_model.safetensors"
    for file in (folder / "adapter_config.json", weights_file):
        if not file.is_file():
            raise ValueError(f"adapter {name!r}: {file} does not exist")
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        _check_config(config)
        weights = _read(weights_file, config, model)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"adapter {name!r}: {error}") from None
    except Exception as error:  # safetensors has an exception class of its own
        raise ValueError(f"adapter {name!r}: {weights_file.name} can't be read: {error}") from None
    with open(weights_file, "rb") as content:
        weights_digest = hashlib.file_digest(content, "blake2b").digest()
    meaning = json.dumps(config, sort_keys=True).encode()  # scales are there
    digest = hashlib.blake2b(weights_digest + meaning).hexdigest()[:16]
    nbytes = sum(tensor.nbytes for pair in weights.values() for tensor in pair)
    return Adapter(name, str(path), f"{name}:{digest}", weights, nbytes)


def _check_config(config: dict[str, Any]) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"peft_type {kind!r} is not supported, only LORA")
    if config.get("bias", "none") != "none":
        raise ValueError(f"bias {config['bias']!r} is not supported, only none")
    # each changes what the weights mean
    for option in (
        "use_dora",
        "fan_in_fan_out",
        "lora_bias",
        "modules_to_save",
        "alora_invocation_tokens",
        "use_bdlora",
    ):
        if config.get(option):
            raise ValueError(f"{option} is not supported")


def _read(file: Path, config: dict[str, Any], model: DecoderModel) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    sizes = _linear_sizes(model)
    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    with safe_open(file, "pt", device="cpu") as tensors:
        for key in tensors.keys():  # noqa: SIM118
            match = _KEY.fullmatch(key)
            if match is None or match[3] not in sizes or match[2] != _TARGETS[match[3]][0]:
                raise ValueError(f"{key} is none of the linears {', '.join(sizes)}")
            if int(match[1]) >= model.num_layers:
                raise ValueError(f"{key}: the model has {model.num_layers} layers")
            halves.setdefault((int(match[1]), match[3]), {})[match[4]] = tensors.get_tensor(key)
    if not halves:
        raise ValueError("no weights")
    weights = {}
    for (layer, target), half in halves.items():
        where = f"layers.{layer}.{_TARGETS[target][0]}.{target}"
        if set(half) != {"A", "B"}:
            raise ValueError(f"{where} lacks lora_{'B' if 'A' in half else 'A'}")
        a, b = half["A"], half["B"]
        out, into = sizes[target]
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or (b.shape[0], a.shape[1]) != (out, into):
            raise ValueError(f"{where}: A {list(a.shape)} and B {list(b.shape)} don't fit a linear of {into} to {out}")
        b = b.float() * _scale(config, f"model.{where}", a.shape[0])
        # A copy: `a` is a view of the file, which may be written over while the adapter is served.
        weights[layer, target] = (a.to(model.device, model.dtype, copy=True), b.to(model.device, model.dtype))
    return weights


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    """As PEFT finds it: a pattern is a suffix of the module's path, or a regular expression for one."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _linear_sizes(model: DecoderModel) -> dict[str, tuple[int, int]]:
    """out and in of each linear that an adapter may target."""
    config = model.config
    hidden, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    if config.use_glu:
        sizes["gate_proj"] = (ffn, hidden)
    return sizes | {"up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}


@dataclass(slots=True)
class AdapterBatch:
    """Which tokens of a batch want which adapter. `groups`: the adapter and the indices of its tokens, int64 [n];
    None: all tokens."""

    groups: list[tuple[Adapter, Tensor | None]] = field(default_factory=list)


class LoRALinear(nn.Module):
    """A linear, or several packed as one, with the adapters that a shared `AdapterBatch` names."""

    def __init__(self, base: Any, batch: AdapterBatch, layer: int, targets: list[str]) -> None:
        super().__init__()
        self.base, self.batch = base, batch
        self.sizes: list[int] = base.sizes if isinstance(base, PackedLinear) else [base.weight.shape[0]]
        ends = torch.tensor(self.sizes).cumsum(0).tolist()
        self.parts = [
            ((layer, target), slice(end - size, end))
            for target, size, end in zip(targets, self.sizes, ends, strict=True)
        ]

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        for adapter, tokens in self.batch.groups:
            for key, columns in self.parts:
                if (pair := adapter.weights.get(key)) is None:
                    continue
                a, b = pair
                if tokens is None:
                    y[:, columns] += x @ a.T @ b.T
                else:
                    y[:, columns].index_add_(0, tokens, x[tokens] @ a.T @ b.T)
        return y


def _linears(model: DecoderModel) -> Iterator[tuple[nn.Module, str, int, list[str]]]:
    """Each linear as it stands, plain or packed: its parent, its name there, its layer, the targets it holds."""
    for index, layer in enumerate(model.model.layers):
        held: dict[tuple[str, str], list[str]] = {}
        for target, (block, packed) in _TARGETS.items():
            parent = getattr(layer, block)
            name = target if isinstance(getattr(parent, target, None), nn.Module) else packed
            if isinstance(getattr(parent, name, None), nn.Module):
                held.setdefault((block, name), []).append(target)
        for (block, name), targets in held.items():
            yield getattr(layer, block), name, index, targets


def enable_adapters(model: DecoderModel) -> AdapterBatch:
    """Let every linear of the layers take adapters; returns what says which. Packing comes before."""
    batch = AdapterBatch()
    for parent, name, layer, targets in _linears(model):
        if isinstance(getattr(parent, name), LoRALinear):
            raise ValueError("the model has adapters already")
        setattr(parent, name, LoRALinear(getattr(parent, name), batch, layer, targets))
    return batch


def apply_lora(model: DecoderModel, adapter: Adapter | str | Path) -> Adapter:
    """Add an adapter, or the one in a PEFT folder, to everything the model computes."""
    if not isinstance(adapter, Adapter):
        adapter = load_adapter(adapter, model)
    enable_adapters(model).groups.append((adapter, None))
    return adapter


def merge_lora(model: DecoderModel) -> None:
    """Put the applied adapter into the weights: the linears are plain again, and cost what they cost before.

    A model without one is left as it is. Raises ValueError for a packed model.
    """
    applied = _take_off(model)
    if applied is not None:
        _add(model, applied, 1.0)
        model.merged_adapter = applied


def unmerge_lora(model: DecoderModel) -> None:
    """Take a merged adapter out of the weights again, within rounding, and apply it beside them."""
    merged = model.merged_adapter
    if merged is not None:
        _add(model, merged, -1.0)
        model.merged_adapter = None
        apply_lora(model, merged)


def _take_off(model: DecoderModel) -> Adapter | None:
    """The linears without their adapters, and the one that was applied to all tokens."""
    if model.packed:
        raise ValueError("a packed model's weights can't be changed: merge before an engine takes the model")
    applied = None
    for parent, name, _, _ in list(_linears(model)):
        if isinstance(linear := getattr(parent, name), LoRALinear):
            for adapter, _ in linear.batch.groups:
                applied = adapter
            setattr(parent, name, linear.base)
    return applied


@torch.no_grad()
def _add(model: DecoderModel, adapter: Adapter, sign: float) -> None:
    for (layer, target), (a, b) in adapter.weights.items():
        linear = getattr(getattr(model.model.layers[layer], _TARGETS[target][0]), target)
        linear.weight += (sign * b.float() @ a.float()).to(linear.weight.dtype)


class AdapterSet:
    """The adapters that requests may name: at most `limit`, the least recently used makes room. From any thread.

    A sequence that has one keeps it, whatever is unloaded meanwhile.
    """

    def __init__(self, model: DecoderModel, limit: int) -> None:
        self.model, self.limit = model, limit
        self.batch = enable_adapters(model)
        self._loaded: OrderedDict[str, Adapter] = OrderedDict()
        self._lock = threading.Lock()

    def load(self, name: str, path: str | Path, replace: bool = False) -> Adapter:
        adapter = load_adapter(path, self.model, name)
        with self._lock:
            if name in self._loaded and not replace:
                raise ValueError(f"adapter {name!r} is loaded already")
            self._loaded[name] = adapter
            self._loaded.move_to_end(name)
            while len(self._loaded) > self.limit:
                self._loaded.popitem(last=False)
        return adapter

    def unload(self, name: str) -> None:
        with self._lock:
            self._find(name)
            del self._loaded[name]

    def use(self, name: str) -> Adapter:
        with self._lock:
            self._loaded.move_to_end(self._find(name))
            return self._loaded[name]

    def loaded(self) -> dict[str, Adapter]:
        with self._lock:
            return dict(self._loaded)

    def _find(self, name: str) -> str:
        if name not in self._loaded:
            raise ValueError(f"unknown adapter {name!r}; loaded: {', '.join(self._loaded) or 'none'}")
        return name

    def select(self, runs: dict[Adapter, list[int]], counts: np.ndarray) -> None:
        """Say which runs of the next batch, of counts [R] tokens, want which adapter."""
        of_token = np.repeat(np.arange(len(counts)), counts)
        self.batch.groups = [
            (adapter, to_device(np.flatnonzero(np.isin(of_token, each)), self.model.device))
            for adapter, each in runs.items()
        ]
