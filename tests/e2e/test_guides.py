"""The guides' commands for servers and against one, as printed but for less work, other ports, and small models under
the names of large ones."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from app.bench.report import Report
from app.cli import free_ports
from tests.e2e.conftest import ROOT, Server, is_ready, llm_serve, wait_until
from tests.engine.fake_hub import TOKEN, fake_hub
from tests.engine.made_tokenizers import byte_level_tokenizer
from tests.test_docs import commands

SHORTER = {
    "--requests": ["--requests", "12"],
    "--duration": ["--duration", "2"],
    "--find-rate": ["--duration", "1", "--find-rate", "e2e=2000"],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with llm_serve() as server:
        yield server


def run(command: str, folder: Path, *more: str, **environment: str) -> str:
    scripts = sysconfig.get_path("scripts")
    done = subprocess.run(
        [*shlex.split(command), *more],
        cwd=folder,
        env={**os.environ, **environment, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_llm_bench(server: Server, tmp_path: Path) -> None:
    printed = [command for _, command in commands() if command.startswith("llm-bench")]
    kinds = ("--rate", "--concurrency", "--find-rate", "--compare")
    assert [next(kind for kind in kinds if kind in command) for command in printed] == list(kinds)
    *loads, compare = printed
    for command in loads:
        shorter = [word for name, words in SHORTER.items() if name in command for word in words]
        run(command, tmp_path, "--base-url", server.url, "--output-tokens", "8", *shorter)
    assert Report.model_validate_json((tmp_path / "new.json").read_bytes()).succeeded == 12
    shutil.copy(tmp_path / "new.json", tmp_path / "base.json")
    run(compare, tmp_path)
    assert (tmp_path / "new.html").stat().st_size > 10_000 and (tmp_path / "compared.html").stat().st_size > 1000


def test_programs_that_need_no_server() -> None:
    """Whose figures are tested elsewhere: that they run as printed."""
    [capacity] = [command for _, command in commands() if command.startswith("python")]
    assert "requests/s" in run(capacity, ROOT)
    [more] = [command for _, command in commands() if command == "llm-serve --help"]
    assert "--speculation" in run(more, ROOT)


def test_make_serve() -> None:
    """The README's first command."""
    [port] = free_ports(1)
    process = subprocess.Popen(["make", "serve", f"ARGS=--port {port}"], cwd=ROOT, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or is_ready(url))
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body | {"max_tokens": 16}, timeout=120).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
    finally:
        process.terminate()
        process.wait(120)


@dataclass
class Desk:
    """Where somebody has followed the guides up to their commands: files, and a hub."""

    folder: Path
    environment: dict[str, str]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("desk")
    torch.manual_seed(0)
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
    gpt2 = {"vocab_size": 402, "n_positions": 256, "n_embd": 48, "n_layer": 2, "n_head": 3}
    GPT2LMHeadModel(GPT2Config(**gpt2, eos_token_id=1)).save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "gpt2")
    page = (ROOT / "docs" / "models.md").read_text()
    [snippet] = [text for text in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "class GPT2" in text]
    sparse = "from engine.models.layers import GatedMLP\n\n\nclass SparseMLP(GatedMLP):\n    pass\n"
    (folder / "my_models.py").write_text(f"{snippet}\n\n{sparse}")
    (folder / "models").mkdir()
    (folder / "models" / "SmolLM2-135M-Instruct").symlink_to(smollm2)
    qwen = {"vocab_size": 402, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    qwen |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    Qwen3ForCausalLM(Qwen3Config(**qwen, eos_token_id=1)).save_pretrained(folder / "qwen")
    tokenizer.save_pretrained(folder / "qwen")
    with fake_hub() as hub:
        hub.commits["Qwen/Qwen3-0.6B"] = []
        hub.commit("Qwen/Qwen3-0.6B", "", {file.name: file.read_bytes() for file in (folder / "qwen").iterdir()})
        hub_settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "hub")}
        hub_settings["HF_HUB_OFFLINE"] = "0"
        yield Desk(folder, {"PYTHONPATH": ".", **hub_settings})


def serve_commands() -> list[str]:
    return [command for _, command in commands() if command.startswith("llm-serve --model")]


@pytest.mark.parametrize("command", serve_commands())
def test_llm_serve(command: str, desk: Desk) -> None:
    if "qwen-draft" in command:
        [distill] = [printed for _, printed in commands() if printed.startswith("llm-distill")]
        less = ["--conversations", "40", "--answer", "8", "--steps", "4", "--shapes", "32x1"]
        run(distill, desk.folder, *less, **desk.environment)
    environment, adapters = desk.environment, "SparseMLP" in command
    flags = ["--max-adapters", "1"] if adapters else []
    if adapters:
        environment = environment | {"LLM_SERVING_API_KEY": "operator"}
    with llm_serve(*shlex.split(command)[1:], *flags, folder=desk.folder, **environment) as server:
        headers = {"Authorization": "Bearer operator"} if adapters else {}
        body = {"prompt": "the quick", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4, answer.text
        if adapters:
            change_adapters(server, desk.folder)


def change_adapters(server: Server, folder: Path) -> None:
    """By curl, as the guide does."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "models" / "SmolLM2-135M-Instruct")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder / "pirate")
    printed = re.findall(r"^    (curl .*)$", (ROOT / "docs" / "models.md").read_text(), re.M)
    assert [re.findall(r"\w+_lora_adapter", command)[0] for command in printed] == [
        "load_lora_adapter",
        "unload_lora_adapter",
    ]
    for command in printed:
        here = command.replace("localhost:8000", server.url).replace("/adapters/pirate", str(folder / "pirate"))
        done = run("bash -c", folder, f"{here} --silent --show-error --fail-with-body", KEY="operator")
        assert "error" not in done, done
        models = httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer operator"}, timeout=60).json()[
            "data"
        ]
        assert ("pirate" in [model["id"] for model in models]) == ("unload" not in command)
