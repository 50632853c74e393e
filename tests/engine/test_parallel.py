"""Tensor parallelism on gloo, a process a rank: the text of one rank, a part of its memory, and what happens when a
rank dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.batch_engine import ContinuousBatchingEngine
from engine.models.loader import load_model
from engine.parallel import start_ranks
from engine.schemas import GenerationRequest


def save(folder: Path, **config: Any) -> Path:
    torch.manual_seed(0)
    shape = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | config
    kind = transformers.Qwen2Config if config.pop("qwen", False) else transformers.LlamaConfig
    shape.pop("qwen", None)
    model = transformers.AutoModelForCausalLM.from_config(kind(max_position_embeddings=256, **shape))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


MODELS: dict[str, dict[str, Any]] = {
    "tied": {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "biased": {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), **MODELS[request.param])


@contextlib.contextmanager
def engine_of(
    model: Path, size: int, dtype: torch.dtype = torch.float32, **options: Any
) -> Iterator[tuple[ContinuousBatchingEngine, list[Any]]]:
    """An engine on `size` ranks, and the processes of the others."""
    if size == 1:
        yield ContinuousBatchingEngine(load_model(model, dtype=dtype), None, dtype=dtype, **options), []
        return
    ranks = start_ranks(size, "cpu", model, dtype=dtype)
    processes = ranks.processes
    try:
        engine = ContinuousBatchingEngine(load_model(model, dtype=dtype, ranks=ranks), None, dtype=dtype, **options)
        yield engine, processes
        if all(process.is_alive() for process in processes):
            engine.unload_model()
            for process in processes:
                process.join(120)
                assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
        ranks.close()


def requests(count: int) -> list[GenerationRequest]:
    """Greedy and sampled, short and in chunks, some with a common prefix, one that asks for its prompt's scores."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 101, (8, 90), generator=generator)
    ids[1, :40] = ids[0, :40]
    made = []
    for i, length in enumerate((90, 70, 5, 1, 33, 48, 16, 12)):
        options: dict[str, Any] = {"temperature": 0.0} if i % 2 == 0 else {"temperature": 1.0, "seed": i, "top_p": 0.9}
        if i == 4:
            options["prompt_logprobs"] = 1
        ids_ = [7, 8, 9] * 4 if i == 7 else ids[i, :length].tolist()
        made.append(GenerationRequest(prompt_ids=ids_, max_new_tokens=count, ignore_eos=True, **options))
    return made


def outputs(engine: ContinuousBatchingEngine, count: int = 20, rounds: int = 2) -> list[Any]:
    results = []
    for together in [requests(count) for _ in range(rounds)]:  # the second time prefixes are cached
        for request in together:
            engine.add_request(request)
        while engine.scheduler.has_pending_work:
            engine.step()
        found = [engine.result(request.request_id) for request in together]
        results += [result.token_ids for result in found if result is not None and result.error is None]
        assert found[4] is not None and found[4].prompt_logprobs is not None
        scores = [score.logprob for score in found[4].prompt_logprobs if score is not None]
        assert len(scores) == 32
        results.append([round(score, 3) for score in scores])
    engine.pool.check()
    return results


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"depth": 1},
    "chunked, few pages": {"depth": 0, "max_batched_tokens": 24, "num_pages": 24, "page_size": 8},
    "speculating": {"speculation": "ngram", "gamma": 3},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_text_of_one_rank(model: Path, options: str) -> None:
    settings = {"max_batch_size": 4, "max_seq_len": 128, **OPTIONS[options]}
    with engine_of(model, 1, **settings) as (engine, _):
        expected = outputs(engine)
    assert len(expected) == 18
    with engine_of(model, 2, **settings) as (engine, _):
        assert outputs(engine) == expected


@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(4, 8, 4), (8, 8, 2)])
def test_four_ranks_and_eight_with_fewer_heads(tmp_path: Path, size: int, heads: int, kv_heads: int) -> None:
    folder = save(tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads)
    settings: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 128}
    with engine_of(folder, 1, **settings) as (engine, _):
        expected = outputs(engine, 3, 1)
    with engine_of(folder, size, **settings) as (engine, _):
        assert outputs(engine, 3, 1) == expected


def test_half_precision_is_packed_on_every_rank(model: Path) -> None:
    """Sums in another order: not the same text, but the same first tokens."""
    settings: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 128, "dtype": torch.bfloat16}
    with engine_of(model, 1, **settings) as (engine, _):
        expected = outputs(engine)
    with engine_of(model, 2, **settings) as (engine, _):
        found = outputs(engine)
    same = sum(a[0] == b[0] for a, b in zip(expected, found, strict=True))
    assert same >= len(expected) - 4


def _bytes(model: Any) -> int:
    return sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())


def test_memory_is_divided(tmp_path: Path) -> None:
    folder = save(
        tmp_path,
        vocab_size=4001,
        hidden_size=128,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    with engine_of(folder, 1, max_seq_len=128) as (engine, _):
        assert engine._runner is not None
        weights, pages = _bytes(engine._runner.model), engine.pool.kv.nbytes
    with engine_of(folder, 4, max_seq_len=128) as (engine, _):
        assert engine._runner is not None
        assert _bytes(engine._runner.model) == pytest.approx(weights / 4, rel=0.1)
        assert engine.pool.kv.nbytes == pages / 4


def test_offline(smollm2: Path) -> None:
    """`LLM` starts its own ranks, in a process that ends like any script."""
    script = """
import sys
from engine import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], tensor_parallel_size=3, device="cpu", dtype="float32", max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=3)
    print(*(output.outputs[0].text for output in llm.generate(["The capital of France is"], params, use_tqdm=False)))
"""
    done = subprocess.run([sys.executable, "-c", script, str(smollm2)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_a_rank_that_dies_ends_the_engine_at_once(model: Path) -> None:
    with engine_of(model, 2, max_seq_len=128) as (engine, processes):
        engine.add_request(GenerationRequest(prompt_ids=[1, 2, 3], max_new_tokens=100, ignore_eos=True))
        for _ in range(5):
            engine.step()
        os.kill(processes[0].pid, signal.SIGKILL)
        processes[0].join()
        with pytest.raises(RuntimeError):
            for _ in range(5):
                engine.step()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}, "num_heads 6 can't be divided"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96}, "num_kv_heads 6 can't be"),
        ({"num_attention_heads": 8, "intermediate_size": 130}, "intermediate_size 130 can't be divided among 4"),
    ],
)
def test_what_cannot_be_divided(config: dict[str, Any], message: str) -> None:
    from engine.models.decoder import DecoderConfig
    from engine.parallel import Ranks

    ranks = Ranks.__new__(Ranks)
    ranks.rank, ranks.size = 0, 4
    names = {"num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads"}
    with pytest.raises(ValueError, match=message):
        ranks.config(DecoderConfig(**{names.get(name, name): value for name, value in config.items()}))
