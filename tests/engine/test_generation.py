"""Backends and the offline LLM: against transformers' generate, and against each other."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import engine
from engine import LLM, GenerationRequest, SamplingParams, batch_generate_requests, get_generation_backend
from engine.batch_engine import ContinuousBatchingEngine
from engine.generation import BatchedBackend, EagerBackend
from engine.models.decoder import DecoderModel
from engine.models.loader import load_model
from engine.schemas import FinishReason
from engine.tokenization import SimpleCharacterTokenizer

BACKENDS = ("eager", "batched", "speculative")
TEXTS = ["The quick brown fox", "a", "0123456789" * 8, "Hello, world! " * 3, "x y z"]


@pytest.fixture(scope="module")
def reference(tiny_reference: Callable[..., Any]) -> Any:
    return tiny_reference("llama", vocab_size=140, eos_token_id=None)


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    reference.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> DecoderModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def tokenizer() -> SimpleCharacterTokenizer:
    return SimpleCharacterTokenizer(131)  # the model has more rows: padding


def make(name: str, model: DecoderModel, tokenizer: SimpleCharacterTokenizer | None = None, **options: Any) -> Any:
    if name != "speculative":
        return get_generation_backend(name, model=model, tokenizer=tokenizer, **options)
    torch.manual_seed(0)
    draft = DecoderModel(vocab_size=model.vocab_size, hidden_size=32, num_layers=1, num_heads=2, max_seq_len=100)
    return get_generation_backend(name, target_model=model, draft_model=draft, gamma=3, tokenizer=tokenizer, **options)


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def backend(name: str, model: DecoderModel, tokenizer: SimpleCharacterTokenizer) -> Any:
    return make(name, model, tokenizer)


def expected_ids(reference: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' greedy ids, of those that the tokenizer knows and that don't end a text."""
    with torch.inference_mode():
        output = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            suppress_tokens=[0, 1, *range(131, 140)],
        )
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids


