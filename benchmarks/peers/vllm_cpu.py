"""vLLM on a CPU, run by the interpreter of its own environment (`make peers`).

Takes one JSON object as its argument and prints one as its last line: see `benchmarks/throughput.py`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB


def main() -> None:
    spec = json.loads(sys.argv[1])
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{spec['threads'] - 1}")
    start = time.perf_counter()
    import vllm

    llm = vllm.LLM(
        model=spec["model"],
        dtype=spec["dtype"],
        max_model_len=spec["input_tokens"] + spec["output_tokens"],
        max_num_seqs=max(spec["requests"]),
        enable_prefix_caching=False,
    )
    started = time.perf_counter() - start
    params = vllm.SamplingParams(temperature=0.0, max_tokens=spec["output_tokens"], ignore_eos=True, detokenize=False)
    rng = random.Random(0)
    figures = {}
    for requests in spec["requests"]:
        wall = float("inf")
        for _ in range(spec["rounds"] + 1):  # the first is its warm-up
            prompts = [
                {"prompt_token_ids": [rng.randrange(10, 40000) for _ in range(spec["input_tokens"])]}
                for _ in range(requests)
            ]
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            wall = min(wall, time.perf_counter() - start)
            assert sum(len(output.outputs[0].token_ids) for output in outputs) == requests * spec["output_tokens"]
        figures[requests] = requests * spec["output_tokens"] / wall
    print(json.dumps({"version": vllm.__version__, "start_seconds": started, "tokens_per_second": figures}), flush=True)


if __name__ == "__main__":
    main()
