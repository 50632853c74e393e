"""One Llama-shaped decoder for every family: what differs between them is data in its config.

There is one token path. `hidden_states` takes packed runs of tokens and reads and writes pages; `forward` with caches
is a thin front on it, and without caches the same layers run as an ordinary differentiable forward.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention import ATTENTION, AttentionBackend, PackedBatch, rotate
from engine.kv_cache import KVCache
from engine.models.layers import MLPS, PackedLinear, RMSNorm, RotaryEmbedding, check_rope_scaling, packed


@dataclass(slots=True)
class DecoderConfig:
    """Shape and switches of a decoder; names follow Hugging Face where it has one."""

    vocab_size: int = 32000
    hidden_size: int = 512
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 0  # 0: as many as num_heads
    head_dim: int = 0  # 0: hidden_size / num_heads
    intermediate_size: int = 0  # 0: 8/3 of hidden_size, rounded up to 64 (4x without GLU)
    max_seq_len: int = 512
    window_size: int | None = None
    window_layers: tuple[int, ...] | None = None  # the layers that have the window; None: all
    attn_impl: str = "mha"
    mlp_impl: str = "mlp"
    use_glu: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    target_hidden_size: int = 0  # of a draft that reads its target's last hidden state beside each token
    draft_vocabulary: tuple[int, ...] | None = None  # the ids that a packed draft proposes; None: all
    model_type: str = "llama"

    def __post_init__(self) -> None:
        self.num_kv_heads = self.num_kv_heads or self.num_heads
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}")
        if not self.head_dim:
            if self.hidden_size % self.num_heads:
                raise ValueError(f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}")
            self.head_dim = self.hidden_size // self.num_heads
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embedding pairs its halves")
        if not self.intermediate_size:
            width = self.hidden_size * 8 / 3 if self.use_glu else self.hidden_size * 4
            self.intermediate_size = math.ceil(width / 64) * 64
        if self.window_size is not None and self.window_size < 1:
            raise ValueError(f"window_size must be at least 1, got {self.window_size}")
        if self.rope_scaling is not None:
            self.rope_scaling = check_rope_scaling(self.rope_scaling, self.max_seq_len)

    def layer_window(self, layer: int) -> int | None:
        if self.window_layers is not None and layer not in self.window_layers:
            return None
        return self.window_size

    @property
    def retention(self) -> int | None:
        """How many of the last tokens the widest layer sees; None when some layer sees all."""
        windows = [self.layer_window(layer) for layer in range(self.num_layers)]
        return None if None in windows else max(w for w in windows if w is not None)


KVPages = Sequence[tuple[Tensor, Tensor]]  # a layer: keys, values [pages, page_size, kv_heads, head_dim]


@dataclass(slots=True)
class _Step:
    """What all layers of one forward share."""

    batch: PackedBatch
    plans: dict[int | None, Any]
    cos: Tensor
    sin: Tensor


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.window = config.layer_window(layer)
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.qkv_proj: PackedLinear | None = None
        self.o_proj: nn.Module = nn.Linear(q_size, config.hidden_size, bias=config.attention_out_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm
        self.backend = ATTENTION.create(config.attn_impl)

    def pack(self) -> None:
        self.qkv_proj = PackedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.o_proj = packed(self.o_proj)
        del self.q_proj, self.k_proj, self.v_proj

    def forward(self, x: Tensor, step: _Step, pages: tuple[Tensor, Tensor] | None) -> Tensor:
        if self.qkv_proj is None:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        else:
            q, k, v = self.qkv_proj(x).split(self.qkv_proj.sizes, dim=-1)
        q = q.unflatten(-1, (self.heads, self.head_dim))
        k = k.unflatten(-1, (self.kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.kv_heads, self.head_dim))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if pages is None:
            q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
        else:
            assert step.batch.slot_mapping is not None
            q = self.backend.append(q, k, v, step.cos, step.sin, pages, step.batch.slot_mapping)
            k, v = pages
        return self.o_proj(self.backend.attend(q, k, v, step.plans[self.window]).flatten(1))


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLPS.create(config.mlp_impl, config)

    def forward(
        self, x: Tensor, delta: Tensor | None, step: _Step, pages: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and what is still to be added to it, so that addition and norm are one."""
        x, normed = self.input_layernorm.add(x, delta)
        x, normed = self.post_attention_layernorm.add(x, self.self_attn(normed, step, pages))
        return x, self.mlp(normed)


