"""Models that go out: what can't is refused with the reason, what does is opened by transformers; the hub over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from engine.models.decoder import DecoderModel
from engine.models.layers import MLPS, PlainMLP
from engine.models.loader import load_model
from engine.models.publisher import save_pretrained
from engine.tokenization import SimpleCharacterTokenizer, load_tokenizer
from tests.engine.fake_hub import TOKEN, FakeHub, fake_hub
from tests.engine.made_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer
from tests.engine.oracle import tiny_model

ROOT = Path(__file__).parents[2]
IDS = torch.arange(3, 43)[None]


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        ({}, "LlamaForCausalLM"),
        ({"model_type": "mistral"}, "MistralForCausalLM"),
        ({"window_size": 5}, "MistralForCausalLM"),
        ({"window_size": 5, "window_layers": (1,)}, "Qwen2ForCausalLM"),
        ({"qkv_bias": True}, "Qwen2ForCausalLM"),
        ({"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}, "LlamaForCausalLM"),
        ({"qk_norm": True, "head_dim": 24, "window_size": 5, "tie_word_embeddings": True}, "Qwen3ForCausalLM"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 5e4}, "LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "LlamaForCausalLM"),
    ],
    ids=str,
)
def test_the_family_that_fits_is_found(changes: dict[str, Any], architecture: str, tmp_path: Path) -> None:
    """Models made here, with no family in mind."""
    changes = {"window_layers": (0, 1), "qkv_bias": True} | changes if "window_layers" in changes else changes
    model = tiny_model(**changes)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    save_pretrained(model, tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(opened).__name__ == architecture
    again = load_model(tmp_path)
    with torch.inference_mode():
        ours = model(IDS)
        assert (opened(IDS).logits - ours).abs().max() < 1e-4
        assert torch.equal(again(IDS), ours)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_glu": False}, "Llama.* has no use_glu False; .*Qwen3ForCausalLM has no use_glu False"),
        (
            {"attention_out_bias": True},
            "Llama.* has no attention_out_bias True; Mistral.* has no attention_out_bias True",
        ),
        ({"qk_norm": True, "mlp_bias": True}, "Qwen3ForCausalLM has no mlp_bias True"),
        (
            {"qkv_bias": True, "qk_norm": True},
            "Qwen2.* has no qk_norm True; Qwen3.* has no attention_out_bias",
        ),
        ({"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "mlp_bias": True}, "not a multiple of the number of att"),
        ({"mlp_impl": "squared"}, "has no mlp_impl 'squared'"),
    ],
    ids=str,
)
def test_what_no_architecture_expresses_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    MLPS.register("squared", PlainMLP)
    try:
        model = tiny_model(**changes)
    finally:
        del MLPS._factories["squared"]
    with pytest.raises(ValueError, match=f"transformers has no architecture for this model: .*{reason}"):
        save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_saved_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    packed = tiny_model().to(torch.bfloat16)
    packed.pack()
    with pytest.raises(ValueError, match="packed for an engine, or divided: load it again"):
        save_pretrained(packed, out)
    adapted = tiny_model()
    adapted.model.layers[0].mlp.up_proj.register_parameter("lora_a", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"not those of LlamaForCausalLM: model\.layers\.0\.mlp\.up_proj\.lora_a"):
        save_pretrained(adapted, out)
    with pytest.raises(ValueError, match="SimpleCharacterTokenizer has no files"):
        save_pretrained(tiny_model(), out, SimpleCharacterTokenizer(64))
    assert not out.exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shards_and_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True).to(dtype)
    save_pretrained(model, tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists() and len(list(tmp_path.glob("*.safetensors"))) > 2
    for size in ("10KB", "5GB"):  # over what was there
        save_pretrained(model, tmp_path, max_shard_size=size)
        again = load_model(tmp_path)
        assert again.dtype == AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == dtype
        assert again.lm_head.weight is again.model.embed_tokens.weight
        for name, parameter in model.named_parameters():
            assert torch.equal(again.get_parameter(name), parameter)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer], ids=["byte level", "SentencePiece"])
def test_tokenizer_and_generation_settings_go_along(make: Any, tiny_reference: Any, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    tiny_reference("llama", vocab_size=420).save_pretrained(source)
    made = make()
    made.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    made.save_pretrained(source)
    makers = {"eos_token_id": [1, 2], "temperature": 0.6, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(makers))
    tokenizer = load_tokenizer(source)
    save_pretrained(load_model(source), out, tokenizer)
    again, opened = load_tokenizer(out), AutoTokenizer.from_pretrained(out)
    text = "naïve 東京 <|end|> </s> 42"
    assert again.encode(text) == tokenizer.encode(text) == opened(text).input_ids == made(text).input_ids
    chat = [{"role": "user", "content": "Hi"}]
    assert again.encode_chat(chat) == opened.apply_chat_template(chat).input_ids
    assert again.eos_token_ids == tokenizer.eos_token_ids and again.special_token_ids == tokenizer.special_token_ids
    generation = GenerationConfig.from_pretrained(out)
    assert (sorted(tokenizer.eos_token_ids), 0.6) == (generation.eos_token_id, generation.temperature)
    save_pretrained(load_model(source), out, made)  # transformers' own will do
    assert load_tokenizer(out).encode(text) == tokenizer.encode(text)
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1, "who may read one may read all"
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == made.eos_token_id


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as server:
        yield server


def run(script: str, hub: FakeHub, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its environment once."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    settings |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=120
    )


def test_push_to_the_hub_and_back(hub: FakeHub, tiny_reference: Any, tmp_path: Path) -> None:
    reference = tiny_reference("qwen2", vocab_size=420)
    reference.save_pretrained(tmp_path / "in")
    byte_level_tokenizer().save_pretrained(tmp_path / "in")
    script = f"""
