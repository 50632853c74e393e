"""The real demo model in fp32 against transformers, in six configurations of the engine."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.batch_engine import ContinuousBatchingEngine
from engine.models.decoder import DecoderModel
from engine.models.loader import load_model
from engine.schemas import FinishReason, GenerationRequest
from engine.tokenization import HuggingFaceTokenizer, load_tokenizer

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "What is the capital of Italy?",
    "Write a haiku about rain.",
    "Explain in one sentence what a prime number is.",
    "Count from one to ten.",
)
NEW_TOKENS = 32
NEAR_TIE = 1e-4


@pytest.fixture(scope="module", autouse=True)
def all_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> HuggingFaceTokenizer:
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> DecoderModel:
    return load_model(smollm2, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(tokenizer: HuggingFaceTokenizer) -> list[list[int]]:
    return [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def expected(smollm2: Path, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """transformers' greedy ids and the gap between its two best logits at each; kept by the weights' checksum."""
    weights = hashlib.sha256((smollm2 / "model.safetensors").read_bytes())
    weights.update(json.dumps([prompts, NEW_TOKENS]).encode())
    cache = Path(__file__).parents[1] / ".cache" / f"greedy-{weights.hexdigest()[:24]}.json"
    if not cache.exists():
        from transformers import AutoModelForCausalLM

        reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
        answers = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            best = torch.stack(out.logits).squeeze(1).topk(2).values
            answers.append((out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
        cache.parent.mkdir(exist_ok=True)
        partial = cache.with_suffix(".partial")
        partial.write_text(json.dumps(answers))
        partial.rename(cache)
    return json.loads(cache.read_text())


@pytest.mark.parametrize(
    ("page_size", "budget", "depth", "pages"),
    ((1, 64, 1, 160), (16, 7, 1, None), (16, 2048, 0, 10), (64, 64, 0, None), (64, 2048, 1, 3), (512, 64, 1, None)),
)
def test_greedy_equals_transformers(
    model, tokenizer, prompts, expected, page_size: int, budget: int, depth: int, pages: int | None
) -> None:
    engine = ContinuousBatchingEngine(
        model,
        tokenizer,
        max_batch_size=4,
        max_seq_len=512,
        page_size=page_size,
        num_pages=pages,
        max_batched_tokens=budget,
        depth=depth,
    )
    rng = random.Random(page_size)
    arriving = list(enumerate(prompts))
    while arriving or engine.scheduler.has_pending_work:
        if arriving and rng.random() < 0.5:
            i, prompt = arriving.pop()
            engine.add_request(
                GenerationRequest(request_id=str(i), prompt_ids=prompt, max_new_tokens=NEW_TOKENS, temperature=0)
            )
        engine.step()
        engine.pool.check()
    near_ties = 0
    for i, (ids, gaps) in enumerate(expected):
        result = engine.result(str(i))
        ended = ids[-1] in tokenizer.eos_token_ids
        wanted = ids[:-1] if ended else ids
        if result.token_ids != wanted:
            differ = next(j for j in range(len(ids)) if result.token_ids[j : j + 1] != wanted[j : j + 1])
            assert gaps[differ] < NEAR_TIE, f"question {i}, token {differ}"
            near_ties += 1
        else:
            assert result.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
    assert near_ties * 10_000 <= sum(len(ids) for ids, _ in expected)


def test_capital_of_france(model, tokenizer, prompts) -> None:
    """Also in the dtype that a server picks here."""
    for dtype in (torch.float32, None):
        engine = ContinuousBatchingEngine(model, tokenizer, max_batch_size=1, max_seq_len=256, dtype=dtype)
        request_id = engine.add_request(GenerationRequest(prompt_ids=prompts[0], max_new_tokens=20, temperature=0))
        while engine.scheduler.has_pending_work:
            engine.step()
        result = engine.result(request_id)
        assert (result.text, result.finish_reason) == ("The capital of France is Paris.", FinishReason.STOP)
