"""Every family in odd settings against transformers: logits, 200 greedy tokens, and back into a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.batch_engine import ContinuousBatchingEngine
from engine.models.loader import load_model
from engine.models.publisher import save_pretrained
from engine.schemas import GenerationRequest
from tests.engine.oracle import NEAR_TIE

THETA = {"rope_theta": 10000.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
SEVEN_TO_ONE = {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56, "head_dim": 40}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-7-to-1-tied": ("llama", {**SEVEN_TO_ONE, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", **THETA, "factor": 2.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", **THETA, "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}),
    "llama-yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", **THETA, **YARN}}),
    "mistral-7-to-1-window": ("mistral", {**SEVEN_TO_ONE, "sliding_window": 5}),
    "mistral-yarn": (
        "mistral",
        {"sliding_window": None, "rope_parameters": {"rope_type": "yarn", **THETA, **YARN, "truncate": False}},
    ),
    "qwen2-window-above": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen2-7-to-1-dynamic": (
        "qwen2",
        {
            **SEVEN_TO_ONE,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", **THETA, "factor": 2.0},
        },
    ),
    "qwen3-7-to-1": ("qwen3", SEVEN_TO_ONE),
    "qwen3-biases-window-yarn": (
        "qwen3",
        {
            "head_dim": 24,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
            "rope_parameters": {"rope_type": "yarn", **THETA, **YARN, "attention_factor": 1.3, "beta_fast": 16},
        },
    ),
}


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_in_and_out(case: str, tiny_reference: Any, tmp_path: Path) -> None:
    family, changes = CASES[case]
    reference = tiny_reference(family, **changes)
    reference.save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")

    engine = ContinuousBatchingEngine(model, None, max_batch_size=2, page_size=16)
    prompts = [[7, 3, 9], list(range(3, 40))]
    for i, prompt in enumerate(prompts):
        engine.add_request(GenerationRequest(prompt_ids=prompt, max_new_tokens=200, temperature=0, request_id=str(i)))
    while engine.scheduler.has_pending_work:
        engine.step()
    save_pretrained(model, tmp_path / "ours")
    again, opened = load_model(tmp_path / "ours"), AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(opened) is type(reference) and opened.dtype == torch.float32
    for i, prompt in enumerate(prompts):
        result = engine.result(str(i))
        assert result is not None and len(result.token_ids) == 200
        ids = prompt + result.token_ids
        expected = logits_of(reference, ids)
        with torch.inference_mode():
            ours, reloaded = model(torch.tensor([ids]))[0], again(torch.tensor([ids]))[0]
        assert (ours - expected).abs().max() < 1e-4
        # what transformers would have chosen at every step, given that all steps before were the same
        best = expected[len(prompt) - 1 : -1].topk(2)
        for step, (token, (first, second)) in enumerate(zip(result.token_ids, best.values.tolist(), strict=True)):
            assert token == best.indices[step, 0] or first - second < NEAR_TIE, step
        assert torch.equal(ours, reloaded)
        assert (logits_of(opened, ids) - expected).abs().max() < 1e-4


def test_rope_scaling_counts(tiny_reference: Any) -> None:
    """The cases above would see a scaling that is left out, but for dynamic, which is none within the context."""
    ids = torch.arange(3, 103)[None]
    for case in ("llama-linear", "llama-llama3", "llama-yarn", "llama-dynamic"):
        _, changes = CASES[case]
        plain = tiny_reference(
            "llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5 if "3" in case else 1e4}
        )
        with torch.inference_mode():
            differ = (tiny_reference("llama", **changes)(ids).logits - plain(ids).logits).abs().max()
        assert (differ > 1e-2) != (case == "llama-dynamic"), case


def test_dynamic_scaling_ends_at_the_context(tiny_reference: Any, tmp_path: Path) -> None:
    """Beyond it, what transformers gives for a token depends on how many came in one forward: refused, not guessed."""
    reference = tiny_reference("llama", **CASES["llama-dynamic"][1])
    reference.save_pretrained(tmp_path)
    ids = list(range(3, 131)) * 3
    with torch.inference_mode():
        cache = reference(torch.tensor([ids[:200]]), use_cache=True).past_key_values
        pieces = reference(torch.tensor([ids[200:300]]), past_key_values=cache).logits[0, -1]
    assert (logits_of(reference, ids[:300])[-1] - pieces).abs().max() > 1e-2
    with pytest.raises(ValueError, match="max_seq_len 300 is above the model's context of 256"):
        load_model(tmp_path, max_seq_len=300)
    model = load_model(tmp_path, max_seq_len=100)
    save_pretrained(model, tmp_path / "shorter")
    shorter = AutoModelForCausalLM.from_pretrained(tmp_path / "shorter")
    assert shorter.config.rope_parameters["rope_type"] == "dynamic" and shorter.config.max_position_embeddings == 100
    assert (logits_of(shorter, ids[:100]) - logits_of(reference, ids[:100])).abs().max() < 1e-4


def test_a_context_that_was_lowered_keeps_yarn(tiny_reference: Any, tmp_path: Path) -> None:
    """Also where the config names no original length, which is then the context."""
    rope = {"rope_type": "yarn", **THETA, "factor": 4.0}
    reference = tiny_reference("llama", rope_parameters=rope)
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"].pop("original_max_position_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_pretrained(load_model(tmp_path, max_seq_len=100), tmp_path / "shorter")
    ids = list(range(3, 103))
    for folder in (tmp_path, tmp_path / "shorter"):
        opened = AutoModelForCausalLM.from_pretrained(folder)
        assert (logits_of(opened, ids) - logits_of(reference, ids)).abs().max() < 1e-4, folder
    assert AutoConfig.from_pretrained(tmp_path / "shorter").max_position_embeddings == 100


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            "'longrope' is not supported; known: def",
        ),
        ({"rope_type": "linear"}, "needs factor above 0, got None|factor"),
        ({"rope_type": "yarn", "factor": "4"}, "needs factor above 0, got '4'"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "llama3"),
        ({"rope_type": "dynamic", "factor": 0}, "needs factor above 0, got 0"),
    ],
)
def test_rope_parameters_that_are_wrong_are_named(
    rope: dict[str, Any], message: str, tiny_reference: Any, tmp_path: Path
) -> None:
    tiny_reference("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": THETA | rope}))
    with pytest.raises(ValueError, match=message) as error:
        load_model(tmp_path)
    assert str(error.value).startswith(str(tmp_path))


def test_the_real_model(smollm2: Path, tmp_path: Path) -> None:
    """200 greedy tokens of SmolLM2 in fp32, and the folder written from it, tokenizer included."""
    from transformers import AutoTokenizer

    from engine.tokenization import load_tokenizer

    tokenizer = load_tokenizer(smollm2)
    model = load_model(smollm2, dtype="float32")
    save_pretrained(model, tmp_path, tokenizer, max_shard_size="200MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    engine = ContinuousBatchingEngine(model, tokenizer, max_batch_size=1, max_seq_len=256)
    chat = [{"role": "user", "content": "Tell me a long story about a fish that pilots sharks."}]
    prompt = tokenizer.encode_chat(chat)
    engine.add_request(
        GenerationRequest(prompt_ids=prompt, max_new_tokens=200, temperature=0, ignore_eos=True, request_id="a")
    )
    while engine.scheduler.has_pending_work:
        engine.step()
    result = engine.result("a")
    assert result is not None
    ids = prompt + result.token_ids
    expected = logits_of(AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32), ids)
    best = expected[len(prompt) - 1 : -1].topk(2)
    differ = [i for i, token in enumerate(result.token_ids) if token != best.indices[i, 0]]
    assert all(best.values[i, 0] - best.values[i, 1] < NEAR_TIE for i in differ)
    with torch.inference_mode():
        logits = model(torch.tensor(ids))[0]
    assert (logits - expected).abs().max() < 1e-4
    del model, engine
    assert (logits_of(AutoModelForCausalLM.from_pretrained(tmp_path), ids) - expected).abs().max() < 1e-4
    theirs, opened = AutoTokenizer.from_pretrained(smollm2), AutoTokenizer.from_pretrained(tmp_path)
    for render in (lambda t: t.apply_chat_template(chat, tokenize=False), lambda t: t("naïve 42 <|im_end|>").input_ids):
        assert render(opened) == render(theirs)
