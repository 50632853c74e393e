"""A served folder: a user's own class, its makers' sampling settings, several EOS ids, one BOS."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.e2e.conftest import Deployed
from tests.engine.made_tokenizers import byte_level_tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"


def test_what_the_folder_says_is_what_clients_get(
    deploy: Callable[..., Deployed], tiny_reference: Any, tmp_path: Path
) -> None:
    reference = tiny_reference("llama", vocab_size=402)
    reference.save_pretrained(tmp_path)
    made = byte_level_tokenizer()
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2, 3], "top_k": 1}))
    app = deploy(model=str(tmp_path), model_class="tests.e2e.own_model:Contrary", memory_fraction=0.5)

    def complete(prompt: list[int], **fields: Any) -> tuple[list[int], dict[str, Any]]:
        body = {"prompt": prompt, "max_tokens": 24, **fields}
        answer = httpx.post(f"{app.url}/v1/completions", json=body, timeout=60).json()
        choice = answer["choices"][0]
        return choice["text"], {**choice, **answer["usage"]}

    prompt = made("the quick dog").input_ids
    ids = list(prompt)
    with torch.inference_mode():
        while len(ids) < len(prompt) + 24:
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1, : len(made)].argmin()))
            if ids[-1] in (1, 2, 3):
                break
    expected = made.decode(ids[len(prompt) :], skip_special_tokens=True)
    # temperature is 1, but of the one token that the makers' top_k leaves
    texts = {complete(prompt, seed=seed)[0] for seed in (1, 2)}
    assert texts == {expected}
    # the client's own settings win
    assert len({complete(prompt, seed=seed, top_k=300)[0] for seed in range(4)}) > 1
    # each of the three EOS ids ends the text
    for eos in (1, 2, 3):
        _, choice = complete(prompt, top_k=300, logit_bias={str(eos): 100})
        assert (choice["finish_reason"], choice["completion_tokens"]) == ("stop", 0)
    # the tokenizer and the template both write BOS: one of them does
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    usage = httpx.post(f"{app.url}/v1/chat/completions", json=chat, timeout=60).json()["usage"]
    assert (
        usage["prompt_tokens"]
        == len(made("Hi").input_ids) + 1
        == len(made.apply_chat_template(chat["messages"])["input_ids"])
    )
