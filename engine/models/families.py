"""Families of models, as data, and their config.json: read into a DecoderConfig, and written from one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple

from engine.models.decoder import DecoderConfig


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

# The engine's table of tokens grows with the context, so that a mistaken one would take the memory.
MAX_CONTEXT = 1 << 22


def decoder_config(config: dict[str, Any], max_seq_len: int | None = None) -> DecoderConfig:
    """DecoderConfig of the contents of a config.json, in the form of transformers 4 or 5.

    `max_seq_len` lowers the context. Raises ValueError for a model that the decoder can't express.
    """
    from transformers import CONFIG_MAPPING

    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    if any("expert" in key and isinstance(value, int) and value > 1 for key, value in config.items()):
        raise ValueError(f"mixture-of-experts models are not supported ({model_type})")
    family = FAMILIES.get(str(model_type))
    if family is None or (architectures and family.architecture not in architectures):
        known = ", ".join(family.architecture for family in FAMILIES.values())
        name = ", ".join(map(str, architectures)) or model_type
        raise ValueError(f"architecture {name} is not supported; known: {known}")
    if (quantisation := config.get("quantization_config") or config.get("compression_config")) is not None:
        method = quantisation.get("quant_method", "?") if isinstance(quantisation, dict) else quantisation
        raise ValueError(f"quantised checkpoints are not supported ({method})")
    try:  # transformers knows each family's defaults, and both forms of the rope keys
        full = CONFIG_MAPPING[model_type].from_dict(config)
    except Exception as error:
        raise ValueError(str(error)) from error
    if full.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act {full.hidden_act!r} is not supported; known: silu")
    rope = dict(full.rope_parameters)
    theta = rope.pop("rope_theta")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported")
    context = full.max_position_embeddings if max_seq_len is None else max_seq_len
    if context > full.max_position_embeddings:
        raise ValueError(f"max_seq_len {context} is above the model's context of {full.max_position_embeddings}")
    if context > MAX_CONTEXT:
        raise ValueError(f"a context of {context} tokens is above {MAX_CONTEXT}: lower it with max_seq_len")
    if rope["rope_type"] == "yarn":
        rope.setdefault("original_max_position_embeddings", full.max_position_embeddings)

    def switch(value: bool | str) -> bool:
        return value if isinstance(value, bool) else bool(getattr(full, value, False))

    window = None if family.window == "none" else full.sliding_window
    window_layers = None
    if family.window == "some":
        window_layers = tuple(i for i, kind in enumerate(full.layer_types) if kind == "sliding_attention")
        window = window if window_layers else None
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
        rope_scaling=rope,
        tie_word_embeddings=full.tie_word_embeddings,
        qkv_bias=switch(family.qkv_bias),
        attention_out_bias=switch(family.out_bias),
        mlp_bias=switch(family.mlp_bias),
        qk_norm=family.qk_norm,
        target_hidden_size=_of_draft(config, "target_hidden_size", 0),
        draft_vocabulary=tuple(ids) if (ids := _of_draft(config, "draft_vocabulary", [])) else None,
        model_type=str(model_type),
    )


def _of_draft(config: dict[str, Any], key: str, default: Any) -> Any:
    """What `llm-distill` adds to a draft's config.json. ValueError: not a size, or ids that the vocabulary lacks."""
    value, vocab_size = config.get(key, default), config.get("vocab_size", 0)
    good = type(value) is int and value >= 0
    if isinstance(default, list):
        good = isinstance(value, list) and all(type(i) is int and 0 <= i < vocab_size for i in value)
    if not good:
        raise ValueError(f"{key} is {str(value)[:60]}")
    return value


def hugging_face_config(config: DecoderConfig) -> dict[str, Any]:
    """The contents of a config.json with which transformers builds the same model, of its own family if that has it.

    Raises ValueError that says for each family what it lacks.
    """
    wanted = _properties(config)
    reasons = []
    for model_type in sorted(FAMILIES, key=lambda name: name != config.model_type):
        candidate = _candidate(config, model_type)
        try:
            found = _properties(decoder_config(candidate))
        except ValueError as error:
            reasons.append(f"{FAMILIES[model_type].architecture}: {' '.join(str(error).split())}")
            continue
        lacking = [f"{key} {value!r}" for key, value in wanted.items() if found[key] != value]
        if not lacking:
            return candidate
        reasons.append(f"{FAMILIES[model_type].architecture} has no {', '.join(lacking)}")
    raise ValueError(f"transformers has no architecture for this model: {'; '.join(reasons)}")


def _candidate(config: DecoderConfig, model_type: str) -> dict[str, Any]:
    """The model as far as that family can express it."""
    family = FAMILIES[model_type]
    candidate = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.target_hidden_size:
        candidate["target_hidden_size"] = config.target_hidden_size
    if config.draft_vocabulary is not None:
        candidate["draft_vocabulary"] = list(config.draft_vocabulary)
    switches = (family.mlp_bias, config.mlp_bias), (family.out_bias, config.attention_out_bias)
    for key, value in (*switches, (family.qkv_bias, config.qkv_bias)):
        if isinstance(key, str):
            candidate[key] = value
    if family.window != "none":
        candidate["sliding_window"] = config.window_size
    if family.window == "some":
        windows = [config.layer_window(layer) for layer in range(config.num_layers)]
        candidate["use_sliding_window"] = config.window_size is not None
        candidate["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    return candidate


def _properties(config: DecoderConfig) -> dict[str, Any]:
    """What makes two models the same."""
    windows = [config.layer_window(layer) for layer in range(config.num_layers)]
    elsewhere = ("attn_impl", "model_type", "window_size", "window_layers")
    properties = {key: value for key, value in asdict(config).items() if key not in elsewhere}
    return properties | {"window_size": windows[0] if len(set(windows)) == 1 else windows}
