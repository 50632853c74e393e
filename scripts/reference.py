"""Writes docs/configuration.md and docs/metrics.md from what the code says: `python scripts/reference.py`."""

from __future__ import annotations

import sys
import typing
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from app.metrics import Metrics  # noqa: E402
from app.settings import ENV_PREFIX, ServingConfig  # noqa: E402

NOTE = "<!-- written by scripts/reference.py -->"

CONFIGURATION = f"""{NOTE}
# Configuration

An option has one name, in three spellings: `max_batch_size` under `args` of a Serve config, `--max-batch-size` for
`llm-serve`, `{ENV_PREFIX}MAX_BATCH_SIZE` in the environment. What is given to `llm-serve` or in `args` wins over the
environment. An option nobody knows is refused, with the nearest one that there is; `llm-serve --check FILE` says so
before anything is deployed.

| option | values | default | |
|---|---|---|---|
"""

METRICS = f"""{NOTE}
# Metrics

Every series has the label `replica`, the process it is from. docs/operating.md says how to query them.

| metric | type | labels | |
|---|---|---|---|
"""


def configuration() -> str:
    rows = []
    for name, field in ServingConfig.model_fields.items():
        default = "required" if field.default is PydanticUndefined and field.default_factory is None else "none"
        if field.default not in (PydanticUndefined, None):
            default = f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"
        values = _values(field.annotation) + _bounds(field.metadata)
        rows.append(f"| `{name}` | {values} | {default} | {field.description or ''} |\n")
    return CONFIGURATION + "".join(rows)


def metrics() -> str:
    rows = []
    for metric in dict.fromkeys(Metrics("")._registry._names_to_collectors.values()):
        (family,) = metric.describe()
        name = family.name + "_total" * (family.type == "counter")
        labels = ", ".join(f"`{label}`" for label in metric._labelnames)
        rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |\n")
    return METRICS + "".join(rows)


def _values(annotation: Any) -> str:
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{kind}`" for kind in kinds)
    if typing.get_origin(annotation) is list:
        return f"list of {_values(kinds[0])}"
    if typing.get_origin(annotation) is dict:
        return f"map of {' to '.join(map(_values, kinds))}"
    if kinds and typing.get_origin(annotation) is not None:
        return " or ".join(_values(kind) for kind in kinds)
    names = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}
    return names.get(annotation, "text")


def _bounds(metadata: list[Any]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [f"{sign} {getattr(each, key):g}" for each in metadata for key, sign in signs.items() if hasattr(each, key)]
    return f", {', '.join(found)}" if found else ""


PAGES = {"configuration.md": configuration, "metrics.md": metrics}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page())
