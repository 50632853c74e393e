"""guidellm as load: twelve requests, four at a time; none may fail, and the tokens are those asked for."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

url, model, folder = sys.argv[1:]
with tempfile.TemporaryDirectory() as work:
    command = ["guidellm", "run", "--backend", f"kind=openai_http,target={url},model={model}"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={folder}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    command += ["--output", f"kind=json,path={work}/report.json", "--disable-console"]
    run = subprocess.run(command, cwd=work, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    report = json.loads(next(Path(work).rglob("*.json")).read_text())
    [benchmark] = report["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 12 and not requests["errored"], requests["errored"][:1]
    assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {16}, requests
