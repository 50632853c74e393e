"""Speculative decoding: who proposes the next tokens, how many, and which of them stand.

The target verifies a run of 1 + gamma tokens in the same forward as everybody's decode and prefill. It samples every
position itself, with noise that depends on seed and position alone, and keeps a draft token if and only if it is its
own sample: the output is that of plain decoding, token for token, whatever is proposed. A draft that samples with the
same noise agrees as often as the two distributions overlap (Daliri et al. 2024, drafter-invariant speculation).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.kv_cache import KVSlotPool
from engine.models.decoder import CausalLM
from engine.runner import ModelRunner
from engine.sampling import Sampler, SamplingTable, Vocabulary
from engine.scheduler import StepPlan
from engine.sequence import SequenceTable

NO_TOKEN = -1
_PROBE_EVERY = 128  # tokens between trials of a row that has stopped speculating
_CATCH_UP = 512  # prompt tokens that a draft model reads in a step


def accept(samples: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """How many leading drafts [R, G] equal the target's own samples [R, G + 1]: int64 [R]."""
    return np.cumprod(samples[:, :-1] == drafts, axis=1, dtype=np.int64).sum(axis=1)


class Proposer(Protocol):
    """Guesses what running sequences say next. What it returns changes speed, never text."""

    def propose(self, rows: np.ndarray, gammas: np.ndarray) -> np.ndarray:
        """Up to gammas[i] tokens after the known ones of row i of the table: int32 [R, max gamma], NO_TOKEN from
        where there is no guess."""
        ...


class NgramProposer:
    """Prompt lookup (Saxena 2023): what followed the last occurrence of the sequence's last few tokens."""

    def __init__(self, table: SequenceTable, longest: int = 4, shortest: int = 2) -> None:
        self.table, self.longest, self.shortest = table, longest, shortest

    def propose(self, rows: np.ndarray, gammas: np.ndarray) -> np.ndarray:
        drafts = np.full((len(rows), int(gammas.max(initial=0))), NO_TOKEN, dtype=np.int32)
        for i, (row, gamma) in enumerate(zip(rows.tolist(), gammas.tolist(), strict=True)):
            tokens = self.table.tokens[row, : self.table.known[row]]
            found = self._lookup(tokens)
            guess = tokens[found : found + gamma] if found else tokens[:0]
            drafts[i, : len(guess)] = guess
        return drafts

    def _lookup(self, tokens: np.ndarray) -> int:
        """Where the continuation begins; 0 for nowhere."""
        text, width = tokens.tobytes(), tokens.itemsize
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            pattern, end = text[-size * width :], len(text) - width
            while (at := text.rfind(pattern, 0, end)) >= 0:
                if at % width == 0:
                    return at // width + size
                end = at + len(pattern) - 1
        return 0


