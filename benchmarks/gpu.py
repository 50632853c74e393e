"""The engine on one CUDA GPU: correctness first, then ceilings, throughput, and its peers, within eight minutes.

    python benchmarks/gpu.py                       # all of it; rows go to results/gpu/rows.jsonl as they come
    python benchmarks/gpu.py --models 135M --workloads c d --engines pilotfish vllm
    python benchmarks/gpu.py --dry-run             # the same code on a CPU, tiny, kernels in Triton's interpreter

It needs torch, triton, and transformers with what that brings; vLLM is measured where it can be imported. Weights are
random and outputs are of fixed lengths, greedy, so that every engine does the same work. Each engine has a process of
its own, with a time limit. Nothing in here has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
# not this folder, which has a module with the name of a package that transformers looks for
sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(Path(__file__).parent))]


def stand_in_for_pydantic() -> None:
    """Where it isn't installed: the requests that are made here are right, nothing has to check them."""
    with contextlib.suppress(ImportError):
        importlib.import_module("pydantic")
        return
    import types

    missing, module = object(), types.ModuleType("pydantic")

    class Field:
        def __init__(self, default: Any = missing, *, default_factory: Any = None, **_: Any) -> None:
            self.default, self.default_factory = default, default_factory

    class BaseModel:
        def __init__(self, **values: Any) -> None:
            for cls in reversed(type(self).__mro__):
                for name in cls.__dict__.get("__annotations__", ()):
                    default = cls.__dict__.get(name, missing)
                    if isinstance(default, Field):
                        default = default.default_factory() if default.default_factory else default.default
                    if (value := values.get(name, default)) is not missing:
                        setattr(self, name, value)

    def decorator(*_: Any, **__: Any) -> Any:
        return lambda function: function

    parts = {"Field": Field, "BaseModel": BaseModel, "StringConstraints": Field, "ConfigDict": dict}
    parts |= {"AliasChoices": lambda *names: names, "field_validator": decorator, "model_validator": decorator}
    parts |= {"ValidationError": type("ValidationError", (ValueError,), {})}
    for name, part in parts.items():
        setattr(module, name, part)
    sys.modules["pydantic"] = module


stand_in_for_pydantic()

WORKLOADS = {
    "a": "256 requests, 128 in, 128 out",
    "b": "1024 requests, in uniform 32..512, out uniform 32..256",
    "c": "1 request, 128 in, 256 out",
    "d": "1024 requests, 32 in, 16 out",
    "tiny": "3 requests, in uniform 4..12, out uniform 2..4",
}
# LlamaForCausalLM, in Hugging Face's names
_NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_NAMES, sizes, strict=True)) | {"vocab_size": vocab, "head_dim": dim, "tie_word_embeddings": tied}
    for name, sizes, vocab, dim, tied in (
        ("135M", (576, 30, 9, 3, 1536), 49152, 64, True),
        ("1B", (2048, 16, 32, 8, 8192), 128256, 64, True),
        ("8B", (4096, 32, 32, 8, 14336), 128256, 128, False),
        ("tiny", (64, 2, 4, 2, 128), 512, 16, True),
    )
}
CONTEXT, ROWS, GAMMA, ACCEPTANCE = 2048, 256, 4, 0.8
Row = dict[str, Any]


def workload(name: str) -> list[tuple[int, int]]:
    """(input tokens, output tokens) of each request."""
    rng = random.Random(f"{name}:0")
    if name == "b":
        return [(rng.randint(32, 512), rng.randint(32, 256)) for _ in range(1024)]
    if name == "tiny":
        return [(rng.randint(4, 12), rng.randint(2, 4)) for _ in range(3)]
    return {"a": [(128, 128)] * 256, "c": [(128, 256)], "d": [(32, 16)] * 1024}[name]


def prompts(name: str, vocab: int) -> list[tuple[list[int], int]]:
    """(ids, output tokens) of each request; ids below 10 are left out, as they tend to be special."""
    rng = random.Random(f"{name}:0:ids")
    return [([10 + int(rng.random() * (vocab - 10)) for _ in range(n)], out) for n, out in workload(name)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["135M", "1B", "8B"])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["c", "d", "a", "b"])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--budget", type=float, default=470, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", nargs=2, metavar=("ENGINE", "MODEL"), help="in this process, rows to stdout alone")
    args = parser.parse_args()
    if args.dry_run:
        args.models, args.workloads = ["tiny"], ["tiny"]
        os.environ["TRITON_INTERPRET"] = "1"
    return args


