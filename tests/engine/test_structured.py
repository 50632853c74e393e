"""Structured output against jsonschema and re, which know nothing of grammars; and schemas made to hurt."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from engine.batch_engine import ContinuousBatchingEngine
from engine.grammars import GRAMMAR_ERROR, GrammarSpec
from engine.models.decoder import DecoderModel
from engine.sampling import Vocabulary, unpack_masks
from engine.schemas import FinishReason, GenerationRequest, GenerationResult
from engine.structured import GrammarCompiler
from engine.tokenization import HuggingFaceTokenizer, SimpleCharacterTokenizer, load_tokenizer

WORDS = ("alpha", "beta", 'ga"mma', "délta", "epsilon\n", "zeta")


class SchemaMaker:
    """Random JSON schemas whose values are of bounded length."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def make(self) -> dict[str, Any]:
        schema = self.node(3)
        while schema.get("type") not in ("object", "array"):
            schema = self.node(3)
        return schema | {"$defs": {"leaf": self.leaf()}}

    def node(self, depth: int) -> dict[str, Any]:
        kinds = ["leaf"] * 2 + ["object", "array", "anyOf", "ref", "tuple"] * (depth > 0)
        match self.rng.choice(kinds):
            case "object":
                names = self.rng.sample(WORDS, self.rng.randint(1, 3))
                required = [name for name in names if self.rng.random() < 0.7]
                properties = {name: self.node(depth - 1) for name in names}
                closed: dict[str, Any] = {"additionalProperties": False} if self.rng.random() < 0.5 else {}
                return {"type": "object", "properties": properties, "required": required, **closed}
            case "array":
                low = self.rng.randint(0, 2)
                high = low + self.rng.randint(0, 2)
                return {"type": "array", "items": self.node(depth - 1), "minItems": low, "maxItems": high}
            case "tuple":
                return {"type": "array", "prefixItems": [self.node(0), self.node(0)], "items": False, "minItems": 2}
            case "anyOf":
                return {"anyOf": [self.node(depth - 1), self.node(0)], "description": "either"}
            case "ref":
                return {"$ref": "#/$defs/leaf"}
        return self.leaf()

    def leaf(self) -> dict[str, Any]:
        low = self.rng.randint(-300, 300)
        return self.rng.choice(
            (
                {"type": "integer", "minimum": low, "maximum": low + self.rng.randint(0, 5000)},
                {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 12},
                {"enum": self.rng.sample((*WORDS, 1, 2.5, None, True, [1, "x"], {"a": "b"}), 3)},
                {"const": self.rng.choice(WORDS)},
                {"type": "string", "pattern": self.rng.choice((r"^[a-f]{2,5}$", r"^\d{3}-(x|yy)$", r"^[^z]{0,4}$"))},
                {"type": "string", "minLength": self.rng.randint(0, 3), "maxLength": self.rng.randint(3, 8)},
                {"type": "boolean"},
                {"type": ["null", "boolean"]},
                {"type": "string", "format": "date-time"},
            )
        )


@pytest.fixture(scope="module")
def tokenizer(smollm2: Any) -> HuggingFaceTokenizer:
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def model(tokenizer: HuggingFaceTokenizer) -> DecoderModel:
    torch.manual_seed(1)
    return DecoderModel(
        vocab_size=tokenizer.vocab_size, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, max_seq_len=1024
    )


