"""guidellm as load: ten requests, four at a time; none may fail, and the tokens are those asked for."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

url, model, folder = sys.argv[1:]
with tempfile.TemporaryDirectory() as work:
    command = ["guidellm", "benchmark", "run", "--target", url, "--model", model, "--processor", folder]
    command += ["--profile", "concurrent", "--rate", "4", "--max-requests", "12"]
    command += ["--data", "prompt_tokens=64,output_tokens=16", "--output-path", f"{work}/report.json"]
    run = subprocess.run(command, cwd=work, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    report = json.loads(next(Path(work).rglob("*.json")).read_text())
    [benchmark] = report["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) >= 12 and not requests["errored"], requests["errored"][:1]
