"""Writes api.md, configuration.md and metrics.md in docs/, from what the code says: `python scripts/reference.py`."""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from app.metrics import Metrics  # noqa: E402
from app.openapi import document  # noqa: E402
from app.settings import ENV_PREFIX, ServingConfig  # noqa: E402

NOTE = "<!-- written by scripts/reference.py -->"

CONFIGURATION = f"""{NOTE}
# Configuration

An option has one name, in three spellings: `max_batch_size` under `args` of a Serve config, `--max-batch-size` for
`llm-serve`, `{ENV_PREFIX}MAX_BATCH_SIZE` in the environment (lists and maps as JSON). What is given to
`llm-serve` or in `args` wins over the environment. An option nobody knows is refused, with the nearest one that there
is; `llm-serve --check FILE` says so before anything is deployed.

| option | values | default | |
|---|---|---|---|
"""

METRICS = f"""{NOTE}
# Metrics

Every series has the label `replica`, the process it is from. docs/operating.md says how to query them.

| metric | type | labels | |
|---|---|---|---|
"""


API = f"""{NOTE}
# HTTP API

`/v1` is OpenAI's API; the other routes are Pilotfish's own. `GET /openapi.json` has all this for machines. Bodies and
answers are JSON. A field that is listed works; any other one is refused with its name, as is a value out of bounds.
`null` is as good as absent.

The key goes into `Authorization: Bearer KEY` or `X-API-Key: KEY`. `X-Request-ID` comes back as sent, or made.
`x-request-timeout-seconds` is a deadline, like the field `timeout`. [serving.md](serving.md) says when each status
comes and what an error looks like.

A stream is server-sent events. Under `/v1` they are OpenAI's chunks and at last `data: [DONE]`; on `/generate`
`data: {{"text": ...}}`, then an event `done` with what the answer has besides, or an event `error`.

```python
# needs a server
import httpx

answer = httpx.post(
    "http://127.0.0.1:8000/generate",
    json={{"prompt": "The capital of France is", "max_new_tokens": 3, "temperature": 0}},
)
print(answer.json()["generated_text"].strip(), answer.json()["token_count"])  # Paris. 3
```

| route | | statuses besides 200 |
|---|---|---|
"""


def api() -> str:
    described = document(True)
    routes, bodies = [], {}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            statuses = ", ".join(status for status in operation["responses"] if status != "200")
            routes.append(f"| `{method.upper()} {path}` | {operation['summary']} | {statuses} |\n")
            for content in operation.get("requestBody", {}).get("content", {}).values():
                bodies[f"{method.upper()} {path}"] = content["schema"]["$ref"].rpartition("/")[2]
    schemas = described["components"]["schemas"]
    text = API + "".join(routes)
    named: dict[str, None] = {}
    for route, name in bodies.items():
        text += f"\n## {route}\n\n" + _fields(schemas[name], named)
    text += "\n## Parts of bodies\n"
    for name in _growing(named):
        schema = schemas[name]
        text += f"\n### {name}\n\n" + (
            _fields(schema, named) if "properties" in schema else f"{_kind(schema, named)}\n"
        )
    return text


def _growing(names: dict[str, None]) -> Iterator[str]:
    """Names, those included that are added meanwhile."""
    i = 0
    while i < len(names):
        yield list(names)[i]
        i += 1


def _fields(schema: dict[str, Any], named: dict[str, None]) -> str:
    rows = ["| field | values | default | |\n|---|---|---|---|\n"]
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        default = "required" if name in required else ""
        if field.get("default") is not None:
            default = f"`{json.dumps(field['default'])}`"
        rows.append(f"| `{name}` | {_kind(field, named)} | {default} | {field.get('description', '')} |\n")
    return "".join(rows)


def _kind(schema: dict[str, Any], named: dict[str, None]) -> str:
    """A JSON schema in words; what it refers to goes into `named`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        named.setdefault(name)
        return f"[{name}](#{name.lower()})"
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            kinds = [_kind(each, named) for each in schema[choice] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds)) or "`null`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    signs = {
        **{"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"},
        **{"minLength": "at least {} characters", "maxLength": "at most {} characters"},
        **{"minItems": "at least {}", "maxItems": "at most {}", "maxProperties": "at most {}"},
    }
    bounds = [text.format(schema[key]) for key, text in signs.items() if key in schema]
    name = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true`, `false`"}.get(
        schema.get("type", ""), "anything"
    )
    if schema.get("type") == "array":
        name = f"list of {_kind(schema.get('items', {}), named)}"
    elif schema.get("type") == "object":
        values = schema.get("additionalProperties")
        name = f"object of {_kind(values, named)}" if isinstance(values, dict) and values else "object"
    elif schema.get("type") == "null":
        return "`null`"
    return ", ".join([name, *bounds])


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


PAGES = {"api.md": api, "configuration.md": configuration, "metrics.md": metrics}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page())
