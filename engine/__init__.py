"""Pilotfish's engine: continuous batching over a paged KV pool. It knows neither Ray nor HTTP.

The public names below are imported when they are first used, so that `import engine` costs nothing.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "batch_engine": ("ContinuousBatchingEngine", "StepStats"),
    "generation": (
        "LLM",
        "RequestOutput",
        "SpeculativeDecodingBackend",
        "batch_generate_requests",
        "get_generation_backend",
    ),
    "kv_cache": ("KVCache", "reset_all_caches"),
    "models.decoder": ("CausalLM", "DecoderConfig", "DecoderModel", "create_decoder_kv_caches"),
    "models.loader": ("load_model",),
    "models.publisher": ("push_to_hub", "save_pretrained"),
    "schemas": ("FinishReason", "GenerationRequest", "GenerationResult", "QueueFull", "SamplingParams"),
    "tokenization": ("HuggingFaceTokenizer", "SimpleCharacterTokenizer", "load_tokenizer"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOME.keys())
