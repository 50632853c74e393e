"""Other people's clients, unmodified and each in an environment of its own, against a real llm-serve.

    python tests/clients/run.py [--url URL] [NAME ...]

Without a URL it starts llm-serve with the demo model, in fp32 so that log-probabilities can be compared.
`make test-clients` runs all; they need the network once, for pip.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "clients"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
# What each needs; its script is use_NAME.py.
CLIENTS = {
    "openai": "openai",
    "litellm": "litellm",
    "langchain": "langchain-openai",
    "llm": "llm",
    "lm_eval": "lm-eval[api] transformers",
    "guidellm": "guidellm",
}


def environment(name: str) -> Path:
    """The python of a virtual environment that has the client."""
    folder = ROOT / ".clients" / name
    stamp = folder / ".installed"
    if not stamp.exists():
        print(f"==> {name}: installing {CLIENTS[name]}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run(
            [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *CLIENTS[name].split()], check=True
        )
        stamp.touch()
    return folder / "bin" / "python"


@contextlib.contextmanager
def llm_serve() -> Iterator[str]:
    sys.path.insert(0, str(ROOT))
    from app.cli import free_ports

    [port] = free_ports(1)
    command = [Path(sysconfig.get_path("scripts")) / "llm-serve", "--model", MODEL, "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--tool-call-parser", "hermes"]
    with (ROOT / ".clients" / "llm-serve.log").open("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            while "llm-serve: ready" not in Path(log.name).read_text():
                if server.poll() is not None:
                    sys.exit(f"llm-serve didn't start:\n{Path(log.name).read_text()[-3000:]}")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--url", help="a server with the demo model in fp32; default: one is started")
    options = parser.parse_args()
    if unknown := set(options.names) - CLIENTS.keys():
        parser.error(f"unknown client {sorted(unknown)[0]}")
    names = options.names or list(CLIENTS)
    (ROOT / ".clients").mkdir(exist_ok=True)
    pythons = {name: environment(name) for name in names}
    failed = []
    with contextlib.nullcontext(options.url) if options.url else llm_serve() as url:
        for name, python in pythons.items():
            print(f"==> {name}", flush=True)
            variables = {**os.environ, "HF_HUB_OFFLINE": "1", "PATH": f"{python.parent}:{os.environ['PATH']}"}
            variables |= {"CHECKER": sys.executable, "TOKENIZERS_PARALLELISM": "false"}
            variables["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks GitHub for prices
            script = [python, FOLDER / f"use_{name}.py", url, MODEL.name, MODEL]
            if subprocess.run(script, env=variables, cwd=ROOT / ".clients").returncode:
                failed.append(name)
    print("failed: " + ", ".join(failed) if failed else f"all {len(names)} clients work")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
