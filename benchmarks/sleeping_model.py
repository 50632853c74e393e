"""A model whose forward only sleeps, as if on a device of known speed: what is left is the cost of all around it."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine import CausalLM
from engine.attention import ATTENTION

TOKENIZER = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"


class SleepingModel(CausalLM):
    """A forward takes `step` seconds and `token` for each token; the likeliest token is always the same ordinary one.
    The file `counts` gets the steps so far and their tokens, as two int64."""

    def __init__(self, vocab_size: int, step: float, token: float, counts: str, attn_impl: str) -> None:
        super().__init__()
        self.vocab_size, self.max_seq_len = vocab_size, 2048
        self.num_layers, self.num_kv_heads, self.head_dim = 1, 1, 8
        self.attention = ATTENTION.create(attn_impl)
        self.row = nn.Parameter(torch.zeros(vocab_size))
        self.step, self.token = step, token
        self.counts = np.memmap(counts, np.int64, "w+", shape=2)

    @classmethod
    def from_checkpoint(
        cls, config: dict[str, Any], *, attn_impl: str, mlp_impl: str, max_seq_len: int | None
    ) -> SleepingModel:
        return cls(config["vocab_size"], config["step"], config["token"], config["counts"], attn_impl)

    def hidden_states(self, input_ids: Tensor, batch: Any, pages: Any = None) -> Tensor:
        self.counts += np.array((1, len(input_ids)))
        time.sleep(self.step + self.token * len(input_ids))
        return self.row.new_zeros(len(input_ids), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.row.expand(len(hidden), -1).clone()


def options(folder: Path, step_ms: float, token_us: float = 0.0) -> list[str]:
    """Writes the model into `folder`, with the demo model's tokenizer: what llm-serve is to be told of it."""
    for file in TOKENIZER.glob("token*.json"):
        shutil.copy(file, folder)
    tokens = len(json.loads((TOKENIZER / "tokenizer.json").read_text())["model"]["vocab"])
    config = {"vocab_size": tokens, "step": step_ms / 1e3, "token": token_us / 1e6, "counts": str(folder / "counts")}
    (folder / "config.json").write_text(json.dumps(config))
    row = torch.zeros(tokens)
    row[1000] = 1.0
    save_file({"row": row}, folder / "model.safetensors")
    return ["--model", str(folder), "--model-class", "benchmarks.sleeping_model:SleepingModel"]


def counts(folder: Path) -> np.ndarray:
    """(steps, tokens in them) of the server that has the model of this folder, as they grow."""
    return np.memmap(folder / "counts", np.int64, "r", shape=2)
