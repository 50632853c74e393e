"""The `openai` client, unmodified, against `llm-serve` of the real demo model; transformers says what is right."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.e2e.conftest import ROOT, Server, llm_serve

MODEL = "SmolLM2-135M-Instruct"
CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "system", "content": "You tell stories."}, {"role": "user", "content": "Tell me about a fox."}]
PROMPT = "The three primary colours are"


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    # fp32: the same tokens in every company
    with llm_serve("--model", str(smollm2), "--dtype", "float32", "--model-aliases", "demo") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def aclient(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> tuple[Any, Any]:
    """transformers' tokenizer and model."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    return transformers.AutoTokenizer.from_pretrained(smollm2), model.eval()


def greedy(reference: tuple[Any, Any], ids: list[int], tokens: int) -> str:
    tokenizer, model = reference
    with torch.inference_mode():
        output = model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))


def logprobs(reference: tuple[Any, Any], ids: list[int]) -> torch.Tensor:
    """[len(ids) - 1, vocabulary]: of each token after the first."""
    with torch.inference_mode():
        return torch.log_softmax(reference[1](torch.tensor([ids])).logits[0, :-1].double(), -1)


# --- chat


def test_chat(client: openai.OpenAI, reference: tuple[Any, Any]) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0)
    [choice] = answer.choices
    assert "Paris" in (choice.message.content or "")
    assert (choice.message.role, choice.finish_reason, answer.model) == ("assistant", "stop", MODEL)
    ids = reference[0].apply_chat_template(CAPITAL, add_generation_prompt=True, return_dict=False)
    assert choice.message.content == greedy(reference, ids, 50)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)
    assert answer.usage.total_tokens == len(ids) + answer.usage.completion_tokens
    with client.chat.completions.stream(model=MODEL, messages=CAPITAL, temperature=0) as stream:
        stream.until_done()
        [accumulated] = stream.get_final_completion().choices
    assert accumulated.message.content == choice.message.content


async def test_async_chat_in_company(aclient: openai.AsyncOpenAI) -> None:
    async def ask(seed: int) -> str | None:
        answer = await aclient.chat.completions.create(model="demo", messages=STORY, max_tokens=12, seed=seed)
        return answer.choices[0].message.content

    alone = [await ask(seed) for seed in range(3)]
    assert await asyncio.gather(*[ask(seed) for seed in (0, 1, 2) * 4]) == alone * 4
    assert len(set(alone)) == 3


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}])
async def test_streams(client: openai.OpenAI, aclient: openai.AsyncOpenAI, sampling: dict[str, Any]) -> None:
    request: Any = {"model": MODEL, "messages": STORY, "max_completion_tokens": 20, **sampling}
    whole = client.chat.completions.create(**request)
    content = whole.choices[0].message.content
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 10
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["length"]
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1

    stream = await aclient.chat.completions.create(**request, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == content


def test_n_and_seed(client: openai.OpenAI) -> None:
    def texts(seed: int, **more: Any) -> list[str | None]:
        answer = client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=16, n=2, seed=seed, **more)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage is not None and answer.usage.completion_tokens == 32
        return [choice.message.content for choice in answer.choices]

    first = texts(7)
    assert first[0] != first[1]
    assert texts(7) == first
    assert texts(8) != first
    streamed = ["", ""]
    for chunk in client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=16, n=2, seed=7, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == first


