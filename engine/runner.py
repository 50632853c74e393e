"""Turns a step's plan into tensors, one forward, and sampled ids.

On CUDA a forward of few tokens is a graph, captured at the start, so that the host launches it at once: decodes,
verifications and short chunks of prompts alike, as a token is a run of its own there. So is what follows where all that
is wanted is a token after each, chosen without penalties.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from engine.attention import PackedBatch, to_device
from engine.kv_cache import KVSlotPool
from engine.models.decoder import CausalLM
from engine.models.lora import Adapter, AdapterSet
from engine.sampling import Sampled, Sampler
from engine.scheduler import MAX_GAMMA, StepPlan
from engine.sequence import SequenceTable
from engine.structured import fill_masks

logger = logging.getLogger(__name__)

_SLICE = 256  # prompt positions whose logits exist at a time
_SHORT, _READ_ALONE = 16, 1 << 20  # tokens of a run that may; keys, over all tokens of a step, that they may read so
_LARGEST_GRAPH = 512  # tokens; more keep the device busy for longer than the host needs to launch them

Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], None]]]
"""From a function of fixed buffers to its output, a fixed buffer too, and what computes it again."""


@dataclass(slots=True)
class LaunchedStep:
    plan: StepPlan
    sampled: Sampled | None = None  # a row for each sampling run and for each draft, on its way to the host
    ready: torch.cuda.Event | None = None
    states: torch.Tensor | None = None  # what each of those was chosen by, if a draft reads it
    prompt_scores: list[tuple[int, int, Sampled]] = field(default_factory=list)  # run, offset in it, its next tokens


@dataclass(slots=True)
class _Graph:
    inputs: torch.Tensor  # int32 [3 + pages, tokens]: row, position, slot (-1: padding, written nowhere) and pages
    hidden: torch.Tensor  # [tokens, hidden_size]
    replay: Callable[[], None]
    ids: torch.Tensor | None = None  # int64 [tokens], what follows each, for plain sampling
    choose: Callable[[], None] = lambda: None  # makes ids of hidden


def cuda_graphs() -> Capture:
    """Captures CUDA graphs that share their memory: they run one after the other."""
    memory, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # cuBLAS keeps memory for each stream

    def capture(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # kernels are compiled and libraries choose theirs
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # what other threads do, such as NCCL's watchdog, is not part of it
        with torch.cuda.graph(graph, pool=memory, stream=side, capture_error_mode="thread_local"):
            output = run()
        return output, graph.replay

    return capture


def graph_sizes(rows: int) -> list[int]:
    """Powers of two and their halfway points, up to a token and the most drafts for each of `rows` sequences."""
    largest = min((1 + MAX_GAMMA) * rows, _LARGEST_GRAPH)
    steps = sorted({size for k in range(10) for size in (1 << k, 3 << k)})
    return steps[: bisect_left(steps, largest) + 1]


class ModelRunner:
    """Owns the model and what its forward reads and writes."""

    chooses_in_graphs = True

    def __init__(
        self,
        model: CausalLM,
        pool: KVSlotPool,
        table: SequenceTable,
        sampler: Sampler,
        page_table: np.ndarray,
        scores_prompts: bool = True,
        adapters: AdapterSet | None = None,
    ) -> None:
        self.model, self.pool, self.table, self.sampler = model, pool, table, sampler
        self.page_table = page_table
        self.scores_prompts = scores_prompts
        self.adapters = adapters
        self.device = model.device
        if model.target_hidden_size:
            table.hold_states(model.target_hidden_size)
        self.graphs: list[_Graph] = []  # of so many tokens:
        self._sizes: list[int] = []
        if self.device.type == "cuda" and model.attention.takes_token_pages:
            self.capture_or_go_without()

    def capture_or_go_without(self) -> None:
        """A user's model may do what a graph can't hold. Ranks must agree: there it is an error."""
        try:
            self.capture(cuda_graphs())
        except Exception:
            if getattr(self.model, "ranks", None) is not None:
                raise
            logger.exception("no CUDA graphs: the host launches every kernel of a forward")
            self.graphs, self._sizes = [], []
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Make the graphs, from the largest on, whose memory the others use again."""
        self._enter_device()
        self._sizes = graph_sizes(len(self.page_table))
        for size in reversed(self._sizes):
            inputs = torch.zeros((3 + self.page_table.shape[1], size), dtype=torch.int32, device=self.device)
            inputs[2] = -1
            graph = _Graph(inputs, *capture(partial(self._forward_tokens, inputs)))
            if self.sampler.fused and self.chooses_in_graphs:
                graph.ids, graph.choose = capture(partial(self._choose_next, graph))
            self.graphs.insert(0, graph)

    def _forward_tokens(self, inputs: torch.Tensor) -> torch.Tensor:
        rows, positions, none = inputs[0].long(), inputs[1].long(), np.empty(0, np.int64)
        batch = PackedBatch(
            positions, none, none, slot_mapping=inputs[2], page_size=self.pool.page_size, token_pages=inputs[3:]
        )
        return self._hidden_states(rows, batch)

    def _hidden_states(self, rows: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        table, positions = self.table, batch.positions
        extra = (table.states_at(rows, positions),) if self.model.target_hidden_size else ()
        return self.model.hidden_states(table.device_tokens[rows, positions], batch, self.pool.pages, *extra)

    def _choose_next(self, graph: _Graph) -> torch.Tensor:
        """The token after each of a graph's, also put where the next step reads it."""
        rows, real = graph.inputs[0].long(), graph.inputs[2] >= 0
        places = graph.inputs[1].long() + real
        ids = self.sampler.choose_plain(self.model.logits(graph.hidden), rows, places)
        tokens = self.table.device_tokens
        # padding is at place 0 of row 0, where no token is ever sampled
        tokens.index_put_((rows, places), torch.where(real, ids.clamp(min=0).to(torch.int32), tokens[rows, places]))
        return ids

    def _replay(self, graph: _Graph, plan: StepPlan) -> torch.Tensor:
        size, rows, positions = self.pool.page_size, plan.rows, plan.starts
        if (counts := plan.counts).max() > 1:
            rows = np.repeat(plan.rows, counts)
            positions = np.arange(len(rows)) + np.repeat(plan.starts - np.cumsum(counts) + counts, counts)
        pages = int(positions.max()) // size + 1
        shape, cuda = (3 + pages, graph.inputs.shape[1]), self.device.type == "cuda"
        staged = torch.empty(shape, dtype=torch.int32, pin_memory=cuda)  # fresh: the last one may still be read
        inputs, count = staged.numpy(), len(rows)
        inputs[:, count:], inputs[2, count:] = 0, -1
        inputs[0, :count], inputs[1, :count], inputs[3:, :count] = rows, positions, self.page_table[rows, :pages].T
        inputs[2, :count] = self.page_table[rows, positions // size] * size + positions % size
        graph.inputs[: len(inputs)].copy_(staged, non_blocking=True)
        graph.replay()
        return graph.hidden[:count]

    def _graph(self, plan: StepPlan, tokens: int) -> _Graph | None:
        """The smallest that takes so many tokens, if any does."""
        if tokens > len(plan.rows) + _SHORT:  # in a graph each token reads its keys by itself
            runs = plan.counts - plan.drafts
            if runs.max() > _SHORT and (runs * (plan.starts + runs)).sum() > _READ_ALONE:
                return None
        at = bisect_left(self._sizes, tokens)
        # a graph knows no adapters
        return self.graphs[at] if at < len(self.graphs) and not self.table.has_adapter[plan.rows].any() else None

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        """Final hidden states of the plan's tokens."""
        batch = PackedBatch.paged(
            self.page_table[plan.rows], self.pool.page_size, plan.starts, plan.counts, self.device
        )
        return self._hidden_states(self._to_device(np.repeat(plan.rows, plan.counts)), batch)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Run a step. On an accelerator this returns before the device is through: the next step may be launched, as
        sampled ids go to the device's own table of tokens."""
        self._enter_device()
        for source, target, tokens in plan.copies:
            self.pool.copy(source, target, tokens)
        if self.adapters is not None:
            self._select_adapters(plan, self.adapters)
        tokens = int(plan.counts.sum())
        graph = self._graph(plan, tokens)
        hidden = self._forward(plan) if graph is None else self._replay(graph, plan)
        step = LaunchedStep(plan)
        if graph is not None and graph.ids is not None and self._is_plain(plan, tokens):
            self.sampler.table.upload()
            graph.choose()
            step.sampled = Sampled(graph.ids[:tokens]).to_host()
            step.states = hidden
        else:
            step.prompt_scores = self._score_prompts(plan, hidden)
            if plan.samples.any():
                step.sampled, step.states = self._sample(plan, hidden)
                step.sampled = step.sampled.to_host()
        if self.table.states is None or self.model.target_hidden_size:
            step.states = None
        elif step.states is not None and graph is not None:
            step.states = step.states.clone()  # the graph's next replay may come before this step is committed
        if self.device.type == "cuda":
            step.ready = torch.cuda.Event()
            step.ready.record()
        return step

    def _is_plain(self, plan: StepPlan, tokens: int) -> bool:
        """Whether each of the plan's tokens is to be followed by one, chosen by the scores as they are."""
        if plan.masked or len(plan.rows) + (plan.drafts.sum() if plan.verifies else 0) < tokens:
            return False
        return bool(plan.samples.all() and self.sampler.table.plain[plan.rows].all())

    def _sample(self, plan: StepPlan, hidden: torch.Tensor) -> tuple[Sampled, torch.Tensor]:
        """A token for the last one of each sampling run and for each of its drafts, and the states they come from."""
        table = self.table
        rows, lengths = plan.rows[plan.samples], plan.lengths[plan.samples]
        last = (np.cumsum(plan.counts) - 1)[plan.samples]
        if plan.verifies:
            per_run = plan.drafts[plan.samples] + 1
            offsets = np.arange(per_run.sum()) - np.repeat(np.cumsum(per_run) - per_run, per_run)
            rows, lengths = np.repeat(rows, per_run), np.repeat(lengths, per_run) + offsets
            last = np.repeat(last + 1 - per_run, per_run) + offsets
        if len(hidden) != len(last):
            hidden = hidden[self._to_device(last)]
        logits = self.model.logits(hidden)
        masks = fill_masks(plan, table, self.sampler.vocab_size) if plan.masked else None  # while the device works
        places = self._to_device(np.stack((rows, lengths)))
        sampled = self.sampler(logits, rows, lengths, table.device_tokens, masks, places)
        table.device_tokens.index_put_((places[0], places[1]), sampled.ids.clamp(min=0).to(torch.int32))
        return sampled, hidden

    def _select_adapters(self, plan: StepPlan, adapters: AdapterSet) -> None:
        runs: dict[Adapter, list[int]] = {}
        for i in np.flatnonzero(self.table.has_adapter[plan.rows]).tolist():
            sequence = self.table.sequences[plan.rows[i]]
            if sequence is not None and sequence.adapter is not None:
                runs.setdefault(sequence.adapter, []).append(i)
        adapters.select(runs, plan.counts)

    def _score_prompts(self, plan: StepPlan, hidden: torch.Tensor) -> list[tuple[int, int, Sampled]]:
        """Log-probabilities of the prompt tokens that follow the runs' positions, for the rows that want them."""
        table, wanted = self.table, self.sampler.table.num_prompt_logprobs[plan.rows]
        scores: list[tuple[int, int, Sampled]] = []
        if not self.scores_prompts:
            return scores
        for index in np.flatnonzero(wanted >= 0).tolist():
            row, start = int(plan.rows[index]), int(plan.starts[index])
            end = min(start + int(plan.counts[index]), int(table.prompt_len[row]) - 1)
            targets = table.device_tokens[row, start + 1 : max(end, start) + 1].long()
            run = hidden[int(plan.counts[:index].sum()) :][: len(targets)]
            for i in range(0, len(targets), _SLICE):
                logits = self.model.logits(run[i : i + _SLICE])
                part = targets[i : i + _SLICE]
                scores.append((index, i, self.sampler.with_logprobs(logits, part, int(wanted[index])).to_host()))
        return scores

    @staticmethod
    def collect(launched: LaunchedStep) -> Sampled | None:
        """Wait for a launched step's samples to be on the host."""
        if launched.ready is not None:
            launched.ready.synchronize()
        return launched.sampled

    def _enter_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread: Triton launches there

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device)
