"""Turns a step's plan into tensors, one forward, and sampled ids."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention import PackedBatch
from engine.kv_cache import KVSlotPool
from engine.models.decoder import DecoderModel
from engine.sampling import Sampled, Sampler
from engine.scheduler import StepPlan
from engine.sequence import SequenceTable
from engine.structured import fill_masks

_SLICE = 256  # prompt positions whose logits exist at a time


@dataclass(slots=True)
class LaunchedStep:
    plan: StepPlan
    sampled: Sampled | None  # a row for each sampling run and for each draft, on its way to the host
    ready: torch.cuda.Event | None
    prompt_scores: list[tuple[int, int, Sampled]] = field(default_factory=list)  # run, offset in it, its next tokens


class ModelRunner:
    """Owns the model and what its forward reads and writes."""

    def __init__(
        self,
        model: DecoderModel,
        pool: KVSlotPool,
        table: SequenceTable,
        sampler: Sampler,
        page_table: np.ndarray,
        scores_prompts: bool = True,
    ) -> None:
        self.model, self.pool, self.table, self.sampler = model, pool, table, sampler
        self.page_table = page_table
        self.scores_prompts = scores_prompts
        self.device = model.device

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Run a step. On an accelerator this returns before the device is through: the next step may be launched, as
        sampled ids go to the device's own table of tokens."""
        table = self.table
        for source, target, tokens in plan.copies:
            self.pool.copy(source, target, tokens)
        batch = PackedBatch.paged(
            self.page_table[plan.rows], self.pool.page_size, plan.starts, plan.counts, self.device
        )
        token_rows = self._to_device(np.repeat(plan.rows, plan.counts))
        hidden = self.model.hidden_states(table.device_tokens[token_rows, batch.positions], batch, self.pool.pages)
        prompt_scores = self._score_prompts(plan, hidden)
        if not plan.samples.any():
            return LaunchedStep(plan, None, None, prompt_scores)
        # a row of logits for the last token of each sampling run and for each of its drafts
        per_run = plan.drafts[plan.samples] + 1
        offsets = np.arange(per_run.sum()) - np.repeat(np.cumsum(per_run) - per_run, per_run)
        if len(hidden) != len(offsets):
            first = (np.cumsum(plan.counts) - 1 - plan.drafts)[plan.samples]
            hidden = hidden[self._to_device(np.repeat(first, per_run) + offsets)]
        rows = np.repeat(plan.rows[plan.samples], per_run)
        lengths = np.repeat(plan.lengths[plan.samples], per_run) + offsets
        logits = self.model.logits(hidden)
        masks = fill_masks(plan, table, self.sampler.vocab_size) if plan.masked else None  # while the device works
        sampled = self.sampler(logits, rows, lengths, table.device_tokens, masks)
        places = self._to_device(rows), self._to_device(lengths)
        table.device_tokens.index_put_(places, sampled.ids.clamp(min=0).to(torch.int32))
        if self.device.type != "cuda":
            return LaunchedStep(plan, sampled, None, prompt_scores)
        sampled = sampled.to_host()
        ready = torch.cuda.Event()
        ready.record()
        return LaunchedStep(plan, sampled, ready, prompt_scores)

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
                scores.append((index, i, self.sampler.with_logprobs(logits, part, int(wanted[index]))))
        return scores

    @staticmethod
    def collect(launched: LaunchedStep) -> Sampled | None:
        """Wait for a launched step's samples to be on the host."""
        if launched.ready is not None:
            launched.ready.synchronize()
        return launched.sampled

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