def say(row: Row) -> None:
    print(json.dumps(row), flush=True)


def result(engine: str, model: str, name: str, wall: float, generated: int, **more: Any) -> Row:
    sizes = workload(name)
    wanted = sum(out for _, out in sizes)
    row = {"engine": engine, "model": model, "workload": name, "output_tok_s": round(wanted / wall, 1)}
    if generated != wanted:
        row["error"] = f"{generated} output tokens, not {wanted}"
    return row | {"wall_s": round(wall, 4), "requests": len(sizes)} | more


# The machine


def ceilings(args: argparse.Namespace, device: Any) -> None:
    """What the device can do at best, besides which every other figure is to be read."""
    import torch

    scale = 10 if args.dry_run else 32
    data = torch.empty(2**scale, dtype=torch.uint8, device=device)
    other, size = torch.empty_like(data), 64 if args.dry_run else 8192
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    row = {
        "ceilings": torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        "torch": torch.__version__,
        "copy_tb_s": round(2 * 2**scale / seconds(lambda: other.copy_(data), 10) / 1e12, 3),
        "matmul_tflop_s": round(2 * size**3 / seconds(lambda: a @ b, 10) / 1e12, 1),
    }
    x, w = torch.randn(1, 576, device=device), torch.randn(576, 576, device=device)
    row["launch_us"] = round(seconds(lambda: x @ w, 500) * 1e6, 2)
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                x = x @ w
        row["graphed_us"] = round(seconds(graph.replay, 20) * 1e4, 2)
    say(row)


def seconds(run: Callable[[], Any], count: int) -> float:
    """Of one run, on the device."""
    import torch

    sync = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(3):
        run()
    sync()
    start = time.perf_counter()
    for _ in range(count):
        run()
    sync()
    return (time.perf_counter() - start) / count


# Correctness


