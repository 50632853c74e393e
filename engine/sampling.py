"""From logits to token ids: penalties, filters, and a Gumbel-max draw with counter-based noise.

The noise of a candidate is a pure function of (seed, absolute position, token id), so that a request's tokens depend
on its prompt, its parameters and its seed alone: not on its batch, not on preemption, not on the process that
resumes it, and a draft model that uses the same noise proposes what the target would choose (Daliri et al. 2024).
Every method works on all rows at once; the number of operators doesn't depend on how many rows there are.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention import has_triton, to_device
from engine.schemas import SamplingParams, TokenLogprobs
from engine.tokenization import Tokenizer

INVALID = -2  # in the place of a token id: the row's logits are not numbers, or everything is forbidden
_COLDEST = 1e-30  # a lower temperature would overflow; this one is argmax already
_REACH = 64.0  # noise spans less than 26: what lies further below the best is never drawn
_BLOCK = 8192  # columns that are worked on at a time
_GOLDEN64 = -7046029254386353131  # 2**64 / phi, as in splitmix64 (Steele et al. 2014)
_GOLDEN32 = -1640531535  # 2654435761, the prime next to 2**32 / phi (Knuth)
_MIX1, _MIX2 = -2048144789, -1028477387  # murmur3's finaliser


def noise_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys for each int64 (seed, position): the halves of splitmix64's output."""
    x = seeds + (positions + 1) * _GOLDEN64
    x = (x ^ _shift64(x, 30)) * -4658895280553007687
    x = (x ^ _shift64(x, 27)) * -7723592293110705685
    x = x ^ _shift64(x, 31)
    return x.to(torch.int32), _shift64(x, 32).to(torch.int32)


