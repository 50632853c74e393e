"""Adapters against PEFT: logits applied, merged and unmerged, and several mixed in one batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.batch_engine import ContinuousBatchingEngine
from engine.models.decoder import DecoderModel
from engine.models.loader import load_model
from engine.models.lora import apply_lora, load_adapter, merge_lora, unmerge_lora
from engine.schemas import GenerationRequest

CONFIG = transformers.LlamaConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 12,
        "target_modules": ["k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2, r"layers\.1\.self_attn\.o_proj": 6},
        "alpha_pattern": {"up_proj": 3, r".*\.2\.mlp\.gate_proj": 40},
        "layers_to_transform": [1, 2],
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    transformers.LlamaForCausalLM(CONFIG).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        torch.manual_seed(seed)
        reference = transformers.AutoModelForCausalLM.from_pretrained(base)
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
        folders[name] = tmp_path_factory.mktemp("adapters") / name
        peft.get_peft_model(reference, config).save_pretrained(folders[name])
    return folders


def reference_logits(base: Path, adapter: Path, ids: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        logits: torch.Tensor = peft.PeftModel.from_pretrained(model, adapter)(ids).logits
    return logits


@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_are_those_of_peft(base: Path, adapters: dict[str, Path], name: str) -> None:
    ids = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(1))
    expected = reference_logits(base, adapters[name], ids)
    model = load_model(base)
    with torch.no_grad():
        plain = model(ids)
        assert (plain - expected).abs().max() > 0.01
        apply_lora(model, adapters[name])
        torch.testing.assert_close(model(ids), expected, atol=1e-4, rtol=0)
        for _ in range(2):  # merging twice is harmless
            merge_lora(model)
            assert type(model.model.layers[1].mlp.down_proj) is torch.nn.Linear
            torch.testing.assert_close(model(ids), expected, atol=1e-4, rtol=0)
        unmerge_lora(model)
        torch.testing.assert_close(model(ids), expected, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="has adapters already"):
        apply_lora(model, adapters[name])


def test_gradients_reach_the_base(base: Path, adapters: dict[str, Path]) -> None:
    model = load_model(base)
    apply_lora(model, adapters["all"])
    model(torch.arange(10)).sum().backward()
    assert model.model.layers[0].self_attn.q_proj.base.weight.grad is not None


def texts(engine: ContinuousBatchingEngine, requests: list[GenerationRequest]) -> list[list[int]]:
    for request in requests:
        engine.add_request(request)
    while engine.scheduler.has_pending_work:
        engine.step()
    results = [engine.result(request.request_id) for request in requests]
    assert all(result is not None and result.error is None for result in results)
    return [result.token_ids for result in results if result is not None]


def request(length: int, adapter: str | None, **options: Any) -> GenerationRequest:
    ids = torch.randint(0, 97, (20 + length,), generator=torch.Generator().manual_seed(length)).tolist()
    return GenerationRequest(
        **{"prompt_ids": ids, "max_new_tokens": 24, "ignore_eos": True, "temperature": 0.0, "adapter": adapter}
        | options
    )


@pytest.mark.parametrize("speculation", ["off", "ngram"])
@pytest.mark.parametrize("depth", [0, 1])
def test_adapters_mixed_in_one_batch(base: Path, adapters: dict[str, Path], depth: int, speculation: str) -> None:
    names = [None, *ADAPTERS]
    alone = []
    for seed in range(8):
        model = load_model(base)
        if (name := names[seed % 4]) is not None:
            apply_lora(model, adapters[name])
            merge_lora(model)
        options: dict[str, Any] = {"temperature": 0.0} if seed < 4 else {"temperature": 1.0, "seed": seed}
        alone += texts(ContinuousBatchingEngine(model, None, max_seq_len=128), [request(seed, None, **options)])
    engine = ContinuousBatchingEngine(
        load_model(base), None, max_batch_size=8, max_seq_len=128, depth=depth, speculation=speculation, max_adapters=3
    )
    for name, path in adapters.items():
        engine.load_adapter(name, path)
    mixed = [
        request(seed, names[seed % 4], **({"temperature": 0.0} if seed < 4 else {"temperature": 1.0, "seed": seed}))
        for seed in range(8)
    ]
    assert texts(engine, mixed) == alone
    assert engine.pool.held_pages == 0


def test_a_prefix_is_shared_under_one_adapter_only(base: Path, adapters: dict[str, Path]) -> None:
    engine = ContinuousBatchingEngine(load_model(base), None, max_seq_len=128, page_size=16, max_adapters=2)
    engine.load_adapter("a", adapters["attention"])
    engine.load_adapter("b", adapters["all"])
    [first] = texts(engine, [request(20, "a")])
    before = engine.stats().cached_tokens
    [again] = texts(engine, [request(20, "a")])
    assert again == first
    hit = engine.stats().cached_tokens - before
    assert hit == 39  # all but the last token
    texts(engine, [request(20, "b")])
    texts(engine, [request(20, None)])
    assert engine.stats().cached_tokens - before == hit
    # other weights under a name that was used before
    engine.unload_adapter("a")
    engine.load_adapter("a", adapters["patterns"])
    fresh = ContinuousBatchingEngine(load_model(base), None, max_seq_len=128, max_adapters=1)
    fresh.load_adapter("a", adapters["patterns"])
    assert texts(engine, [request(20, "a")]) == texts(fresh, [request(20, "a")])


def test_loading_and_dropping_under_traffic(base: Path, adapters: dict[str, Path]) -> None:
    engine = ContinuousBatchingEngine(load_model(base), None, max_batch_size=4, max_seq_len=128, max_adapters=2)
    engine.load_adapter("a", adapters["attention"])
    [expected] = texts(engine, [request(1, "a")])
    running = request(1, "a")
    engine.add_request(running)
    for _ in range(5):
        engine.step()
    engine.unload_adapter("a")  # who has it keeps it
    assert engine.adapters() == {}
    with pytest.raises(ValueError, match="unknown adapter 'a'; loaded: none"):
        engine.add_request(request(2, "a"))
    engine.load_adapter("b", adapters["all"])
    while engine.scheduler.has_pending_work:
        engine.step()
    result = engine.result(running.request_id)
    assert result is not None and result.token_ids == expected
    engine.load_adapter("c", adapters["patterns"])
    texts(engine, [request(3, "b")])
    engine.load_adapter("d", adapters["attention"])  # there is room for two: the least recently used goes
    assert sorted(engine.adapters()) == ["b", "d"]
    with pytest.raises(ValueError, match="'b' is loaded already"):
        engine.load_adapter("b", adapters["all"])
    with pytest.raises(ValueError, match="unknown adapter 'x'"):
        engine.unload_adapter("x")


def test_no_room_for_adapters(base: Path, adapters: dict[str, Path]) -> None:
    engine = ContinuousBatchingEngine(load_model(base), None, max_seq_len=64)
    with pytest.raises(ValueError, match="max_adapters"):
        engine.load_adapter("a", adapters["all"])


def _changed(adapters: dict[str, Path], tmp_path: Path, config: dict[str, Any], rename: dict[str, str]) -> Path:
    folder = tmp_path / "changed"
    folder.mkdir()
    settings = json.loads((adapters["all"] / "adapter_config.json").read_text()) | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors = load_file(adapters["all"] / "adapter_model.safetensors")
    for old, new in rename.items():
        tensors = {key.replace(old, new): tensor for key, tensor in tensors.items() if new or old not in key}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "rename", "message"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type 'IA3' is not supported"),
        ({"use_dora": True}, {}, "use_dora is not supported"),
        ({"bias": "all"}, {}, "bias 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save is not supported"),
        ({}, {"layers.2.": "layers.7."}, "the model has 3 layers"),
        ({}, {"q_proj.lora_A": "wq.lora_A"}, "wq.lora_A.weight is none of the linears q_proj"),
        ({}, {"layers.0.self_attn.q_proj.lora_B": ""}, "layers.0.self_attn.q_proj lacks lora_B"),
        ({}, {"up_proj": "x_proj", "down_proj": "up_proj", "x_proj": "down_proj"}, "don't fit a linear of"),
    ],
)
def test_what_is_refused(
    base: Path, adapters: dict[str, Path], tmp_path: Path, config: dict[str, Any], rename: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_adapter(_changed(adapters, tmp_path, config, rename), load_model(base))


def test_files_that_are_not_there(base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    model: DecoderModel = load_model(base)
    with pytest.raises(ValueError, match="adapter_config.json does not exist"):
        load_adapter(tmp_path, model)
    folder = _changed(adapters, tmp_path, {}, {})
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match="adapter_model.safetensors can't be read"):
        load_adapter(folder, model)


def test_another_scale_is_another_adapter(base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    """Keys and values computed under the old one are not its own."""
    model = load_model(base)
    assert isinstance(model, DecoderModel)
    name, folder = next(iter(adapters.items()))
    shutil.copytree(folder, tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    config = json.loads(file.read_text())
    key = load_adapter(tmp_path / "a", model, name).key
    assert key == load_adapter(folder, model, name).key
    file.write_text(json.dumps(config | {"lora_alpha": config["lora_alpha"] * 2}))
    assert key != load_adapter(tmp_path / "a", model, name).key
