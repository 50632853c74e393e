"""The official client: chat, stream, tools with a forced call, a schema, completions with log-probabilities, errors."""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

url, model, _ = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
question = [{"role": "user", "content": "What is the capital of France?"}]

assert [card.id for card in client.models.list()] == [model]
chat = client.chat.completions.create(model=model, messages=question, temperature=0)
assert "Paris" in chat.choices[0].message.content, chat
stream = client.chat.completions.create(
    model=model, messages=question, temperature=0, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == chat.choices[0].message.content
assert chunks[-1].usage == chat.usage or chunks[-1].usage.completion_tokens == chat.usage.completion_tokens


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_in_europe: bool


parsed = client.chat.completions.parse(
    model=model, messages=question, response_format=City, max_tokens=60, temperature=0
)
assert isinstance(parsed.choices[0].message.parsed, City)

weather = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
tool = {"type": "function", "function": {"name": "weather", "description": "The weather now", "parameters": weather}}
called = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the weather in Paris?"}],
    tools=[tool],
    tool_choice={"type": "function", "function": {"name": "weather"}},
    temperature=0,
    max_tokens=60,
)
[call] = called.choices[0].message.tool_calls
assert call.function.name == "weather" and set(json.loads(call.function.arguments)) == {"city"}

scored = client.completions.create(
    model=model, prompt="The capital of France is Paris", max_tokens=0, echo=True, logprobs=1
)
assert scored.choices[0].text == "The capital of France is Paris"
assert len(scored.choices[0].logprobs.tokens) == scored.usage.prompt_tokens

try:
    client.chat.completions.create(model=model, messages=question, temperature=-1)
except openai.BadRequestError as error:
    assert error.param == "temperature", error
else:
    raise AssertionError("a temperature of -1 was taken")
try:
    client.chat.completions.create(model="other", messages=question)
except openai.NotFoundError as error:
    assert error.code == "model_not_found"
