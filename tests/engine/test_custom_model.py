"""A user's own model behind the engine: the GPT-2 of docs/models.md, as printed, against transformers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from app.replica import build_engine
from app.settings import ConfigError, ServingConfig
from engine.batch_engine import ContinuousBatchingEngine
from engine.models.decoder import CausalLM, DecoderModel, create_decoder_kv_caches
from engine.models.layers import GatedMLP
from engine.models.loader import load_model
from engine.models.publisher import save_pretrained
from engine.schemas import GenerationRequest
from tests.engine.made_tokenizers import byte_level_tokenizer
from tests.engine.oracle import tiny_model

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "models.md").read_text(), re.M | re.S)
IDS = torch.arange(3, 43)[None]


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    """The documented module, importable by its name as a user's would be."""
    (snippet,) = [text for text in SNIPPETS if "class GPT2" in text]
    module = ModuleType("documented_models")
    exec(snippet, module.__dict__)
    module.SmallMLP = SmallMLP  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 made by transformers, with a tokenizer."""
    path = tmp_path_factory.mktemp("gpt2")
    shape = {"vocab_size": 402, "n_positions": 256, "n_embd": 48, "n_layer": 2, "n_head": 3, "initializer_range": 0.2}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=1)).eval().save_pretrained(path)
    byte_level_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(module: ModuleType, folder: Path) -> CausalLM:
    return load_model(folder, model_class=module.GPT2)


def greedy(engine: ContinuousBatchingEngine, prompts: list[list[int]], count: int) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        request = {"prompt_ids": prompt, "max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        engine.add_request(GenerationRequest(**request, request_id=str(i)))
    while engine.scheduler.has_pending_work:
        engine.step()
    results = [engine.result(str(i)) for i in range(len(prompts))]
    return [result.token_ids for result in results if result is not None]


def test_logits_with_and_without_caches(model: CausalLM, folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = reference(IDS).logits
        assert (model(IDS) - expected).abs().max() < 1e-4
        caches = create_decoder_kv_caches(model, 1)
        parts = [model(IDS[:, i : i + 8], kv_caches=caches, use_cache=True)[0] for i in range(0, 40, 8)]
        assert (torch.cat(parts, 1) - expected).abs().max() < 1e-4
    model(IDS).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "options", [{"page_size": 1, "max_batched_tokens": 7, "num_pages": 130}, {"depth": 0}, {"speculation": "ngram"}]
)
def test_greedy_text_in_the_engine(options: dict[str, Any], model: CausalLM, folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder)
    engine = ContinuousBatchingEngine(model, None, max_batch_size=3, **options)
    prompts = [[5, 6, 7] * 4, [5, 6, 7] * 4 + [9], [11], list(range(3, 60)), [8, 8, 8]]
    for prompt, output in zip(prompts, greedy(engine, prompts, 40), strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        for i, token in enumerate(output):
            assert token == best.indices[i, 0] or best.values[i, 0] - best.values[i, 1] < 1e-4


def test_it_drafts_for_another_and_is_drafted_for(model: CausalLM) -> None:
    target = tiny_model(vocab_size=402, max_seq_len=256)
    for one, other in ((model, target), (target, model), (model, model)):
        prompts = [[5, 6, 7], [9, 8]]
        plain = greedy(ContinuousBatchingEngine(one, None, max_batch_size=2), prompts, 30)
        engine = ContinuousBatchingEngine(one, None, max_batch_size=2, speculation="draft", draft_model=other, gamma=3)
        assert greedy(engine, prompts, 30) == plain
        drafted = engine.speculation_stats()
        assert drafted is not None and drafted.drafted > 0 and (one is not other or drafted.acceptance_rate > 0.9)


def test_half_precision(module: ModuleType, folder: Path) -> None:
    loaded = load_model(folder, model_class=module.GPT2, dtype="bfloat16")
    engine = ContinuousBatchingEngine(loaded, None, max_batch_size=1, dtype=torch.bfloat16)
    assert loaded.packed and len(greedy(engine, [[5, 6]], 20)[0]) == 20


def test_a_server_names_it(module: ModuleType, folder: Path) -> None:
    options = {"model": str(folder), "model_class": "documented_models:GPT2", "max_model_len": 128, "dtype": "float32"}
    engine, description = build_engine(ServingConfig.from_options({**options, "num_threads": 1}))
    assert description["model_class"] == "GPT2" and description["max_seq_len"] == 128
    assert len(greedy(engine, [[5, 6]], 20)[0]) == 20
    with pytest.raises(ConfigError, match="model_class needs a model with weights, not dummy"):
        ServingConfig.from_options({**options, "model": "dummy"})


def test_what_the_model_says_ends_a_text_counts_with_another_tokenizer(tmp_path: Path) -> None:
    save_pretrained(tiny_model(vocab_size=402), tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [1, 7], "top_k": 20}')
    byte_level_tokenizer().save_pretrained(tmp_path / "tokenizer")
    options = {"model": str(tmp_path / "model"), "tokenizer": str(tmp_path / "tokenizer"), "num_threads": 1}
    engine, description = build_engine(ServingConfig.from_options(options))
    assert engine.tokenizer is not None and 7 in engine.tokenizer.eos_token_ids
    assert description["sampling_defaults"] == {"top_k": 20}
    free = greedy(engine, [[5, 6]], 20)[0]
    seven = GenerationRequest(prompt_ids=[5, 6], max_new_tokens=20, logit_bias={7: 100.0})
    engine.add_request(seven)
    while engine.scheduler.has_pending_work:
        engine.step()
    result = engine.result(seven.request_id)
    assert len(free) == 20 and result is not None and (result.finish_reason, result.token_ids) == ("stop", [])


class Watched(DecoderModel):
    """A user's own, with a constructor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls = 0

    def hidden_states(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return super().hidden_states(*args, **kwargs)


def test_a_subclass_of_the_decoder_has_its_constructor(tmp_path: Path) -> None:
    model = tiny_model()
    save_pretrained(model, tmp_path)
    loaded = load_model(tmp_path, model_class=Watched)
    assert isinstance(loaded, Watched) and loaded.config == model.config
    assert torch.equal(loaded(IDS % 64)[0], model(IDS % 64)[0]) and loaded.calls == 1


class SmallMLP(GatedMLP):
    """A user's own."""


def test_registered_parts_by_their_place(module: ModuleType, tmp_path: Path) -> None:
    save_pretrained(tiny_model(), tmp_path)
    parts = {"mlp_impl": "documented_models:SmallMLP", "attn_impl": "engine.attention.sdpa:SDPAttention"}
    model = load_model(tmp_path, **parts)
    assert isinstance(model, DecoderModel) and type(model.model.layers[0].mlp) is SmallMLP
    assert torch.equal(model(IDS), tiny_model()(IDS))
    config = ServingConfig.from_options({"model": "dummy", **parts, "num_threads": 1})
    assert build_engine(config)[1]["mlp_impl"] == "documented_models:SmallMLP"
    for name, value in (("attn_impl", "engine.attention:Missing"), ("mlp_impl", "no.such:Thing")):
        with pytest.raises(ValueError, match=rf"implementation '{value}' can't be imported"):
            load_model(tmp_path, **{name: value})


class InProcess(CausalLM):
    """Without `from_checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("table", torch.arange(4), persistent=False)

    def hidden_states(self, *args: Any) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class WithBuffer(InProcess):
    """Whose buffer isn't saved."""

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any], **options: Any) -> WithBuffer:
        return cls()


def test_what_a_class_can_get_wrong_is_named(module: ModuleType, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine"}))
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    for model_class, message in (
        ("documented_models:GPT3", "model_class 'documented_models:GPT3' can't be imported"),
        ("documented_models:Conv1D", "is not a subclass of engine.CausalLM"),
        (WithBuffer, "buffers that the checkpoint doesn't have: table"),
        (InProcess, "InProcess can't be loaded from files: it has no from_checkpoint"),
    ):
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path, model_class=model_class)
    with pytest.raises(ValueError, match="GPT2 can't be saved for transformers, only DecoderModel"):
        save_pretrained(load_model(folder, model_class=module.GPT2), tmp_path / "out")
    with pytest.raises(TypeError, match="abstract method"):
        type("Half", (CausalLM,), {"logits": lambda self, hidden: hidden})()


@pytest.mark.parametrize("snippet", [text for text in SNIPPETS if "class GPT2" not in text])
def test_snippets_run_as_printed(snippet: str, smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(smollm2.parent)
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{snippet}"
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    promised = re.findall(r"^ *print\(.*\)  # (.*)$", snippet, re.M)
    assert promised and all(line in run.stdout.splitlines() for line in promised), run.stdout
