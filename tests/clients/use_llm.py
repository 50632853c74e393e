"""The command `llm`, told of the server as its documentation says, in extra-openai-models.yaml."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, model, _ = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: {model}\n  api_base: {url}/v1\n  can_stream: true\n  supports_schema: true\n"
    )
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}

    def llm(*arguments: str) -> str:
        run = subprocess.run(["llm", *arguments], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout

    streamed = llm("-m", "here", "-o", "temperature", "0", "What is the capital of France?")
    whole = llm("-m", "here", "--no-stream", "-o", "temperature", "0", "What is the capital of France?")
    assert "Paris" in streamed and streamed == whole, (streamed, whole)
    assert "Paris" in llm("logs", "-n", "1")
    assert '"name"' in llm("-m", "here", "-o", "max_tokens", "60", "--schema", "name, country", "The capital of France")
