"""Speculative decoding: who proposes the next tokens, how many, and which of them stand.

The target verifies a run of 1 + gamma tokens in the same forward as everybody's decode and prefill. It samples every
position itself, with noise that depends on seed and position alone, and keeps a draft token if and only if it is its
own sample: the output is that of plain decoding, token for token, whatever is proposed. A draft that samples with the
same noise agrees as often as the two distributions overlap (Daliri et al. 2024, drafter-invariant speculation).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.attention import to_device
from engine.kv_cache import KVSlotPool
from engine.models.decoder import CausalLM
from engine.runner import ModelRunner
from engine.sampling import Sampler, SamplingTable, Vocabulary
from engine.scheduler import MAX_GAMMA, StepPlan
from engine.schemas import DraftAnswer, DraftMessage, DraftSequence
from engine.sequence import SequenceTable

logger = logging.getLogger(__name__)

NO_TOKEN = -1
CATCH_UP = 512  # prompt tokens that a draft model reads in a forward
_HOPE = 0.7  # acceptance that is expected of an unknown draft
_TRIAL = 16  # of so many sequences, one starts with that hope
_PROBE = 4  # tokens of a remote draft's trial
_PROBE_EVERY, _PROBE_SELDOM = 128, 1024  # tokens between trials of a row at 0, at first and at most
_ALLOWED = 0.01  # of the time: what trials may lose
_RETRY = 0.25  # seconds until a draft that is gone is looked for again
_RECONSIDER = 16  # steps after which rows at 0 are looked at again: costs change
_HOLD = 16  # tokens until a sequence that the draft has lost is sent again


def accept(samples: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """How many leading drafts [R, G] equal the target's own samples [R, G + 1]: int64 [R]."""
    return np.cumprod(samples[:, :-1] == drafts, axis=1, dtype=np.int64).sum(axis=1)


class Proposer(Protocol):
    """Guesses what running sequences say next. What it returns changes speed, never text."""

    def propose(self, rows: np.ndarray, gammas: np.ndarray, worth: np.ndarray) -> np.ndarray:
        """Up to gammas[i] tokens after the known ones of row i of the table: int32 [R, max gamma], NO_TOKEN from
        where there is no guess. worth[i]: seconds that this is expected to save, and so may take."""
        ...


class NgramProposer:
    """Prompt lookup (Saxena 2023): what followed the last occurrence of the sequence's last few tokens."""

    def __init__(self, table: SequenceTable, longest: int = 4, shortest: int = 2) -> None:
        self.table, self.longest, self.shortest = table, longest, shortest

    def propose(self, rows: np.ndarray, gammas: np.ndarray, worth: np.ndarray) -> np.ndarray:
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


