"""Log-probabilities of prompts and outputs against the model's own logits."""

from __future__ import annotations

import pytest
import torch

from engine.batch_engine import ContinuousBatchingEngine
from engine.models.decoder import DecoderModel
from engine.schemas import GenerationRequest


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    torch.manual_seed(0)
    return DecoderModel(
        vocab_size=128, hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=2, max_seq_len=400
    ).eval()


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("budget", (7, 2048))
def test_prompt_and_output_logprobs(model, budget: int, depth: int) -> None:
    """Also when the prompt is cached, longer than a slice, and preempted while it is read."""
    engine = ContinuousBatchingEngine(
        model, None, max_batch_size=3, max_batched_tokens=budget, depth=depth, page_size=16, num_pages=21
    )
    prompt = torch.randint(0, 128, (300,)).tolist()
    for _ in range(2):
        request_id = engine.add_request(
            GenerationRequest(
                prompt_ids=prompt,
                max_new_tokens=3,
                prompt_logprobs=2,
                logprobs=1,
                temperature=1.0,
                logit_bias={5: 3.0},
                seed=1,
            )
        )
        engine.add_request(GenerationRequest(prompt_ids=prompt[:50], max_new_tokens=30, priority=-1))
        while engine.scheduler.has_pending_work:
            engine.step()
        result = engine.result(request_id)
        with torch.inference_mode():
            expected = model(torch.tensor([prompt + result.token_ids]))[0].log_softmax(-1)
        assert result.cached_tokens == 0
        assert len(result.prompt_logprobs) == 300 and result.prompt_logprobs[0] is None
        entries = [*result.prompt_logprobs[1:], *result.logprobs]
        tops = [2] * 299 + [1] * 3
        for position, (entry, top) in enumerate(zip(entries, tops, strict=True)):
            row = expected[position]
            assert entry.token_id == (prompt + result.token_ids)[position + 1]
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
            assert [token_id for token_id, _ in entry.top] == row.topk(top).indices.tolist()
            assert [logprob for _, logprob in entry.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)
