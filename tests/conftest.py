"""Fixtures that several test folders share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads starve the servers that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton's kernels run on the CPU; read when they are defined

import pytest
import torch
from hypothesis import settings

# What a test finds must not depend on the run, nor on how fast it is.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")

torch.set_num_threads(1)  # tiny models are faster so, and the servers that tests start need the other core

ROOT = Path(__file__).parents[1]

_SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real demo model, fetched and converted if it isn't there yet."""
    folder = ROOT / "models" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "demo_model.py"), str(ROOT / "models")], check=True)
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2: Path) -> Path:
    return smollm2.parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def tiny_reference() -> Callable[..., Any]:
    """`tiny_reference("llama", num_key_value_heads=1, seed=3)`: a random fp32 model made by transformers."""
    import transformers

    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }

    def make(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
        config_class, model_class = classes[family]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = model_class(config_class(**(_SHAPE | changes))).float().eval()
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:  # transformers starts them at 0 and 1, which hides mistakes
                    parameter.data.add_(0.2 * torch.randn_like(parameter))
        return model

    return make