class Drafter:
    """A draft model with KV pages of its own, over tables that say what the sequences are and how they are sampled:
    with the same noise as the target."""

    def __init__(
        self,
        model: CausalLM,
        table: SequenceTable,
        sampling: SamplingTable,
        vocabulary: Vocabulary,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
    ) -> None:
        rows, context = table.tokens.shape
        context -= 1
        if model.vocab_size < vocabulary.size:
            raise ValueError(f"the draft's vocabulary of {model.vocab_size} is below the target's {vocabulary.size}")
        if model.device != table.device_tokens.device:
            raise ValueError(f"the draft is on {model.device}, the target on {table.device_tokens.device}")
        if model.max_seq_len < context:
            raise ValueError(f"the draft's context of {model.max_seq_len} is below the target's {context}")
        page_size = page_size or model.attention.default_page_size
        if model.dtype != torch.float32 and not model.packed:
            model.pack()
        pages = -(-context // page_size)
        self.table, self.sampling = table, sampling
        num_pages = num_pages or pages * rows
        self.pool = KVSlotPool(model, num_pages, page_size, dtype=model.dtype, enable_prefix_cache=False)
        self.page_table = np.full((rows, pages), -1, dtype=np.int32)
        self.num_pages = np.zeros(rows, dtype=np.int64)
        self.computed = np.zeros(rows, dtype=np.int64)
        sampler = Sampler(sampling, vocabulary, model.device)
        self.runner = ModelRunner(model, self.pool, table, sampler, self.page_table, scores_prompts=False)

    def rewind(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Tokens from `lengths` on are not what was read."""
        self.computed[rows] = np.minimum(self.computed[rows], lengths)

    def forget(self, rows: np.ndarray) -> None:
        for row in rows.tolist():
            self.pool.release(self.page_table[row, : self.num_pages[row]].copy())
            self.num_pages[row] = self.computed[row] = 0

    def advance(self, rows: np.ndarray, lengths: np.ndarray, budget: int = CATCH_UP) -> np.ndarray:
        """One forward: rows read on to their `lengths`, those that lack least first, within `budget` tokens and the
        pages there are. Returns the token that follows for those that get there, else NO_TOKEN: int64 [R]."""
        counts = lengths - self.computed[rows]
        for i in np.argsort(counts, kind="stable").tolist():
            counts[i] = min(counts[i], max(budget, 0))
            if not self._grow(int(rows[i]), int(self.computed[rows[i]] + counts[i])):
                counts[i] = 0
            budget -= int(counts[i])
        ids = np.full(len(rows), NO_TOKEN, dtype=np.int64)
        at = np.flatnonzero(counts > 0)
        if not len(at):
            return ids
        rows, counts, lengths = rows[at], counts[at], lengths[at]
        starts = self.computed[rows]
        there = starts + counts == lengths
        plan = StepPlan(rows, self.table.uid[rows], starts, counts, there, lengths, np.zeros_like(rows))
        sampled = self.runner.collect(self.runner.launch(plan))
        self.computed[rows] += counts
        if sampled is not None:
            ids[at[there]] = np.maximum(sampled.ids.numpy(), NO_TOKEN)
        return ids

    def _grow(self, row: int, tokens: int) -> bool:
        have = int(self.num_pages[row])
        wanted = -(-tokens // self.pool.page_size) - have
        if wanted > self.pool.available or have + wanted > self.page_table.shape[1]:
            return False
        if wanted > 0:
            self.page_table[row, have : have + wanted] = self.pool.allocate(wanted)
            self.num_pages[row] += wanted
        return True


class DraftModelProposer:
    """A draft model in the engine's process, over the engine's own tables."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.table = drafter, drafter.table
        self._uid = np.full(len(self.table.uid), -1, dtype=np.int64)
        self._base = np.zeros(len(self.table.uid), dtype=np.int64)  # tokens known when something was drafted last

    def propose(self, rows: np.ndarray, gammas: np.ndarray, worth: np.ndarray) -> np.ndarray:
        table, drafter = self.table, self.drafter
        gone = np.flatnonzero((self._uid >= 0) & (self._uid != table.uid))
        drafter.forget(gone)
        self._uid[gone] = -1
        lengths, self._uid[rows] = table.known[rows], table.uid[rows]
        # what was drafted is not what the sequence says; the last known token is read anew, for what follows it
        drafter.rewind(rows, np.minimum(lengths - 1, self._base[rows]))
        self._base[rows] = lengths
        drafts = np.full((len(rows), int(gammas.max(initial=0))), NO_TOKEN, dtype=np.int32)
        at = np.arange(len(rows))
        for step in range(drafts.shape[1]):
            ids = drafter.advance(rows[at], lengths[at] + step)
            drafts[at, step] = ids
            at = at[(ids != NO_TOKEN) & (gammas[at] > step + 1)]
            if not len(at):
                break
        return drafts


class DraftChannel(Protocol):
    """The way to a draft somewhere else. Neither method blocks beyond its timeout."""

    @property
    def target_hidden_size(self) -> int:
        """Of the states that the draft reads; 0: none, or no draft."""
        ...

    def send(self, message: DraftMessage) -> None:
        """Raises ConnectionError when there is no draft."""
        ...

    def receive(self, timeout: float) -> DraftAnswer | None:
        """The next answer; None after `timeout` seconds without. Raises ConnectionError, once, when the draft is lost,
        or has been silent for too long after a message."""
        ...


class RemoteProposer:
    """A draft somewhere else, which goes on while the target verifies.

    At most two messages are unanswered: while one is worked on, the next may contradict it. A proposal counts as long
    as the tokens committed since agree with its first ones, however late it comes; others are dropped. A draft that is
    later than it usually is isn't waited for until it has answered.
    """

    def __init__(self, channel: DraftChannel, table: SequenceTable, max_gamma: int = MAX_GAMMA) -> None:
        self.channel, self.table = channel, table
        rows, width = len(table.uid), 2 * max_gamma + 2  # a draft goes on for as long again
        self.ready = 0  # proposals that were there before they were asked for
        self.losses = 0  # of a draft that had answered
        self._uid = np.full(rows, -1, dtype=np.int64)
        self._told = np.zeros(rows, dtype=np.int64)  # tokens that the draft knows; 0: it doesn't know the sequence
        self._gamma = np.zeros(rows, dtype=np.int64)
        self._hold = np.zeros(rows, dtype=np.int64)  # the length at which a sequence that it lost is sent again
        self._base = np.full(rows, -1, dtype=np.int64)  # what a proposal builds on; -1: there was none
        self._count = np.zeros(rows, dtype=np.int64)
        self._guess = np.zeros((rows, width), dtype=np.int32)
        self._dropped: list[int] = []
        self._step = self._answered = 0
        self._lacked = self._up = False
        self._sent_at = self._retry_at = 0.0
        self._seconds = 0.0  # from a message to proposals that were not ready
        self._timed = 0

    @property
    def _awaiting(self) -> bool:
        return self._answered < self._step

    @property
    def up(self) -> bool:
        """Whether the draft has answered, and is not silent now."""
        return self._up and not (self._awaiting and time.perf_counter() - self._sent_at > 1.0)

    def available(self, rows: np.ndarray, gammas: np.ndarray, worth: np.ndarray) -> np.ndarray:
        """How many of the tokens wanted for each row are here or worth waiting for."""
        while self._receive(0.0):
            pass
        have = np.minimum(self._in_hand(rows, self.table.length[rows]), gammas)
        lacking = (have == 0) & (self._base[rows] >= 0)
        waited = time.perf_counter() - self._sent_at if self._awaiting else 0.0
        if waited <= 2 * self._seconds and worth[lacking].sum() > self._seconds - waited:
            have[lacking] = gammas[lacking]
        return have

    def tell(self, wanted: np.ndarray, trial: np.ndarray) -> None:
        """Send what is new of the table's rows, and how many tokens are wanted for each, int64 [rows]; only once for
        those on trial, bool [rows]."""
        table = self.table
        gone = np.flatnonzero((self._uid >= 0) & (self._uid != table.uid))
        if not len(gone) and not self._dropped and not self._gamma.any() and not wanted[table.uid >= 0].any():
            return
        self._dropped += self._uid[gone[self._told[gone] > 0]].tolist()
        self._forget(gone)
        while self._awaiting and self._receive(0.0):
            pass
        if self._step - self._answered > 1 or time.perf_counter() < self._retry_at:
            return
        known = table.known
        wanted = np.where((table.uid >= 0) & (known >= self._hold), wanted, 0)
        new = (wanted > 0) & (self._told == 0)
        rows = np.flatnonzero(
            new | (self._told > 0) & ((wanted != self._gamma) | (wanted > 0) & ~trial & (known > self._told))
        )
        if not len(rows) and not self._dropped:
            return
        lengths = np.where(wanted[rows] > 0, known[rows], self._told[rows])
        counts = np.where(new[rows], 0, lengths - self._told[rows])
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - self._told[rows], counts)
        tokens = table.tokens[np.repeat(rows, counts), places]
        introduced = [self._introduce(row) for row in np.flatnonzero(new).tolist()]
        states = None
        if self.channel.target_hidden_size:
            table.hold_states(self.channel.target_hidden_size)
            at = to_device(np.stack((rows, lengths - 1)), table.device_tokens.device)
            states = table.states_at(at[0], at[1]).to("cpu", torch.float16).numpy()
        self._step += 1
        message = DraftMessage(
            self._step, self._dropped, introduced, table.uid[rows], wanted[rows], lengths, counts, tokens, states
        )
        try:
            self.channel.send(message)
        except ConnectionError:
            self._lose()
            return
        self._dropped = []
        self._uid[rows], self._told[rows], self._gamma[rows] = table.uid[rows], lengths, wanted[rows]
        self._base[rows[wanted[rows] == 0]] = -1
        asked = rows[(wanted[rows] > 0) & (self._base[rows] >= 0)]
        self._lacked = bool(len(asked) and not self._in_hand(asked, known[asked]).all())
        self._sent_at = time.perf_counter()

    def propose(self, rows: np.ndarray, gammas: np.ndarray, worth: np.ndarray) -> np.ndarray:
        known = self.table.known[rows]
        have = self._in_hand(rows, known)
        deadline = time.perf_counter() + worth[have == 0].sum()
        while self._awaiting and not have.all() and self._receive(deadline - time.perf_counter()):
            have = self._in_hand(rows, known)
        places = np.arange(int(gammas.max(initial=0)))
        at = np.minimum((known - self._base[rows])[:, None] + places, self._guess.shape[1] - 1)
        drafts = np.where(places < np.minimum(have, gammas)[:, None], self._guess[rows[:, None], at], NO_TOKEN)
        return drafts.astype(np.int32)

    def went_ahead(self, rows: np.ndarray) -> np.ndarray:
        """Whether each row's proposal was made before its last known tokens were: bool [R]."""
        return self._base[rows] < self.table.known[rows]

    def judge(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many tokens of each row's last proposal came true, and of how many that is known (0: it is too soon)."""
        came, right = self._agreement(rows)
        judged = np.where(right < came, right + 1, np.where(came == self._count[rows], came, 0))
        return right, judged

    def _agreement(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each row's proposed tokens, those whose places are committed by now, and how many of them are right."""
        base = self._base[rows]
        came = np.where(base >= 0, np.minimum(self.table.known[rows] - base, self._count[rows]), 0)
        columns = np.arange(self._guess.shape[1])
        places = np.minimum(np.maximum(base, 0)[:, None] + columns, self.table.tokens.shape[1] - 1)
        right = (self._guess[rows] == self.table.tokens[rows[:, None], places]) & (columns < came[:, None])
        return came, np.cumprod(right, axis=1, dtype=np.int64).sum(axis=1)

    def _in_hand(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Proposed tokens from `lengths` on that may still come true."""
        came, right = self._agreement(rows)
        left = self._count[rows] - (lengths - self._base[rows])
        return np.where((self._base[rows] >= 0) & (right == came), np.maximum(left, 0), 0)

    def _receive(self, timeout: float) -> bool:
        if timeout < 0:
            return False
        try:
            answer = self.channel.receive(timeout)
        except ConnectionError:
            self._lose()
            return False
        if answer is None:
            return False
        self._take(answer)
        return True

    def _take(self, answer: DraftAnswer) -> None:
        self._up = True
        if self._awaiting and answer.step == self._step and self._lacked:
            self._timed += 1
            self._seconds += (time.perf_counter() - self._sent_at - self._seconds) / min(self._timed, 10)
        self._answered = answer.step
        self.ready += answer.ready
        told = np.flatnonzero(self._told > 0)
        row_of = dict(zip(self._uid[told].tolist(), told.tolist(), strict=True))
        ends = np.cumsum(answer.counts)
        for uid, length, start, end in zip(
            answer.uids.tolist(), answer.lengths.tolist(), (ends - answer.counts).tolist(), ends.tolist(), strict=True
        ):
            row = row_of.get(uid, -1)
            if row < 0 or length < self._base[row] or not self._gamma[row]:
                continue
            tokens = answer.tokens[start:end][: self._guess.shape[1]]
            self._base[row], self._count[row] = length, len(tokens)
            self._guess[row, : len(tokens)] = tokens
        for uid in answer.lost:
            if (row := row_of.get(uid, -1)) >= 0:
                self._told[row], self._base[row] = 0, -1
                self._hold[row] = self.table.known[row] + _HOLD

    def _introduce(self, row: int) -> DraftSequence:
        sequence = self.table.sequences[row]
        assert sequence is not None
        return DraftSequence(
            sequence.uid,
            sequence.request.model_copy(
                update={"prompt": None, "prompt_ids": [], "output_ids": [], "grammar": None, "logprobs": None}
            ),
            sequence.seed,
            sequence.prompt_len,
            sequence.limit,
            sequence.stop_ids,
            sequence.bad_words,
            self.table.tokens[row, : self.table.known[row]].copy(),
        )

    def _forget(self, rows: np.ndarray) -> None:
        self._uid[rows] = self._base[rows] = -1
        self._told[rows] = self._gamma[rows] = self._hold[rows] = self._count[rows] = 0

    def _lose(self) -> None:
        """The draft knows nothing any more: what comes back is told everything."""
        self._forget(np.arange(len(self._uid)))
        self._dropped = []
        self.losses += self._up
        self._answered, self._up = self._step, False
        self._retry_at = time.perf_counter() + _RETRY


@dataclass(slots=True)
class SpeculationStats:
    """Counters since the start. `accepted_at[j]`: how often the draft's token j stood."""

    drafted: int
    accepted: int
    accepted_at: list[int]
    ready: int = 0  # a remote draft's proposals that were there before they were asked for
    draft_up: bool = False  # a remote draft answers
    draft_losses: int = 0  # how often it was lost

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


class _StepCost:
    """Seconds of a step as a + b * tokens, fitted with forgetting. With one number of tokens seen, `alone` says what
    others take: as long (0), or in proportion (1)."""

    def __init__(self, alone: int) -> None:
        self._alone = alone
        self._moments = [0.0] * 5  # of 1, tokens, tokens^2, seconds, tokens * seconds

    def observe(self, tokens: int, seconds: float) -> None:
        new = (1, tokens, tokens * tokens, seconds, tokens * seconds)
        self._moments = [0.98 * old + each for old, each in zip(self._moments, new, strict=True)]

    def fade(self) -> None:
        """What was seen long ago gives way to what is seen next: the machine's load changes."""
        if self._moments[0] > 5:
            self._moments = [0.98 * old for old in self._moments]

    def doubt(self) -> None:
        """Take it for half, until it is seen again."""
        self._moments[3:] = [value / 2 for value in self._moments[3:]]

    @property
    def known(self) -> bool:
        return self._moments[0] > 2

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        weight, t, tt, s, ts = self._moments
        spread = tt - t * t / weight
        slope = max((ts - t * s / weight) / spread, 0.0) if spread > 1e-9 * max(tt, 1) else self._alone * s / t
        return np.maximum((s - slope * t) / weight + slope * tokens, 1e-9)


class Speculator:
    """Asks the proposer, and decides how many tokens to ask for.

    gamma: None chooses for each sequence the length with the best expected tokens a second, from its own averaged
    acceptance and the measured costs of a plain step, a verifying step and a proposal; 0 where plain decoding is
    faster, with a trial now and then. A remote draft's trials are only compared with what comes.
    """

    def __init__(self, proposer: Proposer, table: SequenceTable, gamma: int | None = None) -> None:
        if gamma is not None and gamma < 1:
            raise ValueError(f"gamma must be at least 1, got {gamma}")
        self.proposer, self.table, self.fixed = proposer, table, gamma
        self.remote = proposer if isinstance(proposer, RemoteProposer) else None
        self.max_gamma = gamma or MAX_GAMMA
        rows = len(table.uid)
        self._uid = np.full(rows, -1, dtype=np.int64)
        self._acceptance = np.zeros(rows)
        self._delivered = np.ones(rows)  # the averaged part of the wanted tokens that was proposed
        self._chosen = np.zeros(rows, dtype=np.int64)  # tokens that pay, before trials
        self._wanted = np.zeros(rows, dtype=np.int64)  # the same with trials, as a remote draft is asked
        self._trial = np.zeros(rows, dtype=bool)
        self._worth = np.zeros(rows)
        self._next_probe = np.zeros(rows, dtype=np.int64)  # the length at which a row at 0 tries again
        self._gap = np.zeros(rows, dtype=np.int64)  # tokens from a trial in vain to the next
        self._asleep_until = np.zeros(rows, dtype=np.int64)  # the length at which a row at 0 is looked at again
        self._calls = 0
        self._usual = _HOPE  # acceptance of all sequences
        self._met = 0
        self._plain, self._verifying = _StepCost(alone=0), _StepCost(alone=1)
        self._balance = 0.0  # seconds that speculation has won, and may lose again
        self._propose_seconds = 0.0  # a drafted token, for all rows
        self._proposed = 0.0  # the last proposal as a whole
        self._proposals = 0
        self.drafted = 0
        self.accepted_at = np.zeros(self.max_gamma, dtype=np.int64)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Tokens to draft for each row, int64 [R]."""
        table = self.table
        self._meet(rows)
        self._calls += 1
        if self._calls % _RECONSIDER and (table.length[rows] < self._asleep_until[rows]).all():
            return np.zeros_like(rows)
        room = np.maximum(table.limit[rows] - table.length[rows] - 1, 0)
        best, self._worth[rows] = self._choose(rows, len(rows))
        best = np.minimum(best, room)
        probing = np.zeros(len(rows), dtype=bool)
        if self.fixed is None and self._plain.known:
            if not self._affordable(rows, best):
                best[:] = 0
            probing = (best == 0) & (table.length[rows] >= self._next_probe[rows])
            self._asleep_until[rows] = np.where((best == 0) & ~probing, self._next_probe[rows], 0)
        self._chosen[rows] = best
        if self.remote is None:
            probes = np.where(probing, np.minimum(1, room), 0)
            if probing.any() and not best.any() and not self._affordable(rows, probes):
                self._asleep_until[rows[probing]] = table.length[rows[probing]] + _RECONSIDER
                return best
            return best + probes
        self._trial[rows] = probing
        self._judge(rows[probing])
        wanted = self._wanted[rows] = np.where(probing, np.minimum(_PROBE, room), best)
        have = self.remote.available(rows, wanted, self._worth[rows])
        self._delivered[rows[probing & (have > 0)]] = 1.0
        late = rows[(best > 0) & (have == 0) & self.remote.up]
        self._delivered[late] -= 0.05 * self._delivered[late]
        return np.where(probing, 0, have)

    def _meet(self, rows: np.ndarray) -> None:
        """Sequences seen for the first time start as all do, now and then one with more hope."""
        table = self.table
        new = rows[self._uid[rows] != table.uid[rows]]
        if not len(new):
            return
        self._uid[new] = table.uid[new]
        hopeful = (self._met + np.arange(len(new))) % _TRIAL == 0
        self._met += len(new)
        self._acceptance[new] = np.where(hopeful, max(self._usual, _HOPE), self._usual)
        # a remote draft that was late for the row's last sequence is late for this one
        self._delivered[new if self.remote is None else new[hopeful]] = 1.0
        self._gap[new] = _PROBE_EVERY
        self._asleep_until[new] = 0
        self._next_probe[new] = table.length[new] + _PROBE_EVERY
        self._trial[new] = False
        self._wanted[new] = self._choose(new, int((table.uid >= 0).sum()))[0] if self._plain.known else 1

    def _choose(self, rows: np.ndarray, running: int) -> tuple[np.ndarray, np.ndarray]:
        """The number of tokens that pays most for each row in steps of `running` rows, and the seconds of a step that
        each row's proposal saves."""
        if not self._plain.known:
            return np.full(len(rows), self.fixed or 0), np.zeros(len(rows))
        gammas = np.arange(self.max_gamma + 1)
        expected = 1 + self._expected(rows[:, None], gammas)
        # as if every row drafted as many: the costs of a step are everybody's
        plain = self._plain(np.array([running]))
        verifying = (self._verifying if self._verifying.known else self._plain)(running * (1 + gammas))
        verifying = np.maximum(verifying, plain)  # more tokens never take less: that was noise
        seconds = np.where(gammas > 0, verifying + self._propose_seconds * gammas, plain)
        gain = expected * (plain / seconds)
        best = gain.argmax(axis=1)
        best[gain.max(axis=1) < 1.02] = 0
        if self.fixed is not None:
            best[:] = self.fixed
        worth = np.maximum(expected[np.arange(len(rows)), best] * plain - verifying[best], 0) / running
        return best, np.where(best > 0, worth, 0.0)

    def _expected(self, rows: np.ndarray, gammas: np.ndarray) -> np.ndarray:
        """How many of `gammas` drafted tokens of each row will stand."""
        a = np.minimum(self._acceptance[rows], 0.98)
        return self._delivered[rows] * ((1 - a ** (gammas + 1)) / (1 - a) - 1)

    def _affordable(self, rows: np.ndarray, gammas: np.ndarray) -> bool:
        """Whether a step with these drafts pays, or is expected to lose no more than there is to lose: a row that
        drafts alone has all the others wait for its verification."""
        if not self._verifying.known:
            return True
        accepted = float(self._expected(rows, gammas).sum())
        loss = self._lost(len(rows), int(gammas.sum()), accepted, self._propose_seconds * int(gammas.max(initial=0)))
        return self._balance >= max(loss, 0.0)

    def _lost(self, running: int, drafted: int, accepted: float, proposing: float) -> float:
        """Seconds that a step costs more than plain decoding would take for its tokens."""
        plain = float(self._plain(np.array([running]))[0])
        verifying = max(float(self._verifying(np.array([running + drafted]))[0]), plain)
        return verifying + proposing - plain * (1 + accepted / running)

    def _judge(self, rows: np.ndarray) -> None:
        """Learn from a remote draft's trials; those without an answer for long are given up."""
        assert self.remote is not None
        right, judged = self.remote.judge(rows)
        length = self.table.length[rows]
        over = (judged > 0) | (length >= self._next_probe[rows] + _PROBE_EVERY)
        self._learn(rows[judged > 0], right[judged > 0], judged[judged > 0])
        self._next_probe[rows[over]] = length[over] + self._gap[rows[over]]
        self._gap[rows[over]] = np.minimum(2 * self._gap[rows[over]], _PROBE_SELDOM)
        if right.any():  # what keeps them away was a price, and trials don't tell today's
            self._propose_seconds /= 2
            self._verifying.doubt()

    def propose(self, plan: StepPlan) -> None:
        """Put drafts into the plan and into the tables of tokens; runs with fewer than planned get shorter."""
        start = time.perf_counter()
        at = np.flatnonzero(plan.drafts > 0)
        rows = plan.rows[at]
        if self.remote is not None:
            self._meet(plan.rows)
            self.remote.tell(self._wanted, self._trial)
        if not len(at):
            self._proposed = time.perf_counter() - start
            return
        in_vain = self._chosen[rows] == 0
        self._next_probe[rows] = plan.lengths[at] + self._gap[rows]
        self._gap[rows] = np.where(in_vain, np.minimum(2 * self._gap[rows], _PROBE_SELDOM), _PROBE_EVERY)
        try:
            drafts = self.proposer.propose(rows, plan.drafts[at], self._worth[rows])
        except Exception:  # a draft may fail, and a step is not to fail with it
            logger.exception("no proposals for a step")
            drafts = np.full((len(rows), 1), NO_TOKEN, dtype=np.int32)
        self._proposed = time.perf_counter() - start
        seconds = self._proposed / int(plan.drafts[at].max())
        self._proposals += 1
        self._propose_seconds += (seconds - self._propose_seconds) / min(self._proposals, 20)
        drafts[np.arange(drafts.shape[1]) >= plan.drafts[at, None]] = NO_TOKEN
        if self.remote is not None:
            plan.ahead = np.zeros(len(plan.rows), dtype=bool)
            plan.ahead[at] = self.remote.went_ahead(rows)
        for k in np.flatnonzero(self.table.has_grammar[rows]).tolist():
            sequence = self.table.sequences[rows[k]]
            assert sequence is not None and sequence.grammar is not None
            drafts[k, sequence.grammar.fitting(drafts[k, drafts[k] != NO_TOKEN].tolist()) :] = NO_TOKEN
        counts = np.cumprod(drafts != NO_TOKEN, axis=1).sum(axis=1)
        self._delivered[rows] += 0.05 * (counts / plan.drafts[at] - self._delivered[rows])
        plan.counts[at] += counts - plan.drafts[at]
        plan.drafts[at] = counts
        plan.draft_ids = np.full((len(plan.rows), int(counts.max(initial=0))), NO_TOKEN, dtype=np.int32)
        plan.draft_ids[at] = drafts[:, : plan.draft_ids.shape[1]]
        i, j = np.nonzero(np.arange(plan.draft_ids.shape[1]) < plan.drafts[:, None])
        self.table.write(plan.rows[i], plan.lengths[i] + j, plan.draft_ids[i, j])

    def learn(self, plan: StepPlan, accepted: np.ndarray) -> None:
        """Learn how many [B] drafts of each run stood."""
        at = plan.drafts > 0
        if not at.any():
            return
        self.drafted += int(plan.drafts.sum())
        self.accepted_at += (np.arange(self.max_gamma) < accepted[:, None]).sum(axis=0)
        # what follows a rejected token says nothing
        self._learn(plan.rows[at], accepted[at], np.minimum(accepted + 1, plan.drafts)[at])

        if self._plain.known and self._verifying.known:
            running = int((plan.counts - plan.drafts == 1).sum())
            self._settle(-self._lost(running, int(plan.drafts.sum()), int(accepted.sum()), self._proposed), running)

    def _settle(self, seconds: float, running: int) -> None:
        """A good draft's gains don't pay for as many bad ones later; a step that the machine held up isn't paid for
        for ever."""
        bound = 2 * float(self._plain(np.array([running]))[0])
        self._balance = min(max(self._balance + seconds, -bound), bound)

    def _learn(self, rows: np.ndarray, right: np.ndarray, judged: np.ndarray) -> None:
        self._acceptance[rows] += (1 - 0.85**judged) * (right / judged - self._acceptance[rows])
        total = int(judged.sum())
        if total:
            self._usual += (1 - 0.995**total) * (right.sum() / total - self._usual)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn what a step cost; those that read prompts say nothing."""
        if (plan.counts - plan.drafts == 1).all():
            costs = (self._verifying, self._plain) if plan.verifies else (self._plain, self._verifying)
            costs[0].observe(int(plan.counts.sum()), seconds - self._proposed)
            costs[1].fade()
            if not plan.verifies:
                self._settle(_ALLOWED * seconds, len(plan.rows))
        self._proposed = 0.0

    def stats(self) -> SpeculationStats:
        stats = SpeculationStats(self.drafted, int(self.accepted_at.sum()), self.accepted_at.tolist())
        if self.remote is not None:
            stats.ready, stats.draft_up, stats.draft_losses = self.remote.ready, self.remote.up, self.remote.losses
        return stats