def count_forwards(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward from now on."""
    sizes: list[int] = []
    original = model.hidden_states

    def counted(input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        sizes.append(len(input_ids))
        return original(input_ids, *args)

    monkeypatch.setattr(model, "hidden_states", counted)
    return sizes


def test_greedy_is_transformers(backend: Any, reference: Any, tokenizer: SimpleCharacterTokenizer) -> None:
    expected = [expected_ids(reference, tokenizer.encode(text), 12) for text in TEXTS]
    greedy = {"temperature": 0, "max_new_tokens": 12, "logit_bias": {1: -100}}
    results = backend.batch_generate(TEXTS, **greedy)
    assert [result.token_ids for result in results] == expected
    assert [backend.generate(text, **greedy).token_ids for text in TEXTS] == expected
    assert [backend.generate(tokenizer.encode(text), **greedy).token_ids for text in TEXTS] == expected
    for result, ids, text in zip(results, expected, TEXTS, strict=True):
        assert result.text == tokenizer.decode(ids)
        assert (result.finish_reason, result.prompt_tokens) == (FinishReason.LENGTH, len(text))


SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.4},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.8, "temperature": 0.3},
    "frequency": {"frequency_penalty": 1.9, "temperature": 0.3},
    "presence": {"presence_penalty": 1.9, "temperature": 0.3},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "logit_bias": {"logit_bias": {40: 6.0, 41: 5.0, 50: -100.0}},
    "min_tokens": {"min_tokens": 20, "logit_bias": {1: 8.0}},
    "eos": {"logit_bias": {1: 3.0}},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {1: 3.0}},
    "stop ids": {"stop_token_ids": [40, 50, 60, 70, 80]},
    "bad words": {"bad_words": ["a", "bc", "d"], "logit_bias": {i: 3.0 for i in range(68, 73)}},
    "stop": {"stop": ["a", "e", "i", " "], "max_new_tokens": 60},
    "stop kept": {"stop": ["a", "e", "i", " "], "include_stop_str_in_output": True, "max_new_tokens": 60},
    "stop late": {"stop": ["a", "e", "i", " "], "min_tokens": 15, "max_new_tokens": 60},
    "special tokens": {"skip_special_tokens": False, "ignore_eos": True, "logit_bias": {1: 5.0}},
    "logprobs": {"logprobs": 3, "temperature": 0.7},
    "logprobs cut": {"logprobs": 0, "stop": ["a", "e", "i", " "], "max_new_tokens": 60},
    "resumed": {"output_ids": [60, 61, 62, 63], "presence_penalty": 1.5, "logprobs": 1},
    "resumed at the end": {"output_ids": list(range(60, 84))},
}


@pytest.mark.parametrize("case", SAMPLED)
def test_eager_and_batched_sample_the_same(case: str, model: DecoderModel, tokenizer: SimpleCharacterTokenizer) -> None:
    eager = EagerBackend(model, tokenizer)
    batched = BatchedBackend(model, tokenizer)
    params = {"max_new_tokens": 24} | SAMPLED[case]
    requests = [GenerationRequest(prompt=text, seed=seed, **params) for seed, text in enumerate([*TEXTS, *TEXTS])]
    one_by_one = eager.batch_generate(requests)
    together = batched.batch_generate(requests)
    assert [result.request_id for result in one_by_one] == [request.request_id for request in requests]
    for alone, result, request in zip(one_by_one, together, requests, strict=True):
        same_except_numerics(alone, result)
        deltas = []
        stream = batched.stream(request)
        while True:
            try:
                deltas.append(next(stream))
            except StopIteration as end:
                same_except_numerics(alone, end.value)
                break
        known = tokenizer.decode(request.output_ids)
        assert known + "".join(deltas) == known + "".join(eager.stream(request)) == alone.text
        assert all(deltas)


def same_except_numerics(a: Any, b: Any) -> None:
    a, b = copy.copy(a), copy.copy(b)
    a.cached_tokens = b.cached_tokens = 0
    for each in (a, b):
        each.queue_seconds, each.prefill_seconds, each.decode_seconds = 0, None, None
    for one, other in zip(a.logprobs or [], b.logprobs or [], strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [i for i, _ in one.top] == [i for i, _ in other.top]
    assert (a.logprobs is None) == (b.logprobs is None)
    a.logprobs = b.logprobs = None
    assert a == b


def test_the_cases_do_what_they_say(model: DecoderModel, tokenizer: SimpleCharacterTokenizer) -> None:
    """Else two backends that ignore a field would agree."""
    eager = EagerBackend(model, tokenizer)

    def run(case: str) -> list[Any]:
        params = {"max_new_tokens": 24} | SAMPLED[case]
        return [eager.generate(text, seed=seed, **params) for seed, text in enumerate(TEXTS)]

    plain = [result.token_ids for result in run("plain")]
    unchanged = {"plain", "logprobs cut", "special tokens", "stop kept", "stop late"}
    for case in SAMPLED.keys() - unchanged:
        assert [result.token_ids for result in run(case)] != plain, case
    assert any(result.stop_reason in ("a", "e", "i", " ") for result in run("stop"))
    assert any(result.text.endswith(("a", "e", "i", " ")) for result in run("stop kept") if result.stop_reason)
    assert all(len(result.token_ids) >= 15 for result in run("stop late"))
    assert any(result.stop_reason in SAMPLED["stop ids"]["stop_token_ids"] for result in run("stop ids"))
    assert any("<eos>" in result.text for result in run("special tokens"))
    assert any(len(result.token_ids) < 24 for result in run("eos"))
    assert all(len(result.token_ids) >= 20 for result in run("min_tokens"))


def test_logprobs_are_transformers_log_softmax(
    backend: Any, reference: Any, tokenizer: SimpleCharacterTokenizer
) -> None:
    prompt = tokenizer.encode(TEXTS[0])
    result = backend.generate(prompt, seed=1, max_new_tokens=8, logprobs=4, temperature=2.0, ignore_eos=True)
    ids = [*prompt, *result.token_ids]
    with torch.inference_mode():
        rows = reference(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1, : tokenizer.vocab_size].log_softmax(-1)
    for entry, token_id, row in zip(result.logprobs, result.token_ids, rows, strict=True):
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert entry.rank == int((row > row[token_id]).sum()) + 1
        assert [i for i, _ in entry.top] == row.topk(4).indices.tolist()


@pytest.mark.parametrize("chunk", [7, 512])
def test_prompt_logprobs_are_transformers(
    name: str, chunk: int, model: DecoderModel, reference: Any, tokenizer: SimpleCharacterTokenizer, monkeypatch: Any
) -> None:
    monkeypatch.setattr("engine.generation._PREFILL_CHUNK", chunk)
    options = {"max_batched_tokens": chunk} if name == "batched" else {}
    backend = make(name, model, tokenizer, **options)
    prompt = tokenizer.encode(TEXTS[0])
    result = backend.generate(prompt, max_new_tokens=2, prompt_logprobs=2, seed=1)
    with torch.inference_mode():
        rows = reference(torch.tensor([prompt])).logits[0, :-1, : tokenizer.vocab_size].log_softmax(-1)
    first, *others = result.prompt_logprobs
    assert first is None
    for entry, token_id, row in zip(others, prompt[1:], rows, strict=True):
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [i for i, _ in entry.top] == row.topk(2).indices.tolist()


def test_batching_saves_forwards(
    model: DecoderModel, tokenizer: SimpleCharacterTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [GenerationRequest(prompt=text, max_new_tokens=5, ignore_eos=True) for text in "abcd"]
    batched = BatchedBackend(model, tokenizer)
    sizes = count_forwards(model, monkeypatch)
    results = batch_generate_requests(batched, requests)
    assert [len(result.token_ids) for result in results] == [5] * 4
    assert len(sizes) == 5 and max(sizes) == 4
    sizes.clear()
    results = batch_generate_requests(ContinuousBatchingEngine(model, tokenizer), requests)
    assert [len(result.token_ids) for result in results] == [5] * 4
    assert len(sizes) == 5
    sizes.clear()
    batch_generate_requests(EagerBackend(model, tokenizer), requests)
    assert len(sizes) == 20


def test_order_through_a_small_queue(model: DecoderModel, tokenizer: SimpleCharacterTokenizer) -> None:
    """Many more requests than rows, queue places or kept results, of lengths that end out of order."""
    small = ContinuousBatchingEngine(model, tokenizer, max_batch_size=3, max_queued_requests=2, max_results=6)
    requests = [
        GenerationRequest(prompt=f"{i}:", max_new_tokens=1 + 7 * i % 11, ignore_eos=True, temperature=0)
        for i in range(40)
    ]
    results = batch_generate_requests(small, requests)
    assert [result.request_id for result in results] == [request.request_id for request in requests]
    assert [len(result.token_ids) for result in results] == [request.max_new_tokens for request in requests]
    assert batch_generate_requests(small, []) == []
    small.add_request(requests[0])
    with pytest.raises(ValueError, match="is live already"):
        batch_generate_requests(small, [requests[1], requests[0]])
    while small.scheduler.has_pending_work:
        small.step()
    assert small.result(requests[1].request_id) is None  # aborted and gone
    assert small.result(requests[0].request_id) is not None


def test_a_stream_with_an_id_in_use_is_refused_and_harms_nobody(
    model: DecoderModel, tokenizer: SimpleCharacterTokenizer
) -> None:
    backend = BatchedBackend(model, tokenizer)
    request = GenerationRequest(request_id="a", prompt="abc", max_new_tokens=20, temperature=0, ignore_eos=True)
    whole = backend.generate(request).text
    stream = backend.stream(request)
    text = next(stream)
    with pytest.raises(ValueError, match="'a'"):
        next(backend.stream(request))
    assert text + "".join(stream) == whole


def test_streams_interleave_and_can_be_left(model: DecoderModel, tokenizer: SimpleCharacterTokenizer) -> None:
    backend = BatchedBackend(model, tokenizer)
    options = {"max_new_tokens": 30, "ignore_eos": True, "temperature": 0}
    expected = [backend.generate(text, **options).text for text in TEXTS]
    streams = [backend.stream(text, **options) for text in TEXTS]
    parts = ["" for _ in streams]
    for _ in range(10):
        for i, stream in enumerate(streams):
            parts[i] += next(stream)
    assert backend.engine.stats().running == len(TEXTS)
    streams[0].close()
    assert backend.engine.stats().running == len(TEXTS) - 1
    assert expected[0].startswith(parts[0]) and len(parts[0]) < 30
    assert [part + "".join(stream) for part, stream in zip(parts[1:], streams[1:], strict=True)] == expected[1:]
    assert not backend.engine.scheduler.has_pending_work
    assert backend.engine.stats().held_pages == 0
    assert not torch.is_inference_mode_enabled()


def test_eager_leaves_inference_mode_to_itself(model: DecoderModel, tokenizer: SimpleCharacterTokenizer) -> None:
    stream = EagerBackend(model, tokenizer).stream("abc", max_new_tokens=4, ignore_eos=True)
    next(stream)
    assert not torch.is_inference_mode_enabled()


def test_failing_forward(backend: Any, model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        raise RuntimeError("out of cheese")

    prepared = [GenerationRequest(prompt=text, max_new_tokens=4) for text in "ab"]
    monkeypatch.setattr(model, "hidden_states", broken)
    results = backend.batch_generate(prepared)
    assert [(r.finish_reason, r.error) for r in results] == [(FinishReason.ERROR, "RuntimeError: out of cheese")] * 2
    for call in (backend.generate, lambda prompt: list(backend.stream(prompt))):
        with pytest.raises(RuntimeError, match="out of cheese"):
            call("a")
    monkeypatch.undo()
    assert len(backend.generate("a", max_new_tokens=4, ignore_eos=True).token_ids) == 4


def test_deadline(backend: Any) -> None:
    result = backend.generate("abc", max_new_tokens=200, ignore_eos=True, timeout=1e-9)
    assert result.finish_reason is FinishReason.DEADLINE
    assert len(result.token_ids) < 200


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "too long": ("x" * 250, {"max_new_tokens": 7}, "prompt of 250 tokens and max_new_tokens 7 .* context of 256"),
    "no prompt": ("", {}, "prompt has no tokens"),
    "no ids": ([], {}, "prompt_ids is empty"),
    "not a prompt": (3, {}, "prompt_ids"),
    "negative temperature": ("a", {"temperature": -1}, "temperature"),
    "unknown field": ("a", {"temprature": 1}, "temprature"),
    "id": ([140], {}, "token: id 140 is outside the vocabulary of 131"),
    "bias past the tokenizer": ("a", {"logit_bias": {131: 1.0}}, "logit_bias: id 131 is outside the vocabulary of 131"),
    "stop id": ("a", {"stop_token_ids": [135]}, "stop_token_ids: id 135"),
    "adapter": ("a", {"adapter": "lora"}, "adapter"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_prompts_are_refused_before_anything_runs(
    case: str, backend: Any, model: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, fields, message = BAD[case]
    sizes = count_forwards(model, monkeypatch)
    for call in (backend.generate, backend.stream):
        with pytest.raises(ValueError, match=message):
            call(prompt, **fields)
    index = 0 if prompt == "a" else 1
    with pytest.raises(ValueError, match=rf"(?s)prompts\[{index}\]: .*{message}"):
        backend.batch_generate(["ab", prompt], **fields)
    assert sizes == []


def test_misuse(name: str, backend: Any, model: DecoderModel, tokenizer: SimpleCharacterTokenizer) -> None:
    request = GenerationRequest(prompt="a")
    with pytest.raises(ValueError, match="its own sampling parameters"):
        backend.generate(request, temperature=0)
    with pytest.raises(ValueError, match="a list of prompts"):
        backend.batch_generate("abc")
    bare = make(name, model)
    for call in (bare.generate, bare.stream):
        with pytest.raises(ValueError, match="needs a tokenizer"):
            call("abc")
    for needs in ({"stop": "x"}, {"bad_words": ["x"]}):
        with pytest.raises(ValueError, match=f"{next(iter(needs))} needs a tokenizer"):
            bare.generate([70, 71], **needs)
    with pytest.raises(ValueError, match="truncate must be"):
        make(name, model, tokenizer, truncate="right")
    with pytest.raises(ValueError, match="max_seq_len 257 is above the model's 256"):
        make(name, model, tokenizer, max_seq_len=257)
    if isinstance(backend, BatchedBackend):
        with pytest.raises(ValueError, match="same request_id"):
            backend.batch_generate([request, request])


def test_without_a_tokenizer(name: str, model: DecoderModel, reference: Any) -> None:
    result = make(name, model).generate([70, 71, 72], temperature=0, max_new_tokens=6)
    with torch.inference_mode():
        output = reference.generate(
            torch.tensor([[70, 71, 72]]), attention_mask=torch.ones(1, 3), max_new_tokens=6, do_sample=False
        )
    assert result.token_ids == output[0, 3:].tolist()
    assert result.text == ""


def test_truncation_keeps_the_end(name: str, model: DecoderModel, tokenizer: SimpleCharacterTokenizer) -> None:
    backend = make(name, model, tokenizer, max_seq_len=64, truncate="left")
    options = {"max_new_tokens": 14, "temperature": 0, "ignore_eos": True}
    long = "".join(chr(33 + i % 90) for i in range(200))
    result = backend.generate(long, **options)
    assert result.prompt_tokens == 50
    assert backend.generate(long[:20], **options).prompt_tokens == 20
    assert result.token_ids == make(name, model, tokenizer).generate(long[-50:], **options).token_ids
    with pytest.raises(ValueError, match="max_new_tokens 64 are more than the context of 64"):
        backend.generate("abc", max_new_tokens=64)


# The registry


def test_unknown_backend_lists_the_known() -> None:
    with pytest.raises(ValueError, match="unknown generation backend 'fast'; known: batched, eager, speculative$"):
        get_generation_backend("fast")


def test_default_backend_is_eager(model: DecoderModel) -> None:
    assert isinstance(get_generation_backend(model=model), EagerBackend)


def test_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution, as pip leaves it: a module and its metadata."""
    (tmp_path / "parrot_backend.py").write_text(
        "class Parrot:\n"
        "    def __init__(self, times): self.times = times\n"
        "    def generate(self, prompt): return prompt * self.times\n"
    )
    info = tmp_path / "parrot-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parrot\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pilotfish.generation_backends]\nparrot = parrot_backend:Parrot\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert get_generation_backend("parrot", times=2).generate("ab") == "abab"
    with pytest.raises(ValueError, match="known: batched, eager, parrot, speculative"):
        get_generation_backend("fast")


# The offline LLM


def test_llm_from_a_folder(folder: Path, reference: Any, tokenizer: SimpleCharacterTokenizer, capsys: Any) -> None:
    llm = LLM(model=str(folder), tokenizer=tokenizer, dtype="float32", max_num_seqs=2, max_model_len=128)
    greedy = SamplingParams(temperature=0, max_tokens=6, logit_bias={1: -100})
    outputs = llm.generate(TEXTS, greedy)
    assert "tokens/s" in capsys.readouterr().err
    assert [output.prompt for output in outputs] == TEXTS
    for output, text in zip(outputs, TEXTS, strict=True):
        ids = tokenizer.encode(text)
        assert output.prompt_token_ids == ids
        assert output.finished
        (completion,) = output.outputs
        assert completion.token_ids == expected_ids(reference, ids, 6)
        assert completion.text == tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == "length"
    (one,) = llm.generate(TEXTS[1], greedy, use_tqdm=False)
    assert capsys.readouterr().err == ""
    (by_ids,) = llm.generate(tokenizer.encode(TEXTS[1]), greedy, use_tqdm=False)
    assert one.outputs[0].token_ids == by_ids.outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert (one.prompt, by_ids.prompt) == (TEXTS[1], None)
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 1, 3)]
    ragged = llm.generate([[70, 71], [72], [73]], each, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in ragged] == [5, 1, 3]
    assert llm.generate([], use_tqdm=False) == []


