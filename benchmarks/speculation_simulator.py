"""What speculation gives, from acceptance and the seconds of a step, of a drafted token, of a round trip.

    python -m benchmarks.speculation_simulator    # the tables of docs/speculation.md

One sequence, whose draft tokens are each right with the same probability. `synchronous`: the target waits for the draft
and the draft for the target (a draft in the engine's process). `ahead`: a draft elsewhere goes on while the target
verifies, as `engine.speculation.RemoteProposer` and `app.draft.DraftServer` do.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_GAMMA = 8
ACCEPTANCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
DRAFT_COSTS = (0.02, 0.05, 0.1, 0.2, 0.4)  # of a drafted token, in steps
ROUND_TRIP = 0.02  # in steps
_HOPE = 0.25  # as in app.draft: below it a draft doesn't go ahead


@dataclass(frozen=True)
class Costs:
    """Seconds."""

    step: float
    draft: float = 0.0  # a drafted token
    round_trip: float = 0.0
    token: float = 0.0  # what each further token adds to a step

    def verifying(self, gamma: int) -> float:
        return self.step + gamma * self.token


def tokens_a_step(acceptance: float, gamma: int) -> float:
    """Expected tokens of a step that verifies gamma (Leviathan et al. 2023, equation 1)."""
    if acceptance == 1:
        return gamma + 1.0
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


def synchronous(acceptance: float, gamma: int, costs: Costs) -> float:
    """Tokens a second."""
    return tokens_a_step(acceptance, gamma) / (costs.verifying(gamma) + costs.round_trip + gamma * costs.draft)


def ahead(acceptance: float, gamma: int, costs: Costs, tokens: int = 4000, seed: int = 0) -> float:
    """Tokens a second, of a run of `tokens`."""
    rng = random.Random(seed)
    draft = _Draft(acceptance, gamma, costs, rng)
    pays = tokens_a_step(acceptance, gamma) * costs.step - costs.verifying(gamma)  # seconds that a step's drafts save
    now, known, awaiting = 0.0, 0, False
    branch, count = draft.branch, 0  # the last proposal that has come
    coming: deque[tuple[float, _Branch, int, bool]] = deque()

    def receive(until: float) -> None:
        nonlocal branch, count, awaiting
        coming.extend(draft.run(until - costs.round_trip / 2))
        while coming and coming[0][0] + costs.round_trip / 2 <= until:
            _, branch, count, answers = coming.popleft()
            awaiting &= not answers

    def in_hand() -> int:
        return count - (known - branch.base) if known - branch.base <= branch.right else 0

    while known < tokens:
        receive(now)
        waits = in_hand() <= 0 and not awaiting and pays > costs.round_trip + gamma * costs.draft
        if not awaiting:
            coming.extend(draft.tell(known, now + costs.round_trip / 2))
            awaiting = True
        deadline = now + pays
        if waits:
            now = min(max(now, draft.due + costs.round_trip / 2) + 1e-9 * costs.step, deadline)
            receive(now)
        drafted = max(min(in_hand(), gamma), 0)
        stood = min(drafted, branch.right - (known - branch.base)) if drafted else 0
        now += costs.verifying(drafted)
        known += stood + 1
    return known / now


@dataclass
class _Branch:
    """What a draft goes on with after `base` tokens; the first `right` of it are what the target will say."""

    base: int
    right: int


class _Draft:
    """A draft's time: a token after the other, up to the proposal that was asked for, then what may come after it."""

    def __init__(self, acceptance: float, gamma: int, costs: Costs, rng: random.Random) -> None:
        self.acceptance, self.gamma, self.cost, self.rng = acceptance, gamma, max(costs.draft, 1e-9), rng
        self.told, self.count, self.clock, self.stood = 0, 0, 0.0, _HOPE
        self.asked = self.news = False
        self.branch = self._new_branch(0)

    def tell(self, known: int, at: float) -> Iterator[tuple[float, _Branch, int, bool]]:
        """A message arrives; yields what was answered before. It is read when the forward that runs has ended."""
        yield from self.run(at)
        if self.count < self._end():
            self.clock += self.cost
            self.count += 1
        else:
            self.clock = at
        come = known - self.branch.base
        stood = min(come, self.count) <= self.branch.right
        self.stood += 0.3 * (stood - self.stood)
        self.told, self.asked = known, True
        if not stood or come > self.count:
            self.branch, self.count = self._new_branch(known), 0

    @property
    def due(self) -> float:
        """When the answer to the last message leaves."""
        return self.clock + max(self._wanted() - self.count, 0) * self.cost

    def run(self, until: float) -> Iterator[tuple[float, _Branch, int, bool]]:
        """Draft, and yield the answers that leave until then: when, of which branch, how many tokens, and whether they
        are the answer to the last message."""
        while True:
            if self.asked and self.count >= self._wanted():
                yield self.clock, self.branch, self.count, True
                self.asked = self.news = False
            if self.count >= self._end():
                if self.news and not self.asked:
                    yield self.clock, self.branch, self.count, False
                    self.news = False
                return
            if self.clock + self.cost > until:
                return
            self.clock += self.cost
            self.count += 1
            self.news = True

    def _wanted(self) -> int:
        return self.told + self.gamma - self.branch.base

    def _end(self) -> int:
        return self._wanted() + (self.gamma + 1 if self.stood >= _HOPE else 0)

    def _new_branch(self, base: int) -> _Branch:
        if self.acceptance >= 1:
            return _Branch(base, 1 << 40)
        if self.acceptance <= 0:
            return _Branch(base, 0)
        return _Branch(base, int(math.log(1 - self.rng.random()) / math.log(self.acceptance)))


def best(rate: Callable[[float, int, Costs], float], acceptance: float, costs: Costs) -> tuple[float, int]:
    """Speed-up over plain decoding with the gamma that gives most, and that gamma."""
    return max((rate(acceptance, gamma, costs) * costs.step, gamma) for gamma in range(1, MAX_GAMMA + 1))


def table() -> str:
    """Markdown: speed-ups and the gammas that give them."""
    lines = []
    for rate, round_trip in ((synchronous, 0.0), (ahead, ROUND_TRIP)):
        lines.append("| " + " | ".join([f"{rate.__name__}, acceptance", *(f"{cost:g}" for cost in DRAFT_COSTS)]) + " |")
        lines.append("|---" * (len(DRAFT_COSTS) + 1) + "|")
        for acceptance in ACCEPTANCES:
            cells = [f"{acceptance:g}"]
            for cost in DRAFT_COSTS:
                gain, gamma = best(rate, acceptance, Costs(1.0, cost, round_trip))
                cells.append(f"{gain:.2f} ({gamma})" if gain >= 1.02 else "off")
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    print(table())
