"""Which sequences run how many tokens in a step, and which pages they may write.

A prefill chunk and a decode step are the same: a run of tokens appended to a sequence. Running sequences that need one
token come first, chunks of prompts share what is left of the token budget, and waiting sequences are admitted in the
order of their keys (arrival, shifted by priority: every level waits at most `aging_seconds` longer than the one above).
When the pool is exhausted, the running sequence with the last key is preempted and computed again later; the first
never is, so that every step with work makes progress.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.digests import extend_digests
from engine.kv_cache import KVSlotPool
from engine.schemas import QueueFull
from engine.sequence import Sequence, SequenceTable, Status

MAX_GAMMA = 8  # drafted tokens of a sequence in a step, at most
DraftLengths = Callable[[np.ndarray], np.ndarray]  # rows -> tokens to draft for each


@dataclass(slots=True)
class StepPlan:
    """The runs of a step, an entry each. Copies of pages come before the forward."""

    rows: np.ndarray  # int64, into the SequenceTable
    uids: np.ndarray  # int64, who had the row when this was planned
    starts: np.ndarray  # int64, tokens computed before
    counts: np.ndarray  # int64, tokens to compute, drafted ones included
    samples: np.ndarray  # bool: the run reaches the last known token, so that the next is sampled
    lengths: np.ndarray  # int64, tokens known before: the position of the first sampled one
    drafts: np.ndarray  # int64, drafted tokens at the runs' ends
    draft_ids: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int32))  # [B, G]
    ahead: np.ndarray | None = None  # bool: the drafts were made before the last known tokens were
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # source page, target page, tokens
    verifies: bool = False  # drafts were asked for: the step is committed before the next is planned
    masked: bool = False  # some sampling run has a grammar: the same, as the host makes its mask


class Scheduler:
    """Owns the queue, the rows and the pages of sequences. Not thread-safe: the engine holds its lock."""

    def __init__(
        self,
        table: SequenceTable,
        pool: KVSlotPool,
        *,
        max_batched_tokens: int,
        max_queued: int | None = None,
        max_queued_tokens: int | None = None,
        aging_seconds: float = 30.0,
    ) -> None:
        self.table, self.pool = table, pool
        self.max_batched_tokens = max_batched_tokens
        self.max_queued = max_queued
        self.max_queued_tokens = max_queued_tokens
        self.aging_seconds = aging_seconds
        self.num_waiting = 0
        self.waiting_tokens = 0
        self.preemptions = 0
        self.cached_tokens = 0  # of prompts, found in the prefix index
        self._commit_first = False  # a sequence with a grammar could be admitted but for the step in flight
        self._waiting: list[Sequence] = []  # a heap; finished ones are dropped when they are half of it
        self._free_rows = list(range(len(table.sequences) - 1, -1, -1))
        self._pending: dict[bytes, Sequence] = {}  # full pages that a running sequence will compute

    @property
    def num_running(self) -> int:
        return len(self.table.sequences) - len(self._free_rows)

    @property
    def has_pending_work(self) -> bool:
        return self.num_waiting > 0 or self.num_running > 0

    def pages_for(self, tokens: Any) -> Any:
        """The most pages that a sequence of this many tokens, or each of several, holds at once."""
        size = self.pool.page_size
        pages = -(-tokens // size)
        if self.pool.retention is not None:
            pages = np.minimum(pages, -(-self.pool.retention // size) + 1)
        return pages

    def check_fits(self, sequence: Sequence) -> None:
        """Raise ValueError for a sequence that the whole pool could not hold."""
        needed = self.pages_for(sequence.limit - 1)
        if needed > self.pool.num_pages:
            raise ValueError(
                f"request can never fit: prompt and output of {sequence.limit} tokens need {needed} pages of "
                f"{self.pool.page_size}, the pool has {self.pool.num_pages}"
            )

    def check_queue(self, tokens: int) -> None:
        """Raise QueueFull unless a sequence of so many tokens may wait. An empty queue takes one of any length, and
        those that have a row to go to don't count."""
        if self.max_queued is not None and self.num_waiting >= self.max_queued + len(self._free_rows):
            raise QueueFull(f"{self.num_waiting} requests are waiting, the bound is {self.max_queued}")
        bound = self.max_queued_tokens
        if bound is not None and self.num_waiting and self.waiting_tokens + tokens > bound:
            raise QueueFull(f"{self.waiting_tokens} tokens are waiting, the bound is {bound}")

    def add(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        heapq.heappush(self._waiting, sequence)
        self._count_waiting(sequence, 1)

    def _count_waiting(self, sequence: Sequence, change: int) -> None:
        self.num_waiting += change
        self.waiting_tokens += change * len(sequence.tokens)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give its row and pages back."""
        if sequence.status is Status.RUNNING:
            self._retire(sequence)
        elif sequence.status is Status.WAITING:
            self._count_waiting(sequence, -1)
        sequence.status = Status.FINISHED
        if len(self._waiting) > 2 * self.num_waiting:
            self._waiting = [sequence for sequence in self._waiting if sequence.status is Status.WAITING]
            heapq.heapify(self._waiting)

    def plan(self, in_flight: bool, draft_lengths: DraftLengths | None = None) -> StepPlan | None:
        """The next step; None when there is nothing to run, or when a preemption, a draft or a grammar must wait until
        the step in flight is committed. `draft_lengths` says how many tokens to draft for rows that decode."""
        table = self.table
        preemptions = self.preemptions
        active = np.flatnonzero((table.uid >= 0) & (table.length < table.limit))
        if in_flight and (self._commit_first or table.has_grammar[active].any()):
            self._commit_first = False
            return None
        need = table.length[active] - table.computed[active]
        decode = self._grow_decodes(active[need == 1], in_flight)
        if decode is None:
            return None
        budget = self.max_batched_tokens - len(decode)
        drafts = np.zeros_like(decode)
        if draft_lengths is not None and len(decode):
            drafts = draft_lengths(decode)
            if in_flight and drafts.any():
                return None
            drafts = self._grow_drafts(decode, drafts)
            budget -= int(drafts.sum())
        # prompts go on even when decodes alone fill the budget
        budget = max(budget, self.max_batched_tokens // 4, 1)
        runs: list[tuple[int, int]] = []
        copies: list[tuple[int, int, int]] = []
        prefills = active[need > 1]
        if len(prefills):
            prefills = prefills[np.lexsort((table.uid[prefills], table.key[prefills]))]
        for row in prefills.tolist():
            if budget > 0 and table.uid[row] >= 0:
                count = self._grow_run(row, min(int(table.length[row] - table.computed[row]), budget), in_flight)
                if count is None:
                    return None
                if count:
                    runs.append((row, count))
                    budget -= count
        if self.preemptions == preemptions:
            self._admit(budget, runs, copies, in_flight)
        else:
            kept = table.uid[decode] >= 0
            decode, drafts = decode[kept], drafts[kept]
        rows, counts = decode, np.ones_like(decode)
        if runs:
            more = np.array(runs, dtype=np.int64)
            rows, counts = np.concatenate((rows, more[:, 0])), np.concatenate((counts, more[:, 1]))
            drafts = np.concatenate((drafts, np.zeros_like(more[:, 0])))
        elif not len(decode):
            return None
        starts, lengths = table.computed[rows], table.length[rows]
        samples = starts + counts == lengths
        table.computed[rows] = starts + counts
        table.length[rows] = lengths + samples
        return StepPlan(
            rows,
            table.uid[rows],
            starts,
            counts + drafts,
            samples,
            lengths,
            drafts,
            copies=copies,
            verifies=bool(drafts.any()),
            masked=bool(table.has_grammar[rows[samples]].any()),
        )

    def commit(self, plan: StepPlan, live: np.ndarray, accepted: np.ndarray) -> None:
        """Count the keys and values of a step's live runs, of which `accepted` [B] drafts stand; publish the pages
        they filled, give back those of rejected drafts, let go of those that left the window."""
        table, size = self.table, self.pool.page_size
        rows, committed = plan.rows[live], (plan.starts + plan.counts - plan.drafts + accepted)[live]
        table.committed[rows] = committed
        if plan.verifies:
            table.computed[rows] += accepted[live]
            table.length[rows] += accepted[live]
            self._shrink(rows)
        filled = committed // size > table.published[rows]
        ended = (plan.starts[live] < table.prompt_len[rows]) & (table.prompt_len[rows] <= committed)
        for row in rows[filled | ended].tolist():
            self._publish(row, tail=bool(table.committed[row] >= table.prompt_len[row]))
            self._leave_window(row)

    def _grow_decodes(self, rows: np.ndarray, in_flight: bool) -> np.ndarray | None:
        """A page for every row whose next token begins one; returns the rows that still run."""
        table = self.table
        while True:
            crossing = rows[table.computed[rows] >= table.num_pages[rows] * self.pool.page_size]
            if len(crossing) <= self.pool.available:
                break
            if in_flight:
                return None
            victim = self._last_running()
            self._preempt(victim)
            rows = rows[rows != victim]
        if len(crossing):
            table.page_table[crossing, table.num_pages[crossing]] = self.pool.allocate(len(crossing))
            table.num_pages[crossing] += 1
        return rows

    def _grow_drafts(self, rows: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """Pages for drafts, as far as they can be had without taking any from a sequence; returns what fits."""
        table, size = self.table, self.pool.page_size
        drafts = drafts.copy()
        for i in np.flatnonzero(drafts).tolist():
            row, tokens = int(rows[i]), int(table.computed[rows[i]]) + 1
            room = int(table.num_pages[row] + self.pool.available) * size - tokens
            drafts[i] = min(int(drafts[i]), room)
            self._extend(row, tokens + int(drafts[i]))
        return drafts

    def _shrink(self, rows: np.ndarray) -> None:
        """Give back pages past the one that the next token goes to."""
        table = self.table
        for row in rows[table.num_pages[rows] > table.computed[rows] // self.pool.page_size + 1].tolist():
            keep = int(table.computed[row]) // self.pool.page_size + 1
            self.pool.release(table.page_table[row, keep : table.num_pages[row]].copy())
            table.page_table[row, keep : table.num_pages[row]] = -1
            table.num_pages[row] = keep

    def _grow_run(self, row: int, count: int, in_flight: bool) -> int | None:
        """Pages for `count` more tokens of a running prompt, or for as many as can be had; None: commit first."""
        table, pool = self.table, self.pool
        while True:
            room = int(table.num_pages[row] + pool.available) * pool.page_size - int(table.computed[row])
            if count <= room:
                break
            if in_flight:
                return None
            victim = self._last_running()
            if victim == row:
                count = max(room, 0)
                break
            self._preempt(victim)
        self._extend(row, int(table.computed[row]) + count)
        return count

    def _extend(self, row: int, tokens: int) -> None:
        table = self.table
        have = int(table.num_pages[row])
        pages = self.pool.allocate(max(-(-tokens // self.pool.page_size) - have, 0))
        table.page_table[row, have : have + len(pages)] = pages
        table.num_pages[row] += len(pages)

    def _admit(
        self, budget: int, runs: list[tuple[int, int]], copies: list[tuple[int, int, int]], in_flight: bool
    ) -> None:
        deferred: list[Sequence] = []
        while budget > 0 and self._free_rows and self._waiting and len(deferred) < len(self.table.sequences):
            sequence = heapq.heappop(self._waiting)
            if sequence.status is not Status.WAITING:
                continue
            if in_flight and sequence.grammar is not None:
                self._commit_first = True
                deferred.append(sequence)
                break
            outcome = self._admit_one(sequence, budget, copies)
            if outcome is None:  # it waits for a prefix that is being computed; others may pass
                deferred.append(sequence)
            elif outcome == 0:
                deferred.append(sequence)
                break
            else:
                runs.append((sequence.row, outcome))
                budget -= outcome
        for sequence in deferred:
            heapq.heappush(self._waiting, sequence)

    def _admit_one(self, sequence: Sequence, budget: int, copies: list[tuple[int, int, int]]) -> int | None:
        """Tokens to run; 0 when the pool has no room now, None to wait for another's pages."""
        table, pool, size = self.table, self.pool, self.pool.page_size
        count = len(sequence.tokens)
        full = (count - 1) // size  # the last token is computed always: its logits are wanted
        pages: list[int] = []
        tail_page, tail = -1, 0
        # cached pages don't serve a prompt whose own log-probabilities are wanted
        if pool.index is not None and sequence.request.prompt_logprobs is None:
            digests, tokens = sequence.digests[: full + 1], sequence.tokens[: count - 1]
            pages, tail_page, tail = pool.index.match(digests, tokens, pool.retention)
            if len(pages) < full and sequence.digests[len(pages) + 1] in self._pending:
                return None
        held = [page for page in pages if page >= 0]
        pool.hold(held)
        # what the admitted prompts are still to take is spoken for
        running = np.flatnonzero(table.uid >= 0)
        prompts = running[table.length[running] - table.computed[running] > 1]
        have = table.num_pages[prompts] - table.first_page[prompts]
        promised = int(np.maximum(self.pages_for(table.length[prompts]) - have, 0).sum())
        if len(running) and self.pages_for(count) - len(held) > pool.available - promised:
            pool.release(np.array(held, dtype=np.int32))
            return 0
        row = self._free_rows.pop()
        table.place(sequence, row)
        sequence.status = Status.RUNNING
        self._count_waiting(sequence, -1)
        table.page_table[row, : len(pages)] = pages
        table.num_pages[row] = table.published[row] = len(pages)
        table.first_page[row] = len(pages) - len(held)
        hit = len(pages) * size + tail
        if not sequence.admitted:
            sequence.admitted = time.monotonic()
            sequence.cached_tokens = min(hit, sequence.prompt_len)
            self.cached_tokens += sequence.cached_tokens
        run = min(count - hit, budget, (len(pages) + pool.available) * size - hit)
        if tail:
            pool.touch(tail_page)
        self._extend(row, hit + run)
        if tail:
            copies.append((tail_page, int(table.page_table[row, len(pages)]), tail))
        table.computed[row], table.committed[row] = hit, len(pages) * size  # the tail is copied at the launch
        for digest in sequence.digests[len(pages) + 1 : full + 1]:
            self._pending.setdefault(digest, sequence)
        return run

    def _last_running(self) -> int:
        table = self.table
        rows = np.flatnonzero(table.uid >= 0)
        return int(rows[np.lexsort((table.uid[rows], table.key[rows]))[-1]])

    def _preempt(self, row: int) -> None:
        sequence = self.table.sequences[row]
        assert sequence is not None
        sequence.tokens = self.table.tokens[row, : self.table.length[row]].copy()
        self._retire(sequence)
        self.add(sequence)
        self.preemptions += 1

    def _retire(self, sequence: Sequence) -> None:
        """Give back the row and the pages of a running sequence; what they hold stays cached."""
        row = sequence.row
        self._publish(row, tail=True)
        for digest in sequence.digests[int(self.table.published[row]) + 1 :]:
            if self._pending.get(digest) is sequence:
                del self._pending[digest]
        self.pool.release(self.table.pages(row).copy())
        self.table.remove(row)
        self._free_rows.append(row)

    def _publish(self, row: int, tail: bool) -> None:
        """Tell the prefix index of pages filled by committed tokens and, with `tail`, of the one partly filled."""
        table, pool, size = self.table, self.pool, self.pool.page_size
        sequence = table.sequences[row]
        committed = int(table.committed[row])
        if pool.index is None or sequence is None:
            table.published[row] = committed // size
            return
        tokens = table.tokens[row, :committed]
        digests = sequence.digests
        extend_digests(digests, tokens, size)
        full = committed // size
        for i in range(int(table.published[row]), full):
            run = tokens[i * size : (i + 1) * size]
            table.page_table[row, i] = pool.publish(int(table.page_table[row, i]), digests[i], run, digests[i + 1])
            if self._pending.get(digests[i + 1]) is sequence:
                del self._pending[digests[i + 1]]
        table.published[row] = full
        if tail and committed % size:
            pool.publish(int(table.page_table[row, full]), digests[full], tokens[full * size :], None)

    def _leave_window(self, row: int) -> None:
        table, pool = self.table, self.pool
        if pool.retention is None:
            return
        first = max(0, int(table.committed[row]) - pool.retention + 1) // pool.page_size
        if first > table.first_page[row]:
            gone = table.page_table[row, table.first_page[row] : first].copy()
            table.page_table[row, table.first_page[row] : first] = -1
            table.first_page[row] = first
            pool.release(gone)