def noise_bits(keys: tuple[Tensor, Tensor], token_ids: Tensor) -> Tensor:
    """31 random bits, int32 >= 0, for each key [R, 1] and token id ([1, V] or [R, V] int32): murmur3's finaliser over
    the id, keyed before and in the middle. Integer arithmetic modulo 2**32, the same on every device."""
    first = token_ids * _GOLDEN32
    # the first shift goes over exclusive or: its two sides are smaller than what they make
    x = first.bitwise_xor_(_shift32(first, 16)) ^ (keys[0] ^ _shift32(keys[0], 16))
    scratch = torch.empty_like(x)
    x *= _MIX1
    x ^= _shift32(x, 13, scratch)
    x += keys[1]
    x *= _MIX2
    x ^= _shift32(x, 16, scratch)
    x &= 0x7FFFFFFF
    return x


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32 [R, V], for rows with int64 seeds and positions [R] and ids [1 or R, V]."""
    k0, k1 = noise_keys(seeds, positions)
    uniform = noise_bits((k0.unsqueeze(1), k1.unsqueeze(1)), token_ids).to(torch.float32)
    uniform.add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)
    return uniform.log1p_().neg_().log_().neg_()


def _shift32(x: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (32 - bits)) - 1)


def _shift64(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw_seed() -> int:
    return secrets.randbits(63)


class _Column:
    """A value a row, on the host and, once uploaded, on the device; on the CPU the two are one."""

    def __init__(self, rows: int, dtype: type, device: torch.device, fill: float = 0, width: int | None = None) -> None:
        self.device_type = device
        self.fill = fill
        self.host: np.ndarray = np.full(rows if width is None else (rows, width), fill, dtype=dtype)
        self.device = torch.from_numpy(self.host).to(device)

    def set_list(self, row: int, values: list[int] | list[float]) -> None:
        """Fill a row of a wide column, which grows to hold the longest one."""
        rows, width = self.host.shape
        if len(values) > width:
            grown = np.full((rows, 1 << (len(values) - 1).bit_length()), self.fill, dtype=self.host.dtype)
            grown[:, :width] = self.host
            self.host = grown
            self.device = torch.from_numpy(grown).to(self.device_type)
        self.host[row] = self.fill
        self.host[row, : len(values)] = values


class SamplingTable:
    """The sampling parameters of the running sequences, one row each."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.temperature = _Column(rows, np.float32, device)
        self.top_k = _Column(rows, np.int64, device)  # 0: all
        self.top_p = _Column(rows, np.float32, device)
        self.log_min_p = _Column(rows, np.float32, device)
        self.repetition = _Column(rows, np.float32, device)
        self.frequency = _Column(rows, np.float32, device)
        self.presence = _Column(rows, np.float32, device)
        self.seed = _Column(rows, np.int64, device)
        self.prompt_len = _Column(rows, np.int64, device)
        self.min_len = _Column(rows, np.int64, device)  # no stop id below this many tokens, prompt included
        self.stop_ids = _Column(rows, np.int64, device, fill=INVALID, width=5)  # INVALID, which ends a row, among them
        self.bias_ids = _Column(rows, np.int64, device, width=4)
        self.bias = _Column(rows, np.float32, device, width=4)
        self.greedy = np.ones(rows, dtype=bool)
        self.filtered = np.zeros(rows, dtype=bool)  # by top_k, top_p or min_p, which greedy rows ignore
        self.penalised = np.zeros(rows, dtype=bool)
        self.biased = np.zeros(rows, dtype=bool)
        self.has_min_len = np.zeros(rows, dtype=bool)
        self.plain = np.ones(rows, dtype=bool)  # none of the three, no bad words and no log-probabilities
        self.num_logprobs = np.full(rows, -1)  # -1: none wanted
        self.num_prompt_logprobs = np.full(rows, -1)
        self.bad_words: dict[int, list[list[int]]] = {}
        self.on_host = device.type == "cpu"
        self._changed: list[int] = []  # rows that the device doesn't know yet

    def set(
        self, row: int, params: SamplingParams, seed: int, prompt_len: int, stop_ids: list[int], bad: list[list[int]]
    ) -> None:
        self.temperature.host[row] = max(params.temperature, _COLDEST)
        self.top_k.host[row] = params.top_k or 0
        self.top_p.host[row] = params.top_p
        self.log_min_p.host[row] = np.log(params.min_p) if params.min_p > 0 else -np.inf
        self.repetition.host[row] = params.repetition_penalty
        self.frequency.host[row] = params.frequency_penalty
        self.presence.host[row] = params.presence_penalty
        self.seed.host[row] = seed
        self.prompt_len.host[row] = prompt_len
        self.min_len.host[row] = prompt_len + params.min_tokens
        self.stop_ids.set_list(row, [INVALID, *stop_ids])
        self.bias_ids.set_list(row, list(params.logit_bias))
        self.bias.set_list(row, list(params.logit_bias.values()))
        if not self.on_host:
            self._changed.append(row)
        self.greedy[row] = params.temperature == 0
        filters = params.top_k is not None or params.top_p < 1 or params.min_p > 0
        self.filtered[row] = filters and not self.greedy[row]
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.penalised[row] = penalties != (1, 0, 0)
        self.biased[row] = bool(params.logit_bias)
        self.has_min_len[row] = params.min_tokens > 0 and bool(stop_ids)
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.bad_words.pop(row, None)
        if bad:
            self.bad_words[row] = bad
        special = (self.penalised, self.biased, self.has_min_len)
        self.plain[row] = not (any(column[row] for column in special) or bad or params.logprobs is not None)

    def upload(self) -> None:
        """Have the device know what was set since, all rows at once."""
        if not self._changed:
            return
        rows = np.unique(self._changed)
        self._changed.clear()
        at = to_device(rows, self.seed.device.device)
        for column in vars(self).values():
            if isinstance(column, _Column):
                values = to_device(column.host[rows], at.device)
                column.device.index_copy_(0, at, values)

    def clear(self, row: int) -> None:
        """Forget the row's costly features, so that rows to come don't pay for them."""
        self.bad_words.pop(row, None)