def test_llm_of_a_model_and_its_seed(model: DecoderModel, tokenizer: SimpleCharacterTokenizer) -> None:
    def run(seed: int | None) -> list[list[int]]:
        llm = LLM(model, tokenizer, seed=seed, max_num_seqs=4)
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(["same", "same"], params, use_tqdm=False)]

    first, second = run(7)
    assert first != second
    assert run(7) == [first, second]
    assert run(8) != [first, second]
    assert run(None) != run(None)


def test_llm_defaults_are_the_makers(tiny_reference: Callable[..., Any], tmp_path: Path) -> None:
    tiny_reference("llama", vocab_size=140).save_pretrained(tmp_path)
    makers = {"temperature": 0.3, "top_k": 7, "top_p": 0.8, "do_sample": True, "eos_token_id": [1]}
    (tmp_path / "generation_config.json").write_text(json.dumps(makers))
    llm = LLM(tmp_path, SimpleCharacterTokenizer(131))
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.3, 7, 0.8, 0.0)
    requests = []
    original = llm.backend.run_batch
    llm.backend.run_batch = lambda batch: original(requests.extend(batch) or batch)  # type: ignore[method-assign]
    llm.generate("abc", use_tqdm=False)
    assert (requests[0].temperature, requests[0].top_k, requests[0].top_p) == (0.3, 7, 0.8)


