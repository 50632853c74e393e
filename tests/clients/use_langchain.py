"""langchain-openai: invoke, stream, a structured answer, a bound tool."""

import sys
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url, model, _ = sys.argv[1:]
chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=60)
answer = chat.invoke("What is the capital of France?")
assert "Paris" in answer.content and answer.usage_metadata["output_tokens"] > 3, answer
assert "".join(chunk.content for chunk in chat.stream("What is the capital of France?")) == answer.content


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]


for method in ("json_schema", "function_calling"):
    city = chat.with_structured_output(City, method=method).invoke("What is the capital of France?")
    assert isinstance(city, City), (method, city)
