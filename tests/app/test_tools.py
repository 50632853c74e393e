"""Tool calls, thinking and structured output through the official client, and the parsers piece by piece."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, Literal

import httpx
import pytest
from openai import BadRequestError, pydantic_function_tool
from pydantic import BaseModel

from app.ingress import build_asgi_app
from app.replica import EngineReplica, build_engine
from app.router import Router
from app.settings import ServingConfig
from app.tools import FORMATS, AnswerStream, OutputForm, ToolUse
from engine.tokenization import SimpleCharacterTokenizer
from tests.app.edge import ScriptedRouter, http, openai_client
from tests.app.fakes import LocalEngines

TEMPLATES = {
    "hermes": "{{ tools }}<tool_call></tool_call>",
    "llama3_json": "{{ tools }} ipython",
    "mistral": "{{ tools }}[TOOL_CALLS]",
    "thinking": "{{ tools }}<tool_call> <think></think>",
    "none": "{{ messages }}",
}
WEATHER = {"name": "weather", "arguments": {"city": 'New "York" {}]', "days": 3, "deep": {"a": [1, {}]}}}
TIME = {"name": "time", "arguments": {}}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "time")
]
DEEP = '<tool_call>{"arguments": ' + "[" * 9999 + "]" * 9999 + ', "name": "f"}</tool_call>'
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather?"}]


def written(family: str, *calls: dict[str, Any]) -> str:
    """The calls as such a model writes them."""
    if family == "llama3_json":
        return "; ".join(json.dumps({"name": c["name"], "parameters": c["arguments"]}) for c in calls)
    if family == "mistral":
        return "[TOOL_CALLS]" + json.dumps(list(calls))
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


class TemplateTokenizer(SimpleCharacterTokenizer):
    """Characters, with a template that shows what it was given."""

    has_chat_template = True

    def __init__(self, template: str, suffix: str = "") -> None:
        super().__init__()
        self.chat_template = template
        self.suffix = suffix

    def apply_chat_template(self, messages: Any, *, tools: Any = None, **kwargs: Any) -> str:
        return json.dumps({"messages": messages, "tools": tools}) + self.suffix


def router(output: str, family: str = "hermes", suffix: str = "") -> ScriptedRouter:
    made = ScriptedRouter(output)
    made.tokenizer = TemplateTokenizer(TEMPLATES[family], suffix)
    made.max_model_len = 8192
    return made


def prompt(made: ScriptedRouter) -> dict[str, Any]:
    ids = made.requests[-1].prompt_ids or []
    return json.loads(made.tokenizer.decode(ids).removesuffix("[TOOL_CALLS]").removesuffix("<think>"))


def form(family: str | None, *, thinks: bool = False, inside: bool = False, forced: bool = False) -> OutputForm:
    functions = [tool["function"] for tool in TOOLS] if forced else []
    return OutputForm(FORMATS[family] if family else None, ToolUse(functions, True), thinks, inside)


def parse(form: OutputForm, text: str, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message that the deltas add up to, which is that of the whole text, and the pieces of calls."""
    rng, stream, deltas, rest = random.Random(seed), AnswerStream(form), [], text
    while rest:
        size = rng.choice((1, 2, 3, 7, 30))
        deltas.append(stream.push(rest[:size]))
        rest = rest[size:]
    delta, answer = stream.finish()
    deltas.append(delta)
    pieces = [call for delta in deltas for call in delta.get("tool_calls", [])]
    message = answer.message()
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == (message.get(name) or "")
    for i, call in enumerate(message.get("tool_calls", [])):
        own = [piece["function"]["arguments"] for piece in pieces if piece["index"] == i]
        assert "".join(own) == call["function"]["arguments"]
    whole = form.whole(text).message()
    assert calls_of(whole) == calls_of(message)
    assert whole | {"tool_calls": 0} == message | {"tool_calls": 0}
    return message, pieces