@dataclass(slots=True)
class Sampled:
    """ids: int64 [R], INVALID where no token can be chosen.

    With log-probabilities wanted by some row, of the unmodified logits: logprob and rank [R] of the
    chosen, and the top ids and log-probabilities [R, K]."""

    ids: Tensor
    logprob: Tensor | None = None
    rank: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def token_logprobs(self, i: int, count: int) -> TokenLogprobs:
        """Row i's log-probabilities, with `count` alternatives; for samples on the host."""
        assert self.logprob is not None and self.rank is not None
        assert self.top_ids is not None and self.top_logprobs is not None
        top = list(zip(self.top_ids[i, :count].tolist(), self.top_logprobs[i, :count].tolist(), strict=True))
        return TokenLogprobs(int(self.ids[i]), float(self.logprob[i]), int(self.rank[i]), top)

    def to_host(self) -> Sampled:
        """Start copying everything to the host, into pinned memory."""

        def copy(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=True)

        ids = copy(self.ids)
        assert ids is not None
        return Sampled(ids, copy(self.logprob), copy(self.rank), copy(self.top_ids), copy(self.top_logprobs))


class Vocabulary:
    """The ids that a model and its tokenizer know: which a request may name, which may be sampled, which end it.

    size: ids from there on are never sampled, nor are those in `forbidden` (padding).
    """

    def __init__(self, model_size: int, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.size = min(model_size, tokenizer.vocab_size) if tokenizer else model_size
        self.eos = sorted(i for i in tokenizer.eos_token_ids if i < self.size) if tokenizer else []
        pad = tokenizer.pad_token_id if tokenizer else None
        self.forbidden = [pad] if pad is not None and pad not in self.eos and pad < self.size else []

    def check(self, params: SamplingParams, tokens: list[int]) -> None:
        """Raise ValueError for a token, a bias or a stop id that the tokenizer or the model doesn't know."""
        self._check_ids("token", tokens)
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("stop_token_ids", params.stop_token_ids)

    def _check_ids(self, what: str, ids: Collection[int]) -> None:
        array = np.fromiter(ids, np.int64, len(ids))
        bad = array[(array < 0) | (array >= self.size)]
        if len(bad):
            raise ValueError(f"{what}: id {bad[0]} is outside the vocabulary of {self.size}")

    def stop_ids(self, params: SamplingParams) -> list[int]:
        return [*([] if params.ignore_eos else self.eos), *params.stop_token_ids]

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Token sequences of each bad word, at the start of a text and after a space."""
        found: list[list[int]] = []
        for word in params.bad_words:
            assert self.tokenizer is not None
            for text in (word, " " + word.lstrip()):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in found and max(ids) < self.size:
                    found.append(ids)
        return found


class Sampler:
    """Chooses the next token of every row."""

    def __init__(self, table: SamplingTable, vocabulary: Vocabulary, device: torch.device) -> None:
        self.table = table
        self.vocab_size = vocabulary.size
        self.fused = has_triton(device)
        self.forbidden = torch.tensor(vocabulary.forbidden, dtype=torch.int64, device=device)
        self.token_ids = torch.arange(self.vocab_size, dtype=torch.int32, device=device).unsqueeze(0)

    def __call__(
        self,
        logits: Tensor,
        rows: np.ndarray,
        lengths: np.ndarray,
        tokens: Tensor,
        masks: tuple[np.ndarray, Tensor] | None = None,
        places: Tensor | None = None,
    ) -> Sampled:
        """logits: [R, >= vocab_size]. rows: int64 [R] into the table. lengths: int64 [R], tokens known, which is the
        position of the chosen one. tokens: [table rows, max_seq_len + 1] int32, all known tokens by position. masks:
        indices of rows with a grammar, and what each allows (`structured.fill_masks`). places: int64 [2, R], rows and
        lengths on the device, if they are there already."""
        table = self.table
        table.upload()
        device = logits.device
        if places is None:
            places = to_device(np.stack((rows, lengths)), device)
        row_ids, positions = places[0], places[1]
        raw = logits[:, : self.vocab_size]
        wanted = int(table.num_logprobs[rows].max(initial=-1))
        if self.fused and wanted < 0 and masks is None and self._leaves_alone(rows, lengths):
            return Sampled(self._choose(raw, rows, row_ids, positions))
        scores = raw.clone() if wanted >= 0 and raw.dtype == torch.float32 else raw.float()
        if masks is not None:
            at = to_device(masks[0], device)
            allowed = unpack_masks(masks[1].to(device, non_blocking=True), self.vocab_size)
            scores[at] = scores[at].masked_fill_(~allowed, float("-inf"))
        self._modify(scores, rows, lengths, row_ids, positions, tokens)
        ids = self._choose(scores, rows, row_ids, positions)
        return Sampled(ids) if wanted < 0 else self.with_logprobs(raw, ids, wanted)

    def choose_plain(self, logits: Tensor, row_ids: Tensor, positions: Tensor) -> Tensor:
        """Ids [R] for plain rows; the host decides nothing, so that a graph may hold it. Where kernels are fused."""
        from engine.fused import choose

        scores = logits[:, : self.vocab_size]
        if len(self.forbidden):
            scores.index_fill_(1, self.forbidden, float("-inf"))
        table = self.table
        filters = table.top_k.device, table.top_p.device, table.log_min_p.device
        return choose(scores, row_ids, positions, table.temperature.device, table.seed.device, filters, INVALID)

    def _choose(self, scores: Tensor, rows: np.ndarray, row_ids: Tensor, positions: Tensor) -> Tensor:
        """Ids [R] by scores [R, vocab_size], INVALID where there is none."""
        if self.fused:
            return self.choose_plain(scores, row_ids, positions)
        greedy = self.table.greedy[rows]
        if not greedy.any():
            ids = self._draw(scores, rows, row_ids, positions)
        else:
            ids = scores.max(-1).indices  # several times faster than argmax
            if not greedy.all():
                at = to_device(np.flatnonzero(~greedy), scores.device)
                ids[at] = self._draw(scores[at], rows[~greedy], row_ids[at], positions[at])
        return torch.where(scores.gather(1, ids.unsqueeze(1)).squeeze(1) > float("-inf"), ids, INVALID)

    def probabilities(self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray, tokens: Tensor) -> Tensor:
        """The distributions [R, vocab_size] that ids are drawn from; arguments as in a call. All 0 where no token can
        be chosen."""
        table = self.table
        table.upload()
        row_ids, positions = to_device(rows, logits.device), to_device(lengths, logits.device)
        scores = logits[:, : self.vocab_size].to(torch.float32, copy=True)
        self._modify(scores, rows, lengths, row_ids, positions, tokens)
        scores /= table.temperature.device[row_ids].unsqueeze(1)
        filtered = np.flatnonzero(table.filtered[rows])
        if len(filtered):
            at = to_device(filtered, scores.device)
            kept = scores[at]
            scores[at] = kept.masked_fill_(kept < self._cutoff(kept, row_ids[at]), float("-inf"))
        best = scores.max(-1, keepdim=True)
        greedy = to_device(table.greedy[rows], scores.device).unsqueeze(1)
        scores.masked_fill_(greedy & (self.token_ids != best.indices), float("-inf"))
        return scores.sub_(best.values).softmax(-1).nan_to_num_(0)

    def with_logprobs(self, logits: Tensor, ids: Tensor, wanted: int) -> Sampled:
        """Ids [R] with their log-probabilities under unmodified logits [R, V], and `wanted` alternatives; INVALID ones
        have any. Rows that only pad the model's vocabulary don't count: no text could be made of them."""
        logprobs = logits[:, : self.vocab_size].float().log_softmax(-1)
        logprob = logprobs.gather(1, ids.clamp(min=0).unsqueeze(1))
        top_logprobs, top_ids = logprobs.topk(min(max(wanted, 1), logprobs.shape[1]), dim=-1)
        rank = (logprobs > logprob).sum(-1) + 1
        return Sampled(ids, logprob.squeeze(1), rank, top_ids, top_logprobs)

    def _leaves_alone(self, rows: np.ndarray, lengths: np.ndarray) -> bool:
        """Whether `_modify` would change nothing."""
        table = self.table
        early = table.has_min_len[rows] & (lengths < table.min_len.host[rows])
        touched = table.penalised[rows] | table.biased[rows] | early
        return not (touched.any() or table.bad_words or len(self.forbidden))

    def _modify(
        self, scores: Tensor, rows: np.ndarray, lengths: np.ndarray, row_ids: Tensor, positions: Tensor, tokens: Tensor
    ) -> None:
        """Penalties, bias and forbidden ids, in place."""
        table = self.table
        penalised, biased = table.penalised[rows], table.biased[rows]
        early = table.has_min_len[rows] & (lengths < table.min_len.host[rows])
        if penalised.any():
            at = to_device(np.flatnonzero(penalised), scores.device)
            longest = int(lengths[penalised].max())
            scores[at] = self._penalise(scores[at], row_ids[at], positions[at], tokens[:, :longest])
        if biased.any():
            ids = table.bias_ids.device[row_ids]
            scores.scatter_add_(1, ids, table.bias.device[row_ids])
        if early.any():
            stop = table.stop_ids.device[row_ids]
            late = to_device(~early, scores.device).unsqueeze(1) | (stop < 0)
            highest = torch.where(late, float("inf"), float("-inf"))
            scores.scatter_reduce_(1, stop.clamp(min=0), highest, "amin")  # ids may repeat
        if table.bad_words:
            bad = [(i, word) for i, row in enumerate(rows.tolist()) for word in table.bad_words.get(row, ())]
            if bad:
                self._forbid_bad_words(scores, bad, row_ids, positions, tokens)
        if len(self.forbidden):
            scores[:, self.forbidden] = float("-inf")

    def _penalise(self, scores: Tensor, row_ids: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        """Repetition over prompt and output (Keskar et al. 2019), frequency and presence over the output (OpenAI)."""
        table = self.table
        history = tokens[row_ids].long()
        place = torch.arange(history.shape[1], device=scores.device)
        known = place < positions.unsqueeze(1)
        history = torch.where(known, history, history[:, :1])
        seen = scores.gather(1, history)
        penalty = table.repetition.device[row_ids].unsqueeze(1)
        scores.scatter_(1, history, torch.where(seen > 0, seen / penalty, seen * penalty))
        output = known & (place >= table.prompt_len.device[row_ids].unsqueeze(1))
        counts = torch.zeros_like(scores).scatter_add_(1, history, output.float())
        scores -= counts * table.frequency.device[row_ids].unsqueeze(1)
        return scores.sub_((counts > 0) * table.presence.device[row_ids].unsqueeze(1))

    @staticmethod
    def _forbid_bad_words(
        scores: Tensor, words: list[tuple[int, list[int]]], row_ids: Tensor, positions: Tensor, tokens: Tensor
    ) -> None:
        """Forbid the last token of every bad sequence whose others have just been generated."""
        longest = max(len(word) for _, word in words) - 1
        device = scores.device
        at = to_device(np.array([i for i, _ in words]), device)
        prefix = to_device(np.array([[-1] * (longest - len(w) + 1) + w[:-1] for _, w in words], np.int64), device)
        place = positions[at].unsqueeze(1) + torch.arange(-longest, 0, device=device)
        recent = tokens[row_ids[at].unsqueeze(1), place.clamp(min=0)]
        match = ((recent == prefix) & (place >= 0) | (prefix < 0)).all(-1)
        last = to_device(np.array([word[-1] for _, word in words]), device)
        scores.index_put_((at, last), torch.where(match, float("-inf"), 0.0), accumulate=True)

    def _draw(self, scores: Tensor, rows: np.ndarray, row_ids: Tensor, positions: Tensor) -> Tensor:
        """Gumbel-max over the filtered, tempered scores [R, V], which are overwritten."""
        table = self.table
        scores /= table.temperature.device[row_ids].unsqueeze(1)
        ids = self._gumbel_max(scores, row_ids, positions)
        if (filtered := table.filtered[rows]).any():
            at = to_device(np.flatnonzero(filtered), scores.device)
            self._filter(scores, ids, row_ids, positions, at)
        return ids

    def _filter(self, scores: Tensor, ids: Tensor, row_ids: Tensor, positions: Tensor, at: Tensor) -> None:
        """Choose anew, in place, for those of the rows `at` whose id the filters drop."""
        # the winner of all is the winner of the kept if it is kept itself, which is cheaper to see than what is
        at = at[~self._keeps(scores, ids, row_ids, at)]
        if len(at):
            kept = scores[at]
            kept.masked_fill_(kept < self._cutoff(kept, row_ids[at]), float("-inf"))
            ids[at] = self._gumbel_max(kept, row_ids[at], positions[at])

    def _gumbel_max(self, scores: Tensor, row_ids: Tensor, positions: Tensor) -> Tensor:
        seeds = self.table.seed.device[row_ids]
        best, ids = [], []
        for start, block in _blocks(scores, _BLOCK * max(1, 16 // len(scores))):
            noise = gumbel_noise(seeds, positions, self.token_ids[:, start : start + block.shape[1]])
            values, places = noise.add_(block).max(-1)
            best.append(values)
            ids.append(places + start)
        at = torch.stack(best).max(0).indices
        return torch.stack(ids).gather(0, at.unsqueeze(0)).squeeze(0)

    def _keeps(self, scores: Tensor, ids: Tensor, row_ids: Tensor, at: Tensor) -> Tensor:
        """Whether the filters surely keep the ids of rows `at`."""
        table = self.table
        top = scores.amax(-1, keepdim=True)[at]
        score = scores[at, ids[at]].unsqueeze(1)
        total, mass_above, count_above = torch.zeros(3, len(at), device=scores.device)
        for _, block in _blocks(scores):
            block = block.index_select(0, at)
            above = torch.gt(block, score, out=torch.empty_like(block))  # as floats: several times faster
            exp = block.sub_(top).exp_()
            total += exp.sum(-1)
            mass_above += exp.mul_(above).sum(-1)
            count_above += above.sum(-1)
        top_k, top_p = table.top_k.device[row_ids[at]], table.top_p.device[row_ids[at]]
        # after top_k the mass is less than the total, but at least that of what is seen here
        total = torch.where(top_k > 0, mass_above + (score - top).exp().squeeze(1), total)
        inside = (top_k == 0) | (count_above < top_k)
        inside &= (top_p >= 1) | (mass_above < top_p * total)
        return inside & ((score - top).squeeze(1) >= table.log_min_p.device[row_ids[at]])

    def _cutoff(self, scores: Tensor, row_ids: Tensor) -> Tensor:
        """The smallest score [R, 1] that the filters keep; equal ones are kept or dropped together."""
        table = self.table
        top = scores.amax(-1, keepdim=True)
        floor = top + table.log_min_p.device[row_ids].unsqueeze(1)
        exp = (scores - top).exp_()
        top_k, top_p = table.top_k.device[row_ids].unsqueeze(1), table.top_p.device[row_ids].unsqueeze(1)
        kth = torch.full_like(top, float("-inf"))
        if (most := min(int(top_k.max()), scores.shape[1])) > 0:
            values = scores.topk(most, dim=-1).values
            kth = torch.where(top_k > 0, values.gather(1, top_k.clamp(1, most) - 1), kth)
            exp.masked_fill_(scores < kth, 0)
        wanted = exp.sum(-1, keepdim=True) * top_p
        if (top_k > 0).all():  # what is not among these is not kept
            scores, exp = values, (values - top).exp_().masked_fill_(values < kth, 0)
        low, high, above = top - _REACH, top, torch.empty_like(scores)
        for _ in range(32 if (top_p < 1).any() else 0):  # halve the range, to fp32's last bits
            middle = (low + high) / 2
            enough = torch.ge(scores, middle, out=above).mul_(exp).sum(-1, keepdim=True) >= wanted
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        return torch.where(top_p < 1, low, kth).maximum(kth).maximum(floor)


def unpack_masks(masks: Tensor, vocab_size: int) -> Tensor:
    """Bits of int32 [n, >= vocab_size / 32], the lowest first, as bool [n, vocab_size]."""
    bits = masks.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=masks.device)
    return (bits & 1).bool().flatten(1)[:, :vocab_size]


def _blocks(scores: Tensor, width: int = _BLOCK) -> Iterator[tuple[int, Tensor]]:
    """Blocks of columns that stay in a CPU's cache, with the number of their first column."""
    width = width if scores.device.type == "cpu" else scores.shape[1]
    return ((start, scores[:, start : start + width]) for start in range(0, scores.shape[1], width))