class _Body(nn.Module):
    """What Hugging Face's names put under `model.`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers: list[DecoderLayer] = nn.ModuleList(  # type: ignore[assignment]
            DecoderLayer(config, layer) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.target_hidden_size:
            self.state_proj = nn.Linear(config.target_hidden_size, config.hidden_size, bias=False)


class CausalLM(nn.Module, ABC):
    """What an engine needs of a model: a user's own subclass is served, trained and speculated with like DecoderModel.

    Its constructor sets the attributes below; `hidden_states` and `logits` are all that must be written.
    """

    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int  # tokens
    attention: AttentionBackend  # ATTENTION.create(name)
    retention: int | None = None  # how many of the last tokens the widest layer sees; None: all
    target_hidden_size = 0  # of a draft whose `hidden_states` take their target's; see DecoderModel
    packed = False
    quantization: str | None = None  # of the packed weights
    ranks: Any = None  # engine.parallel.Ranks that hold this model's other parts
    generation_config: dict[str, Any] | None = None  # generation_config.json of the checkpoint it came from

    @classmethod
    def from_checkpoint(
        cls, config: dict[str, Any], *, attn_impl: str, mlp_impl: str, max_seq_len: int | None
    ) -> CausalLM:
        """The model of a config.json, for `load_model`, which calls this on the meta device and then replaces every
        tensor of `state_dict` by the checkpoint's of that name. ValueError: the class can't express it."""
        raise ValueError(f"{cls.__name__} can't be loaded from files: it has no from_checkpoint")

    @abstractmethod
    def hidden_states(self, input_ids: Tensor, batch: PackedBatch, pages: KVPages | None = None) -> Tensor:
        """Final hidden states [T, hidden_size] of packed tokens [T].

        Every layer attends by `attention`: `plan(batch, window)` once for all layers of a window; then, a layer,
        `write` of the run's keys and values into its pages, and `attend` to them (without pages: to the run's own).
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size]."""

    def pack(self, quantization: str | None = None) -> None:
        """Lay out the weights for inference, for good; an engine does so in half precision or to quantise them."""
        if quantization is not None:
            raise ValueError(f"{type(self).__name__} has no quantization")
        self.packed = True

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self,
        input_ids: Tensor,
        kv_caches: Sequence[KVCache] | None = None,
        use_cache: bool = False,
        attn_mask: Tensor | None = None,
    ) -> Any:
        """Logits [B, S, vocab_size] of ids [B, S] (or [S], a batch of one); with `use_cache`, (logits, kv_caches).

        With caches, the ids follow the caches' contents, which grow by S. `attn_mask`, boolean (True: may attend) or
        additive, broadcastable to [B, heads, S, S], restricts the causal mask; it works without caches only. Raises
        ValueError for caches that are missing, too many or full, before anything is written.
        """
        ids = input_ids.unsqueeze(0) if input_ids.dim() == 1 else input_ids
        batch_size, length = ids.shape
        if use_cache != (kv_caches is not None):
            raise ValueError("use_cache=True and kv_caches go together: give both or neither")
        if kv_caches is None:
            if length > self.max_seq_len:
                raise ValueError(f"{length} tokens are more than max_seq_len {self.max_seq_len}")
            if attn_mask is not None:
                attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
            batch = PackedBatch.uncached(batch_size, length, ids.device, attn_mask)
            hidden = self.hidden_states(ids.flatten(), batch)
            return self.logits(hidden).unflatten(0, (batch_size, length))
        if attn_mask is not None:
            raise ValueError("attn_mask is not supported with kv_caches")
        if len(kv_caches) != self.num_layers:
            raise ValueError(f"{len(kv_caches)} caches for {self.num_layers} layers")
        for cache in kv_caches:
            cache.check(batch_size, length)
        start = kv_caches[0].seq_len
        if start + length > self.max_seq_len:
            raise ValueError(f"{start + length} tokens are more than max_seq_len {self.max_seq_len}")
        batch = kv_caches[0].packed_batch(batch_size, length)
        hidden = self.hidden_states(ids.flatten(), batch, [cache.pages for cache in kv_caches])
        for cache in kv_caches:
            cache.advance(batch_size, length)
        return self.logits(hidden).unflatten(0, (batch_size, length)), kv_caches


class DecoderModel(CausalLM):
    """A decoder language model. Parameter names are those of Hugging Face's Llama.

    Keyword arguments are the fields of `DecoderConfig`; each has a default.
    """

    def __init__(self, *, num_kv_heads: int | None = None, **options: Any) -> None:
        super().__init__()
        try:
            self.config = config = DecoderConfig(num_kv_heads=num_kv_heads or 0, **options)
        except TypeError as error:
            raise ValueError(f"DecoderModel: {error}") from None
        self.vocab_size, self.hidden_size, self.max_seq_len = config.vocab_size, config.hidden_size, config.max_seq_len
        self.num_layers, self.num_heads = config.num_layers, config.num_heads
        self.num_kv_heads, self.head_dim, self.retention = config.num_kv_heads, config.head_dim, config.retention
        self.model = _Body(config)
        self.attention = self.model.layers[0].self_attn.backend
        self.lm_head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rotary = RotaryEmbedding(config)
        self.target_hidden_size = config.target_hidden_size
        self.draft_ids: Tensor | None = None  # int64, what a packed draft's head is limited to
        self.merged_adapter: Any = None  # what `merge_lora` put into the weights

    @classmethod
    def from_config(cls, config: DecoderConfig) -> DecoderModel:
        return cls(**asdict(config))

    @classmethod
    def from_checkpoint(
        cls, config: dict[str, Any], *, attn_impl: str, mlp_impl: str, max_seq_len: int | None
    ) -> DecoderModel:
        from engine.models.families import decoder_config

        decoder = decoder_config(config, max_seq_len)
        decoder.attn_impl, decoder.mlp_impl = attn_impl, mlp_impl
        return cls.from_config(decoder)

    def pack(self, quantization: str | None = None) -> None:
        """Fuse and lay out the weights for inference, for good: the model can't be trained, saved or converted
        afterwards. quantization: int8 or int4 weights in the layers; embedding and head, where it would cost most, stay
        as they are."""
        if self.packed:
            return
        # without a reference to the modules that they replace, whose weights are to go at once
        packs = [pack for m in self.model.modules() if isinstance(pack := getattr(m, "pack", None), MethodType)]
        for pack in packs:
            pack()
        if self.config.draft_vocabulary is not None:
            self.draft_ids = torch.tensor(self.config.draft_vocabulary, device=self.device)
            part = nn.Linear(self.hidden_size, len(self.draft_ids), bias=False, device="meta")
            part.weight = nn.Parameter(self.lm_head.weight.data[self.draft_ids])  # type: ignore[index]
            self.lm_head = part
        self.lm_head = packed(self.lm_head)
        for linear in self.modules():
            if isinstance(linear, PackedLinear):
                linear.lay_out(None if linear is self.lm_head else quantization)
        self.packed, self.quantization = True, quantization

    def hidden_states(
        self, input_ids: Tensor, batch: PackedBatch, pages: KVPages | None = None, target_states: Tensor | None = None
    ) -> Tensor:
        """As of CausalLM. target_states, for a draft that reads them: [T, target_hidden_size], the final hidden state
        of the target that each token was chosen by, or zeros (Li et al. 2024, EAGLE)."""
        layers = self.model.layers
        plans = {w: self.attention.plan(batch, w) for w in {layer.self_attn.window for layer in layers}}
        step = _Step(batch, plans, *self.rotary.rows(batch.positions))
        # the residual stream is fp32 whatever the weights are: it halves the error of bf16 and costs next to nothing
        x, delta = self.model.embed_tokens(input_ids).float(), None
        if target_states is not None:
            x = x + self.model.state_proj(target_states.to(self.model.state_proj.weight.dtype))
        for index, layer in enumerate(layers):
            x, delta = layer(x, delta, step, pages[index] if pages is not None else None)
        return self.model.norm.add(x, delta)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        if self.draft_ids is None:
            return logits
        return logits.new_full((len(hidden), self.vocab_size), -math.inf).index_copy_(1, self.draft_ids, logits)


def create_decoder_kv_caches(
    model: CausalLM, batch_size: int, max_seq_len: int | None = None, dtype: torch.dtype | None = None
) -> list[KVCache]:
    """One cache a layer of the model, none sharing storage."""
    return KVCache.from_model_config(
        batch_size,
        max_seq_len or model.max_seq_len,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        device=model.device,
        dtype=dtype or model.dtype,
    )