def calls_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [{"name": f["name"], "arguments": json.loads(f["arguments"])} for f in functions]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("family", FORMATS)
def test_calls_are_found_however_the_text_is_cut(family: str, seed: int) -> None:
    message, pieces = parse(form(family), written(family, WEATHER, TIME), seed)
    assert calls_of(message) == [WEATHER, TIME]
    assert message["content"] is None
    assert [piece["index"] for piece in pieces] == sorted(piece["index"] for piece in pieces)
    assert all(("id" in piece) == ("name" in piece["function"]) for piece in pieces)
    assert len({piece["id"] for piece in pieces if "id" in piece}) == 2


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    (
        ("hermes", "I look.\n\n" + written("hermes", TIME) + " Done.", "I look. Done.", [TIME]),
        ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}', "", [{"name": "f", "arguments": {"x": 1}}]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [{"name": "f", "arguments": {}}]),
        ("hermes", "1 < 2 <tool", "1 < 2 <tool", []),
        ("hermes", "<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
        ("hermes", '<tool_call>{"name": "a\\x", "arguments": {}}', '<tool_call>{"name": "a\\x", "arguments": {}}', []),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}', "", [{"name": "?", "arguments": {}}]),
        ("hermes", '<tool_call>{"arguments": "\\"\\ud800\\"", "name": "f"}', "", [{"name": "f", "arguments": "?"}]),
        ("hermes", DEEP, DEEP, []),
        ("llama3_json", '{"answer": 42} is it', '{"answer": 42} is it', []),
        ("llama3_json", 'It is {"name": "f", "parameters": {}}', 'It is {"name": "f", "parameters": {}}', []),
        ("llama3_json", "<|python_tag|>" + written("llama3_json", TIME), "", [TIME]),
        ("mistral", "Yes. " + written("mistral", TIME), "Yes.", [TIME]),
        ("mistral", '[TOOL_CALLS]time[ARGS]{}[TOOL_CALLS]time{"a": 1}', "", [TIME, TIME | {"arguments": {"a": 1}}]),
    ),
)
def test_text_that_is_a_call_in_part_or_not_at_all(
    family: str, text: str, content: str, calls: list[Any], seed: int
) -> None:
    message, _ = parse(form(family), text, seed)
    assert (message["content"] or "") == content
    assert calls_of(message) == calls


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"),
    (
        (False, "<think>\nHm < 3 </thin.\n</think>\n\nYes.", "\nHm < 3 </thin.\n", "Yes."),
        (False, "No thought.", "", "No thought."),
        (False, " <thi", "", " <thi"),
        (True, "Hm.</think>Yes.", "Hm.", "Yes."),
        (True, "Cut off", "Cut off", ""),
    ),
)
def test_thinking_is_split_off(inside: bool, text: str, reasoning: str, content: str, seed: int) -> None:
    message, _ = parse(form(None, thinks=True, inside=inside), text, seed)
    assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, content or None)