def correctness(args: argparse.Namespace, device: Any) -> bool:
    """Kernels against fp32 torch, then whole engines against an uncached fp32 forward; a row for each."""
    import torch

    from engine import fused
    from engine.attention import ATTENTION, PackedBatch
    from engine.sampling import gumbel_noise

    torch.manual_seed(0)
    rng, right = random.Random(0), True
    norm = torch.linalg.vector_norm

    def check(name: str, error: Any, most: float) -> None:
        nonlocal right
        error = float(error)
        right &= error <= most
        say({"check": name, "off": float(f"{error:.3g}"), "most": most, "right": error <= most})

    def attention(dtype: Any, heads: int, kv_heads: int, dim: int, window: int | None, page_size: int) -> float:
        import numpy as np

        longest = 100 if args.dry_run else 3000
        query_lens = np.array([1, 1, 5, 1, 40 if args.dry_run else 300])
        computed = np.array([rng.randrange(longest) for _ in query_lens])
        pages = -(-int((computed + query_lens).max()) // page_size)
        table = torch.randperm(pages * len(query_lens)).int().view(len(query_lens), -1).numpy()
        batch = PackedBatch.paged(table, page_size, computed, query_lens, device)
        k, v = torch.randn(2, table.size, page_size, kv_heads, dim, device=device)
        q = torch.randn(int(query_lens.sum()), heads, dim, device=device)
        k, v, q = (x.to(dtype) for x in (k, v, q))
        ours, exact = ATTENTION.create("triton"), ATTENTION.create("mha")
        out = ours.attend(q, k, v, ours.plan(batch, window)).float()
        expected = exact.attend(q.float(), k.float(), v.float(), exact.plan(batch, window))
        return float(norm(out - expected) / norm(expected))

    half = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
    # Triton's interpreter can't multiply bf16
    dtypes = {torch.float32: 1e-5} | ({} if args.dry_run else half)
    shapes = [(9, 3, 64), (32, 8, 64), (32, 8, 128), (16, 1, 256), (4, 4, 80)]
    for heads, kv_heads, dim in shapes[:1] if args.dry_run else shapes:
        for dtype, most in dtypes.items():
            if dtype == torch.float16 and dim != 128:
                continue  # each kernel takes a second to compile
            for window, page_size in ((None, 64), (100, 16)):
                name = f"attention {dtype} {heads}/{kv_heads} heads of {dim}, window {window}, pages of {page_size}"
                check(name, attention(dtype, heads, kv_heads, dim, window, page_size), most)
    x, delta, weight = torch.randn(3, 7, 576, device=device)
    expected = torch.nn.functional.rms_norm(x + delta, (576,), weight[0], 1e-5)
    check("add_rms_norm", (fused.add_rms_norm(x, delta, weight[0], 1e-5, x.dtype) - expected).abs().max(), 1e-5)
    gate_up = torch.randn(7, 3000, device=device)
    gate, up = gate_up.chunk(2, 1)
    check("silu_mul", (fused.silu_mul(gate_up) - torch.nn.functional.silu(gate) * up).abs().max(), 1e-5)
    scores = torch.randn(64, 5000 if args.dry_run else 128256, device=device)
    rows = torch.arange(64, device=device)
    temperatures = torch.where(rows % 2 == 0, 1.0, 1e-30)
    noise = gumbel_noise(rows, rows + 9, torch.arange(scores.shape[1], dtype=torch.int32, device=device)[None])
    drawn, ordered = (rows % 2 == 0)[:, None], scores.sort(1, descending=True).values
    nucleus = (ordered.softmax(1).cumsum(1) < 0.3).sum(1, keepdim=True)
    for name, top_k, top_p, log_min_p, lowest in (
        ("all", 0, 1.0, -100.0, float("-inf")),
        ("the 20 best", 20, 1.0, -100.0, ordered[:, 19:20]),
        ("a nucleus of 0.3", 0, 0.3, -100.0, ordered.gather(1, nucleus)),
        ("a tenth of the best and above", 0, 1.0, -2.3, ordered[:, :1] - 2.3),
    ):
        filters = tuple(
            torch.full_like(like, x) for like, x in ((rows, top_k), (noise[:, 0], top_p), (noise[:, 0], log_min_p))
        )
        best = torch.where(drawn, (scores + noise).masked_fill(scores < lowest, float("-inf")), scores).argmax(1)
        chosen = fused.choose(scores, rows, rows + 9, temperatures, rows, filters, -2)
        check(f"choose of {name}, rows that differ", (chosen != best).sum(), 1 if top_p < 1 else 0)  # sums are rounded
    greedy(args, device, check)
    return right


def greedy(args: argparse.Namespace, device: Any, check: Callable[[str, Any, float], None]) -> None:
    """Tokens of engines against the best and second best logits of an uncached fp32 forward over what they said."""
    import torch

    from engine.attention import has_triton

    shape = "tiny" if args.dry_run else "135M"
    for dtype, most, speculation in (
        (torch.float32, 1e-3, False),
        (torch.float32, 1e-3, True),
        (torch.bfloat16, 0.8, False),  # five random sets of weights came to 0.34; a wrong kernel is some 3 off
    ):
        if dtype == torch.bfloat16 and not has_triton(device):
            continue
        model = build(shape, device, torch.float32)
        for parameter in model.parameters():  # flat logits would say nothing
            if parameter.dim() > 1:
                parameter.data.mul_(3)
        exact = build(shape, device, torch.float32, "mha")
        exact.load_state_dict(model.state_dict())
        options = {"speculation": "ngram", "gamma": 3} if speculation else {}
        engine = make_engine(model, device, dtype, 4, **options)
        todo = [(ids[:60], 8 if args.dry_run else 40) for ids, _ in prompts("tiny" if args.dry_run else "b", 512)[:6]]
        worst = 0.0
        for (ids, _), output in zip(todo, run_engine(engine, todo), strict=True):
            with torch.no_grad():
                logits = exact(torch.tensor([[*ids, *output]], device=device))[0, len(ids) - 1 : -1]
            said = logits.gather(1, torch.tensor(output, device=device)[:, None])
            worst = max(worst, float(((logits.max(1, keepdim=True).values - said) / logits.std()).max()))
        kind = "verified" if speculation else "plain"
        check(f"greedy tokens, {dtype}, {kind}: how far below the best logit, in deviations", worst, most)


# The engine


def build(name: str, device: Any, dtype: Any, attn_impl: str = "triton") -> Any:
    import torch

    from engine.models.decoder import DecoderModel

    shape = SHAPES[name]
    ours = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size")
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            return DecoderModel(
                **{new: shape[old] for new, old in zip(ours, _NAMES, strict=True)},
                **{key: shape[key] for key in ("vocab_size", "head_dim", "tie_word_embeddings")},
                max_seq_len=CONTEXT,
                attn_impl=attn_impl,
            ).eval()
    finally:
        torch.set_default_dtype(default)


def make_engine(model: Any, device: Any, dtype: Any, rows: int = ROWS, **options: Any) -> Any:
    from engine.batch_engine import ContinuousBatchingEngine

    pages = rows * 1024 // model.attention.default_page_size
    defaults = {"max_batched_tokens": 8192, "num_pages": pages, "enable_prefix_cache": False}
    return ContinuousBatchingEngine(model, None, device, rows, dtype=dtype, **(defaults | options))


def run_engine(engine: Any, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    names = submit(engine, requests)
    while engine.scheduler.has_pending_work:
        engine.step()
    return [engine.result(name).token_ids for name in names]


def submit(engine: Any, requests: list[tuple[list[int], int]]) -> list[str]:
    from engine.schemas import GenerationRequest

    return [
        engine.add_request(GenerationRequest(prompt_ids=ids, max_new_tokens=out, ignore_eos=True, temperature=0.0))
        for ids, out in requests
    ]


def kernels(engine: Any, rows: int) -> Row:
    """Where the device's time goes in decode steps of `rows` sequences: us a step of the costliest kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = engine.device.type == "cuda"
    steps = 20 if cuda else 2
    submit(engine, [([10 + i] * 100, steps + 20) for i in range(rows)])
    while engine.step().generated < rows:  # prompts
        pass
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            engine.step()
        if cuda:
            torch.cuda.synchronize()
    while engine.scheduler.has_pending_work:
        engine.step()
    totals = {
        event.key[:60]: (event.self_device_time_total if cuda else event.self_cpu_time_total) / steps
        for event in profiler.key_averages()
    }
    top = sorted(totals, key=lambda key: -totals[key])[:14]
    return {"device_us_a_step": round(sum(totals.values()), 1), "kernels": {key: round(totals[key], 1) for key in top}}


def pilotfish(args: argparse.Namespace, name: str) -> None:
    import numpy as np
    import torch

    from engine import batch_engine, memory
    from engine.runner import ModelRunner

    device = torch.device("cpu" if args.dry_run else "cuda:0")
    dtype = torch.float32 if args.dry_run else torch.bfloat16
    if args.dry_run:
        memory._free_memory = lambda device: 1 << 30  # a CPU's is told by a package that needn't be here
    if name == args.models[0]:
        ceilings(args, device)
        if not correctness(args, device):
            say({"engine": "pilotfish", "model": name, "error": "not correct: see the checks"})
    rows = 4 if args.dry_run else ROWS
    start = time.perf_counter()
    model = build(name, device, dtype)
    weights = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    if not SHAPES[name]["tie_word_embeddings"]:
        weights -= model.model.embed_tokens.weight.numel() * dtype.itemsize  # a row a token is read
    built = time.perf_counter()
    engine = make_engine(model, device, dtype, rows)
    started = time.perf_counter()
    say({"engine": "pilotfish", "model": name, "build_s": round(built - start, 2),
         "start_s": round(started - built, 2), "graphs": [len(graph.hidden) for graph in engine._runner.graphs],
         "weight_bytes_a_step": weights})  # fmt: skip
    waited, collect = 0.0, ModelRunner.collect

    def waiting(launched: Any) -> Any:
        nonlocal waited
        begin = time.perf_counter()
        try:
            return collect(launched)
        finally:
            waited += time.perf_counter() - begin

    for which in args.workloads:
        requests = prompts(which, model.vocab_size)
        run_engine(engine, requests[: rows * 2])
        waited, steps, start = 0.0, engine.stats().steps, time.perf_counter()
        with mock.patch.object(ModelRunner, "collect", staticmethod(waiting)):
            outputs = run_engine(engine, requests)
        wall, steps = time.perf_counter() - start, engine.stats().steps - steps
        say(result("pilotfish", name, which, wall, sum(map(len, outputs)), steps=steps,
                   step_ms=round(wall / steps * 1e3, 3), host_ms=round((wall - waited) / steps * 1e3, 3)))  # fmt: skip
    for count in (1, rows) if not args.dry_run else (1,):
        say({"engine": "pilotfish", "model": name, "rows": count} | kernels(engine, count))
    del engine
    which = args.workloads[0]
    engine = make_engine(model, device, dtype, 1, speculation="ngram", gamma=GAMMA)
    generator = np.random.default_rng(0)

    class Anything:
        def propose(self, rows: np.ndarray, gammas: np.ndarray, *more: Any) -> np.ndarray:
            return np.full((len(rows), int(gammas.max())), 10, dtype=np.int32)

    def accepted(samples: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        hits = (generator.random(drafts.shape) < ACCEPTANCE) & (drafts >= 0)
        return np.cumprod(hits, axis=1, dtype=np.int64).sum(axis=1)

    engine._speculator.proposer = Anything()
    with mock.patch.object(batch_engine, "accept", accepted):
        run_engine(engine, prompts(which, model.vocab_size)[:1])
        start = time.perf_counter()
        outputs = run_engine(engine, prompts(which, model.vocab_size))
    stats, wall = engine.speculation_stats(), time.perf_counter() - start
    say(result("pilotfish, speculating", name, which, wall, sum(map(len, outputs)), gamma=GAMMA, rows=1,
               acceptance=ACCEPTANCE, drafted=stats.drafted, accepted=stats.accepted))  # fmt: skip


# The peers


def vllm(args: argparse.Namespace, name: str) -> None:
    """vLLM 0.25 with dummy weights, its own defaults but for prefix caching, which random prompts can't use."""
    import tempfile

    for key, value in (
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_USE_FLASHINFER_SAMPLER", "0"),
        ("VLLM_CACHE_ROOT", "/tmp/vllm_cache"),
        ("VLLM_HOST_IP", "127.0.0.1"),
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("NCCL_SOCKET_IFNAME", "lo"),
        ("VLLM_USE_DEEP_GEMM", "0"),
        ("VLLM_CONFIG_ROOT", "/tmp/vllm_config"),
        ("HF_HUB_OFFLINE", "1"),
        ("TRANSFORMERS_OFFLINE", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("DO_NOT_TRACK", "1"),
    ):
        os.environ.setdefault(key, value)
    from vllm import LLM, SamplingParams

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(hf_config(name) | {"dtype": "bfloat16"}))
    start = time.perf_counter()
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=CONTEXT,
        gpu_memory_utilization=0.5,
        max_num_seqs=ROWS,
        enable_prefix_caching=False,
    )
    say({"engine": "vllm", "model": name, "start_s": round(time.perf_counter() - start, 2)})
    for which in args.workloads:
        requests = prompts(which, SHAPES[name]["vocab_size"])
        ids = [{"prompt_token_ids": ids} for ids, _ in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True, detokenize=False) for _, out in requests
        ]
        llm.generate(ids[: 2 * ROWS], params[: 2 * ROWS], use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.generate(ids, params, use_tqdm=False)
        wall = time.perf_counter() - start
        say(result("vllm", name, which, wall, sum(len(output.outputs[0].token_ids) for output in outputs)))
    os._exit(0)  # its engine's process may hang


def transformers(args: argparse.Namespace, name: str) -> None:
    """transformers' continuous batching over its paged SDPA."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    device = "cpu" if args.dry_run else "cuda"
    config = {key: value for key, value in hf_config(name).items() if key not in ("architectures", "model_type")}
    config |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**config),
            dtype=torch.float32 if args.dry_run else torch.bfloat16,
            attn_implementation="paged|sdpa",
        ).eval()
    small = {"num_blocks": 8, "max_batch_tokens": 64} if args.dry_run else {}
    batching = ContinuousBatchingConfig(max_requests_per_batch=ROWS, allow_block_sharing=False, **small)
    for which in args.workloads:
        requests = prompts(which, SHAPES[name]["vocab_size"])[: 2 * ROWS]  # it takes long; a rate needs no more
        longest = max(out for _, out in requests)
        generation = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
        hints = WorkloadHints(
            max_prompt_length=max(len(ids) for ids, _ in requests),
            max_generated_length=longest,
            num_requests=len(requests),
        )
        wall = generated = 0
        for part in (requests[:ROWS], requests):
            with model.continuous_batching_context_manager(
                generation_config=generation,
                continuous_batching_config=batching,
                block=True,
                timeout=20,
                persistent_manager=True,
                workload_hints=hints,
            ) as manager:
                start = time.perf_counter()
                for ids, out in part:
                    manager.add_request(ids, max_new_tokens=out)
                ended = generated = 0
                while ended < len(part) and manager.is_running():
                    if (answer := manager.get_result(timeout=1)) is not None and answer.is_finished():
                        ended += 1
                        generated += len(answer.generated_tokens)
                wall = time.perf_counter() - start
        say({"engine": "transformers", "model": name, "workload": which, "output_tok_s": round(generated / wall, 1),
             "wall_s": round(wall, 4), "requests": ended})  # fmt: skip
        model.destroy_cached_continuous_batching_manager()
    os._exit(0)  # its threads may stay


def hf_config(name: str) -> Row:
    return SHAPES[name] | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


ENGINES = {"pilotfish": pilotfish, "vllm": vllm, "transformers": transformers}
SECONDS = {"135M": 90, "1B": 90, "8B": 130, "tiny": 300}  # that an engine may take for a model


def main() -> None:
    args = parse()
    if args.only:
        ENGINES[args.only[0]](args, args.only[1])
        return
    begin = time.perf_counter()
    args.output.mkdir(parents=True, exist_ok=True)
    table: list[Row] = []
    # what matters most comes first
    plan = [(engine, model) for model in args.models for engine in args.engines if engine != "transformers"]
    plan += [("transformers", model) for model in args.models if "transformers" in args.engines]
    with open(args.output / "rows.jsonl", "w") as rows:
        for engine, model in plan:
            left = args.budget - (time.perf_counter() - begin)
            reason = "no time is left" if left < 15 else ""
            if engine != "pilotfish" and find_spec(engine) is None:
                reason = "not installed"
            if reason:
                table.append({"engine": engine, "model": model, "skipped": reason})
                rows.write(json.dumps(table[-1]) + "\n")
                continue
            limit = min(left, SECONDS[model] + (40 if model == args.models[0] and engine == "pilotfish" else 0))
            command = [sys.executable, __file__, "--only", engine, model, "--models", *args.models]
            command += ["--workloads", *args.workloads, *(["--dry-run"] if args.dry_run else [])]
            code = child(command, limit, args.output / f"{engine}-{model}.log", rows, table)
            if code:
                say({"engine": engine, "model": model, "exit": code, "log": f"{engine}-{model}.log"})
                table.append({"engine": engine, "model": model, "error": f"exit {code}"})
                rows.write(json.dumps(table[-1]) + "\n")
    summary = summarise(table)
    (args.output / "summary.md").write_text(summary)
    print(summary)
    if any("error" in row or row.get("right") is False for row in table if row.get("engine") != "vllm"):
        sys.exit(1)


def child(command: list[str], limit: float, log: Path, rows: Any, table: list[Row]) -> int:
    """Run, take its rows as they come, and end it with all its children when its time is over."""
    import signal
    import threading

    with open(log, "w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, bufsize=1
        )
        timer = threading.Timer(limit, lambda: os.killpg(process.pid, signal.SIGKILL))
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"'):
                print(line, end="", flush=True)
                with contextlib.suppress(ValueError):  # a library's own line
                    table.append(json.loads(line))
                rows.write(line)
                rows.flush()
            else:
                errors.write(line)
        code = process.wait()
        timer.cancel()
    return code


def summarise(table: list[Row]) -> str:
    """Output tokens a second, and ours over each peer's."""
    rates = {(r["model"], r["workload"], r["engine"]): r["output_tok_s"] for r in table if "output_tok_s" in r}
    lines = ["| model | workload | engine | output tokens/s | pilotfish over it |", "|---|---|---|---|---|"]
    for (model, which, engine), rate in rates.items():
        ours = rates.get((model, which, "pilotfish"))
        ratio = f"{ours / rate:.2f}" if ours and rate and engine != "pilotfish" else ""
        lines.append(f"| {model} | {which} | {engine} | {rate} | {ratio} |")
    wrong = [r["check"] for r in table if r.get("right") is False]
    checks = sum("check" in r for r in table)
    lines += ["", f"{checks - len(wrong)} of {checks} checks are right" + "".join(f"; not {name}" for name in wrong)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
