"""The loader against transformers: models it made and saved, loaded here, must give its logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.models import loader
from engine.models.loader import check_tokenizer, load_generation_defaults, load_model
from engine.tokenization import SimpleCharacterTokenizer, load_tokenizer
from tests.engine.made_tokenizers import byte_level_tokenizer
from tests.engine.oracle import tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-7-to-1-wide-heads": (
        "llama",
        {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56, "head_dim": 26},
    ),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama-rope-yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": 24}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window-in-upper-layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-biases-tied": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
}


def logits_differ_by(model: Any, reference: Any, length: int = 40) -> float:
    ids = torch.randint(3, reference.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return float((model(ids) - reference(ids).logits).abs().max())


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace or (None) remove tensors; names with a double underscore for the dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def folder(tiny_reference: Any, tmp_path: Path) -> Path:
    """A saved tiny Llama, to be broken."""
    tiny_reference("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tiny_reference: Any, tmp_path: Path) -> None:
    family, changes = CASES[case]
    reference = tiny_reference(family, **changes)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert model.dtype == torch.float32
    assert logits_differ_by(model, reference) < 1e-4


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, YARN_ROPE | {"rope_theta": 20000.0}], ids=lambda rope: rope["rope_type"])
def test_rope_keys_as_transformers_4_wrote_them(rope: dict[str, Any], tiny_reference: Any, tmp_path: Path) -> None:
    reference = tiny_reference("llama", rope_parameters=rope)
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert logits_differ_by(load_model(tmp_path), reference) < 1e-4


def test_shards(tiny_reference: Any, tmp_path: Path) -> None:
    reference = tiny_reference("llama", num_hidden_layers=3)
    reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert logits_differ_by(load_model(str(tmp_path)), reference) < 1e-4
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.rename(tmp_path / "gone")
    with pytest.raises(ValueError, match=f"{shard.name} is missing"):
        load_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../model.safetensors"}}))
    with pytest.raises(ValueError, match="weight_map"):
        load_model(tmp_path)


def test_real_model(smollm2: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    assert logits_differ_by(load_model(smollm2, dtype="float32"), reference) < 1e-4


def test_dtype_is_the_checkpoints_unless_another_is_asked_for(tiny_reference: Any, tmp_path: Path) -> None:
    tiny_reference("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert load_model(tmp_path).dtype == torch.bfloat16
    model = load_model(tmp_path, dtype="float32")
    assert logits_differ_by(model, reference) < 1e-4
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert load_model(tmp_path, dtype=torch.float16).dtype == torch.float16
    with pytest.raises(ValueError, match="dtype int8 is not supported; known: float32, float16, bfloat16"):
        load_model(tmp_path, dtype="int8")


def test_nothing_stays_on_the_meta_device(folder: Path) -> None:
    model = load_model(folder)
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"cpu"}
    assert not model.training


@pytest.mark.parametrize("tied", [True, False])
def test_head_is_tied_or_not(tied: bool, tiny_reference: Any, tmp_path: Path) -> None:
    tiny_reference("llama", tie_word_embeddings=tied).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_tied_checkpoint_may_repeat_its_head(tiny_reference: Any, tmp_path: Path) -> None:
    reference = tiny_reference("llama", tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)
    edit_tensors(tmp_path, lm_head__weight=torch.zeros(131, 64))
    assert logits_differ_by(load_model(tmp_path), reference) < 1e-4


def test_context_can_be_lowered_and_not_raised(folder: Path) -> None:
    assert load_model(folder).max_seq_len == 256
    assert load_model(folder, max_seq_len=64).max_seq_len == 64
    with pytest.raises(ValueError, match="max_seq_len 257 is above the model's context of 256"):
        load_model(folder, max_seq_len=257)
    with pytest.raises(ValueError, match="max_seq_len"):
        load_model(folder, max_seq_len=0)


def test_gradients_reach_loaded_weights(folder: Path) -> None:
    model = load_model(folder)
    model(torch.tensor([[3, 4, 5]])).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported; known: Llama",
        ),
        ({"model_type": "brandnew", "architectures": None}, "architecture brandnew is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported"),
        ({"model_type": "mixtral", "num_local_experts": 8}, r"mixture-of-experts .* \(mixtral\)"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, r"mixture-of-experts .* \(qwen3_moe\)"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"quantised .* \(awq\)"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised .* \(gptq\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised .* \(fp8\)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, "8 is not divisible by num_kv_heads 3"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"intermediate_size": -3}, "-3"),
        ({"max_position_embeddings": 2**40}, "lower it with max_seq_len"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers, but only"),
        ({"num_hidden_layers": 3}, r"missing: model\.layers\.2\.input_layernorm\.weight.* and 4 more"),
        ({"num_hidden_layers": 1}, r"unexpected: model\.layers\.1\."),
        ({"intermediate_size": 97}, r"wrong shape: .*down_proj\.weight \[64, 96\] \(expected \[64, 97\]\)"),
        ({"attention_bias": True}, r"missing: model\.layers\.0\.self_attn\.k_proj\.bias"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_config_can_get_wrong_is_named(changes: dict[str, Any], message: str, folder: Path) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_tensors_that_are_wrong_are_named(folder: Path) -> None:
    edit_tensors(folder, model__norm__weight=None, extra__qweight=torch.zeros(1))
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight; tensors unexpected: extra\.qweight"):
        load_model(folder)


def test_tensors_that_are_not_plain_numbers_are_named(folder: Path) -> None:
    eight_bit = torch.zeros(64, 96).to(torch.float8_e4m3fn)
    edit_tensors(folder, model__layers__1__mlp__down_proj__weight=eight_bit)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight is stored as F8_E4M3"):
        load_model(folder)


def test_old_rotary_buffers_are_ignored(folder: Path) -> None:
    edit_tensors(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    load_model(folder)


def test_broken_files_are_named(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors can't be read"):
        load_model(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin must be converted to safetensors"):
        load_model(folder)
    for text, message in (("{", "not valid JSON"), ("[" * 100_000, "not valid JSON"), ("[]", "not a JSON object")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json is {message}"):
            load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_model(folder)


def test_places_where_no_model_is(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a GGUF file"):
        load_model(folder / "config.json")
    with pytest.raises(ValueError, match=r"nowhere/a/b: no such file or folder, and not a hub id"):
        load_model("nowhere/a/b")
    with pytest.raises(ValueError, match=r"owner/name: no such file or folder, and not available from the hub"):
        load_model("owner/name")  # tests run with the hub offline
    with pytest.raises(ValueError, match="revision 'v1' is for hub models"):
        load_model(folder, revision="v1")


def test_hub_id_with_revision(tiny_reference: Any, tmp_path: Path) -> None:
    """In a cache laid out as huggingface_hub lays it out, which is the library's own path when it is offline."""
    repo = tmp_path / "hub" / "models--owner--tiny"
    for revision, seed in (("a" * 40, 1), ("b" * 40, 2)):
        tiny_reference("llama", seed=seed).save_pretrained(repo / "snapshots" / revision)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "refs" / "v2").write_text("b" * 40)
    script = (
        "import sys; from engine.models.loader import load_model\n"
        "for revision in (None, 'v2'):\n"
        "    print(load_model('owner/tiny', revision=revision).model.norm.weight.tolist())"
    )
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    run = [sys.executable, "-c", script]
    root = Path(loader.__file__).parents[2]
    lines = subprocess.run(run, env=environment, cwd=root, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    for seed, line in ((1, lines[0]), (2, lines[1])):
        assert json.loads(line) == tiny_reference("llama", seed=seed).model.norm.weight.tolist()


def test_generation_defaults(folder: Path) -> None:
    generation = folder / "generation_config.json"
    generation.unlink()
    assert load_generation_defaults(folder) == {"eos_token_ids": [2]}  # config.json's
    generation.write_text(
        json.dumps({"eos_token_id": [7, 9], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_length": 4096})
    )
    expected = {"eos_token_ids": [7, 9], "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert load_generation_defaults(folder) == expected
    generation.write_text(json.dumps({"eos_token_id": 7, "top_k": 0, "temperature": None}))
    assert load_generation_defaults(folder) == {"eos_token_ids": [7]}
    generation.write_text(json.dumps({"top_p": 3.0}))
    with pytest.raises(ValueError, match="generation_config top_p"):
        load_generation_defaults(folder)
    generation.write_text(json.dumps({"eos_token_id": ["</s>"]}))
    with pytest.raises(ValueError, match="eos_token_id"):
        load_generation_defaults(folder)


def test_tokenizer_larger_than_the_model(folder: Path) -> None:
    model = load_model(folder)
    check_tokenizer(model, SimpleCharacterTokenizer(131))
    with pytest.raises(ValueError, match="132 tokens, the model only 131"):
        check_tokenizer(model, SimpleCharacterTokenizer(132))


def test_added_tokens_beyond_the_models_vocabulary(tmp_path: Path) -> None:
    made = byte_level_tokenizer()
    made.save_pretrained(tmp_path)
    check_tokenizer(tiny_model(vocab_size=len(made)), load_tokenizer(tmp_path))
    made.add_tokens(["<one>", "<two>"])
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{len(made)} tokens, the model only {len(made) - 1}"):
        check_tokenizer(tiny_model(vocab_size=len(made) - 1), load_tokenizer(tmp_path))
