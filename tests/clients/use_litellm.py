"""litellm's OpenAI-compatible provider: a chat, a stream, a tool, a text completion, an error of its own kind."""

import sys

import litellm

url, model, _ = sys.argv[1:]
common = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
question = [{"role": "user", "content": "What is the capital of France?"}]
answer = litellm.completion(messages=question, **common)
assert "Paris" in answer.choices[0].message.content and answer.usage.completion_tokens > 3
stream = litellm.completion(messages=question, stream=True, **common)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.choices[0].message.content
tool = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
called = litellm.completion(messages=question, tools=[tool], tool_choice="required", max_tokens=60, **common)
assert called.choices[0].message.tool_calls[0].function.name == "weather"
text = litellm.text_completion(
    prompt="The capital of France is", max_tokens=5, **{**common, "model": f"text-completion-openai/{model}"}
)
assert "Paris" in text.choices[0].text, text
try:
    litellm.completion(messages=question, max_tokens=10**6, **common)
except litellm.BadRequestError as error:
    assert "context" in str(error)
else:
    raise AssertionError("more tokens than the context were promised")
