"""Graphs of forwards, with a stand-in for CUDA's: it keeps a function of fixed buffers and calls it again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from engine import runner, sampling
from engine.batch_engine import ContinuousBatchingEngine
from engine.models import layers
from engine.runner import graph_sizes
from engine.scheduler import MAX_GAMMA, StepPlan
from engine.schemas import GenerationRequest
from tests.engine.oracle import Reference, tiny_model


class Recorder:
    def __init__(self) -> None:
        self.replays: list[int] = []  # tokens of each forward
        self.choices = 0

    def __call__(self, run: partial[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        output = run().clone()

        def replay() -> None:
            if run.func.__name__ == "_choose_next":
                self.choices += 1
            else:
                self.replays.append(len(output))
            output.copy_(run())

        return output, replay


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "graph_sizes", lambda rows: [1, 3, 8])


def engine_of(graphs: Recorder | None = None, window: int | None = None, **options: Any) -> ContinuousBatchingEngine:
    model = tiny_model(window_size=window, attn_impl="triton")
    engine = ContinuousBatchingEngine(model, None, **({"max_batch_size": 2} | options))
    if graphs is not None:
        assert engine._runner is not None and not engine._runner.graphs
        engine._runner.capture(graphs)
    return engine


def requests(**params: Any) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(0)
    return [
        GenerationRequest(
            request_id=str(i),
            prompt_ids=torch.randint(0, 64, (length,), generator=generator).tolist(),
            max_new_tokens=count,
            seed=i,
            **params,
        )
        for i, (length, count) in enumerate(((3, 4), (12, 5), (1, 6), (9, 1)))
    ]


def test_sizes() -> None:
    assert graph_sizes(1) == [1, 2, 3, 4, 6, 8, 12]
    assert graph_sizes(3)[-1] == 32
    assert graph_sizes(1)[-2] < 1 + MAX_GAMMA <= graph_sizes(1)[-1]
    assert graph_sizes(256)[-1] == graph_sizes(64)[-1] == 512
    for sizes in map(graph_sizes, range(1, 300)):
        assert all(a < b <= 2 * a for a, b in zip(sizes, sizes[1:], strict=False))


@pytest.mark.parametrize(
    ("window", "options", "params"),
    [
        (None, {"depth": 1}, {"temperature": 0}),
        (5, {"depth": 0, "page_size": 4}, {"temperature": 1.0, "logprobs": 1}),
        (None, {"depth": 1, "speculation": "ngram", "gamma": 3}, {"temperature": 0}),
    ],
)
def test_tokens_are_those_of_the_reference(window: int | None, options: dict[str, Any], params: dict[str, Any]) -> None:
    reference = Reference(tiny_model(window_size=window), None)
    graphs = Recorder()
    engine = engine_of(graphs, window, **options)
    todo = requests(**params)
    for request in todo:
        engine.add_request(request)
    while engine.scheduler.has_pending_work:
        engine.step()
        engine.pool.check()
    for request in todo:
        result = engine.result(request.request_id)
        assert result is not None
        reference.check(request, result)
    reference.check_rate()
    assert any(size > 2 for size in graphs.replays) and len(graphs.replays) > 3
    assert engine.stats().steps > len(graphs.replays)  # a whole long prompt is no graph's


def test_padding_is_written_nowhere() -> None:
    """Step by step the pool is that of an engine without graphs, the places that nobody has written to included."""
    graphs = Recorder()
    engines = [engine_of(graphs, depth=0), engine_of(depth=0)]
    for engine in engines:
        for request in requests(temperature=0):
            engine.add_request(request)
    while engines[0].scheduler.has_pending_work:
        for engine in engines:
            engine.step()
        ours, plain = (engine.pool.kv for engine in engines)
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
        assert ((ours == 0) == (plain == 0)).all()
    assert 3 in graphs.replays  # of two rows
    assert (engines[0].pool.kv == 0).any()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that runs on CUDA but for the graphs' capture: fused norms, gates and choices."""
    for module in (layers, sampling):
        monkeypatch.setattr(module, "has_triton", lambda device: True)


def run(todo: list[GenerationRequest], **options: Any) -> Recorder:
    """Serve them, check every token, and return what was replayed."""
    reference, model, graphs = Reference(tiny_model(), None), tiny_model(attn_impl="triton"), Recorder()
    model.pack()
    engine = ContinuousBatchingEngine(model, None, **({"max_batch_size": 2} | options))
    assert engine._runner is not None
    engine._runner.capture(graphs)
    for request in todo:
        engine.add_request(request)
    while engine.scheduler.has_pending_work:
        engine.step()
    for request in todo:
        result = engine.result(request.request_id)
        assert result is not None
        reference.check(request, result)
    reference.check_rate()
    return graphs


@pytest.mark.usefixtures("fused")
def test_fused_kernels_in_an_engine() -> None:
    changes: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5, "logprobs": 2},
        {"temperature": 0.0, "frequency_penalty": 1.0},
    )
    graphs = run([r.model_copy(update=c) for r, c in zip(requests(), changes, strict=True)])
    assert 0 < graphs.choices < len(graphs.replays)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("options", [{"depth": 1}, {"depth": 0}, {"speculation": "ngram", "gamma": 2}], ids=str)
def test_plain_choices_are_in_a_graph(options: dict[str, Any]) -> None:
    """All are: no step here has a prompt that is short enough for a graph."""
    todo = requests()
    for i, request in enumerate(todo):
        request.temperature = i / 2
    todo[2].top_k, todo[3].top_p = 5, 0.5
    graphs = run(todo, **options)
    assert graphs.choices == len(graphs.replays) > 0


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    "params",
    [{"logprobs": 0}, {"frequency_penalty": 1.0}, {"logit_bias": {3: 5.0}}, {"min_tokens": 1, "stop_token_ids": [5]}],
    ids=str,
)
def test_other_choices_are_not(params: dict[str, Any]) -> None:
    assert run(requests(**params)).choices == 0


def test_a_long_text_is_read_by_tiles() -> None:
    """A token of a graph reads all its keys by itself."""
    engine = engine_of()
    assert engine._runner is not None
    engine._runner.graphs = [runner._Graph(torch.zeros(3, 512), torch.zeros(512, 1), lambda: None)]
    engine._runner._sizes = [512]

    def in_a_graph(start: int, count: int, drafts: int = 0) -> bool:
        starts, counts = np.array([start, 5]), np.array([count, 1])
        none, flags = np.zeros(2, dtype=np.int64), np.ones(2, dtype=bool)
        plan = StepPlan(none, none, starts, counts, flags, starts + counts, np.array([drafts, 0]))
        assert engine._runner is not None
        return engine._runner._graph(plan, int(counts.sum())) is not None

    assert in_a_graph(0, 300) and in_a_graph(50_000, 1) and in_a_graph(50_000, 9, 8)
    assert not in_a_graph(50_000, 300)


def test_a_capture_that_fails_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(run: Callable[[], torch.Tensor]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(runner, "cuda_graphs", lambda: fails)
    engine = engine_of()
    loop = engine._runner
    assert loop is not None
    loop.capture_or_go_without()
    assert not loop.graphs and not loop._sizes and "no CUDA graphs" in caplog.text
    loop.model.ranks = object()
    with pytest.raises(RuntimeError, match="not permitted"):
        loop.capture_or_go_without()
