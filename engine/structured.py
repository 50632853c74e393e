"""Structured output: grammars that say which tokens may come next, by xgrammar.

A grammar comes from a client, so it is met with suspicion: one that isn't plain is first compiled and followed in a
process of its own, where limits of time and memory can be enforced, and a step that its grammar holds up ends it.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.grammars import GRAMMAR_ERROR, GrammarSpec
from engine.schemas import QueueFull

if TYPE_CHECKING:
    import xgrammar
    from torch import Tensor

    from engine.sampling import Vocabulary
    from engine.scheduler import StepPlan
    from engine.sequence import SequenceTable

_CACHE_BYTES = 256 << 20
_TASTE_CPU_SECONDS = 5.0
_TASTE_BYTES = 2 << 30
_TASTE_STEPS = 96
_SLOW, _PATIENCE = 0.05, 0.3  # CPU seconds for one token, which a garbage collection may take; over all slow ones
_BUSY_SECONDS = 20.0


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps what it compiled within a bound. From any thread.

    Compiling leaves Python, so other threads go on. A grammar that isn't plain is compiled and followed for some steps
    in another process first; one that is too much for that is refused.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tasting = threading.Lock()
        self._compilers: list[Any] = []
        self._verdicts: OrderedDict[GrammarSpec, str] = OrderedDict()  # of the taster; empty: it may be compiled
        self._taster: subprocess.Popen[bytes] | None = None

    def compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        """ValueError with the reason for a grammar that can't be compiled; QueueFull when many wait for that."""
        if not self._vocabulary.eos:
            raise ValueError("a grammar needs a tokenizer with an EOS token")
        if not spec.is_plain and (verdict := self._taste(spec)):
            raise ValueError(verdict)
        with self._lock:
            self._compilers = self._compilers or make_compilers(self._pieces(), self._vocabulary.eos)
        return compile_grammar(self._compilers, spec)

    def state(self, spec: GrammarSpec, output_ids: Iterable[int] = ()) -> GrammarState:
        """The state of a sequence after its output so far. As `compile`; ValueError too if that output doesn't fit."""
        state = GrammarState(self.compile(spec))
        for token_id in output_ids:
            if not state.advance(token_id):
                raise ValueError(f"output_ids: {state.error or 'they break the grammar'}")
        return state

    def close(self) -> None:
        """End the process that tries grammars, if there is one."""
        with self._tasting:
            if self._taster is not None:
                self._taster.kill()
                self._taster.communicate()
                self._taster = None

    def _pieces(self) -> list[bytes]:
        """The bytes of every token; none for those that no text contains."""
        tokenizer = self._vocabulary.tokenizer
        assert tokenizer is not None
        hidden = tokenizer.special_token_ids | set(self._vocabulary.forbidden) | set(self._vocabulary.eos)
        return [b"" if i in hidden else tokenizer.token_bytes(i) for i in range(self._vocabulary.size)]

    def _taste(self, spec: GrammarSpec) -> str:
        """What is wrong with a grammar; empty if nothing."""
        if not self._tasting.acquire(timeout=_BUSY_SECONDS):
            raise QueueFull("other grammars are being compiled")
        try:
            if (verdict := self._verdicts.get(spec)) is None:
                verdict = self._verdicts[spec] = self._ask_taster(spec)
                while len(self._verdicts) > 1024:
                    self._verdicts.popitem(last=False)
            return verdict
        finally:
            self._tasting.release()

    def _ask_taster(self, spec: GrammarSpec) -> str:
        if self._taster is None:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
            self._taster = subprocess.Popen(
                [sys.executable, "-c", "from engine.structured import taste; taste()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            pickle.dump((self._pieces(), self._vocabulary.eos), self._taster.stdin)  # type: ignore[arg-type]
        taster = self._taster
        assert taster.stdin is not None and taster.stdout is not None
        try:
            pickle.dump(spec, taster.stdin)
            taster.stdin.flush()
            return str(pickle.load(taster.stdout))
        except (EOFError, OSError):
            taster.stdin.close()
            taster.stdout.close()
            code, self._taster = taster.wait(), None
            if code in (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT):
                return f"{GRAMMAR_ERROR}is too complex"
            raise RuntimeError(f"the process that tries grammars ended with code {code}") from None


def make_compilers(pieces: list[bytes], eos: list[int]) -> list[Any]:
    """xgrammar's compilers for free text and for JSON, in whose strings a control character has no place."""
    import xgrammar

    compilers = []
    for banned in (None, re.compile(rb"[\x00-\x09\x0b-\x1f]")):
        allowed = [b"" if banned and banned.search(piece) else piece for piece in pieces]
        info = xgrammar.TokenizerInfo(allowed, xgrammar.VocabType.RAW, vocab_size=len(pieces), stop_token_ids=eos)
        compilers.append(xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES))
    return compilers


def compile_grammar(compilers: list[Any], spec: GrammarSpec) -> xgrammar.CompiledGrammar:
    """ValueError with xgrammar's reason."""
    free, strict = compilers
    try:
        if spec.kind == "structural_tag":
            return strict.compile_structural_tag(f'{{"type": "structural_tag", "format": {spec.text}}}')
        if spec.kind in ("json_schema", "json_object"):
            schema = spec.text or '{"type": "object", "additionalProperties": true}'
            return strict.compile_json_schema(schema, any_whitespace=False)
        if spec.kind == "regex":
            return free.compile_regex(spec.text)
        if spec.kind == "choice":
            words = [json.dumps(word, ensure_ascii=False) for word in json.loads(spec.text)]
            return free.compile_grammar("root ::= " + " | ".join(words))
        return free.compile_grammar(spec.text)
    except RuntimeError as error:
        reason = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip()
        raise ValueError(f"{GRAMMAR_ERROR}can't be compiled: {reason[:500]}") from None


def taste() -> None:
    """The process that tries grammars: reads them from stdin, answers what is wrong. A signal ends it when one takes
    too long, which no thread could do."""
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    pieces, eos = pickle.load(source)
    compilers = make_compilers(pieces, eos)
    with open("/proc/self/statm") as sizes:
        limit = int(sizes.read().split()[0]) * resource.getpagesize() + _TASTE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while True:
        try:
            spec = pickle.load(source)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, _TASTE_CPU_SECONDS)
        try:
            verdict = _try_out(compilers, spec, len(pieces))
        except (ValueError, MemoryError) as error:
            verdict = str(error) or f"{GRAMMAR_ERROR}is too complex"
        signal.setitimer(signal.ITIMER_PROF, 0)
        pickle.dump(verdict, answers)
        answers.flush()


