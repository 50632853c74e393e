"""The parts of the decoder: RMSNorm, rotary embedding, MLPs and their registry."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention import Registry, has_triton

if TYPE_CHECKING:
    from engine.models.decoder import DecoderConfig


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension (Zhang & Sennrich 2019), in fp32; the result has the weight's
    dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.packed_dtype: torch.dtype | None = None

    def pack(self) -> None:
        self.packed_dtype = self.weight.dtype
        self.weight.data = self.weight.data.float()
        size = self.weight.numel()
        self.floor, self.scale = self.weight.new_tensor(math.sqrt(size * self.eps)), self.weight.data * math.sqrt(size)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed_dtype is not None and x.device.type == "cpu":  # where rms_norm is nine operators
            x = x.float()
            norm = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.floor)
            return torch.div(x, norm).mul_(self.scale).to(self.packed_dtype)
        dtype = self.packed_dtype or self.weight.dtype
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(dtype)

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The fp32 x [T, size] plus delta, maybe in place, and the norm of that."""
        if self.packed_dtype is not None and has_triton(x.device):
            from engine.fused import add_rms_norm

            return x, add_rms_norm(x, delta, self.weight, self.eps, self.packed_dtype)
        x = x if delta is None else x + delta
        return x, self(x)


class RotaryEmbedding:
    """Rotary position embedding (Su et al. 2021) in the rotate-half form, in fp32 whatever the model's dtype."""

    def __init__(self, config: DecoderConfig) -> None:
        self._inverse, self._factor = rope_frequencies(config)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of the elements, and of those half a head away: of positions [T], each [T, 1, head_dim]."""
        self._inverse = self._inverse.to(positions.device)
        angles = positions[:, None, None] * self._inverse
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1:
            cos, sin = cos * self._factor, sin * self._factor
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


# The rope scalings that are known, with the keys they need.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),  # Chen et al. 2023
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),  # Peng et al. 2023
}


def check_rope_scaling(scaling: dict[str, Any], max_seq_len: int) -> dict[str, Any] | None:
    """Hugging Face's rope parameters, the type as `rope_type`; None for the default type.

    Raises ValueError for a type that isn't known, which it names, or lacks a key.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPE_KEYS:
        raise ValueError(f"rope scaling {kind!r} is not supported; known: {', '.join(_ROPE_KEYS)}")
    for key in _ROPE_KEYS[kind]:
        if not isinstance(scaling.get(key), (int, float)) or not scaling[key] > 0:
            raise ValueError(f"rope scaling {kind!r} needs {key} above 0, got {scaling.get(key)!r}")
    if kind == "default":
        return None
    original = {"original_max_position_embeddings": max_seq_len} if kind == "yarn" else {}
    return original | {key: value for key, value in scaling.items() if key != "type"} | {"rope_type": kind}