class DraftModelProposer:
    """A smaller model over the engine's own tables, with a pool of its own and the same noise."""

    def __init__(
        self,
        model: CausalLM,
        target: CausalLM,
        table: SequenceTable,
        sampling: SamplingTable,
        vocabulary: Vocabulary,
        *,
        page_size: int = 16,
        num_pages: int | None = None,
    ) -> None:
        rows, context = table.tokens.shape
        context -= 1
        if model.vocab_size != target.vocab_size:
            raise ValueError(f"the draft's vocabulary of {model.vocab_size} is not the target's {target.vocab_size}")
        if model.device != table.device_tokens.device:
            raise ValueError(f"the draft is on {model.device}, the target on {table.device_tokens.device}")
        if model.max_seq_len < context:
            raise ValueError(f"the draft's context of {model.max_seq_len} is below the target's {context}")
        pages = -(-context // page_size)
        self.table = table
        self.pool = KVSlotPool(
            num_pages or pages * rows,
            page_size,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            device=model.device,
            dtype=model.dtype,
            enable_prefix_cache=False,
        )
        self.page_table = np.full((rows, pages), -1, dtype=np.int32)
        self.num_pages = np.zeros(rows, dtype=np.int64)
        self.computed = np.zeros(rows, dtype=np.int64)
        self.uid = np.full(rows, -1, dtype=np.int64)
        sampler = Sampler(sampling, vocabulary, model.device)
        self.runner = ModelRunner(model, self.pool, table, sampler, self.page_table, scores_prompts=False)

    def propose(self, rows: np.ndarray, gammas: np.ndarray) -> np.ndarray:
        table = self.table
        self._forget(np.flatnonzero((self.uid >= 0) & (self.uid != table.uid)))
        self.uid[rows] = table.uid[rows]
        lengths = table.known[rows]
        # what was drafted past the last known token but one is not what the sequence says
        self.computed[rows] = np.minimum(self.computed[rows], lengths - 1)
        drafts = np.full((len(rows), int(gammas.max(initial=0))), NO_TOKEN, dtype=np.int32)
        budget, active = _CATCH_UP, np.zeros(len(rows), dtype=bool)
        counts = lengths - self.computed[rows]
        for i in np.argsort(counts, kind="stable").tolist():
            counts[i] = min(counts[i], max(budget, 0))
            if counts[i] and not self._grow(int(rows[i]), int(self.computed[rows[i]] + counts[i])):
                counts[i] = 0
            budget -= int(counts[i])
            active[i] = counts[i] > 0
        for step in range(drafts.shape[1]):
            at = np.flatnonzero(active)
            if not len(at):
                break
            ids = self._run(rows[at], counts[at], lengths[at] + step)
            caught_up = self.computed[rows[at]] == lengths[at] + step
            drafts[at[caught_up], step] = ids[caught_up]
            active[at] = caught_up & (gammas[at] > step + 1)
            counts[:] = 1
            for i in np.flatnonzero(active).tolist():
                active[i] = self._grow(int(rows[i]), int(lengths[i]) + step + 1)
        return drafts

    def _run(self, rows: np.ndarray, counts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Read `counts` tokens of each row and sample the one at `lengths`, which counts where all before are read."""
        starts = self.computed[rows]
        samples = np.ones(len(rows), dtype=bool)
        plan = StepPlan(rows, self.table.uid[rows], starts, counts, samples, lengths, np.zeros_like(rows))
        launched = self.runner.launch(plan)
        sampled = self.runner.collect(launched)
        assert sampled is not None
        self.computed[rows] += counts
        return sampled.ids.numpy()

    def _grow(self, row: int, tokens: int) -> bool:
        have = int(self.num_pages[row])
        wanted = -(-tokens // self.pool.page_size) - have
        if wanted > self.pool.available or -(-tokens // self.pool.page_size) > self.page_table.shape[1]:
            return False
        if wanted > 0:
            self.page_table[row, have : have + wanted] = self.pool.allocate(wanted)
            self.num_pages[row] += wanted
        return True

    def _forget(self, rows: np.ndarray) -> None:
        for row in rows.tolist():
            self.pool.release(self.page_table[row, : self.num_pages[row]].copy())
            self.num_pages[row] = self.computed[row] = 0
            self.uid[row] = -1


@dataclass(slots=True)
class SpeculationStats:
    """Counters since the start. `accepted_at[j]`: how often the draft's token j stood."""

    drafted: int
    accepted: int
    accepted_at: list[int]

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


class _StepCost:
    """Seconds of a step as a + b * tokens, fitted with forgetting."""

    def __init__(self) -> None:
        self._moments = np.zeros(5)  # of 1, tokens, tokens^2, seconds, tokens * seconds

    def observe(self, tokens: int, seconds: float) -> None:
        self._moments *= 0.98
        self._moments += (1, tokens, tokens * tokens, seconds, tokens * seconds)

    @property
    def known(self) -> bool:
        return bool(self._moments[0] > 2)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        weight, t, tt, s, ts = self._moments
        spread = tt - t * t / weight
        slope = max((ts - t * s / weight) / spread, 0.0) if spread > 1e-9 * max(tt, 1) else 0.0
        return np.maximum((s - slope * t) / weight + slope * tokens, 1e-9)


class Speculator:
    """Asks the proposer, and decides how many tokens to ask for.

    gamma: None chooses for each sequence the length with the best expected tokens a second, from its own averaged
    acceptance and the measured costs of a plain step, a verifying step and a proposal; 0 where plain decoding is
    faster, with a trial now and then.
    """

    def __init__(self, proposer: Proposer, table: SequenceTable, gamma: int | None = None, max_gamma: int = 8) -> None:
        if gamma is not None and gamma < 1:
            raise ValueError(f"gamma must be at least 1, got {gamma}")
        self.proposer, self.table, self.fixed = proposer, table, gamma
        self.max_gamma = gamma or max_gamma
        rows = len(table.uid)
        self._uid = np.full(rows, -1, dtype=np.int64)
        self._acceptance = np.zeros(rows)
        self._next_probe = np.zeros(rows, dtype=np.int64)  # the length at which a row at 0 tries again
        self._plain, self._verifying = _StepCost(), _StepCost()
        self._propose_seconds = 0.0  # a drafted token, for all rows
        self._proposed = 0.0  # the last proposal as a whole
        self._proposals = 0
        self.drafted = 0
        self.accepted_at = np.zeros(self.max_gamma, dtype=np.int64)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Tokens to draft for each row, int64 [R]."""
        table = self.table
        room = table.limit[rows] - table.length[rows] - 1
        if self.fixed is not None:
            return np.minimum(self.fixed, room)
        if not self._plain.known:
            return np.zeros_like(rows)
        new = rows[self._uid[rows] != table.uid[rows]]
        self._uid[new] = table.uid[new]
        self._acceptance[new] = 0.7
        self._next_probe[new] = table.length[new] + _PROBE_EVERY
        gammas = np.arange(self.max_gamma + 1)
        a = np.minimum(self._acceptance[rows], 0.98)[:, None]
        expected = (1 - a ** (gammas + 1)) / (1 - a)
        # as if every row drafted as many: the costs of a step are everybody's
        plain = self._plain(np.array([len(rows)]))
        verifying = (self._verifying if self._verifying.known else self._plain)(len(rows) * (1 + gammas))
        seconds = np.where(gammas > 0, verifying + self._propose_seconds * gammas, plain)
        gain = expected * (plain / seconds)
        best = gain.argmax(axis=1)
        best[gain.max(axis=1) < 1.02] = 0
        probing = (best == 0) & (table.length[rows] >= self._next_probe[rows])
        best[probing] = 1
        return np.minimum(best, room)

    def propose(self, plan: StepPlan) -> None:
        """Put drafts into the plan and into the tables of tokens; runs with fewer than planned get shorter."""
        at = np.flatnonzero(plan.drafts > 0)
        self._next_probe[plan.rows[at]] = plan.lengths[at] + _PROBE_EVERY
        start = time.perf_counter()
        drafts = self.proposer.propose(plan.rows[at], plan.drafts[at])
        self._proposed = time.perf_counter() - start
        seconds = self._proposed / int(plan.drafts[at].max())
        self._proposals += 1
        self._propose_seconds += (seconds - self._propose_seconds) / min(self._proposals, 20)
        drafts[np.arange(drafts.shape[1]) >= plan.drafts[at, None]] = NO_TOKEN
        for k in np.flatnonzero(self.table.has_grammar[plan.rows[at]]).tolist():
            sequence = self.table.sequences[plan.rows[at[k]]]
            assert sequence is not None and sequence.grammar is not None
            drafts[k, sequence.grammar.fitting(drafts[k, drafts[k] != NO_TOKEN].tolist()) :] = NO_TOKEN
        counts = np.cumprod(drafts != NO_TOKEN, axis=1).sum(axis=1)
        plan.counts[at] += counts - plan.drafts[at]
        plan.drafts[at] = counts
        plan.draft_ids = np.full((len(plan.rows), int(counts.max(initial=0))), NO_TOKEN, dtype=np.int32)
        plan.draft_ids[at] = drafts[:, : plan.draft_ids.shape[1]]
        i, j = np.nonzero(np.arange(plan.draft_ids.shape[1]) < plan.drafts[:, None])
        ids, rows, places = plan.draft_ids[i, j], plan.rows[i], plan.lengths[i] + j
        self.table.tokens[rows, places] = ids
        if self.table.device_tokens.device.type != "cpu":
            self.table.device_tokens[torch.from_numpy(rows), torch.from_numpy(places)] = torch.from_numpy(ids).to(
                self.table.device_tokens.device
            )

    def learn(self, plan: StepPlan, accepted: np.ndarray) -> None:
        """Learn how many [B] drafts of each run stood."""
        at = plan.drafts > 0
        if not at.any():
            return
        self.drafted += int(plan.drafts.sum())
        self.accepted_at += (np.arange(self.max_gamma) < accepted[:, None]).sum(axis=0)
        # what follows a rejected token says nothing
        judged = np.minimum(accepted + 1, plan.drafts)[at]
        rows = plan.rows[at]
        self._acceptance[rows] += (1 - 0.85**judged) * (accepted[at] / judged - self._acceptance[rows])

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn what a step cost; those that read prompts say nothing."""
        if (plan.counts - plan.drafts == 1).all():
            cost = self._verifying if plan.verifies else self._plain
            cost.observe(int(plan.counts.sum()), seconds - self._proposed)
        self._proposed = 0.0

    def stats(self) -> SpeculationStats:
        return SpeculationStats(self.drafted, int(self.accepted_at.sum()), self.accepted_at.tolist())
