"""lm-eval's local-completions on twenty questions of four answers each; every log-likelihood and every greedy flag is
then computed by transformers."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

url, model, folder = sys.argv[1:]
CHECK = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
worst = 0.0
for line in sys.stdin:
    context, continuation, logprob, greedy = json.loads(line)
    ids, start = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
    with torch.inference_mode():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)[start - 1 : -1]
    wanted = torch.tensor(ids[start:])
    worst = max(worst, abs(rows.gather(1, wanted[:, None]).sum().item() - logprob))
    assert greedy == bool((rows.argmax(-1) == wanted).all()), (context, continuation)
assert worst < 1e-3, f"a log-likelihood is {worst} from that of transformers"
print(f"    transformers agrees: the largest difference of 80 log-likelihoods is {worst:.1e}")
"""
with tempfile.TemporaryDirectory() as work:
    shutil.copytree(Path(__file__).parent / "tasks", work, dirs_exist_ok=True)
    arguments = f"model={model},base_url={url}/v1/completions,tokenizer={folder},num_concurrent=4,max_length=1024"
    command = ["lm_eval", "run", "--model", "local-completions", "--model_args", arguments, "--tasks", "capitals"]
    command += ["--include_path", work, "--output_path", f"{work}/out", "--log_samples"]
    environment = {**os.environ, "HF_DATASETS_CACHE": f"{work}/cache", "OPENAI_API_KEY": "none"}
    run = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    [samples] = Path(work, "out").rglob("samples_capitals_*.jsonl")
    lines = []
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        for request, response in zip(sample["arguments"].values(), sample["filtered_resps"], strict=True):
            lines.append(
                json.dumps([request["arg_0"], request["arg_1"], float(response[0]), str(response[1]) == "True"])
            )
    assert len(lines) == 80
    checker = [os.environ["CHECKER"], "-c", CHECK, folder]
    subprocess.run(checker, input="\n".join(lines), text=True, check=True)
    [results] = Path(work, "out").rglob("results_*.json")
    accuracy = json.loads(results.read_text())["results"]["capitals"]["acc,none"]
    print(f"    accuracy {accuracy:.2f}")
    assert accuracy > 0.5