@pytest.fixture(scope="module")
def compiler(tokenizer: HuggingFaceTokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(Vocabulary(tokenizer.vocab_size, tokenizer))
    yield compiler
    compiler.close()


@pytest.fixture
def make_engine(model: DecoderModel, tokenizer: HuggingFaceTokenizer, compiler: GrammarCompiler) -> Any:
    def make(**options: Any) -> ContinuousBatchingEngine:
        engine = ContinuousBatchingEngine(model, tokenizer, max_batch_size=16, max_seq_len=1024, **options)
        engine.grammars = compiler  # so that the tests share one process that tries grammars
        return engine

    return make


def spec_of(schema: Any) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", text=json.dumps(schema))


def run(engine: ContinuousBatchingEngine, requests: list[GenerationRequest]) -> list[GenerationResult]:
    for request in requests:
        engine.add_request(request)
    while engine.scheduler.has_pending_work:
        engine.step()
        engine.pool.check()
    results = [engine.result(request.request_id) for request in requests]
    assert all(result is not None for result in results)
    return results  # type: ignore[return-value]


class Replay:
    """Drafts what an earlier run said, with mistakes: the best and the worst that a draft can be."""

    def __init__(self, engine: ContinuousBatchingEngine, texts: dict[str, list[int]]) -> None:
        self.engine, self.texts, self.rng = engine, texts, np.random.default_rng(0)
        self.cut = 0

    def propose(self, rows: np.ndarray, gammas: np.ndarray, worth: np.ndarray) -> np.ndarray:
        table = self.engine.table
        drafts = np.full((len(rows), gammas.max(initial=0)), -1, dtype=np.int32)
        for i, row in enumerate(rows.tolist()):
            sequence = table.sequences[row]
            assert sequence is not None
            done = int(table.known[row]) - sequence.prompt_len
            guess = self.texts[sequence.request.request_id][done : done + int(gammas[i])]
            wrong = self.rng.random(len(guess)) < 0.2
            drafts[i, : len(guess)] = np.where(wrong, self.rng.integers(0, 5000, len(guess)), guess)
            self.cut += int(wrong.any())
        return drafts


def schema_requests() -> list[tuple[dict[str, Any], GenerationRequest]]:
    pairs = []
    for seed in range(100):
        schema = SchemaMaker(seed).make()
        request = GenerationRequest(
            request_id=str(seed),
            prompt_ids=[5 + seed % 7] * (1 + seed % 40),
            max_new_tokens=400,
            temperature=1.5,
            seed=seed,
            grammar=spec_of(schema),
        )
        pairs.append((schema, request))
    return pairs


def test_random_schemas_with_and_without_speculation(make_engine: Any) -> None:
    pairs = schema_requests()
    requests = [request for _, request in pairs]
    plain = run(make_engine(num_pages=192, page_size=16), requests)
    stopped = 0
    for (schema, _), result in zip(pairs, plain, strict=True):
        if result.finish_reason is FinishReason.STOP:
            stopped += 1
            jsonschema.validate(json.loads(result.text), schema, cls=jsonschema.Draft202012Validator)
        else:
            assert result.finish_reason is FinishReason.LENGTH, result.error
    assert stopped >= 95

    engine = make_engine(speculation="ngram", gamma=4)
    replay = Replay(engine, {result.request_id: [*result.token_ids, 2] for result in plain})
    engine._speculator.proposer = replay
    speculated = run(engine, requests)
    assert [(r.text, r.finish_reason) for r in speculated] == [(r.text, r.finish_reason) for r in plain]
    stats = engine.speculation_stats()
    assert 0.5 < stats.accepted / stats.drafted <= 1
    assert replay.cut > 10

    resumed = []
    for request, result in zip(requests[:20], plain, strict=False):
        half = result.token_ids[: len(result.token_ids) // 2]
        resumed.append(request.model_copy(update={"output_ids": half}))
    again = run(make_engine(depth=0), resumed)
    assert [r.text for r in again] == [r.text for r in plain[:20]]


def test_a_preempted_sequence_keeps_its_place(make_engine: Any) -> None:
    schema = {"type": "array", "items": {"enum": ["left", "right"]}, "minItems": 40, "maxItems": 40}
    requests = [
        GenerationRequest(request_id=str(i), prompt_ids=[9], max_new_tokens=300, seed=i, grammar=spec_of(schema))
        for i in range(4)
    ]
    roomy = run(make_engine(), requests)
    engine = make_engine(num_pages=24, page_size=16, enable_prefix_cache=False)
    tight = run(engine, requests)
    assert engine.stats().preemptions > 0
    assert [r.text for r in tight] == [r.text for r in roomy]
    assert all(r.finish_reason is FinishReason.STOP and len(json.loads(r.text)) == 40 for r in tight)


def test_cut_by_max_tokens_says_length(make_engine: Any) -> None:
    grammar = spec_of({"type": "array", "items": {"type": "boolean"}, "minItems": 30})
    (result,) = run(make_engine(), [GenerationRequest(prompt_ids=[9], max_new_tokens=8, grammar=grammar)])
    assert (result.finish_reason, len(result.token_ids)) == (FinishReason.LENGTH, 8)


@pytest.mark.parametrize("temperature", (0, 1.5))
@pytest.mark.parametrize(
    ("kind", "text", "check"),
    (
        ("regex", r"\d{3}-[a-f]{2}(é|ü)\n?", lambda t: re.fullmatch(r"\d{3}-[a-f]{2}(é|ü)\n?", t)),
        ("choice", json.dumps(WORDS), lambda t: t in WORDS),
        ("grammar", 'root ::= "<" name ">" \nname ::= [a-z] | [a-z] name2\nname2 ::= [0-9]', lambda t: t[0] == "<"),
        ("json_object", "", lambda t: t.startswith("{")),
    ),
)
def test_other_kinds(make_engine: Any, kind: Any, text: str, check: Any, temperature: int) -> None:
    grammar = GrammarSpec(kind=kind, text=text)
    requests = [
        GenerationRequest(
            request_id=str(i), prompt_ids=[9], max_new_tokens=30, temperature=temperature, seed=i, grammar=grammar
        )
        for i in range(8)
    ]
    neighbour = GenerationRequest(request_id="free", prompt_ids=[7], max_new_tokens=30, temperature=1, seed=4)
    *results, free = run(make_engine(), [*requests, neighbour])
    for result in results:
        assert result.error is None and check(result.text), result.text
        assert result.finish_reason is (FinishReason.LENGTH if len(result.token_ids) == 30 else FinishReason.STOP)
    assert [free.text] == [r.text for r in run(make_engine(), [neighbour])]


def test_json_of_a_character_vocabulary() -> None:
    tokenizer = SimpleCharacterTokenizer()
    torch.manual_seed(0)
    model = DecoderModel(vocab_size=tokenizer.vocab_size, hidden_size=16, num_heads=2, num_layers=1)
    engine = ContinuousBatchingEngine(model, tokenizer, max_seq_len=256)
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]}
    (result,) = run(engine, [GenerationRequest(prompt="x", grammar=spec_of(schema), temperature=1.5)])
    assert 0 <= json.loads(result.text)["a"] <= 9