def _try_out(compilers: list[Any], spec: GrammarSpec, size: int) -> str:
    """Follow a grammar along a random path."""
    import torch

    from engine.sampling import unpack_masks

    state, rng = GrammarState(compile_grammar(compilers, spec)), np.random.default_rng(0)
    mask = torch.zeros((1, -(-size // 32)), dtype=torch.int32)
    for _ in range(_TASTE_STEPS):
        state.fill(mask, 0)
        allowed = np.flatnonzero(unpack_masks(mask, size)[0].numpy())
        if not len(allowed):
            return f"{GRAMMAR_ERROR}allows no token at some point"
        if not state.advance(int(rng.choice(allowed))) or state.is_over:
            break
    return state.error


class GrammarState:
    """Where a sequence is in its grammar. `error` says why it can't go on: its tokens took too long, or none fits."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self.error = ""
        self._waited = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the EOS has been taken."""
        return self._matcher.is_terminated()

    def fill(self, masks: Tensor, index: int) -> None:
        """Write what may come next, a bit a token, into a row of masks, int32 [n, vocabulary / 32] on the CPU."""
        if self.error or self.is_over:
            masks[index] = -1
            return
        start = time.thread_time()
        self._matcher.fill_next_token_bitmask(masks, index)
        self._check_time(start)

    def advance(self, token_id: int) -> bool:
        """Take a token; False, and nothing changes, if it doesn't fit."""
        if self.error or self.is_over:
            return False
        start = time.thread_time()
        fits = self._matcher.accept_token(token_id)
        self._check_time(start)
        return fits

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        if count:
            self._matcher.rollback(count)

    def fitting(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens fit, one after the other. The state stays."""
        count = 0
        while count < len(token_ids) and self.advance(token_ids[count]):
            count += 1
        self.rollback(count)
        return count

    def _check_time(self, start: float) -> None:
        if (seconds := time.thread_time() - start) > _SLOW:
            self._waited += seconds
        if self._waited > _PATIENCE:
            self.error = f"{GRAMMAR_ERROR}takes too long to follow"


def fill_masks(plan: StepPlan, table: SequenceTable, size: int) -> tuple[np.ndarray, Tensor] | None:
    """Masks for the sampled positions of a step whose sequences have grammars: which rows of the step's logits
    (int64 [n]), and their masks (int32 [n, size / 32]). Position j of a verified run knows its first j drafts."""
    import torch

    places = plan.drafts[plan.samples] + 1
    first = np.cumsum(places) - places
    at = np.flatnonzero(table.has_grammar[plan.rows[plan.samples]])
    if not len(at):
        return None
    rows = np.concatenate([np.arange(first[i], first[i] + places[i]) for i in at.tolist()])
    masks = torch.zeros((len(rows), -(-size // 32)), dtype=torch.int32)
    runs = np.flatnonzero(plan.samples)[at]
    index = 0
    for run in runs.tolist():
        sequence = table.sequences[plan.rows[run]]
        assert sequence is not None and sequence.grammar is not None
        state, taken = sequence.grammar, 0
        drafts = plan.draft_ids[run, : plan.drafts[run]].tolist() if len(plan.draft_ids) else []
        for token_id in [*drafts, None]:
            state.fill(masks, index)
            index += 1
            taken += token_id is not None and state.advance(token_id)
        state.rollback(taken)
    return rows, masks