import torch
from engine import load_model, load_tokenizer, push_to_hub
model, tokenizer = load_model({str(tmp_path / "in")!r}), load_tokenizer({str(tmp_path / "in")!r})
print(push_to_hub(model, "me/fish", private=True, commit_message="The first", token="{TOKEN}", tokenizer=tokenizer))
first = load_model("me/fish", token="{TOKEN}")
print(torch.equal(first.lm_head.weight, model.lm_head.weight))
torch.nn.init.zeros_(model.lm_head.weight)
print(push_to_hub(model, repo_id="me/fish", token="{TOKEN}"))
print(load_model("me/fish", token="{TOKEN}").lm_head.weight.abs().sum().item())
"""
    result = run(script, hub, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [f"{hub.url}/me/fish", "True", f"{hub.url}/me/fish", "0.0"]
    assert hub.private == {"me/fish": True}
    (commit, message, files), (_, second, _) = hub.commits["me/fish"]
    assert (message, second) == ("The first", "Upload model")
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert "model.safetensors: 100%" in result.stderr  # download progress

    for name, data in files.items():
        (tmp_path / "theirs").mkdir(exist_ok=True)
        (tmp_path / "theirs" / name).write_bytes(data)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    with torch.inference_mode():
        assert torch.equal(opened(IDS).logits, reference(IDS).logits)

    script = f"""
from engine import load_model, load_tokenizer
print(load_model("me/fish", revision="{commit}").lm_head.weight.abs().sum().item() > 0)
print(load_tokenizer("me/fish", revision="{commit}").encode("the dog"))
for options in ({{"revision": "gone", "token": "{TOKEN}"}}, {{"token": "hf_wrong"}}):
    try:
        load_model("me/sharks", **options)
    except ValueError as error:
        print(error)
"""
    result = run(script, hub, tmp_path, HF_TOKEN=TOKEN)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:2] == ["True", str(byte_level_tokenizer()("the dog").input_ids)]
    for line, status in zip(lines[2:], ("404 Client Error", "Client error '401 Unauth"), strict=True):
        assert line.startswith(f"me/sharks: no such file or folder, and not available from the hub: {status}")


def test_a_push_that_fails_leaves_nothing(hub: FakeHub, tmp_path: Path) -> None:
    script = """
from engine import DecoderModel, push_to_hub
from huggingface_hub.errors import HfHubHTTPError
shape = {"vocab_size": 100, "hidden_size": 32, "num_layers": 1, "num_heads": 2}
for model in (DecoderModel(**shape), DecoderModel(**shape, use_glu=False)):
    try:
        push_to_hub(model, "me/fish", token="hf_wrong")
    except (HfHubHTTPError, ValueError) as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""
    result = run(script, hub, tmp_path)
    assert result.returncode == 0, result.stderr
    refused, inexpressible = result.stdout.splitlines()
    assert refused.startswith("HfHubHTTPError Client error '401 Unauthorized'")
    assert inexpressible.startswith("ValueError transformers has no architecture for this model")
    assert [request for request in hub.requests if request[0] != "GET"] == [("POST", "/api/repos/create")]
    assert hub.commits == {} and list((tmp_path / "tmp").iterdir()) == []


def test_a_file_of_another_format_goes_out_as_a_folder(smollm2_gguf: Path, tmp_path: Path) -> None:
    """GGUF in, safetensors out."""
    model = load_model(smollm2_gguf)
    assert isinstance(model, DecoderModel)
    save_pretrained(model, tmp_path, load_tokenizer(smollm2_gguf))
    again = load_model(tmp_path)
    assert again.dtype == torch.bfloat16 and again.config == model.config
    assert all(torch.equal(again.get_parameter(name), tensor) for name, tensor in model.named_parameters())
    assert load_tokenizer(tmp_path).eos_token_ids == {2}
