"""A model in two ranks on real Ray: its text, and what a client sees when a rank dies."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
import torch
import transformers

from engine.batch_engine import ContinuousBatchingEngine
from engine.models.loader import load_model
from engine.schemas import GenerationRequest
from tests.e2e.conftest import Cluster, Deployed, wait_until

TOKENS = 400


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small and random, with a real tokenizer."""
    folder = tmp_path_factory.mktemp("ranks")
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for file in smollm2.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def ranks(cluster: Cluster) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(cluster._process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is such a one
            if "_Rank" in " ".join(process.cmdline()[:1]):
                found.append(process)
    return found


def test_a_rank_dies_in_mid_stream(model: Path, cluster: Cluster, deploy: Callable[..., Deployed]) -> None:
    engine = ContinuousBatchingEngine(load_model(model), None, max_seq_len=1024)
    request = GenerationRequest(prompt_ids=[5, 6, 7], max_new_tokens=TOKENS, temperature=0, ignore_eos=True)
    engine.add_request(request)
    while engine.scheduler.has_pending_work:
        engine.step()
    result = engine.result(request.request_id)
    assert result is not None
    app = deploy(model=str(model), tensor_parallel_size=2, num_threads=1, max_model_len=1024)
    [rank] = ranks(cluster)
    body = {"prompt": [5, 6, 7], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    text, done = "", False
    with httpx.stream("POST", f"{app.url}/v1/completions", json=body, timeout=180) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                if not text:
                    rank.kill()
                text += json.loads(line[6:])["choices"][0]["text"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert done
    assert text == tokenizer.decode(result.token_ids, skip_special_tokens=True)
    wait_until(lambda: [each.pid for each in ranks(cluster)] not in ([], [rank.pid]))
