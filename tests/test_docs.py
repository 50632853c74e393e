"""That the pages of docs/ tell the truth: their snippets run, what they name exists, and what is generated is current.
The README's snippets run in test_project.py, those of models.md and speculation.md beside what they are about."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import pytest

from app import cli as llm_serve
from app.bench import cli as llm_bench
from app.bench.load import Load, Run, Target, read_mix
from app.bench.report import Report
from app.check import check_file
from app.metrics import Metrics
from app.settings import ServingConfig
from engine import distill as llm_distill
from tests.test_operating import family_names

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
ELSEWHERE = {"models.md", "speculation.md"}


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page.name, text)
        for page in DOCS
        if page.name not in ELSEWHERE
        for text in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)
    ]


@pytest.mark.parametrize(
    ("page", "snippet"), [(p, text) for p, text in blocks("python") if not text.startswith("# needs a server")]
)
def test_snippets_run_as_printed(page: str, snippet: str, smollm2: Path) -> None:
    """As in the README: a comment after a print is what it must print."""
    run = subprocess.run([sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    promised = re.findall(r"^ *print\(.*\)  # (.*)$", snippet, re.M)
    assert promised and all(line in run.stdout.splitlines() for line in promised), run.stdout


def test_serve_configs_pass_the_check(tmp_path: Path) -> None:
    configs = blocks("yaml")
    assert configs
    for page, text in configs:
        (tmp_path / "config.yaml").write_text(text)
        assert check_file(str(tmp_path / "config.yaml")) == [], page


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    import importlib.util

    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["api.md", "configuration.md", "metrics.md"])
def test_generated_pages_are_current(name: str, reference: ModuleType) -> None:
    expected = reference.PAGES[name]()
    assert (ROOT / "docs" / name).read_text() == expected, "run: python scripts/reference.py"


def test_the_reference_is_complete(reference: ModuleType) -> None:
    page = reference.configuration()
    assert all(f"| `{name}` |" in page for name in ServingConfig.model_fields)
    page = reference.metrics()
    assert all(
        f"| `{family_names(f.name, f.type)[0].removesuffix('_bucket')}` |" in page for f in Metrics("").families()
    )


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def commands() -> list[tuple[str, str]]:
    """Indented lines of the pages and the README that begin with a program, without comments."""
    found = []
    for page in (ROOT / "README.md", *DOCS):
        for line in re.findall(r"^    (\S.*)$", prose(page), re.M):
            line = re.sub(r"^(?:[A-Z]+=\S+ )*(?:\.venv/bin/)?", "", line.partition("  # ")[0].strip())
            if re.match(r"(llm-serve|llm-bench|llm-distill|make|python|kubectl|docker) ", line):
                found.append((page.name, line))
    return found


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_have_programs_options_and_files(
    page: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What they do is tested beside the programs, and in e2e/test_guides.py; here, that nothing in them is misspelt."""
    program, *arguments = shlex.split(command)
    for file in (word.partition("=")[2] or word for word in arguments if "/" in word and "://" not in word):
        if file.startswith(("k8s/", "benchmarks/", "scripts/", "models/")):
            assert (ROOT / file).exists(), file
    if program == "llm-serve" and arguments[0] == "--check":
        assert llm_serve.main([arguments[0], str(ROOT / arguments[1])]) == 0
    elif program == "llm-serve" and arguments != ["--help"]:
        ServingConfig.from_options(llm_serve._parse(arguments))
    elif program == "llm-bench":
        monkeypatch.chdir(tmp_path)
        report = Report.of(Run(Target("http://x"), Load((), rate=1, requests=1)), started=datetime.now(UTC), options={})
        for name in ("base.json", "new.json"):
            Path(name).write_text(report.model_dump_json())
        llm_bench._parser().parse_args(arguments)
    elif program == "llm-distill":
        llm_distill._parser().parse_args(arguments)
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M)
        assert all(re.match(r"(PYTHON|TORCH_INDEX|MODEL|ARGS)=", argument) for argument in arguments[1:])
    elif program == "python" and arguments[0] == "-m":
        assert (ROOT / arguments[1].replace(".", "/")).with_suffix(".py").exists()


def test_the_mix_of_the_guide_is_one() -> None:
    lines = re.findall(r"^    ({.*})$", (ROOT / "docs" / "benchmarking.md").read_text(), re.M)
    assert {kind.name for kind in read_mix("\n".join(lines))} == {"chat", "summary"}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_files_and_links_exist(page: Path) -> None:
    text = prose(page)
    named = set(re.findall(r"`((?:app|engine|k8s|docs|scripts|tests)/[\w./-]*)`", text))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text)):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.M) if anchor else []
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{target}#{anchor}"


def test_the_tour_names_what_there_is() -> None:
    source = "\n".join(path.read_text() for folder in ("app", "engine") for path in (ROOT / folder).rglob("*.py"))
    names = set(re.findall(r"`([A-Za-z_][\w.]*)`", prose(ROOT / "docs" / "engine.md")))
    assert len(names) > 30
    missing = [n for n in names for part in n.split(".") if not re.search(rf"\b{part}\b", source)]
    assert missing == []


def test_flags_and_series_of_ours_exist() -> None:
    ours = "\n".join(prose(page) for page in DOCS if page.name not in ELSEWHERE)
    rows = re.findall(r"^\| .*? \| (.*?) \|", prose(ROOT / "docs" / "migrating.md").partition("\n## Offline")[0], re.M)
    flags = set(re.findall(r"`?(--[a-z-]+)", " ".join(rows)))
    assert len(flags) > 15
    known = {"--" + name.replace("_", "-") for name in ServingConfig.model_fields}
    assert {flag.replace("--no-", "--") for flag in flags} <= known
    exist = {name for f in Metrics("").families() for name in (f.name, *family_names(f.name, f.type))}
    assert set(re.findall(r"\bllm_\w+", ours)) - {"llm_configs"} <= exist