def test_masks_roll_back(compiler: GrammarCompiler, tokenizer: HuggingFaceTokenizer) -> None:
    state = compiler.state(GrammarSpec(kind="choice", text='["abc", "abd", "x"]'))
    masks = torch.zeros((2, -(-tokenizer.vocab_size // 32)), dtype=torch.int32)
    state.fill(masks, 0)
    a, b, c, x = (tokenizer.encode(text)[0] for text in "abcx")
    eos = min(tokenizer.eos_token_ids)
    assert state.fitting([a, b, c, eos, a]) == 4
    assert state.fitting([a, x]) == 1
    state.fill(masks, 1)
    assert (masks[0] == masks[1]).all()
    allowed = {tokenizer.decode([i]) for i in unpack_masks(masks, tokenizer.vocab_size)[0].nonzero().flatten().tolist()}
    assert allowed <= {"a", "ab", "abc", "abd", "x"} and {"a", "x"} <= allowed


@pytest.mark.parametrize(
    ("schema", "reason"),
    (
        ({"type": "strin"}, "unknown type"),
        ([], "must be an object"),
        ({"not": {}}, "'not' is not supported"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "#/properties/a: 'uniqueIt"),
        ({"allOf": [{"type": "object"}, {"type": "object"}]}, "'allOf'"),
        ({"$ref": "#/$defs/x", "minimum": 3}, "'minimum' beside '\\$ref'"),
        ({"$ref": "http://elsewhere/x"}, "into the schema itself"),
        ({"type": "integer", "enum": ["x"]}, "not of the type"),
        ({"type": "string", "pattern": "^(?!a)b"}, "not supported"),
        ({"type": "string", "pattern": "^a$", "maxLength": 3}, "write the length"),
        ({"type": "object", "required": ["a"]}, "which is not in 'properties'"),
        ({"minimum": 3}, "needs a 'type'"),
        ({"maxItems": 1}, "'maxItems' needs a 'type'"),
        ({"minProperties": 1}, "'minProperties' needs a 'type'"),
        ({"maxProperties": 1}, "'maxProperties' needs a 'type'"),
        ({"patternProperties": {"^b$": {"type": "integer"}}}, "'patternProperties' needs a 'type'"),
        ({"propertyNames": {"pattern": "^b$"}}, "'propertyNames' needs a 'type'"),
        ({"type": ["number", "null"], "multipleOf": 3}, "'multipleOf' is supported for type integer only"),
        ({"required": 5}, "malformed"),
        ({"allOf": 5}, "malformed"),
        ({"type": 5}, "unknown type"),
    ),
)
def test_what_a_grammar_cannot_hold_to_is_refused_by_name(schema: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        spec_of(schema)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    (
        ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum greater than maximum"),
        ("regex", "(a", "not closed"),
        ("regex", r"a[^\s\S]", "allows no token"),
        ("grammar", "root ::= nothing", "not defined"),
        ("grammar", 'leaf ::= "a"', "root"),
    ),
)
def test_what_cannot_be_compiled_says_why(compiler: GrammarCompiler, kind: Any, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compiler.compile(GrammarSpec(kind=kind, text=text))


@pytest.mark.parametrize(
    ("options", "reason"),
    (
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"bad_words": ["a"]}, "bad_words"),
    ),
)
def test_options_that_would_leave_no_token(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=f"{reason} and a grammar exclude each other"):
        GenerationRequest(prompt="x", grammar=spec_of({"type": "null"}), **options)


def test_output_that_breaks_the_grammar_cannot_be_resumed(make_engine: Any) -> None:
    with pytest.raises(ValueError, match="break the grammar"):
        make_engine().add_request(
            GenerationRequest(prompt_ids=[9], output_ids=[40, 41], grammar=spec_of({"type": "null"}))
        )


def _deep(levels: int) -> str:
    return '{"type":"object","properties":{"a":' * levels + '{"type":"null"}' + "}}" * levels


@pytest.mark.parametrize(
    ("kind", "text"),
    (
        ("json_schema", _deep(100)),
        ("json_schema", _deep(20_000)),
        ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(100_000)]})),
        ("regex", "(((((.*)*)*)*)*)*"),
        ("regex", "(((.{0,200}b){0,200}c){0,200}.){0,200}"),
        ("regex", r"[\w\W]{0,5000}[^\d]{0,5000}"),
        ("grammar", 'root ::= root "a" | [^\\n]* root | ""'),
    ),
)
def test_a_schema_made_to_hurt_is_refused_while_others_go_on(make_engine: Any, kind: Any, text: str) -> None:
    engine = make_engine()
    engine.add_request(GenerationRequest(request_id="other", prompt_ids=[9], max_new_tokens=1000, ignore_eos=True))
    outcome: list[str] = []

    def arrive() -> None:
        try:
            grammar = GrammarSpec(kind=kind, text=text)
            engine.add_request(GenerationRequest(prompt_ids=[9], max_new_tokens=4, grammar=grammar))
            outcome.append("taken")
        except ValueError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=arrive)
    thread.start()
    steps = 0
    while thread.is_alive():
        engine.step()
        steps += 1
        time.sleep(0.001)
    thread.join()
    assert re.search("too complex|too long|nested|at most|recursion|Recursion", outcome[0]), outcome
    if steps > 1:
        assert engine.stats().generated_tokens > 0


