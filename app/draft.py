"""DraftModel: proposals for many sequences of many engines, from one small model.

`DraftServer` is the arithmetic, `DraftHost` the process around it, `SocketChannel` an engine's way to it. This module
imports no torch: thread settings must be in the environment before torch is loaded.

The steps' messages go over a socket, authenticated by a secret that only Ray's calls carry: on the same machine a round
trip took 0.1 ms and 0.1 ms of the engine's CPU, a call of a raw Ray actor 2 ms and 1 ms.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

import numpy as np

from app.replica import load_model, load_tokenizer, set_thread_environment
from engine.schemas import DraftAnswer, DraftMessage, DraftSequence

if TYPE_CHECKING:
    from app.settings import ServingConfig
    from engine.speculation import Drafter

logger = logging.getLogger(__name__)

_ROWS = 256  # sequences at once
_NEAR = 32  # tokens to read, beside those of others, that don't make an answer late
_READ = 512  # tokens to read when nobody waits
_HANDSHAKE = 5  # seconds
_NOBODY = ("", -1)
_STOOD = 0.1  # of a sequence's proposals, averaged: below it going on ahead is in vain


@dataclass(slots=True)
class _Engine:
    heard: float
    step: int = 0
    asked: bool = False  # its last message is not answered yet
    news: bool = False  # something was drafted since the last answer
    lost: list[int] = field(default_factory=list)
    ready: int = 0


class DraftServer:
    """Sequences of many engines, drafted for in one batched forward. No thread, no clock, no input or output.

    A sequence is known by (engine, uid). Its row holds the committed tokens and, after them, what the draft goes on
    with: `gamma` tokens are what was asked for, and as many again, with the one that the target adds, are for the case
    that all of those stand. That is worked on when nothing else is left to do, so under load it stops first.
    """

    def __init__(self, drafter: Drafter, lease: float = 60.0) -> None:
        """lease: silent seconds after which an engine's sequences are dropped."""
        rows, width = drafter.table.tokens.shape
        self.drafter, self.lease = drafter, lease
        self.table = drafter.table
        self.context = width - 1
        self.forwards = 0
        self._engines: dict[str, _Engine] = {}
        self._rows: dict[tuple[str, int], int] = {}
        self._keys = [_NOBODY] * rows
        self._known = np.zeros(rows, dtype=np.int64)
        self._length = np.zeros(rows, dtype=np.int64)  # tokens known and drafted
        self._limit = np.zeros(rows, dtype=np.int64)
        self._gamma = np.zeros(rows, dtype=np.int64)
        self._stuck = np.zeros(rows, dtype=bool)  # nothing can be drafted until more is known
        self._stood = np.zeros(rows)

    @property
    def sequences(self) -> int:
        return len(self._rows)

    def put(self, engine: str, message: DraftMessage, now: float) -> None:
        """Take in what an engine says. Answers are due then, see `answers`."""
        state = self._engines.setdefault(engine, _Engine(now))
        state.heard = now
        for uid in message.dropped:
            self._drop((engine, uid))
        for sequence in message.new:
            self._add((engine, sequence.uid), sequence)
        rows = np.array([self._rows.get((engine, uid), -1) for uid in message.uids.tolist()], dtype=np.int64)
        good = (rows >= 0) & (self._known[rows] + message.counts == message.lengths) & (message.lengths <= self.context)
        for i in np.flatnonzero(~good).tolist():
            self._drop((engine, int(message.uids[i])))
            if message.gammas[i]:
                state.lost.append(int(message.uids[i]))
        tokens = message.tokens[np.repeat(good, message.counts)]
        state.ready += self._learn(rows[good], message.gammas[good], message.counts[good], tokens)
        if message.states is not None and good.any():
            self.table.set_states(rows[good], message.lengths[good] - 1, message.states[good])
        state.step, state.asked = message.step, True

    def _learn(self, rows: np.ndarray, gammas: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> int:
        """Take in newly committed tokens; returns for how many rows all that is wanted is there already."""
        table, known, length = self.table, self._known, self._length
        runs = np.repeat(np.arange(len(rows)), counts)
        at = rows[runs]
        places = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts - known[rows], counts)
        wrong = np.flatnonzero((table.tokens[at, places] != tokens) & (places < length[at]))
        first = np.full(len(rows), self.context + 1)
        np.minimum.at(first, runs[wrong], places[wrong])
        stood = first > self.context
        table.write(at, places, tokens)
        known[rows] += counts
        length[rows] = np.where(stood, np.maximum(length[rows], known[rows]), known[rows])
        self.drafter.rewind(rows, np.minimum(first, length[rows] - 1))
        self._gamma[rows] = gammas
        self._stuck[rows] = False
        told = rows[counts > 0]
        self._stood[told] += 0.2 * (stood[counts > 0] - self._stood[told])
        return int(((gammas > 0) & (counts > 0) & (length[rows] >= self._ends(rows, 0))).sum())

    def _ends(self, rows: np.ndarray, ahead: int) -> np.ndarray:
        """Tokens of each row with all that is to be drafted; ahead: 1 with what comes after that."""
        gamma = self._gamma[rows]
        end = self._known[rows] + gamma + ahead * (gamma + 1)
        return np.minimum(end, np.minimum(self._limit[rows] - 1, self.context))

    def work(self) -> bool:
        """One forward; False when there is nothing to do."""
        wanted, near = self._wanted()
        budget = _READ
        if near.any():
            budget = int((self._length - self.drafter.computed)[near].sum()) + _NEAR
        rows = np.flatnonzero(wanted)
        if not len(rows):
            rows = np.flatnonzero(self._ahead())
        if not len(rows):
            return False
        drafter, length = self.drafter, self._length
        before = drafter.computed[rows].copy()
        ids = drafter.advance(rows, length[rows], budget)
        self.forwards += 1
        there = drafter.computed[rows] == length[rows]
        drafted = ids >= 0
        self._stuck[rows[there & ~drafted]] = True
        halted = drafter.computed[rows] == before
        if halted.all() and not self._give_pages_back():
            self._stuck[rows[halted]] = True
        self.table.write(rows[drafted], length[rows[drafted]], ids[drafted].astype(np.int32))
        length[rows[drafted]] += 1
        for row in rows[drafted].tolist():
            self._engines[self._keys[row][0]].news = True
        return True

    def _wanted(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows that lack something asked for, and those that can have it soon."""
        everyone = np.arange(len(self._known))
        wanted = (self._gamma > 0) & ~self._stuck & (self._length < self._ends(everyone, 0))
        return wanted, wanted & (self._length - self.drafter.computed <= _NEAR)

    def _ahead(self) -> np.ndarray:
        everyone = np.arange(len(self._known))
        hopeful = (self._gamma > 0) & ~self._stuck & (self._stood >= _STOOD)
        return hopeful & (self._length < self._ends(everyone, 1))

    def answers(self) -> Iterator[tuple[str, DraftAnswer]]:
        """What engines can be told now: all that they asked for and that can be had soon, or what else came since."""
        wanted, near = self._wanted()
        ahead = self._ahead()
        for engine, state in self._engines.items():
            if not state.asked and not state.news:
                continue
            rows = np.array([row for (owner, _), row in self._rows.items() if owner == engine], dtype=np.int64)
            if (near[rows] if state.asked else wanted[rows] | ahead[rows]).any():
                continue
            rows = rows[(self._gamma[rows] > 0) & (self._length[rows] > self._known[rows])]
            counts = self._length[rows] - self._known[rows]
            places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - self._known[rows], counts)
            uids = self.table.uid[rows]
            tokens = self.table.tokens[np.repeat(rows, counts), places]
            answer = DraftAnswer(state.step, uids, self._known[rows], counts, tokens, state.lost, state.ready)
            state.asked, state.news, state.lost, state.ready = False, False, [], 0
            yield engine, answer

    def goodbye(self, engine: str) -> None:
        """An engine has left: its sequences go."""
        for key in [key for key in self._rows if key[0] == engine]:
            self._drop(key)
        self._engines.pop(engine, None)

    def expire(self, now: float) -> None:
        """Drop what engines hold that have been silent for a lease."""
        for engine in [name for name, state in self._engines.items() if state.heard < now - self.lease]:
            self.goodbye(engine)

    def _add(self, key: tuple[str, int], sequence: DraftSequence) -> None:
        self._drop(key)
        count = len(sequence.tokens)
        row = self._free_row()
        if row is None or count > self.context:
            return
        self._rows[key], self._keys[row] = row, key
        self._known[row] = self._length[row] = count
        self._limit[row] = sequence.limit
        self._stood[row] = _STOOD
        self._gamma[row] = 1  # taken, until its engine says more: the next new one goes elsewhere
        self.table.uid[row] = sequence.uid
        self.table.write(np.full(count, row), np.arange(count), sequence.tokens)
        self.drafter.sampling.set(
            row, sequence.request, sequence.seed, sequence.prompt_len, sequence.stop_ids, sequence.bad_words
        )

    def _free_row(self) -> int | None:
        """A row that nobody has, or else one that nothing is wanted for."""
        if _NOBODY in self._keys:
            return self._keys.index(_NOBODY)
        idle = np.flatnonzero(self._gamma == 0)
        if not len(idle):
            return None
        self._drop(self._keys[idle[0]])
        return int(idle[0])

    def _give_pages_back(self) -> bool:
        """Forget the keys and values of sequences that nothing is wanted for; False when there are none."""
        idle = np.flatnonzero((self._gamma == 0) & (self.drafter.num_pages > 0))
        self.drafter.forget(idle)
        return len(idle) > 0

    def _drop(self, key: tuple[str, int]) -> None:
        row = self._rows.pop(key, None)
        if row is None:
            return
        self._keys[row] = _NOBODY
        self.drafter.forget(np.array([row]))
        self.drafter.sampling.clear(row)
        self.table.uid[row] = -1
        self._gamma[row] = self._known[row] = self._length[row] = 0


def _expect_answers(connection: Connection, within: int) -> None:
    """Reads that take longer, in seconds, raise OSError; 0: they may take for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", within, 0))


class _Link:
    """A connection with a thread for each direction, so that neither end ever waits for the other."""

    def __init__(self, connection: Connection, on_message: Callable[[Any], None], on_close: Callable[[], None]) -> None:
        self._connection, self._on_message, self._on_close = connection, on_message, on_close
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.open = True

    def start(self) -> None:
        for target in (self._read, self._write):
            threading.Thread(target=target, name="draft link", daemon=True).start()

    def send(self, message: Any) -> None:
        self._outbox.put(message)

    def close(self) -> None:
        self._outbox.put(None)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # what wakes the reader, as closing doesn't

    def _read(self) -> None:
        try:
            while True:
                self._on_message(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("a message that can't be read")
        self.open = False
        self.close()
        self._connection.close()
        self._on_close()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._connection.send(message)


class DraftHost:
    """Listens, and runs a DraftServer in a thread of its own."""

    def __init__(self, server: DraftServer, host: str, vocab_size: int, description: dict[str, Any]) -> None:
        self.server, self.vocab_size, self.description = server, vocab_size, description
        self.key = secrets.token_bytes(32)
        self._listener = Listener((host, 0), backlog=64)
        self._inbox: queue.SimpleQueue[tuple[str, DraftMessage | None]] = queue.SimpleQueue()
        self._links: dict[str, _Link] = {}
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._last = time.monotonic()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._run, self._accept)]
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> tuple[str, int]:
        address: tuple[str, int] = self._listener.address
        return address

    def check_health(self) -> None:
        """Raises when the thread that drafts is dead or stuck."""
        if self._failure is not None:
            raise RuntimeError(f"the draft has died: {self._failure!r}")
        if time.monotonic() - self._last > 60:
            raise RuntimeError("the draft is stuck")

    def close(self) -> None:
        self._stop.set()
        self._listener.close()
        for link in list(self._links.values()):
            link.close()
        self._threads[0].join(timeout=10)

    def _run(self) -> None:
        try:
            busy = False
            while not self._stop.is_set():
                self._last = time.monotonic()
                self._read_inbox(0.0 if busy else 0.5)
                busy = self.server.work()
                for engine, answer in self.server.answers():
                    if (link := self._links.get(engine)) is not None:
                        link.send(answer)
        except BaseException as error:
            self._failure = error
            logger.exception("the draft died")
            for link in list(self._links.values()):
                link.close()

    def _read_inbox(self, timeout: float) -> None:
        with contextlib.suppress(queue.Empty):
            engine, message = self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
            while True:
                if message is None:
                    self.server.goodbye(engine)
                else:
                    self.server.put(engine, message, self._last)
                engine, message = self._inbox.get_nowait()
        self.server.expire(self._last)

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                connection = self._listener.accept()
            except OSError:  # the other side has gone again, or there are too many files
                time.sleep(0.1)
                continue
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: Connection) -> None:
        """Nothing is unpickled before the other side has shown that it knows the key."""
        try:
            _expect_answers(connection, within=_HANDSHAKE)
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            name, vocab_size = connection.recv()
            if vocab_size != self.vocab_size:
                connection.send(f"the draft's vocabulary of {self.vocab_size} is not the target's {vocab_size}")
                connection.close()
                return
            connection.send(self.description)
            _expect_answers(connection, within=0)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            return
        engine = f"{name} {secrets.token_hex(4)}"  # a connection's sequences end with it
        link = self._links[engine] = _Link(
            connection, lambda message: self._inbox.put((engine, message)), lambda: self._close(engine)
        )
        link.start()

    def _close(self, engine: str) -> None:
        self._links.pop(engine, None)
        self._inbox.put((engine, None))


