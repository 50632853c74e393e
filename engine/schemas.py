"""The one request type of the system and what comes back for it."""

from __future__ import annotations

import enum
import uuid
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from engine.grammars import GrammarSpec

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024

StopString = Annotated[str, StringConstraints(min_length=1, max_length=512)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class SamplingParams(BaseModel):
    """How the next tokens are chosen and when to stop.

    The order of operations on a row of logits is: repetition penalty, frequency and presence penalties,
    logit_bias, forbidden ids, temperature, top_k, top_p, min_p, then a Gumbel-max draw. `temperature=0` is argmax
    after the forbidden ids; the filters after it don't apply.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=())

    max_new_tokens: int = Field(50, ge=1, validation_alias=AliasChoices("max_new_tokens", "max_tokens"))
    temperature: float = Field(1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=1, description="keep the k likeliest tokens")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="keep the likeliest tokens up to this mass")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="drop tokens below this fraction of the likeliest")
    repetition_penalty: float = Field(1.0, ge=1.0, le=100.0, description="over prompt and output")
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="over the output, per occurrence")
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="over the output, once")
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict, max_length=MAX_LOGIT_BIAS
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="one is drawn at admission when absent")
    min_tokens: int = Field(0, ge=0, description="no EOS and no stop token before this many output tokens")
    ignore_eos: bool = False
    stop: list[StopString] = Field(default_factory=list, max_length=16)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=64)
    bad_words: list[StopString] = Field(default_factory=list, max_length=128)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="top alternatives per output token")
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    grammar: GrammarSpec | None = Field(None, description="what the output must look like")
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: object) -> object:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_new_tokens {self.max_new_tokens}")
        clash = [name for name in ("min_tokens", "ignore_eos", "bad_words") if getattr(self, name)]
        if self.grammar is not None and clash:
            raise ValueError(f"{clash[0]} and a grammar exclude each other")
        return self


class GenerationRequest(SamplingParams):
    """One prompt to continue.

    Give `prompt` or `prompt_ids`. `output_ids` are tokens already generated for this request: generation goes on
    after them, and limits, penalties and log-probabilities count them (a resumed or failed-over request).
    """

    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex, min_length=1, max_length=256)
    prompt: str | None = None
    prompt_ids: list[TokenId] | None = None
    output_ids: list[TokenId] = Field(default_factory=list)
    attempt: int = Field(0, ge=0)
    priority: int = Field(0, ge=-1000, le=1000, description="lower runs earlier")
    timeout: float | None = Field(None, gt=0, description="seconds from arrival to the deadline")
    cache_salt: str | None = Field(None, max_length=256, description="prefix cache entries are shared within a salt")
    adapter: str | None = None

    @model_validator(mode="after")
    def _has_a_prompt(self) -> GenerationRequest:
        if (self.prompt is None) == (self.prompt_ids is None):
            raise ValueError("give exactly one of prompt and prompt_ids")
        if self.prompt_ids is not None and not self.prompt_ids:
            raise ValueError("prompt_ids is empty")
        return self


class FinishReason(enum.StrEnum):
    STOP = "stop"  # EOS, a stop token id or a stop string
    LENGTH = "length"  # max_new_tokens or the context's end
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of one position under the unmodified logits; `top` is sorted, best first."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class GenerationResult:
    """How a request ended. `token_ids` are the sampled tokens, without the EOS that ended them."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int = 0
    stop_reason: str | int | None = None
    error: str | None = None
    attempt: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float | None = None  # from its first step to its first token; None without one
    decode_seconds: float | None = None  # from there to its end
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


ORIGINS = ("target", "draft", "draft_ahead")
"""Who proposed a token: nobody; a draft; a draft that had gone on before the tokens it follows were known."""


@dataclass(slots=True)
class StepTokens:
    """What one step gave, as arrays: nothing in it is per sequence but `finished` and `logprobs`.

    tags: int64 [n], the tag given with each request; counts: int32 [n], new tokens of each;
    tokens: int32 [sum(counts)], in the order of tags. A sequence whose last token was an EOS appears in
    `finished` only. A sequence's tokens come before or together with its end, never after. cached: full pages, by
    digest, that came into the prefix cache (True) or left it. origins: int8, indices into ORIGINS; None: all 0.
    """

    tags: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    finished: list[tuple[int, GenerationResult]] = field(default_factory=list)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    cached: dict[bytes, bool] = field(default_factory=dict)
    origins: np.ndarray | None = None


@dataclass(slots=True)
class DraftSequence:
    """A sequence as a remote draft gets to know it. `request` is without its prompt."""

    uid: int
    request: GenerationRequest
    seed: int
    prompt_len: int
    limit: int  # tokens at which it ends
    stop_ids: list[int]
    bad_words: list[list[int]]
    tokens: np.ndarray  # int32, all that are committed


@dataclass(slots=True)
class DraftMessage:
    """What an engine tells a remote draft, at most once a step; in this order. The first one of a connection is empty.

    uids, gammas, lengths, counts: int64 [n], the sequences of which something has changed: tokens to propose after the
    committed ones (0: stop working on it), tokens committed, and how many of those the draft doesn't know;
    tokens: int32 [sum(counts)], those. states: for a draft that reads them, the target's final hidden states that chose
    the last ones committed, or zeros, float16 [n, hidden_size].
    """

    step: int
    dropped: list[int]
    new: list[DraftSequence]
    uids: np.ndarray
    gammas: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    states: np.ndarray | None = None


@dataclass(slots=True)
class DraftAnswer:
    """What a remote draft proposes, or has gone on with since.

    step: the last message it knows of. uids, lengths, counts: int64 [n], sequences, the committed length each proposal
    builds on, and its tokens; tokens: int32 [sum(counts)]. lost: sequences that it was asked about and doesn't have.
    ready: proposals that were there before they were asked for.
    """

    step: int
    uids: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    lost: list[int] = field(default_factory=list)
    ready: int = 0


class QueueFull(Exception):
    """The waiting queue is at its bound."""
