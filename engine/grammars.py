"""What a client may ask an output to look like, and what of that is refused by name.

A JSON schema says many things that a grammar can't hold to; the library would ignore them in silence.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

GRAMMAR_ERROR = "the grammar "
"""How the error of a request begins whose grammar failed, before or while it ran."""

_MAX_DEPTH = 64
_PLAIN_CHARS = 16_384


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ANNOTATIONS = _words(
    "$schema $id $comment $defs definitions $anchor title description default examples example deprecated readOnly "
    "writeOnly discriminator nullable strict contentEncoding contentMediaType"
)
_REFUSED = _words(
    "not if then else contains minContains maxContains dependentRequired dependentSchemas dependencies "
    "unevaluatedItems unevaluatedProperties $dynamicRef $recursiveRef"
)
_NEED_TYPE = _words(
    "minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minItems maxItems "
    "minProperties maxProperties patternProperties propertyNames"
)
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


_COSTLY = re.compile(r'"(pattern\w*|format|propertyNames|grammar)"')


class GrammarSpec(BaseModel):
    """What an output must look like.

    json_schema: `text` is a schema; properties come in its order, and none that it doesn't name; `oneOf` is read as
    `anyOf`. json_object: any JSON object. regex: matched as a whole. choice: `text` is a JSON list of strings.
    grammar: EBNF whose first rule is `root`. structural_tag: a format of xgrammar's. JSON is written on one line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]
    text: str = Field("", max_length=1 << 18)

    @model_validator(mode="after")
    def _is_sound(self) -> GrammarSpec:
        if self.kind in ("json_schema", "choice", "structural_tag"):
            try:
                value = json.loads(self.text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"not valid JSON: {error}") from None
            if self.kind == "json_schema":
                try:
                    check_schema(value)
                except (AttributeError, TypeError):
                    raise ValueError("malformed JSON schema") from None
            elif self.kind == "choice" and not (value and isinstance(value, list) and all(map(_is_text, value))):
                raise ValueError("choice must be a list of non-empty strings")
        elif self.kind != "json_object" and not self.text:
            raise ValueError(f"{self.kind} is empty")
        if self.kind == "regex":
            check_regex(self.text)
        return self

    @property
    def is_plain(self) -> bool:
        """Whether compiling it and following it takes next to no time, whatever it says."""
        if len(self.text) > _PLAIN_CHARS or self.kind in ("regex", "grammar"):
            return False
        return self.kind == "choice" or not _COSTLY.search(self.text)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def check_regex(pattern: str) -> None:
    """ValueError for a regular expression that is malformed or uses what a grammar can't."""
    if found := re.search(r"\(\?(?:[=!]|<[=!])|(?<!\\)(?:\\\\)*\\[bB1-9]", pattern):
        raise ValueError(f"regular expression: {found[0]!r} is not supported")


def check_schema(schema: Any, where: str = "#", depth: int = 0) -> None:
    """ValueError, naming the place, for a JSON schema that is malformed or says what a grammar can't hold to."""

    def refuse(what: str) -> ValueError:
        return ValueError(f"JSON schema, at {where}: {what}")

    if depth > _MAX_DEPTH:
        raise refuse(f"nested deeper than {_MAX_DEPTH}")
    if isinstance(schema, bool) and depth:
        return
    if not isinstance(schema, dict):
        raise refuse("must be an object")
    asserting = schema.keys() - _ANNOTATIONS
    bad = sorted(asserting & _REFUSED) + ["uniqueItems"] * (schema.get("uniqueItems") is True)
    if bad:
        raise refuse(f"'{bad[0]}' is not supported")
    for keyword in asserting & {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"}:
        allowed = {keyword, "type"} if keyword in ("enum", "const") else {keyword}
        if beside := sorted(asserting - allowed):
            raise refuse(f"'{beside[0]}' beside '{keyword}' is not supported")
    if not str(schema.get("$ref", "#")).startswith("#"):
        raise refuse("'$ref' must lead into the schema itself")
    if len(schema.get("allOf", "1")) != 1:
        raise refuse("'allOf' of several schemas is not supported")
    kinds = schema.get("type", list(_TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
        raise refuse("unknown type")
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if "type" in schema and not all(any(type(value) in _TYPES[kind] for kind in kinds) for value in values):
        raise refuse("a value is not of the type")
    if isinstance(schema.get("pattern"), str):
        if {"minLength", "maxLength"} & asserting:
            raise refuse("'pattern' with a length is not supported: write the length into the pattern")
        if '"' in schema["pattern"] or "\\\\" in schema["pattern"]:
            raise refuse("a quote or a backslash in 'pattern' is not supported")
        check_regex(schema["pattern"])
    if "type" not in schema and (untyped := sorted(asserting & _NEED_TYPE)):
        raise refuse(f"'{untyped[0]}' needs a 'type'")
    if "multipleOf" in asserting and "number" in kinds:
        raise refuse("'multipleOf' is supported for type integer only")
    missing = set(map(str, schema.get("required", []))) - set(schema.get("properties", {}))
    if missing:
        raise refuse(f"'required' names {min(missing)!r}, which is not in 'properties'")
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        children = schema.get(keyword, {})
        if not isinstance(children, dict):
            raise refuse(f"'{keyword}' must be an object")
        for name, child in children.items():
            check_schema(child, f"{where}/{keyword}/{name}"[:200], depth + 1)
    for keyword in ("items", "additionalProperties", "propertyNames"):
        if keyword in schema:
            check_schema(schema[keyword], f"{where}/{keyword}"[:200], depth + 1)
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for i, child in enumerate(schema.get(keyword, [])):
            check_schema(child, f"{where}/{keyword}/{i}"[:200], depth + 1)