class SocketChannel:
    """An engine's way to a DraftHost: `engine.speculation.DraftChannel`. Not connected at first, and again after a
    loss. A draft that answers a message for `silence` seconds with nothing is lost."""

    silence = 5.0

    def __init__(self) -> None:
        self.on_round_trip: Callable[[float], None] = lambda seconds: None
        self.description: dict[str, Any] | None = None  # of the draft that is connected, or was last
        self._link: _Link | None = None
        self._inbox: queue.SimpleQueue[DraftAnswer | None] = queue.SimpleQueue()
        self._sent: tuple[int, float] | None = None
        self._heard = 0.0
        self._renewed = False  # another draft, which the engine hasn't been told of

    @property
    def connected(self) -> bool:
        return self._link is not None and self._link.open

    @property
    def up(self) -> bool:
        """Whether a draft is connected and not silent now; for any thread, also of an engine that is idle."""
        sent = self._sent
        silent = sent is not None and self._heard < sent[1] < time.perf_counter() - 1.0
        return self.connected and not silent

    @property
    def target_hidden_size(self) -> int:
        return 0 if self.description is None else self.description.get("target_hidden_size", 0)

    def connect(self, address: tuple[str, int], key: bytes, name: str, vocab_size: int, hidden_size: int) -> None:
        """May take seconds: not for the engine's thread. Raises ConnectionError, or ValueError when
        draft and target don't go together."""
        try:
            connection = Client(address)
            _expect_answers(connection, within=_HANDSHAKE)
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            connection.send((name, vocab_size))
            answer = connection.recv()
            _expect_answers(connection, within=0)
        except (AuthenticationError, EOFError, OSError) as error:
            raise ConnectionError(f"no draft at {address}: {error!r}") from None
        if isinstance(answer, str):
            raise ValueError(answer)
        if (size := answer.get("target_hidden_size", 0)) not in (0, hidden_size):
            connection.close()
            raise ValueError(f"the draft reads hidden states of {size}, not the target's of {hidden_size}")
        self._renewed, self._sent = self.description is not None, None
        self.description = answer
        inbox: queue.SimpleQueue[DraftAnswer | None] = queue.SimpleQueue()

        def hear(answer: DraftAnswer) -> None:
            self._heard = time.perf_counter()
            inbox.put(answer)

        link = _Link(connection, hear, lambda: inbox.put(None))
        link.start()
        self._inbox, self._link = inbox, link

    def send(self, message: DraftMessage) -> None:
        self._tell_of_loss()
        if self._link is None:
            raise ConnectionError("no draft is connected")
        self._sent = (message.step, time.perf_counter())
        self._link.send(message)

    def _tell_of_loss(self) -> None:
        if self._renewed:
            self._renewed = False
            raise ConnectionError("the draft is another one")

    def receive(self, timeout: float) -> DraftAnswer | None:
        self._tell_of_loss()
        if self._link is None:
            return None
        try:
            answer = self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
        except queue.Empty:
            if self._sent is not None and time.perf_counter() - self._sent[1] > self.silence:
                answer = None
            else:
                return None
        if answer is None:
            self.close()
            raise ConnectionError("the draft is gone")
        if self._sent is not None and answer.step == self._sent[0]:
            self.on_round_trip(time.perf_counter() - self._sent[1])
            self._sent = None
        return answer

    def close(self) -> None:
        link, self._link, self._sent = self._link, None, None
        if link is not None:
            link.close()


