"""Fields of the OpenAI bodies: what each maps to, what is refused by name, and log-probabilities in both formats."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.completion import Completion

from app.errors import ApiError
from app.schemas import SamplingFields, choice_seed, parse
from app.schemas.native import GenerateBody
from app.schemas.openai import ChatCompletionRequest, CompletionRequest
from engine.schemas import GenerationRequest
from engine.tokenization import SimpleCharacterTokenizer
from tests.app.edge import ScriptedRouter, http, logprob, openai_client

CHAT = [{"role": "user", "content": "hi"}]


class BytesTokenizer(SimpleCharacterTokenizer):
    """Every UTF-8 byte is a token, so that a character can take several."""

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size = 259

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [3 + byte for byte in text.encode()]

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id}")
        return bytes([token_id - 3]) if token_id >= 3 else b""


# --- every field arrives


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", 0.5, 0.5),
        ("temperature", 0, 0.0),
        ("top_k", 5, 5),
        ("top_p", 0.9, 0.9),
        ("min_p", 0.1, 0.1),
        ("repetition_penalty", 1.5, 1.5),
        ("frequency_penalty", -1, -1.0),
        ("presence_penalty", 2, 2.0),
        ("logit_bias", {"5": -100, "7": 1.5}, {5: -100.0, 7: 1.5}),
        ("seed", -3, -3),
        ("min_tokens", 2, 2),
        ("ignore_eos", True, True),
        ("stop", "x", ["x"]),
        ("stop", ["x", "yz"], ["x", "yz"]),
        ("stop_token_ids", [4], [4]),
        ("bad_words", ["no"], ["no"]),
        ("include_stop_str_in_output", True, True),
        ("skip_special_tokens", False, False),
        ("priority", -1, -1),
        ("cache_salt", "me", "me"),
        ("timeout", 5, 5.0),
    ],
)
async def test_sampling_fields_reach_the_engine(path: str, field: str, value: Any, expected: Any) -> None:
    router = ScriptedRouter()
    prompt: dict[str, Any] = {"messages": CHAT} if "chat" in path else {"prompt": "x"}
    async with http(router) as client:
        response = await client.post(path, json={**prompt, field: value})
    assert response.status_code == 200, response.text
    (request,) = router.requests
    assert getattr(request, field) == expected
    plain = GenerationRequest(prompt_ids=[3])
    for name in SamplingFields.model_fields:
        if name != field:
            assert getattr(request, name) == getattr(plain, name)


def test_the_sampling_fields_are_the_engines() -> None:
    assert SamplingFields.model_fields.keys() <= GenerationRequest.model_fields.keys()


@pytest.mark.parametrize(
    "limit", [{"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}]
)
async def test_chat_limits(limit: dict[str, int]) -> None:
    router = ScriptedRouter()
    async with http(router) as client:
        assert (await client.post("/v1/chat/completions", json={"messages": CHAT, **limit})).status_code == 200
    assert router.requests[0].max_new_tokens == 5


# --- what asks for nothing is taken, what can't be done is refused by name


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "me"},
        {"metadata": {"a": "b"}},
        {"store": False},
        {"service_tier": "auto"},
        {"service_tier": "default"},
        {"parallel_tool_calls": True},
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"stream_options": None, "tools": None, "max_tokens": None, "n": None, "stop": None, "logit_bias": None},
        {"stream": True, "stream_options": {"include_usage": False}},
        {"stream": True, "stream_options": {}},
        {"logprobs": False},
        {"chat_template_kwargs": {}},
    ],
)
async def test_harmless_fields_are_taken(extra: dict[str, Any]) -> None:
    async with http(ScriptedRouter()) as client:
        response = await client.post("/v1/chat/completions", json={"messages": CHAT, "model": "Tiny", **extra})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("chat", {"response_format": {"type": "xml"}}, "response_format.type"),
        ("chat", {"functions": [{"name": "f"}]}, "functions"),
        ("chat", {"audio": {}}, "audio"),
        ("chat", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("chat", {"store": True}, "store"),
        ("chat", {"service_tier": "priority"}, "service_tier"),
        ("chat", {"user": 5}, "user"),
        ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat", {"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag"),
        ("chat", {"top_logprobs": 3}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("chat", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("chat", {"temperature": -0.1}, "temperature"),
        ("chat", {"temperature": "0.5"}, "temperature"),
        ("chat", {"temperature": True}, "temperature"),
        ("chat", {"top_p": 1.1}, "top_p"),
        ("chat", {"n": 0}, "n"),
        ("chat", {"n": 129}, "n"),
        ("chat", {"n": 1.5}, "n"),
        ("chat", {"n": "2"}, "n"),
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"max_tokens": 255}, "max_tokens"),
        ("chat", {"max_completion_tokens": 255}, "max_completion_tokens"),
        ("chat", {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ("chat", {"max_tokens": 5, "min_tokens": 6}, None),
        ("chat", {"seed": 2**63}, "seed"),
        ("chat", {"stop": ""}, "stop.0"),
        ("chat", {"stop": ["x"] * 17}, "stop"),
        ("chat", {"stop": [1]}, "stop.0"),
        ("chat", {"logit_bias": {"x": 1}}, "logit_bias.x"),
        ("chat", {"logit_bias": {"5": 101}}, "logit_bias.5"),
        ("chat", {"stream": "yes"}, "stream"),
        ("chat", {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ("chat", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ("chat", {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": "hi"}, "messages"),
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ("chat", {"messages": [{"role": "user"}]}, "messages.0"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ("chat", {"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages.0.foo"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
        ),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}]},
            "messages.0.tool_calls.0.function",
        ),
        ("completions", {"suffix": "x"}, "suffix"),
        ("completions", {"best_of": 2}, "best_of"),
        ("completions", {"n": 2, "best_of": 3}, "best_of"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_tokens": 256}, "max_tokens"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": ["x", ""]}, "prompt"),
        ("completions", {"prompt": [[]]}, "prompt"),
        ("completions", {"prompt": [1, "x"]}, "prompt"),
        ("completions", {"prompt": [True]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"prompt": [98, 10**6]}, "prompt"),
        ("completions", {"prompt": [[5], [10**30]]}, "prompt"),
        ("completions", {"prompt": {"a": 1}}, "prompt"),
        ("completions", {"prompt": ["x"] * 129, "n": 2}, "prompt"),
        ("completions", {"echo": True, "logprobs": 1, "stream": True}, "logprobs"),
    ],
)
async def test_refused_by_name(path: str, extra: dict[str, Any], param: str | None) -> None:
    router = ScriptedRouter()
    body: dict[str, Any] = {"messages": CHAT} if path == "chat" else {"prompt": "x"}
    async with http(router) as client:
        url = "/v1/chat/completions" if path == "chat" else "/v1/completions"
        response = await client.post(url, json={**body, **extra})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    if param is not None:
        assert param.split(".")[0] in error["message"]
    assert not router.opened


def test_a_misspelt_field_suggests_the_near_one() -> None:
    with pytest.raises(ApiError, match="did you mean 'max_tokens'") as caught:
        parse(ChatCompletionRequest, {"messages": CHAT, "max_token": 5}, 400)
    assert (caught.value.status, caught.value.param) == (400, "max_token")
    with pytest.raises(ApiError) as caught:
        parse(GenerateBody, {"prompt": "x", "zzz" * 100: 5}, 422)
    assert caught.value.status == 422 and len(caught.value.message) < 200


def test_messages_never_repeat_the_value() -> None:
    with pytest.raises(ApiError) as caught:
        parse(CompletionRequest, {"prompt": "x", "temperature": "secret" * 1000}, 400)
    assert "secret" not in caught.value.message


# --- messages


async def test_message_shapes() -> None:
    router = ScriptedRouter()
    earlier = ChatCompletionMessage(role="assistant", content=None, tool_calls=[]).model_dump()
    async with openai_client(router) as api:
        await api.chat.completions.create(
            model="Tiny",
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
                earlier,  # type: ignore[list-item]
                {"role": "tool", "content": "4", "tool_call_id": "c1"},
            ],
        )
    text = router.tokenizer.decode(router.requests[0].prompt_ids)
    assert text == "system: be brief\nuser: one\ntwo\nassistant: \ntool: 4\nassistant:"


async def test_generation_prompt_and_continuation() -> None:
    router = ScriptedRouter()
    messages = [*CHAT, {"role": "assistant", "content": "Well"}]
    async with openai_client(router) as api:
        for extra in ({}, {"continue_final_message": True}, {"add_generation_prompt": False}):
            await api.chat.completions.create(model="Tiny", messages=messages, extra_body=extra)  # type: ignore[arg-type]
    texts = [router.tokenizer.decode(request.prompt_ids) for request in router.requests]
    start = "user: hi\nassistant: Well"
    assert texts == [f"{start}\nassistant:", start, f"{start}\n"]


async def test_template_errors_are_the_clients() -> None:
    router = ScriptedRouter()
    async with openai_client(router) as api:
        with pytest.raises(openai.BadRequestError, match="enable_thinking"):
            await api.chat.completions.create(
                model="Tiny",
                messages=CHAT,  # type: ignore[arg-type]
                extra_body={"chat_template_kwargs": {"enable_thinking": False}},
            )


# --- log-probabilities


async def test_chat_logprobs() -> None:
    router = ScriptedRouter("hé")
    router.tokenizer = tokenizer = BytesTokenizer()
    async with openai_client(router) as api:
        alone = await api.chat.completions.create(model="Tiny", messages=CHAT, logprobs=True)  # type: ignore[arg-type]
        top = await api.chat.completions.create(model="Tiny", messages=CHAT, logprobs=True, top_logprobs=2)  # type: ignore[arg-type]
        stream = await api.chat.completions.create(
            model="Tiny",
            messages=CHAT,  # type: ignore[arg-type]
            logprobs=True,
            top_logprobs=2,
            stream=True,
        )
        chunks = [chunk.choices[0] async for chunk in stream]
    assert isinstance(alone, ChatCompletion) and alone.choices[0].logprobs is not None
    content = alone.choices[0].logprobs.content or []
    ids = tokenizer.encode("hé")
    assert [entry.logprob for entry in content] == [logprob(token_id) for token_id in ids]
    assert [entry.bytes for entry in content] == [[byte] for byte in "hé".encode()]
    assert [entry.token for entry in content] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert [entry.top_logprobs for entry in content] == [[], [], []]
    assert top.choices[0].logprobs is not None
    first = (top.choices[0].logprobs.content or [])[0]
    assert [(entry.token, entry.logprob) for entry in first.top_logprobs] == [
        ("h", logprob(ids[0])),
        ("i", logprob(ids[0]) - 1),
    ]
    streamed = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content or []]
    assert streamed == top.choices[0].logprobs.content
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "hé"


async def test_completion_logprobs() -> None:
    router = ScriptedRouter("aéb")
    router.tokenizer = tokenizer = BytesTokenizer()
    ids = tokenizer.encode("aéb")
    async with openai_client(router) as api:
        zero = await api.completions.create(model="Tiny", prompt="p", logprobs=0)
        two = await api.completions.create(model="Tiny", prompt="p", logprobs=2)
        echo = await api.completions.create(model="Tiny", prompt="éq", logprobs=1, echo=True)
        stream = await api.completions.create(model="Tiny", prompt="p", logprobs=2, stream=True)
        chunks = [chunk.choices[0].logprobs async for chunk in stream]
    found = logprobs_of(zero)
    assert found.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert found.token_logprobs == [logprob(token_id) for token_id in ids]
    assert found.top_logprobs == [
        {token: value} for token, value in zip(found.tokens, found.token_logprobs, strict=True)
    ]
    assert found.text_offset == [0, 1, 1, 2], "offsets are characters of the text"
    assert logprobs_of(two).top_logprobs[0] == {"a": logprob(ids[0]), "b": logprob(ids[0]) - 1}
    assert logprobs_of(two).top_logprobs[3] == {"b": logprob(ids[3]), "c": logprob(ids[3]) - 1}
    streamed = [offset for chunk in chunks if chunk for offset in chunk.text_offset or []]
    assert streamed == logprobs_of(two).text_offset
    assert [t for chunk in chunks if chunk for t in chunk.top_logprobs or []] == logprobs_of(two).top_logprobs

    assert echo.choices[0].text == "éqaéb"
    found = logprobs_of(echo)
    assert found.tokens == ["bytes:\\xc3", "bytes:\\xa9", "q", "a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[1:] == [logprob(i) for i in tokenizer.encode("éqaéb")[1:]]
    assert found.text_offset == [0, 0, 1, 2, 3, 3, 4]


def logprobs_of(answer: Completion) -> Any:
    found = answer.choices[0].logprobs
    assert found is not None
    return found


async def test_prompt_logprobs() -> None:
    router = ScriptedRouter()
    ids = router.tokenizer.encode("ab")
    async with http(router) as client:
        text = await client.post("/v1/completions", json={"prompt": "ab", "prompt_logprobs": 2})
        chat = await client.post("/v1/chat/completions", json={"messages": CHAT, "prompt_logprobs": 0})
    assert text.json()["choices"][0]["prompt_logprobs"] == [
        None,
        {
            str(ids[1]): {"logprob": logprob(ids[1]), "rank": 1, "decoded_token": "b"},
            str(ids[1] + 1): {"logprob": logprob(ids[1]) - 1, "rank": 2, "decoded_token": "c"},
        },
    ]
    assert len(chat.json()["prompt_logprobs"]) == len(router.requests[1].prompt_ids or [])


# --- seeds


def test_choice_seeds() -> None:
    assert [choice_seed(None, i) for i in range(3)] == [None, None, None]
    assert choice_seed(5, 0) == 5
    # splitmix64 with state 0: the first outputs of the reference implementation (Vigna, splitmix64.c)
    assert choice_seed(0, 1) == 0xE220A8397B1DCDAF - 2**64
    assert choice_seed(0, 2) == 0x6E789E6AA1B965F4
    seeds = [choice_seed(seed, i) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for i in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds)