@pytest.mark.parametrize("family", FORMATS)
async def test_the_clients_tool_loop(family: str) -> None:
    made = router(written(family, WEATHER), family)
    messages = list(QUESTION)
    async with openai_client(made) as api:
        answer = await api.chat.completions.create(model="Tiny", messages=messages, tools=TOOLS)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or []
        assert json.loads(call.function.arguments) == WEATHER["arguments"]  # type: ignore[union-attr]
        assert prompt(made)["tools"] == TOOLS
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}]
        made._script = lambda request: "It is sunny."
        answer = await api.chat.completions.create(model="Tiny", messages=messages, tools=TOOLS)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It is sunny.", "stop")
    shown = prompt(made)["messages"]
    assert shown[1]["tool_calls"][0]["function"] == WEATHER
    assert shown[1]["content"] == ""
    assert shown[2] == {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    if family == "mistral":
        assert len(call.id) == 9 and call.id.isalnum()


@pytest.mark.parametrize("family", FORMATS)
async def test_streamed_calls(family: str) -> None:
    made = router(written(family, WEATHER, TIME), family)
    async with (
        openai_client(made) as api,
        api.chat.completions.stream(model="Tiny", messages=QUESTION, tools=TOOLS) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.delta") > 10  # as they come, not at the end
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert final.choices[0].finish_reason == "tool_calls"
    calls = [call.function for call in final.choices[0].message.tool_calls or []]
    assert [(f.name, json.loads(f.arguments)) for f in calls] == [
        (call["name"], call["arguments"]) for call in (WEATHER, TIME)
    ]


async def test_the_clients_parse_helper() -> None:
    class City(BaseModel):
        name: str
        size: Literal["small", "large"]
        neighbours: list[str]

    made = router('{"name": "Paris", "size": "large", "neighbours": ["Lyon"]}')
    async with openai_client(made) as api:
        answer = await api.chat.completions.parse(model="Tiny", messages=QUESTION, response_format=City)
        assert answer.choices[0].message.parsed == City(name="Paris", size="large", neighbours=["Lyon"])
        grammar = made.requests[-1].grammar
        assert grammar is not None and grammar.kind == "json_schema"
        assert json.loads(grammar.text)["required"] == ["name", "size", "neighbours"]
        made._script = lambda request: written(
            "hermes",
            {"name": "City", "arguments": City.model_construct(name="Rome", size="large", neighbours=[]).model_dump()},
        )
        answer = await api.chat.completions.parse(
            model="Tiny", messages=QUESTION, tools=[pydantic_function_tool(City)], tool_choice="required"
        )
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == City(name="Rome", size="large", neighbours=[])


@pytest.mark.parametrize("family", FORMATS)
async def test_tool_choice(family: str) -> None:
    made = router(written(family, TIME, WEATHER).removeprefix("[TOOL_CALLS]"), family)
    async with openai_client(made) as api:

        async def ask(**options: Any) -> Any:
            answer = await api.chat.completions.create(model="Tiny", messages=QUESTION, tools=TOOLS, **options)
            return answer.choices[0]

        choice = await ask(tool_choice="required")
        assert len(choice.message.tool_calls) == 2
        grammar = made.requests[-1].grammar
        assert grammar is not None and grammar.kind == "structural_tag"
        assert {name for name in ("time", "weather") if f'"{name}\\' in grammar.text} == {"time", "weather"}
        opener = made.tokenizer.encode("[TOOL_CALLS]")
        assert (made.requests[-1].prompt_ids[-len(opener) :] == opener) == (family == "mistral")  # type: ignore[index]
        assert len((await ask(tool_choice="required", parallel_tool_calls=False)).message.tool_calls) == 1
        choice = await ask(tool_choice={"type": "function", "function": {"name": "time"}})
        assert [call.function.name for call in choice.message.tool_calls] == ["time"]
        assert '"weather' not in made.requests[-1].grammar.text  # type: ignore[union-attr]
        choice = await ask(tool_choice="none")
        assert choice.message.tool_calls is None and choice.message.content
        assert made.requests[-1].grammar is None and prompt(made)["tools"] is None


async def test_reasoning_and_calls_together() -> None:
    text = "I need it.</think>\n\nLook:\n" + written("hermes", WEATHER)
    made = router(text, "thinking", suffix="<think>")
    async with openai_client(made) as api:
        message = (await api.chat.completions.create(model="Tiny", messages=QUESTION, tools=TOOLS)).choices[0].message
        assert message.reasoning_content == "I need it."  # type: ignore[attr-defined]
        assert message.content == "Look:"
        assert calls_of(message.model_dump()) == [WEATHER]
        stream = await api.chat.completions.create(model="Tiny", messages=QUESTION, tools=TOOLS, stream=True)
        reasoning = content = ""
        async for chunk in stream:
            delta = chunk.choices[0].delta
            reasoning += getattr(delta, "reasoning_content", None) or ""
            content += delta.content or ""
        assert (reasoning, content, chunk.choices[0].finish_reason) == ("I need it.", "Look:", "tool_calls")
        await api.chat.completions.create(model="Tiny", messages=QUESTION, response_format={"type": "json_object"})
        assert "</think>" in made.requests[-1].grammar.text  # type: ignore[union-attr]


@pytest.mark.parametrize("echoed", ({"tool_calls": []}, {"tool_calls": None}, {}))
async def test_history_as_clients_send_it(echoed: dict[str, Any]) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": None, **echoed}, *QUESTION]
    made = router("Fine.")
    async with http(made) as client:
        reply = await client.post("/v1/chat/completions", json={"messages": messages, "tools": []})
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"] == {"role": "assistant", "content": "Fine."}
    assert prompt(made)["messages"][1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("route", ("/v1/chat/completions", "/v1/completions", "/generate"))
@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    (
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"guided_json": {"type": "null"}}, "json_schema", '{"type": "null"}'),
        ({"structured_outputs": {"json": '{"type":"null"}'}}, "json_schema", '{"type":"null"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a", "b"]'),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"response_format": {"type": "text"}}, None, None),
    ),
)
async def test_grammars_reach_the_engine(route: str, fields: Any, kind: Any, text: Any) -> None:
    made = ScriptedRouter()
    body = {"messages": QUESTION} if "chat" in route else {"prompt": "Hi"}
    async with http(made) as client:
        reply = await client.post(route, json=body | fields)
    assert reply.status_code == 200, reply.text
    grammar = made.requests[-1].grammar
    assert (grammar and grammar.kind, grammar and grammar.text) == (kind, text)