def test_stop(client: openai.OpenAI) -> None:
    request: Any = {"model": MODEL, "messages": STORY, "max_tokens": 24, "temperature": 0}
    full = client.chat.completions.create(**request).choices[0].message.content or ""
    stop = full[50:57]
    choice = client.chat.completions.create(**request, stop=["never comes", stop]).choices[0]
    assert choice.message.content == full[: full.index(stop)]
    assert (choice.finish_reason, choice.model_extra) == ("stop", {"stop_reason": stop})
    chunks = list(client.chat.completions.create(**request, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


def test_chat_logprobs(client: openai.OpenAI, reference: tuple[Any, Any]) -> None:
    tokenizer, _ = reference
    answer = client.chat.completions.create(
        model=MODEL, messages=STORY, max_tokens=8, seed=1, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
    assert entries is not None and len(entries) == 8
    prompt = tokenizer.apply_chat_template(STORY, add_generation_prompt=True, return_dict=False)
    output = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(entry.token)[0]) for entry in entries]
    rows = logprobs(reference, [*prompt, *output])[len(prompt) - 1 :]
    for entry, token, row in zip(entries, output, rows, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
        assert bytes(entry.bytes or []).decode() == entry.token


# --- completions


def test_prompts_as_text_and_as_ids(client: openai.OpenAI, reference: tuple[Any, Any]) -> None:
    prompts = [PROMPT, "Water boils at"]
    ids = [reference[0].encode(prompt) for prompt in prompts]
    expected = [greedy(reference, each, 12) for each in ids]
    for form in (prompts, ids):
        answer = client.completions.create(model=MODEL, prompt=form, max_tokens=12, temperature=0)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, ids))
    for one in (prompts[0], ids[0]):
        answer = client.completions.create(model=MODEL, prompt=one, max_tokens=12, temperature=0)
        assert [choice.text for choice in answer.choices] == expected[:1]
    texts = ["", ""]
    for chunk in client.completions.create(model=MODEL, prompt=prompts, max_tokens=12, temperature=0, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_echo_with_logprobs(client: openai.OpenAI, reference: tuple[Any, Any]) -> None:
    """What evaluation harnesses ask for: the log-probabilities of a given text."""
    ids = reference[0].encode(PROMPT)
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=2)
    [choice] = answer.choices
    assert choice.text == PROMPT and choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == PROMPT
    assert (choice.logprobs.token_logprobs or [])[0] is None
    rows = logprobs(reference, ids)
    expected = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert (choice.logprobs.token_logprobs or [])[1:] == pytest.approx(expected, abs=1e-3)
    for top, row in zip((choice.logprobs.top_logprobs or [])[1:], rows, strict=True):
        assert sorted(top.values())[-2:] == pytest.approx(sorted(row.topk(2).values.tolist()), abs=1e-3)


# --- models and errors


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "demo"]
    assert client.models.retrieve("demo").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


async def test_errors_are_the_clients_exceptions(client: openai.OpenAI, aclient: openai.AsyncOpenAI) -> None:
    def chat(**changes: Any) -> Any:
        request: Any = {"model": MODEL, "messages": CAPITAL, "max_tokens": 4, **changes}
        return client.chat.completions.create(**request)

    with pytest.raises(openai.NotFoundError, match="no such model: gpt-4") as missing:
        chat(model="gpt-4")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as hot:
        chat(temperature=-1, stream=True)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        chat(messages=[{"role": "user", "content": "fox " * 10_000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as unknown:
        chat(extra_body={"temprature": 1})
    assert "did you mean 'temperature'" in unknown.value.message
    with pytest.raises(openai.BadRequestError):
        await aclient.completions.create(model=MODEL, prompt=[-1])
    assert "Paris" in chat(temperature=0, max_tokens=20).choices[0].message.content


# --- the README


def snippets() -> list[str]:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = re.findall(r"^```python\n(.*?)^```", "\n".join(page.read_text() for page in pages), re.M | re.S)
    return [text for text in texts if text.startswith("# needs a server")]


def test_readme_snippets_run_as_printed(server: Server) -> None:
    assert snippets()
    for snippet in snippets():
        assert "http://127.0.0.1:8000" in snippet
        text = snippet.replace("http://127.0.0.1:8000", server.url)
        run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        promised = re.findall(r"^ *print\(.*\)  # (.*)$", snippet, re.M)
        assert promised and all(line in run.stdout.splitlines() for line in promised), run.stdout