def rope_frequencies(config: DecoderConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the factor on cos and sin, for the scaling that the config names.

    Dynamic NTK scaling changes them with the length of the sequence, from max_seq_len on: up to there, which is as far
    as a sequence gets here, it is no scaling at all.
    """
    dim, base = config.head_dim, config.rope_theta
    inverse = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    scaling: dict[str, Any] = config.rope_scaling or {"rope_type": "default"}
    kind = scaling["rope_type"]
    if kind == "linear":
        return inverse / scaling["factor"], 1.0
    if kind == "llama3":
        original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = original * inverse / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * inverse / factor + smooth * inverse, 1.0
    if kind == "yarn":
        return _yarn(inverse, dim, base, scaling)
    return inverse, 1.0


def _yarn(inverse: Tensor, dim: int, base: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def dim_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)).clamp(0, 1)

    def mscale(scale: float, m: float = 1.0) -> float:
        return 0.1 * m * math.log(scale) + 1.0 if scale > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        m, m_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = mscale(factor, m) / mscale(factor, m_all) if m and m_all else mscale(factor)
    return inverse / factor * ramp + inverse * (1 - ramp), attention_factor


class PackedLinear(nn.Module):
    """Linears over one input as one, [N, in] -> [N, sum of outs], for inference."""

    def __init__(self, *linears: Any) -> None:
        super().__init__()
        self.sizes = [linear.weight.shape[0] for linear in linears]
        weights = [linear.weight.detach() for linear in linears]
        self.packed = torch.cat(weights) if len(weights) > 1 else weights[0]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.scales = self.packed.new_empty(0)
        self.form = "plain"

    def lay_out(self, quantization: str | None = None) -> None:
        """Give the weight its last form: quantised, or, on a CPU, as oneDNN wants it, where plain linears have that
        done at every call. Raises ValueError for a weight that can't be quantised."""
        if quantization is not None:
            self.packed, self.scales = quantize(self.packed, quantization)
            self.form = quantization
        elif self.packed.device.type == "cpu" and self.packed.dtype != torch.float32 and hasattr(_ONEDNN, _POINTWISE):
            self.packed = _ONEDNN._reorder_linear_weight(self.packed, 16)
            self.form = "onednn"

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "onednn":
            return _ONEDNN._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        if self.form == "plain":
            return F.linear(x, self.packed, self.bias)
        if self.form == "int8" and len(x) > _FEW:
            y = F.linear(x, self.packed.to(x.dtype)).mul_(self.scales)
        elif self.form == "int8":
            y = torch.ops.aten._weight_int8pack_mm(x, self.packed, self.scales)
        else:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, _GROUP, self.scales)
        return y if self.bias is None else y.add_(self.bias)


_ONEDNN, _POINTWISE = torch.ops.mkldnn, "_linear_pointwise"
_FEW = 40  # rows up to which int8's kernel is faster than a plain product
_GROUP = 32  # inputs that share a scale and a zero in int4, as in GGUF's Q4_1


def quantize(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A weight [out, in] rounded to nearest, as torch's CPU kernels take it, which don't check shapes themselves. int8:
    symmetric, a scale [out] a row. int4: a scale and a middle [in / 32, out, 2] for each 32 inputs. Raises ValueError
    for a shape or device they don't take."""
    rows, size = weight.shape
    if weight.device.type != "cpu":
        raise ValueError(f"quantization {kind} is for CPUs, not {weight.device.type}")
    if rows % 16 or size % _GROUP:
        raise ValueError(f"quantization needs outputs in 16s and inputs in {_GROUP}s, not {rows} and {size}")
    if kind == "int8":
        scales = (weight.float().abs().amax(1) / 127).clamp_(min=torch.finfo(weight.dtype).tiny).to(weight.dtype)
        return (weight / scales.float().unsqueeze(1)).round().clamp_(-127, 127).to(torch.int8), scales
    groups = weight.float().unflatten(1, (-1, _GROUP))
    low, high = groups.aminmax(dim=2)
    scales = ((high - low) / 15).clamp_(min=torch.finfo(weight.dtype).tiny).to(weight.dtype)
    middles = (low + 8 * scales).to(weight.dtype)
    codes = ((groups - middles.unsqueeze(2)) / scales.float().unsqueeze(2) + 8).round().clamp_(0, 15)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.flatten(1).to(torch.int32), 1)
    return packed, torch.stack((scales, middles), 2).transpose(0, 1).contiguous()


def packed(linear: Any) -> nn.Module:
    """A linear, packed; a module that has one inside packs that."""
    if isinstance(linear, nn.Linear):
        return PackedLinear(linear)
    linear.linear = packed(linear.linear)
    return linear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), the SwiGLU of Shazeer 2020."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj: nn.Module = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.gate_up_proj: PackedLinear | None = None

    def pack(self) -> None:
        self.gate_up_proj, self.down_proj = PackedLinear(self.gate_proj, self.up_proj), packed(self.down_proj)
        del self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up_proj is None:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        gate_up = self.gate_up_proj(x)
        if has_triton(gate_up.device):
            from engine.fused import silu_mul

            return self.down_proj(silu_mul(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down_proj(F.silu(gate).mul_(up))


class PlainMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


MLPS: Registry[nn.Module] = Registry("MLP implementation")
MLPS.register("mlp", lambda config: GatedMLP(config) if config.use_glu else PlainMLP(config))