def test_llm_refuses_by_name(
    folder: Path, model: DecoderModel, tokenizer: SimpleCharacterTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, message in (
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"dtype": "int3"}, "dtype int3 is not supported; known: float32"),
        ({"max_model_len": 257}, "257"),
        ({"max_num_seqs": -1}, "max_batch_size must be at least 1"),
        ({"revision": "main"}, "revision"),
        ({"tokenizer": SimpleCharacterTokenizer(141)}, "141 tokens, the model only 140"),
        ({"model": folder / "absent"}, "absent"),
        ({"tokenizer": None, "model": folder}, "no tokenizer can be loaded"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(**({"model": model, "tokenizer": tokenizer} | options))
    with pytest.raises(TypeError, match="pipeline_parallel_size"):
        LLM(model, tokenizer, pipeline_parallel_size=2)  # type: ignore[call-arg]
    llm = LLM(model, tokenizer)
    sizes = count_forwards(model, monkeypatch)
    with pytest.raises(ValueError, match=r"prompts\[2\]: prompt of 300 tokens"):
        llm.generate(["a", "b", "c" * 300], use_tqdm=False)
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])
    good = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match=r"messages\[1\]: messages is empty"):
        llm.chat([good, []])
    with pytest.raises(ValueError, match="messages is empty"):
        llm.chat([])
    with pytest.raises(ValueError, match="enable_thinking"):
        llm.chat(good, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ValueError, match="chat needs a tokenizer"):
        LLM(model).chat(good)
    assert sizes == []