def test_a_big_but_honest_schema_is_taken(compiler: GrammarCompiler) -> None:
    schema = {"enum": [f"value {i}" for i in range(5000)]}
    assert not spec_of(schema).is_plain
    compiler.compile(spec_of(schema))
    compiler.compile(
        spec_of({"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}}})
    )


@pytest.mark.parametrize("temperature", (0, 1))
def test_a_grammar_that_the_vocabulary_cannot_write_ends_with_an_error(temperature: float) -> None:
    tokenizer = SimpleCharacterTokenizer("ab")
    torch.manual_seed(0)
    model = DecoderModel(vocab_size=tokenizer.vocab_size, hidden_size=16, num_heads=2, num_layers=1)
    engine = ContinuousBatchingEngine(model, tokenizer, max_seq_len=64)
    grammar = GrammarSpec(kind="choice", text='["abc"]')
    bad, free = run(
        engine,
        [
            GenerationRequest(request_id="bad", prompt="a", grammar=grammar, temperature=temperature),
            GenerationRequest(request_id="free", prompt="a", max_new_tokens=9, ignore_eos=True),
        ],
    )
    assert (bad.finish_reason, bad.text) == (FinishReason.ERROR, "ab")
    assert bad.error is not None and bad.error.startswith(GRAMMAR_ERROR)
    assert (free.finish_reason, len(free.token_ids)) == (FinishReason.LENGTH, 9)
