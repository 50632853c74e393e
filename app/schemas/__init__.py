"""What the HTTP schemas share: how a body is validated, the sampling fields, and the shape of an answer."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from app.errors import ApiError
from engine.grammars import GrammarSpec
from engine.schemas import GenerationRequest as GenerationRequest
from engine.schemas import GenerationResult

if TYPE_CHECKING:
    from app.router import TextChunk

M = TypeVar("M", bound="Body")


def _refuse(value: bool) -> bool:
    if value:
        raise ValueError("true is not supported")
    return value


No = Annotated[bool, AfterValidator(_refuse), WithJsonSchema({"const": False})]
"""false; `Literal[False]` takes 0 too."""


class Body(BaseModel):
    """A request body. Types are strict, null is absence, and an unknown field is an error.

    `inert` names fields that mean nothing here, each with the type of the values that ask for nothing: those are
    accepted, any other is refused by name.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    inert: ClassVar[Mapping[str, TypeAdapter[Any]]] = {}


class JsonSchemaFormat(Body):
    name: str | None = None
    description: str | None = None
    definition: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        definition = None if self.json_schema is None else self.json_schema.definition
        if definition is None if self.type == "json_schema" else self.json_schema is not None:
            raise ValueError("type 'json_schema' and json_schema.schema go together")
        return self


class StructuredOutputs(Body):
    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GrammarFields(Body):
    """What the output must look like, in OpenAI's words or in vLLM's new or old ones."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def grammar(self, status: int) -> GrammarSpec | None:
        """The one grammar that was given; two, or an unsound one, are an ApiError of this status."""
        given: list[tuple[str, str, Any]] = []
        if self.response_format is not None and self.response_format.type != "text":
            schema = self.response_format.json_schema
            given.append(("response_format", self.response_format.type, schema.definition if schema else ""))
        nested = self.structured_outputs or StructuredOutputs()
        for kind in ("json", "regex", "choice", "grammar"):
            name = "json_schema" if kind == "json" else kind
            given.append((f"guided_{kind}", name, getattr(self, f"guided_{kind}")))
            given.append((f"structured_outputs.{kind}", name, getattr(nested, name)))
        given = [item for item in given if item[2] is not None]
        if len(given) > 1:
            raise ApiError(status, f"{given[0][0]} and {given[1][0]} exclude each other", param=given[1][0])
        for param, name, value in given:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            try:
                return GrammarSpec.model_validate({"kind": name, "text": text})
            except ValidationError as error:
                raise ApiError(status, f"{param}: {invalid(error, status).message}", param=param) from None
        return None


class SamplingFields(Body):
    """The sampling fields of every generating route. Only types are checked here: bounds are the engine's own."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = Field(None, ge=0.001, description="seconds until the request ends with 408")

    @field_validator("stop", mode="before", json_schema_input_type=str | list[str] | None)
    @classmethod
    def _one_stop_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    def sampling(self) -> dict[str, Any]:
        """The sampling fields that were given, by their name in GenerationRequest, but for the timeout."""
        return {name: getattr(self, name) for name in self.model_fields_set & _SAMPLING_FIELDS}


_SAMPLING_FIELDS = frozenset(SamplingFields.model_fields) - {"timeout"}


def parse(model: type[M], data: object, status: int) -> M:
    """Validates a decoded JSON body; a bad one is an ApiError of this status that names the field."""
    if not isinstance(data, dict):
        raise ApiError(400, "the body is not a JSON object")
    given = {}
    for name, value in data.items():
        if value is None:
            continue
        if name in model.model_fields:
            given[name] = value
        elif name not in model.inert:
            near = difflib.get_close_matches(name, list(model.model_fields), n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ApiError(status, f"unknown field '{_short(name)}'{hint}", param=_short(name), code="unknown_field")
        else:
            try:
                model.inert[name].validate_python(value, strict=True)
            except ValidationError:
                message = f"'{name}' is not supported with this value"
                raise ApiError(status, message, param=name, code="unsupported_parameter") from None
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise invalid(error, status) from None


def build_request(status: int, names: Mapping[str, str] | None = None, **fields: Any) -> GenerationRequest:
    """A GenerationRequest; a value out of bounds is an ApiError that names the field as the client does (`names`)."""
    try:
        return GenerationRequest(**fields)
    except ValidationError as error:
        raise invalid(error, status, names or {}) from None


def invalid(error: ValidationError, status: int, names: Mapping[str, str] | None = None) -> ApiError:
    """The first complaint of a ValidationError. The offending value isn't repeated: it may be megabytes."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    parts = [_short(str(part)) for part in first["loc"] if part != "[key]"]
    if parts and names:
        parts[0] = names.get(parts[0], parts[0])
    param = ".".join(parts) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown field"
    return ApiError(status, f"{param}: {message}" if param else message, param=param)


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of choice `index` of n: the request's own for 0, then splitmix64 of seed + index * golden ratio.

    Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators". The result is a signed 64-bit int.
    """
    if seed is None or index == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


class Renderer(Protocol):
    """Writes one answer in one API's words, as a whole or as server-sent events. Knows nothing of transport."""

    def body(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The whole answer."""

    def start(self) -> bytes:
        """Events before the first token."""

    def chunk(self, index: int, chunk: TextChunk) -> bytes:
        """The event for new tokens of a choice; empty when there is nothing to show."""

    def finish(self, index: int, result: GenerationResult) -> bytes:
        """The event that ends a choice."""

    def end(self, results: Sequence[GenerationResult]) -> bytes:
        """Events after the last choice has ended."""

    def error(self, error: ApiError, request_id: str) -> bytes:
        """The event that ends a stream that failed."""


def usage(results: Sequence[GenerationResult], n: int) -> dict[str, Any]:
    """OpenAI's usage object; results come in prompt order, n to a prompt, whose tokens count once."""
    prompt = sum(result.prompt_tokens for result in results[::n])
    completion = sum(len(result.token_ids) for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in results[::n])},
    }


def _short(name: str) -> str:
    return name if len(name) <= 80 else name[:77] + "..."