def test_llm_bad_words_and_logprobs(model: DecoderModel, tokenizer: SimpleCharacterTokenizer) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True, seed=3, logprobs=2, stop=["e", "a"])
    (output,) = LLM(model, tokenizer).generate("abc", params, use_tqdm=False)
    result = EagerBackend(model, tokenizer).generate("abc", params)
    same_except_numerics_of(output.outputs[0], result)


def same_except_numerics_of(a: Any, b: Any) -> None:
    a, b = copy.copy(a), copy.copy(b)
    a.request_id = b.request_id = ""
    same_except_numerics(a, b)


def test_llm_chat_of_the_demo_model(smollm2: Path) -> None:
    """Greedy, against transformers' own chat and generate in fp32."""
    chats = [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "Say hello."}],
    ]
    llm = LLM(smollm2, dtype="float32", max_model_len=256, max_num_seqs=2)
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    hf_tokenizer = AutoTokenizer.from_pretrained(smollm2)
    hf = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for chat, output in zip(chats, outputs, strict=True):
        text = hf_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = hf_tokenizer(text, return_tensors="pt", add_special_tokens=False)
        assert output.prompt == text
        assert output.prompt_token_ids == ids.input_ids[0].tolist()
        with torch.inference_mode():
            generated = hf.generate(**ids, max_new_tokens=16, do_sample=False, repetition_penalty=1.0)
        expected = hf_tokenizer.decode(generated[0, ids.input_ids.shape[1] :], skip_special_tokens=True)
        assert output.outputs[0].text == expected
    assert "Paris" in outputs[0].outputs[0].text
    (alone,) = llm.chat(chats[0], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    assert alone.outputs[0].text == outputs[0].outputs[0].text
    (text,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert "Paris" in text.outputs[0].text


# The package's public names


def test_public_names_are_lazy() -> None:
    script = (
        "import sys, engine\n"
        "assert not {'torch', 'numpy', 'pydantic', 'transformers'} & set(sys.modules), sorted(sys.modules)\n"
        "assert 'LLM' in dir(engine)\n"
        "from engine import SamplingParams\n"
        "assert SamplingParams.__module__ == 'engine.schemas' and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=True)


def test_public_names_are_there() -> None:
    from engine import _HOME

    assert {
        "LLM",
        "ContinuousBatchingEngine",
        "KVCache",
        "reset_all_caches",
        "create_decoder_kv_caches",
    } <= _HOME.keys()
    for name, module in _HOME.items():
        assert getattr(engine, name) is getattr(sys.modules[f"engine.{module}"], name)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = engine.Nothing
