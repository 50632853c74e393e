"""A sequence: one request on its way through the engine, and the arrays that hold the running ones."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention import to_device
from engine.models.lora import Adapter
from engine.sampling import SamplingTable
from engine.schemas import GenerationRequest, TokenLogprobs
from engine.structured import GrammarState
from engine.tokenization import TextStream


class Status(enum.Enum):
    NEW = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """What Python keeps of a request. The steps work on the arrays of `SequenceTable`, a row a running sequence."""

    uid: int
    request: GenerationRequest
    tag: int  # the caller's name for its tokens; -1: the engine keeps the result itself
    tokens: np.ndarray  # int32, prompt and output as of the last time it was not running
    prompt_len: int
    limit: int  # tokens at which it ends: prompt + max_new_tokens, or the context
    key: float  # the order of service: arrival, shifted by priority
    seed: int
    stop_ids: list[int]
    bad_words: list[list[int]]
    deadline: float
    digests: list[bytes]  # chain over the full pages of `tokens`, root first
    arrival: float
    adapter: Adapter | None = None
    grammar: GrammarState | None = None
    reader: TextStream | None = None  # cuts at stop strings when the caller does not
    status: Status = Status.NEW
    row: int = -1
    cached_tokens: int = 0
    admitted: float = 0.0  # when it first got a row
    first_token: float = 0.0  # when its first token was there, as of the last time it was not running
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])  # nothing precedes the first

    def __lt__(self, other: Sequence) -> bool:
        return (self.key, self.uid) < (other.key, other.uid)


class SequenceTable:
    """The running sequences as arrays, one row each. `length`, `computed` and what depends on them are as planned: a
    step in flight is counted already; `committed` is not."""

    def __init__(self, rows: int, max_seq_len: int, max_pages: int, device: torch.device) -> None:
        self.sequences: list[Sequence | None] = [None] * rows
        self.uid = np.full(rows, -1, dtype=np.int64)  # -1: a free row
        self.tag = np.full(rows, -1, dtype=np.int64)
        self.key = np.zeros(rows)
        self.prompt_len = np.zeros(rows, dtype=np.int64)
        self.limit = np.zeros(rows, dtype=np.int64)
        self.placed = np.zeros(rows, dtype=np.int64)  # tokens that came with the sequence; the others were sampled here
        self.length = np.zeros(rows, dtype=np.int64)  # known tokens
        self.computed = np.zeros(rows, dtype=np.int64)  # tokens with keys and values in the pool
        self.committed = np.zeros(rows, dtype=np.int64)
        self.known = np.zeros(rows, dtype=np.int64)  # tokens that the host has seen
        self.published = np.zeros(rows, dtype=np.int64)  # full pages in the prefix index
        self.num_pages = np.zeros(rows, dtype=np.int64)  # entries of the page table, those that left included
        self.first_page = np.zeros(rows, dtype=np.int64)  # entries before it have left the window
        self.page_table = np.full((rows, max_pages), -1, dtype=np.int32)
        self.first_token = np.zeros(rows)  # when it was there; 0: not yet
        self.has_reader = np.zeros(rows, dtype=bool)
        self.has_grammar = np.zeros(rows, dtype=bool)
        self.has_adapter = np.zeros(rows, dtype=bool)
        self.tokens = np.zeros((rows, max_seq_len + 1), dtype=np.int32)
        # the same by the device: the sampler writes it, so that a step can follow one that is not committed yet
        self.device_tokens = torch.from_numpy(self.tokens).to(device)
        self.states: torch.Tensor | None = None  # [rows, hidden_size], the target's, for a draft that reads them
        self.state_places = torch.full((rows,), -1, device=device)  # of the tokens that were chosen by them
        self.sampling: SamplingTable | None = None  # kept as the rows are

    def hold_states(self, hidden_size: int) -> None:
        """Have room for a final hidden state of the target a row, that which chose the row's last known token."""
        if self.states is None:
            rows, device = len(self.uid), self.device_tokens.device
            self.states = torch.zeros((rows, hidden_size), dtype=torch.float32, device=device)

    def set_states(self, rows: np.ndarray, places: np.ndarray, states: torch.Tensor | np.ndarray) -> None:
        """Put states [n, hidden_size], which chose the tokens at places [n] of rows [n]."""
        assert self.states is not None
        at = to_device(np.stack((rows, places)), self.states.device)
        self.states.index_copy_(0, at[0], torch.as_tensor(states).to(self.states))
        self.state_places.index_copy_(0, at[0], at[1])

    def states_at(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """States [n, hidden_size] that chose the tokens at places [n] of rows [n], int64; zeros for those not held."""
        assert self.states is not None
        return self.states[rows] * (self.state_places[rows] == places).unsqueeze(1)

    def place(self, sequence: Sequence, row: int) -> None:
        """Give a sequence a row, with nothing computed."""
        count = len(sequence.tokens)
        sequence.row = row
        self.sequences[row] = sequence
        self.uid[row], self.tag[row], self.key[row] = sequence.uid, sequence.tag, sequence.key
        self.prompt_len[row], self.limit[row] = sequence.prompt_len, sequence.limit
        self.placed[row] = self.length[row] = self.known[row] = count
        self.computed[row] = self.committed[row] = self.published[row] = 0
        self.num_pages[row] = self.first_page[row] = 0
        self.first_token[row] = sequence.first_token
        self.has_reader[row] = sequence.reader is not None
        self.has_grammar[row] = sequence.grammar is not None
        self.has_adapter[row] = sequence.adapter is not None
        if self.states is not None:
            self.state_places[row] = -1
        if self.sampling is not None:
            self.sampling.set(
                row, sequence.request, sequence.seed, sequence.prompt_len, sequence.stop_ids, sequence.bad_words
            )
        self.tokens[row, :count] = sequence.tokens
        if self.device_tokens.device.type != "cpu":
            self.device_tokens[row, :count] = to_device(sequence.tokens, self.device_tokens.device)

    def write(self, rows: np.ndarray, places: np.ndarray, ids: np.ndarray) -> None:
        """Put ids [n] at places [n] of rows [n], for the host and for the device."""
        self.tokens[rows, places] = ids
        device = self.device_tokens.device
        if device.type != "cpu":
            at = to_device(np.stack((rows, places, ids.astype(np.int64))), device)
            self.device_tokens.index_put_((at[0], at[1]), at[2].to(torch.int32))

    def remove(self, row: int) -> None:
        sequence = self.sequences[row]
        assert sequence is not None
        sequence.row = -1
        sequence.first_token = float(self.first_token[row])
        self.sequences[row] = None
        self.uid[row] = self.tag[row] = -1
        self.page_table[row, : self.num_pages[row]] = -1
        self.has_reader[row] = self.has_grammar[row] = False
        if self.sampling is not None:
            self.sampling.clear(row)

    def pages(self, row: int) -> np.ndarray:
        """The pages that a row holds, in order."""
        return self.page_table[row, self.first_page[row] : self.num_pages[row]]
