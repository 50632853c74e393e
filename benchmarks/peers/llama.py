"""llama.cpp's batched decode, run by the interpreter of its own environment (`make peers`).

Takes one JSON object as its argument and prints one as its last line: see `benchmarks/throughput.py`.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import llama_cpp
import numpy as np


def generate(context: Any, vocabulary: int, prompts: list[list[int]], count: int) -> None:
    """All prompts in one batch, then one token of each a step; the best token is taken on the host."""
    requests = len(prompts)
    batch = llama_cpp.llama_batch_init(sum(map(len, prompts)), 0, 1)
    try:
        wanted = put(
            batch, [(token, at, i, at == len(p) - 1) for i, p in enumerate(prompts) for at, token in enumerate(p)]
        )
        for step in range(count):
            if llama_cpp.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            tokens = [
                int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, at), (vocabulary,)).argmax())
                for at in wanted
            ]
            wanted = put(batch, [(tokens[i], len(prompts[i]) + step, i, True) for i in range(requests)])
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)


def put(batch: Any, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
    """Fill the batch with (token, position, sequence, wants logits); the places whose logits are wanted."""
    batch.n_tokens = len(tokens)
    for i, (token, position, sequence, wants) in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wants
        batch.seq_id[i][0] = sequence
    return [i for i, (_, _, _, wants) in enumerate(tokens) if wants]


def main() -> None:
    spec = json.loads(sys.argv[1])
    start = time.perf_counter()
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(spec["model"].encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"can't load {spec['model']}")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    length = spec["input_tokens"] + spec["output_tokens"]
    figures = {}
    started = 0.0
    rng = random.Random(0)
    for requests in spec["requests"]:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = requests * length, requests
        params.n_batch = params.n_ubatch = max(512, requests * spec["input_tokens"])
        params.n_threads = params.n_threads_batch = spec["threads"]
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise RuntimeError(f"no context for {requests} sequences")
        started = started or time.perf_counter() - start
        wall = float("inf")
        for _ in range(spec["rounds"] + 1):  # the first is its warm-up
            prompts = [[rng.randrange(10, 40000) for _ in range(spec["input_tokens"])] for _ in range(requests)]
            begin = time.perf_counter()
            generate(context, vocabulary, prompts, spec["output_tokens"])
            wall = min(wall, time.perf_counter() - begin)
        llama_cpp.llama_free(context)
        figures[requests] = requests * spec["output_tokens"] / wall
    version = llama_cpp.__version__
    print(json.dumps({"version": version, "start_seconds": started, "tokens_per_second": figures}), flush=True)


if __name__ == "__main__":
    main()
