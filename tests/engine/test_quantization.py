"""int8 and int4 weights: an engine with them is transformers with the rounded weights, and loses what they lose."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.attention import PackedBatch
from engine.batch_engine import ContinuousBatchingEngine
from engine.generation import LLM
from engine.models.decoder import DecoderModel
from engine.models.layers import PackedLinear, quantize
from engine.models.loader import load_model
from engine.schemas import GenerationRequest, SamplingParams

KINDS = ("int8", "int4")
MAX_LEN = 64


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What the documented rounding leaves of a weight [out, in], in numpy."""
    w = weight.double().numpy()
    if kind == "int8":
        scale = (np.abs(w).max(1, keepdims=True) / 127).astype(np.float32)
        return torch.from_numpy((np.rint(w / scale) * scale).astype(np.float32))
    groups = w.reshape(len(w), -1, 32)
    low = groups.min(2, keepdims=True)
    scale = ((groups.max(2, keepdims=True) - low) / 15).astype(np.float32)
    middle = (low + 8 * scale).astype(np.float32)
    codes = np.clip(np.rint((groups - middle) / scale + 8), 0, 15)
    return torch.from_numpy(((codes - 8) * scale + middle).astype(np.float32).reshape(w.shape))


def make_reference() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def make_model(reference: LlamaForCausalLM, **config: object) -> DecoderModel:
    shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 8}
    model = DecoderModel(**shape, num_kv_heads=2, max_seq_len=MAX_LEN, **config)
    model.load_state_dict(reference.state_dict(), strict=False)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_transformers_with_the_rounded_weights(kind: str) -> None:
    """In fp32, alone or beside others, whatever the pages, the chunks and the drafts."""
    reference = make_reference()
    model = make_model(reference)
    with torch.no_grad():
        for name, parameter in reference.model.layers.named_parameters():
            if parameter.dim() == 2:
                assert "proj" in name
                parameter.copy_(rounded(parameter, kind))
    rng = random.Random(3)
    prompts = [[rng.randrange(128) for _ in range(rng.randrange(1, 40))] for _ in range(10)]
    for options in (
        {"max_batch_size": 8, "page_size": 4, "max_batched_tokens": 9},
        {"max_batch_size": 1, "page_size": MAX_LEN, "depth": 0},
        {"max_batch_size": 4, "speculation": "ngram", "gamma": 3},
    ):
        engine = ContinuousBatchingEngine(model, None, dtype=torch.float32, quantization=kind, **options)
        ids = [
            engine.add_request(GenerationRequest(prompt_ids=p, max_new_tokens=12, temperature=0, ignore_eos=True))
            for p in prompts
        ]
        while engine.scheduler.has_pending_work:
            engine.step()
        for prompt, request_id in zip(prompts, ids, strict=True):
            result = engine.result(request_id)
            assert result is not None
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 : -1]
            best = logits.topk(2)
            right = best.indices[:, 0] == torch.tensor(result.token_ids)
            assert (right | (best.values[:, 0] - best.values[:, 1] < 1e-4)).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_any_batch(kind: str, dtype: torch.dtype) -> None:
    """To the bit, up to the 32 rows of decodes: which the kernels without quantisation don't promise."""
    torch.manual_seed(1)
    linear = PackedLinear(torch.nn.Linear(96, 48).to(dtype), torch.nn.Linear(96, 32, bias=False).to(dtype))
    plain = torch.nn.functional.linear
    x = torch.randn(48, 96, dtype=dtype)
    exact = plain(x.float(), linear.packed.float())
    linear.bias = None
    linear.lay_out(kind)
    with torch.inference_mode():
        y, many = linear(x[:32]), linear(x)
        for count in (1, 2, 3, 5, 8, 17):
            for start in range(0, 32 - count, 7):
                assert torch.equal(linear(x[start : start + count]), y[start : start + count])
    for got in (y, many):
        loss = (got.float() - exact[: len(got)]).norm() / exact[: len(got)].norm()
        assert loss < {"int8": 0.01, "int4": 0.1}[kind]


@pytest.mark.parametrize(("kind", "most"), (("int8", 0.02), ("int4", 0.2)))
def test_loss_in_logits(kind: str, most: float) -> None:
    torch.manual_seed(2)
    ids = torch.randint(0, 128, (MAX_LEN,))
    batch = PackedBatch.uncached(1, MAX_LEN, torch.device("cpu"))
    logits = []
    for quantization in (None, kind):
        torch.manual_seed(5)
        model = DecoderModel(vocab_size=128, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=4)
        with torch.inference_mode():
            model.pack(quantization)
            logits.append(model.logits(model.hidden_states(ids, batch)))
    loss = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert most / 20 < loss < most


@pytest.fixture(scope="module")
def surprise(smollm2: Path) -> float:
    return mean_surprise(LLM(smollm2, max_model_len=128, max_num_seqs=2))


def mean_surprise(llm: LLM) -> float:
    """Nats a token."""
    text = (
        "The capital of France is Paris. It lies on the river Seine, and more than two million people live there. "
        "Water boils at one hundred degrees. The Earth goes round the Sun once a year, and the Moon round the Earth."
    )
    (answer,) = llm.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    places = answer.outputs[0].prompt_logprobs
    assert places is not None
    return -statistics.mean(place.logprob for place in places if place is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_real_model_still_knows(smollm2: Path, surprise: float, kind: str) -> None:
    llm = LLM(smollm2, quantization=kind, max_model_len=128, max_num_seqs=2)
    assert abs(mean_surprise(llm) - surprise) < 0.1 < surprise
    weights = sum(m.packed.nbytes for m in llm.backend.engine._runner.model.model.modules() if hasattr(m, "packed"))
    assert weights < {"int8": 107e6, "int4": 54e6}[kind]  # bf16: 212 MB


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(ValueError, match="inputs in 32s, not 16 and 40"):
        quantize(torch.zeros(16, 40), "int8")
    with pytest.raises(ValueError, match="outputs in 16s .* not 24 and 64"):
        quantize(torch.zeros(24, 64), "int4")
    with pytest.raises(ValueError, match="for CPUs, not meta"):
        quantize(torch.zeros(32, 64, device="meta"), "int4")
    model = make_model(make_reference())
    ContinuousBatchingEngine(model, None, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="packed with quantization None, not int4"):
        ContinuousBatchingEngine(model, None, dtype=torch.bfloat16, quantization="int4")
    loaded = make_model(make_reference())
    loaded.pack("int8")
    assert loaded.quantization == "int8" and quantize(torch.zeros(16, 32), "int8")[0].count_nonzero() == 0


def test_gguf_in_four_bits_keeps_its_codes(smollm2: Path) -> None:
    """The demo model was Q4_1, which has the same groups: int4 rounds to what it was."""
    weight = load_model(smollm2, dtype=torch.float32).model.layers[3].mlp.up_proj.weight.detach()
    assert (rounded(weight, "int4") - weight).norm() / weight.norm() < 0.01