@pytest.mark.parametrize(
    ("fields", "param"),
    (
        ({"guided_json": {"type": "null"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"required": 3}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tools"),
    ),
)
async def test_what_is_refused_names_the_field(fields: Any, param: str) -> None:
    async with openai_client(router("Hi")) as api:
        with pytest.raises(BadRequestError) as error:
            await api.chat.completions.create(model="Tiny", messages=QUESTION, extra_body=fields)
    assert error.value.param == param


async def test_a_template_without_a_form_for_calls_refuses_tools() -> None:
    async with openai_client(router("Hi", "none")) as api:
        with pytest.raises(BadRequestError, match="tools are not supported"):
            await api.chat.completions.create(model="Tiny", messages=QUESTION, tools=TOOLS)


def test_the_forced_form_of_mistral_is_read_without_its_opener() -> None:
    message, _ = parse(form("mistral", forced=True), json.dumps([TIME, WEATHER]), 0)
    assert calls_of(message) == [TIME, WEATHER]


async def test_grammars_through_router_replica_and_engine() -> None:
    config = ServingConfig(model="dummy", num_threads=1)
    engine, description = build_engine(config)
    engines = LocalEngines(config)
    engines.replicas["a"] = EngineReplica(engine, config, description)
    engines.calls["a"], engines.frozen["a"] = set(), asyncio.Event()
    engines.frozen["a"].set()
    made = Router(config, engines, SimpleCharacterTokenizer())
    transport = httpx.ASGITransport(build_asgi_app(made))
    try:
        async with asyncio.timeout(30):
            while not made.ready:
                await asyncio.sleep(0.01)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:

            async def ask(**fields: Any) -> tuple[int, Any]:
                body = {"prompt": "Hi", "max_tokens": 100, "temperature": 1.5, "seed": 1, **fields}
                reply = await client.post("/v1/completions", json=body)
                return reply.status_code, reply.json()

            schema = {"type": "object", "properties": {"n": {"enum": [1, 22, "x"]}}, "required": ["n"]}
            status, answer = await ask(guided_json=schema)
            assert status == 200 and json.loads(answer["choices"][0]["text"])["n"] in (1, 22, "x")
            assert answer["choices"][0]["finish_reason"] == "stop"
            status, answer = await ask(guided_json={"$ref": "#/nowhere"})
            assert status == 400 and "nowhere" in answer["error"]["message"]
            status, answer = await ask(guided_regex="(a")
            assert status == 400 and "not closed" in answer["error"]["message"]
            status, answer = await ask(guided_choice=["abé"])  # no token for the last letter
            assert status == 400 and "the grammar" in answer["error"]["message"]
            status, answer = await ask(guided_regex="[ab]{3}")
            assert status == 200 and set(answer["choices"][0]["text"]) <= {"a", "b"}
    finally:
        await made.close()
        engines.close()
        engine.unload_model()
