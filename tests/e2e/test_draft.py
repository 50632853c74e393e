"""A draft process that dies, hangs or comes back is never noticed in a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from engine.batch_engine import ContinuousBatchingEngine
from engine.models.decoder import DecoderModel
from engine.models.loader import load_model
from engine.models.publisher import save_pretrained
from engine.schemas import GenerationRequest
from engine.tokenization import load_tokenizer
from tests.e2e.conftest import Deployed, wait_until
from tests.engine.made_tokenizers import byte_level_tokenizer

CONTEXT = 1024
TOKENS = 300
STREAMS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose layers but the first do nothing, and its draft, that layer: the same tokens at a fraction of the
    cost."""
    tokenizer = byte_level_tokenizer()
    shape = {"hidden_size": 64, "num_heads": 4, "vocab_size": len(tokenizer), "max_seq_len": CONTEXT}
    torch.manual_seed(0)
    target = DecoderModel(num_layers=48, **shape)
    for name, parameter in target.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and ".layers.0." not in name:
            torch.nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    draft = DecoderModel(num_layers=1, **shape)
    draft.load_state_dict({name: target.state_dict()[name] for name in draft.state_dict()})
    folders = tuple(tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    for model, folder in zip((target, draft), folders, strict=True):
        save_pretrained(model, folder, tokenizer)
    return folders


@pytest.fixture(scope="module")
def reference(models: tuple[Path, Path]) -> list[str]:
    """The texts of the first seeds, by one engine in this process that doesn't speculate."""
    engine = ContinuousBatchingEngine(load_model(models[0], dtype=torch.float32), load_tokenizer(models[0]))
    for seed in range(STREAMS):
        request = {"prompt": f"stream {seed}", "max_new_tokens": TOKENS, "seed": seed, "ignore_eos": True}
        engine.add_request(GenerationRequest(**request, request_id=str(seed)))
    while engine.scheduler.has_pending_work:
        engine.step()
    return [engine.result(str(seed)).text for seed in range(STREAMS)]


@pytest.fixture
def app(deploy: Callable[..., Deployed], models: tuple[Path, Path]) -> Iterator[Deployed]:
    app = deploy(model=str(models[0]), draft_model=str(models[1]), gamma=4)
    wait_until(lambda: draft_of(app) is not None)
    wait_until(lambda: speculates(app))
    yield app


def draft_of(app: Deployed) -> dict[str, Any] | None:
    [snapshot] = app.snapshots()
    draft: dict[str, Any] | None = snapshot["draft"]
    return draft


def speculation(app: Deployed) -> dict[str, Any]:
    [snapshot] = app.snapshots()
    stats: dict[str, Any] = snapshot["speculation"]
    return stats


def speculates(app: Deployed) -> bool:
    before = speculation(app)["drafted"]
    body = {"prompt": "again", "max_tokens": 100, "ignore_eos": True}
    assert httpx.post(f"{app.url}/v1/completions", json=body, timeout=60).status_code == 200
    return bool(speculation(app)["drafted"] > before)


def metric(app: Deployed, name: str) -> float:
    lines = httpx.get(f"{app.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


async def check_streams(app: Deployed, reference: list[str], disturb: Callable[[], None] = lambda: None) -> None:
    """All streams say what they should; `disturb` is called when every one has begun."""
    begun = [asyncio.Event() for _ in range(STREAMS)]

    async def read(client: httpx.AsyncClient, seed: int) -> str:
        body = {"prompt": f"stream {seed}", "max_tokens": TOKENS, "seed": seed, "ignore_eos": True, "stream": True}
        text = ""
        async with client.stream("POST", f"{app.url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    text += choice["text"]
                    begun[seed].set()
        return text

    async with httpx.AsyncClient(timeout=120) as client:
        reading = [asyncio.create_task(read(client, seed)) for seed in range(STREAMS)]
        for event in begun:
            await event.wait()
        disturb()
        assert await asyncio.gather(*reading) == reference


async def test_killed(app: Deployed, reference: list[str]) -> None:
    await check_streams(app, reference)
    first = draft_of(app)
    assert first is not None
    await check_streams(app, reference, lambda: os.kill(first["pid"], signal.SIGKILL))
    wait_until(lambda: (draft_of(app) or first)["pid"] != first["pid"] and speculates(app))
    await check_streams(app, reference)
    stats = speculation(app)
    # alone and in a batch a model's logits differ in their last bits, so now and then a choice differs
    assert stats["accepted"] >= 0.98 * stats["drafted"] > 0 and stats["ready"]
    assert metric(app, "llm_speculation_drafted_total") == stats["drafted"]
    assert metric(app, "llm_speculation_accepted_total") == stats["accepted"]
    assert metric(app, "llm_speculation_ready_total") == stats["ready"]
    assert metric(app, "llm_draft_round_trip_seconds_count") > 0
    wait_until(lambda: metric(app, "llm_draft_up") == 1)
    assert metric(app, "llm_draft_losses_total") >= 1


async def test_stopped_and_continued(app: Deployed, reference: list[str]) -> None:
    draft = draft_of(app)
    assert draft is not None
    await check_streams(app, reference, lambda: os.kill(draft["pid"], signal.SIGSTOP))
    with contextlib.suppress(ProcessLookupError):  # on a slow machine Serve has replaced it by now
        os.kill(draft["pid"], signal.SIGCONT)
    wait_until(lambda: speculates(app))
    await check_streams(app, reference)


async def test_stopped_for_good(app: Deployed, reference: list[str]) -> None:
    draft = draft_of(app)
    assert draft is not None
    os.kill(draft["pid"], signal.SIGSTOP)
    await check_streams(app, reference)
    wait_until(lambda: (draft_of(app) or draft)["pid"] != draft["pid"] and speculates(app), 180)
    wait_until(lambda: metric(app, "llm_draft_up") == 1)
    assert metric(app, "llm_draft_losses_total") >= 1