def build_draft(config: ServingConfig, host: str, threads: int, gpus: float) -> DraftHost:
    """Loads the configured draft, on a GPU (a share of one) or on the CPU, and listens on `host`. Raises ValueError."""
    set_thread_environment(threads, config.omp_wait_policy)
    import torch

    torch.set_num_threads(threads)
    from engine.batch_engine import sane_dtype
    from engine.memory import fitting_pages
    from engine.sampling import SamplingTable, Vocabulary
    from engine.sequence import SequenceTable
    from engine.speculation import CATCH_UP, Drafter

    tokenizer = load_tokenizer(config)
    device = torch.device("cuda" if gpus else "cpu")
    model = load_model(config.of_draft().model_copy(update={"device": device.type}), tokenizer)
    model = model.to(dtype=sane_dtype(model.dtype, device))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    context = min(config.max_model_len or model.max_seq_len, model.max_seq_len)
    rows = max(_ROWS, config.max_batch_size)
    page_size = model.attention.default_page_size
    pages = fitting_pages(
        model,
        page_size,
        max_seq_len=context,
        max_batch_size=rows,
        max_batched_tokens=CATCH_UP,
        memory_fraction=0.9 if gpus == 1 else gpus or 0.25,  # beside an engine there is less
    )
    table = SequenceTable(rows, context, 1, device)
    vocabulary = Vocabulary(model.vocab_size, tokenizer)
    drafter = Drafter(model, table, SamplingTable(rows, device), vocabulary, page_size=page_size, num_pages=pages)
    description = {
        "model": config.draft_model,
        "model_class": type(model).__name__,
        "param_count_total": parameters,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "max_seq_len": context,
        "target_hidden_size": model.target_hidden_size,
        "num_pages": pages,
        "num_threads": threads,
        "pid": os.getpid(),
    }
    return DraftHost(DraftServer(drafter), host, vocabulary.size, description)
