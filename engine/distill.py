"""`llm-distill` trains a small draft for a target, on text that the target writes itself.

The target makes up users' questions, answers them (Xu et al. 2024, Magpie), and says how likely its best candidates
were at each place; a small decoder over the same token ids learns these distributions (Hinton et al. 2015): a narrow
one, or one as wide as the target that also reads the final hidden state that chose the last token (Li et al. 2024,
EAGLE). Some conversations are held out: there the draft's samples, drawn with the engine's noise, are compared with the
target's, which says how many tokens a step would give, and, with the measured costs of both models' steps, how much
faster it is. Of several shapes the one that promises most early is trained on.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import random
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from engine.attention import PackedBatch
from engine.generation import BatchedBackend
from engine.models.decoder import CausalLM, DecoderConfig, DecoderModel
from engine.models.loader import load_model, resolve_model
from engine.models.publisher import save_pretrained
from engine.sampling import Sampler, SamplingTable, Vocabulary
from engine.scheduler import MAX_GAMMA
from engine.schemas import FinishReason, GenerationRequest, GenerationResult, SamplingParams
from engine.sequence import SequenceTable
from engine.speculation import Drafter
from engine.tokenization import HuggingFaceTokenizer, Tokenizer, load_tokenizer

TOP = 16  # candidates of the target that are learned at a place
QUESTION = 96  # tokens, at most, of a question that the target makes up
JUDGED = 48  # conversations, at most, that judge a draft
PATIENCE = 3  # looks at a speed-up that doesn't rise, after which training ends
_SHARD = 256  # conversations that are written, and lost by an interruption, together
_ROWS, _CONTEXT = 64, 2048  # of the engine that writes them
_NEGATIVES = 4096  # other tokens that a step of training looks at
_STEADY = 256  # hidden size up to which the learning rate is the one given; beyond it falls (Yang et al. 2021)
_STATE_GAIN = 5  # length that hidden states are as good as scaled to where their weights are learned
_SINCE = 4  # tokens drafted since the last state was read: as many cases are told apart


class Shape(NamedTuple):
    hidden_size: int
    num_layers: int
    reads_states: bool = False  # of the target

    def __str__(self) -> str:
        return f"{self.hidden_size}x{self.num_layers}{'+state' * self.reads_states}"


@dataclass(slots=True)
class Conversation:
    """A prompt and what the target answered with a seed and a temperature."""

    tokens: Tensor  # int32 [N]
    prompt_len: int
    seed: int
    temperature: float
    top_ids: Tensor  # int32 [N, TOP], the likeliest tokens after each, best first
    top_logits: Tensor  # float16 [N, TOP]
    states: Tensor  # bfloat16 [N, hidden_size], the target's final ones

    def chosen_by(self, read: Tensor) -> Tensor:
        """States [N, hidden_size] that chose the tokens, where `read` [N] is true and they were chosen, else zeros."""
        read = read.clone()
        read[: self.prompt_len] = False
        return self.states.roll(1, 0) * read.unsqueeze(1)


# --- the text


def opening(tokenizer: Tokenizer) -> list[int]:
    """Ids of a chat up to where the user's words begin; where that is the very start, an EOS as before another text."""
    marker = "USER_TEXT"
    text = tokenizer.apply_chat_template([{"role": "user", "content": marker}])
    ids = tokenizer.encode(text.split(marker)[0], add_special_tokens=not tokenizer.has_chat_template)
    if not ids and not tokenizer.eos_token_ids:
        raise ValueError("the model's chats begin with the user's words, which it can't make up: give --prompts")
    return ids or sorted(tokenizer.eos_token_ids)[:1]


def converse(
    backend: BatchedBackend, model: CausalLM, prompts: Sequence[str] | None, count: int, answer: int, seed: str
) -> list[Conversation]:
    """`count` conversations, with answers of at most `answer` tokens, about `prompts`, which are drawn from, or about
    what the target makes up."""
    tokenizer, rng = backend.tokenizer, random.Random(seed)
    assert tokenizer is not None
    if prompts is None:
        start = opening(tokenizer)
        asks = [
            GenerationRequest(prompt_ids=start, max_new_tokens=QUESTION, seed=rng.getrandbits(63)) for _ in range(count)
        ]
        prompts = [result.text or "Hi" for result in _run(backend, asks, "Questions")]
    else:
        prompts = rng.choices(prompts, k=count)
    requests = [
        GenerationRequest(
            prompt_ids=tokenizer.encode_chat([{"role": "user", "content": text}]),
            max_new_tokens=answer,
            temperature=rng.random(),
            seed=rng.getrandbits(63),
        )
        for text in prompts
    ]
    eos = sorted(tokenizer.eos_token_ids)[:1]
    conversations = []
    for request, result in zip(requests, _run(backend, requests, "Answers"), strict=True):
        assert request.prompt_ids is not None and request.seed is not None
        ids = request.prompt_ids + result.token_ids + eos * (result.finish_reason is FinishReason.STOP)
        tokens = torch.tensor(ids, dtype=torch.int32)
        seen = observe(model, tokens, tokenizer.vocab_size)
        conversations.append(Conversation(tokens, len(request.prompt_ids), request.seed, request.temperature, *seen))
    return conversations


def _run(backend: BatchedBackend, requests: Sequence[GenerationRequest], what: str) -> list[GenerationResult]:
    prepared = [backend.prepare(request) for request in requests]
    results: list[GenerationResult] = [None] * len(requests)  # type: ignore[list-item]
    for index, result in tqdm(backend.run_batch(prepared), what, len(prepared), unit="", leave=False, disable=None):
        if result.error is not None:
            raise RuntimeError(f"the target failed: {result.error}")
        results[index] = result
    return results


@torch.inference_mode()
def observe(model: CausalLM, tokens: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The model's TOP candidates after each of tokens [N], ids int32 [N, TOP] and logits float16, and its states."""
    hidden = model.hidden_states(tokens.to(model.device), PackedBatch.uncached(1, len(tokens), model.device))
    count = min(TOP, vocab_size)
    blocks = [model.logits(block)[:, :vocab_size].topk(count, dim=-1) for block in hidden.split(256)]
    ids, logits = torch.cat([b.indices for b in blocks]), torch.cat([b.values for b in blocks])
    return ids.to("cpu", torch.int32), logits.to("cpu", torch.float16), hidden.to("cpu", torch.bfloat16)


_COLUMNS = ("tokens", "top_ids", "top_logits", "states")


def write_shard(file: Path, conversations: Sequence[Conversation]) -> None:
    columns = {name: [getattr(c, name) for c in conversations] for name in _COLUMNS}
    tensors = {name: torch.cat(parts) for name, parts in columns.items()}
    for name, dtype in (("prompt_len", torch.int64), ("seed", torch.int64), ("temperature", torch.float64)):
        tensors[name] = torch.tensor([getattr(c, name) for c in conversations], dtype=dtype)
    tensors["length"] = torch.tensor([len(c.tokens) for c in conversations])
    partial = file.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(file)


def read_shard(file: Path) -> list[Conversation]:
    tensors = load_file(file)
    lengths = tensors["length"].tolist()
    tokens, *others = (tensors[name].split(lengths) for name in _COLUMNS)
    scalars = (tensors[name].tolist() for name in ("prompt_len", "seed", "temperature"))
    return [Conversation(*c) for c in zip(tokens, *scalars, *others, strict=True)]


def hold_out(conversations: Sequence[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Those to learn from, and those of one prompt in 16, at least of one, to judge a draft by: no prompt is on both
    sides. ValueError when all have the same."""
    prompts = [zlib.crc32(c.tokens[: c.prompt_len].numpy().tobytes()) for c in conversations]
    distinct = sorted(set(prompts))
    if len(distinct) < 2:
        raise ValueError("all conversations begin with the same prompt: none can be held out to judge a draft by")
    held = set(distinct[: max(len(distinct) // 16, 1)])
    sides: tuple[list[Conversation], list[Conversation]] = [], []
    for conversation, prompt in zip(conversations, prompts, strict=True):
        sides[prompt in held].append(conversation)
    return sides


# --- the draft


def make_draft(target: DecoderModel, hidden_size: int, num_layers: int, reads_states: bool = False) -> DecoderModel:
    """An untrained draft in fp32: the target's embedding and first layers, or its last ones if it reads the target's
    states, of which it has the `hidden_size` directions in which the embedding varies most."""
    config = target.config
    if not (0 < hidden_size <= config.hidden_size and 0 < num_layers <= config.num_layers):
        most = f"{config.hidden_size}x{config.num_layers}"
        raise ValueError(f"a draft of shape {hidden_size}x{num_layers} is not within the target's {most}")
    windows, first = config.window_layers, config.num_layers - num_layers if reads_states else 0
    config = replace(
        config,
        hidden_size=hidden_size,
        num_layers=num_layers,
        window_layers=windows and tuple(i - first for i in windows if first <= i < first + num_layers),
        attn_impl="mha",
        tie_word_embeddings=True,
        target_hidden_size=config.hidden_size if reads_states else 0,
    )
    draft = DecoderModel.from_config(config).to(target.device)
    state = {name: tensor.float() for name, tensor in target.state_dict().items()}
    embedding = state["model.embed_tokens.weight"]
    basis = torch.eye(hidden_size, device=target.device)
    if hidden_size < target.config.hidden_size:
        basis = torch.linalg.eigh(embedding.T @ embedding).eigenvectors[:, -hidden_size:]
    gain = (target.config.hidden_size / hidden_size) ** 0.5  # a vector seen in part has the same length
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            *path, module, kind = name.split(".")
            if "layers" in path:
                path[2] = str(int(path[2]) + first)
            if module == "state_proj":
                parameter.copy_(basis.T * (embedding.norm(dim=1).mean() / state["model.norm.weight"].norm()))
                continue
            tensor = state[".".join((*path, module, kind))]
            if module == "embed_tokens":
                tensor = tensor @ basis
            elif module == "norm":
                tensor = gain * (basis * tensor.unsqueeze(1) * basis).sum(0)
            elif module.endswith("layernorm"):  # what it scales is in the weights that follow
                tensor = torch.full_like(parameter, gain)
            elif module in ("o_proj", "down_proj"):
                tensor = basis.T @ tensor
            elif kind == "weight" and not module.endswith("_norm"):
                norm = "input_layernorm" if "self_attn" in path else "post_attention_layernorm"
                scale = state[".".join([*path[:-1], norm, kind])]
                tensor = tensor * scale @ basis
            parameter.copy_(tensor)
    return draft


# --- training


def distillation_loss(draft: DecoderModel, batch: Sequence[Conversation], skip: int, rng: torch.Generator) -> Tensor:
    """Cross entropy of the draft's next tokens with the target's distribution over its TOP candidates, a mean over the
    places of a batch from token `skip` on. The draft's own distribution is taken over all candidates in the batch and a
    sample of the other tokens, whose weight is raised accordingly: a whole vocabulary would be most of the work."""
    device = draft.device
    length = max(len(conversation.tokens) for conversation in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.int64)
    learned = torch.zeros(len(batch), length, dtype=torch.bool)
    for i, conversation in enumerate(batch):
        ids[i, : len(conversation.tokens)] = conversation.tokens
        learned[i, skip : len(conversation.tokens)] = True
    top_ids = torch.cat([conversation.top_ids[skip:] for conversation in batch]).to(device, torch.int64)
    top = torch.cat([conversation.top_logits[skip:].float() for conversation in batch]).to(device).softmax(-1)
    columns = top_ids.unique()
    others = torch.randint(draft.vocab_size, (_NEGATIVES,), generator=rng).to(device).unique()
    others = others[~torch.isin(others, columns)]
    states = None
    if draft.target_hidden_size:
        states = torch.zeros(len(batch), length, draft.target_hidden_size)
        for row, conversation in zip(states, batch, strict=True):
            count = len(conversation.tokens)
            row[:count] = conversation.chosen_by(torch.rand(count, generator=rng) < 0.5)
        states = states.flatten(0, 1).to(device)
    runs = PackedBatch.uncached(len(batch), length, device)
    hidden = draft.hidden_states(ids.flatten().to(device), runs, target_states=states)
    hidden = hidden[learned.flatten().to(device)]
    weight = F.embedding(torch.cat((columns, others)), draft.model.embed_tokens.weight)
    logits = F.linear(hidden, weight).float()
    share = (draft.vocab_size - len(columns)) / max(len(others), 1)
    normaliser = torch.logaddexp(
        logits[:, : len(columns)].logsumexp(-1), logits[:, len(columns) :].logsumexp(-1) + math.log(max(share, 1))
    )
    chosen = logits.gather(1, torch.searchsorted(columns, top_ids))
    return (normaliser - (top * chosen).sum(-1)).mean()


def order(conversations: Sequence[Conversation], batch_size: int, seed: int) -> Iterator[list[int]]:
    """Batches of indices without end, conversations of similar lengths together, so that little is padding."""
    for epoch in itertools.count():
        rng = random.Random(f"{seed} {epoch}")
        shuffled = rng.sample(range(len(conversations)), len(conversations))
        span, batches = 8 * batch_size, []
        for start in range(0, len(shuffled), span):
            near = sorted(shuffled[start : start + span], key=lambda i: len(conversations[i].tokens))
            batches += [near[at : at + batch_size] for at in range(0, len(near), batch_size)]
        rng.shuffle(batches)
        yield from batches


# --- what it is worth


@torch.inference_mode()
def agreement(draft: DecoderModel, conversations: Sequence[Conversation]) -> list[np.ndarray]:
    """Whether the draft, asked for a token of an answer after those before it, says the same: bool [cases, tokens] an
    answer, where case i is that i tokens have been drafted since it read a state of the target."""
    device = draft.device
    cases = _SINCE if draft.target_hidden_size else 1
    table = SamplingTable(1, device)
    sampler = Sampler(table, Vocabulary(draft.vocab_size, None), device)
    agreed = []
    for conversation in conversations:
        params = SamplingParams(temperature=conversation.temperature)
        table.set(0, params, conversation.seed, conversation.prompt_len, [], [])
        tokens = conversation.tokens.to(device)
        places = np.arange(conversation.prompt_len, len(tokens))
        right = np.zeros((cases, len(places)), dtype=bool)
        for first in range(cases):
            states = None
            if draft.target_hidden_size:
                states = conversation.chosen_by(torch.arange(len(tokens)) % cases == first).to(device)
            runs = PackedBatch.uncached(1, len(tokens), device)
            hidden = draft.hidden_states(tokens, runs, target_states=states)
            logits = draft.logits(hidden[conversation.prompt_len - 1 : -1])
            sampled = sampler(logits, np.zeros_like(places), places, tokens.unsqueeze(0))
            said = (sampled.ids == tokens[conversation.prompt_len :]).cpu().numpy()
            right[(places - 1 - first) % cases, np.arange(len(places))] = said
        agreed.append(right)
    return agreed


def tokens_a_step(agreed: Sequence[np.ndarray], gamma: int) -> float:
    """What a step yields on average with `gamma` drafted tokens, after the first token, which comes with the prompt."""
    tokens = steps = 0
    for right in agreed:
        right, at = right[:, 1:], 0
        cases, count = right.shape
        tokens += count
        while at < count:
            drafted = np.arange(min(gamma, count - at))
            wrong = np.flatnonzero(~right[np.minimum(drafted, cases - 1), at + drafted])
            at += 1 + (int(wrong[0]) if len(wrong) else gamma)
            steps += 1
    return tokens / max(steps, 1)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step of the target, of one that verifies MAX_GAMMA drafted tokens, and of a step of the draft."""

    plain: float
    verifying: float
    draft: float

    def speed_up(self, agreed: Sequence[np.ndarray]) -> tuple[float, int]:
        """Tokens a second over those of plain decoding with the gamma from 1 on for which that is highest, and the
        gamma. Below 1 an engine doesn't speculate."""

        def at(gamma: int) -> float:
            token = (self.verifying - self.plain) / MAX_GAMMA + self.draft
            return tokens_a_step(agreed, gamma) * self.plain / (self.plain + gamma * token)

        return max((at(gamma), gamma) for gamma in range(1, MAX_GAMMA + 1))


def measure(target: CausalLM, config: DecoderConfig, rounds: int = 12) -> Costs:
    """What steps of one sequence take, as an engine runs them: the least of some, and CPU time on a CPU, as others may
    use the machine."""
    draft = DecoderModel.from_config(config).to(target.device, target.dtype).eval()
    steps, draft_steps = _stepper(target), _stepper(draft)
    times = [(steps(1), steps(1 + MAX_GAMMA), *(draft_steps(1) for _ in range(4))) for _ in range(rounds)]
    plain, verifying, *drafts = (min(column) for column in zip(*times, strict=True))
    return Costs(plain, max(plain, verifying), min(drafts))


def _stepper(model: CausalLM, length: int = 128) -> Callable[[int], float]:
    """Seconds of a step of so many tokens."""
    length = min(length, model.max_seq_len - MAX_GAMMA - 1)
    table, sampling = SequenceTable(1, length + MAX_GAMMA + 1, 1, model.device), SamplingTable(1, model.device)
    sampling.set(0, SamplingParams(temperature=0.7), 0, 1, [], [])
    drafter = Drafter(model, table, sampling, Vocabulary(model.vocab_size, None))
    row = np.zeros(1, dtype=np.int64)
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter

    def seconds(count: int) -> float:
        drafter.rewind(row, row + length)
        start = clock()
        drafter.advance(row, row + length + count)
        return clock() - start

    table.uid[0] = 0
    seconds(0)
    return seconds


# --- a run


@dataclass(frozen=True, slots=True)
class Plan:
    """What a draft depends on, beside the time that steps take."""

    model: str
    prompts: str  # a digest of them; empty: the target makes them up
    conversations: int
    answer: int  # tokens at most
    steps: int
    batch_size: int  # conversations
    learning_rate: float
    seed: int


class Trainer:
    """One draft on its way. All that its next step depends on is in its file."""

    def __init__(
        self,
        draft: DecoderModel,
        learned: Sequence[Conversation],
        judged: Sequence[Conversation],
        plan: Plan,
        file: Path,
        half: bool,
    ) -> None:
        self.draft, self.learned, self.judged, self.plan, self.file = draft.train(), learned, judged, plan, file
        self.half = half  # multiply in bf16
        steady = min(1.0, _STEADY / draft.hidden_size)
        groups: list[dict[str, Any]] = [{"params": [], "pace": steady}]
        if draft.target_hidden_size:
            length = float(learned[0].states.float().norm(dim=1).mean())
            groups.append({"params": [draft.model.state_proj.weight], "pace": steady * _STATE_GAIN / length})
        groups[0]["params"] = [p for name, p in draft.named_parameters() if "state_proj" not in name]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
        # where all begin alike, as with a system prompt, there is nothing to learn
        self.skip = len(os.path.commonprefix([c.tokens[: c.prompt_len - 1].tolist() for c in learned]))
        self.step, self.spent = 0, 0.0  # seconds of the CPU
        self.last = plan.steps  # the step before which the learning rate is 0
        self.history: list[dict[str, float]] = []
        if file.exists():
            state = torch.load(file, map_location=draft.device, weights_only=True)
            draft.load_state_dict(state["draft"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.last, self.spent = state["step"], state["last"], state["spent"]
            self.history = state["history"]

    def save(self) -> None:
        state = {name: getattr(self, name) for name in ("step", "last", "spent", "history")}
        state |= {name: getattr(self, name).state_dict() for name in ("draft", "optimizer")}
        partial = self.file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.file)

    def train(self, until: int, costs: Costs, watch: Callable[[dict[str, float]], None]) -> None:
        """Go on to step `until`, or to the end, which comes sooner when the expected speed-up no longer rises."""
        plan, start = self.plan, time.process_time() - self.spent
        warm_up, cool_down, interval = max(plan.steps // 50, 1), max(plan.steps // 4, 1), max(plan.steps // 20, 1)
        batches = itertools.islice(order(self.learned, plan.batch_size, plan.seed), self.step, None)
        with tqdm(total=self.last, initial=self.step, desc="Training", unit="step", leave=False, disable=None) as bar:
            while self.step < min(until, self.last):
                rate = min(1.0, (self.step + 1) / warm_up, (self.last - self.step) / cool_down)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate * plan.learning_rate * group["pace"]
                batch = [self.learned[i] for i in next(batches)]
                noise = torch.Generator().manual_seed(plan.seed + self.step)
                with torch.autocast(self.draft.device.type, torch.bfloat16, enabled=self.half):
                    loss = distillation_loss(self.draft, batch, self.skip, noise)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step += 1
                bar.update()
                if self.step % interval and self.step < self.last:
                    continue
                self.spent = time.process_time() - start
                self.history.append(self.judge(costs))
                best = [point["speed_up"] for point in self.history]
                if len(best) > PATIENCE and max(best[-PATIENCE:]) < 1.005 * max(best[:-PATIENCE]):
                    self.last = bar.total = min(self.last, self.step + cool_down)
                self.save()
                watch(self.history[-1])

    def judge(self, costs: Costs) -> dict[str, float]:
        self.draft.eval()
        with torch.autocast(self.draft.device.type, torch.bfloat16, enabled=self.half):
            agreed = agreement(self.draft, self.judged)
        self.draft.train()
        speed_up, gamma = costs.speed_up(agreed)
        return {
            "step": self.step,
            "cpu_seconds": round(self.spent, 1),
            "acceptance": round(float(np.concatenate(agreed, axis=1)[0].mean()), 4),
            "tokens_a_step_at_gamma_4": round(tokens_a_step(agreed, 4), 4),
            "speed_up": round(speed_up, 4),
            "gamma": gamma,
        }


def distill(
    model: str,
    output: Path,
    *,
    prompts: Sequence[str] | None = None,
    shapes: Sequence[Shape] | None = None,
    device: str = "auto",
    **options: Any,
) -> dict[str, Any]:
    """Train a draft for the model in folder, hub id or file `model`, into the folder `output`, and go on with what is
    there from an interrupted run.

    prompts: what the target is asked; None: it makes questions up. shapes: of the drafts to choose from. options:
    fields of Plan. Returns the report, which is in training/report.json as well.
    ValueError: what can't be used, or a folder of another plan.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no GPU here")
    if prompts is not None and len(set(prompts)) < 2:
        raise ValueError("prompts: two different ones are needed at least, one to learn from and one to judge by")
    digest = hashlib.sha256("\n".join(prompts).encode()).hexdigest() if prompts is not None else ""
    path, folder = resolve_model(model), output / "training"
    plan = Plan(model=str(path.resolve()) if Path(model).exists() else model, prompts=digest, **options)
    _check_output(output, path)
    target, tokenizer = load_model(path, device=device), load_tokenizer(path)
    if not isinstance(target, DecoderModel):
        raise ValueError(f"{model}: no draft can be made of a {type(target).__name__}")
    shapes = shapes or _shapes(target.config)
    drafts = {Shape(*shape): make_draft(target, *shape) for shape in shapes}  # before the engine packs the target
    if plan.answer >= (context := _context(target)):
        raise ValueError(f"answer {plan.answer} leaves no room for a prompt in the context of {context}")
    _settle(folder / "plan.json", plan)
    conversations = _corpus(folder, target, tokenizer, prompts, plan)
    learned, judged = hold_out(conversations)
    judged = judged[:JUDGED]
    # what it has never seen said it would hardly say itself, and a head costs as much as a layer or more
    said = torch.cat([c.tokens[c.prompt_len :] for c in learned]).unique().tolist()
    vocabulary = tuple(said) if len(said) < target.vocab_size // 2 else None
    report_file = folder / "report.json"
    report: dict[str, Any] = json.loads(report_file.read_text()) if report_file.exists() else {"drafts": {}}
    trainers = {}
    for shape, draft in drafts.items():
        name = str(shape)
        draft.config.draft_vocabulary = vocabulary
        if name not in report["drafts"]:
            attention = replace(draft.config, attn_impl=target.config.attn_impl)
            report["drafts"][name] = {"costs": asdict(measure(target, attention))}
        half = target.dtype != torch.float32
        trainers[name] = Trainer(draft, learned, judged, plan, folder / f"{name}.pt", half)
        report["drafts"][name]["history"] = trainers[name].history

    def train(name: str, until: int) -> float:
        trainer = trainers[name]

        def watch(point: dict[str, float]) -> None:
            _write_json(report_file, report)
            _save(trainer.draft, target, output, tokenizer)
            tqdm.write(
                f"{name}  step {point['step']}/{trainer.last}  acceptance {point['acceptance']:.3f}  tokens a step at "
                f"gamma 4 {point['tokens_a_step_at_gamma_4']:.2f}  speed-up {point['speed_up']:.2f} (gamma "
                f"{point['gamma']})  CPU {point['cpu_seconds']:.0f} s"
            )

        trainer.train(until, Costs(**report["drafts"][name]["costs"]), watch)
        return trainer.history[0]["speed_up"]

    if len(shapes) > 1:
        report["chosen"] = max(trainers, key=lambda name: train(name, max(plan.steps // 20, 1)))
    else:
        report["chosen"] = next(iter(trainers))
    train(report["chosen"], plan.steps)
    _save(trainers[report["chosen"]].draft, target, output, tokenizer)
    _write_json(report_file, report)
    return report


def _shapes(config: DecoderConfig) -> list[Shape]:
    """A quarter and a half of the target's width, in 64s, and the whole of it with its states."""
    quarter, half = (min(max(config.hidden_size * part // 512 * 64, 64), config.hidden_size) for part in (2, 4))
    return [Shape(quarter, 1), Shape(half, min(2, config.num_layers)), Shape(config.hidden_size, 1, True)]


def _check_output(output: Path, target: Path) -> None:
    """ValueError where a draft would be written over something else."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is not a folder")
    if output.resolve() == (target if target.is_dir() else target.parent).resolve():
        raise ValueError(f"{output} is the target's own folder: the draft needs another")
    if (output / "config.json").exists() and not (output / "training" / "plan.json").exists():
        raise ValueError(f"{output} has a model that this didn't make: take another folder, or remove it")


def _context(target: DecoderModel) -> int:
    """Tokens of a conversation at most."""
    return min(target.max_seq_len, _CONTEXT)


def _settle(file: Path, plan: Plan) -> None:
    """Keep the plan beside what is made by it. ValueError when something there was made by another."""
    if file.exists() and any(file.parent.glob("*.safetensors")):
        found = json.loads(file.read_text())
        if odd := [name for name, value in asdict(plan).items() if found.get(name) != value]:
            wanted = ", ".join(f"{name} {found.get(name)!r}, not {getattr(plan, name)!r}" for name in odd)
            raise ValueError(f"{file.parent} was begun with {wanted}: take another folder, or remove it")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    _write_json(file, asdict(plan))


def _corpus(
    folder: Path, target: DecoderModel, tokenizer: HuggingFaceTokenizer, prompts: Sequence[str] | None, plan: Plan
) -> list[Conversation]:
    backend: BatchedBackend | None = None
    conversations: list[Conversation] = []
    for index, start in enumerate(range(0, plan.conversations, _SHARD)):
        file = folder / f"{index:05}.safetensors"
        if not file.exists():
            if backend is None:
                options: dict[str, Any] = {"max_batch_size": _ROWS, "max_seq_len": _context(target)}
                backend = BatchedBackend(target, tokenizer, device=target.device, truncate="left", **options)
            count = min(_SHARD, plan.conversations - start)
            write_shard(file, converse(backend, target, prompts, count, plan.answer, f"{plan.seed} {index}"))
        conversations += read_shard(file)
    return conversations


def _save(draft: DecoderModel, target: DecoderModel, output: Path, tokenizer: HuggingFaceTokenizer) -> None:
    copy = DecoderModel.from_config(draft.config).to(dtype=target.dtype)
    copy.load_state_dict(draft.state_dict())
    copy.generation_config = target.generation_config
    save_pretrained(copy, output, tokenizer)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llm-distill",
        description="Trains a small draft model for a target, for --draft-model of llm-serve. Interrupted, it goes on "
        "from the last 256 conversations or twentieth of the training when it is started again.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="the target: a Hugging Face folder, a hub id or a .gguf file")
    add("--output", required=True, type=Path, help="the draft's folder; what is needed to go on is in training/ there")
    add("--prompts", type=Path, help="a text file, a question a line; without it the target makes questions up")
    add("--conversations", type=_positive, default=768, help="that the target writes")
    add("--answer", type=_positive, default=256, help="tokens of an answer at most")
    add("--steps", type=_positive, default=800, help="of training at most")
    add("--batch-size", type=_positive, default=8, help="conversations a step")
    add("--learning-rate", type=_rate, default=2e-3)
    add(
        "--shapes",
        type=_shape,
        nargs="+",
        metavar="HIDDENxLAYERS[+state]",
        help="to choose from (default: by the target's); +state: reads the target's hidden states",
    )
    add("--seed", type=_seed, default=0, help="with the same shape and number of threads, the same draft")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 2 for what can't be used, 130 when interrupted."""
    options = vars(_parser().parse_args(argv))
    try:
        if options["prompts"] is not None:
            options["prompts"] = _read_prompts(options["prompts"])
        distill(**options)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"llm-distill: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("llm-distill: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _read_prompts(file: Path) -> list[str]:
    try:
        prompts = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None
    if not prompts:
        raise ValueError(f"{file} has no line with text")
    return prompts


def _positive(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of up to 18 digits")
    return int(text)


def _rate(text: str) -> float:
    if not re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", text) or not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return float(text)


def _shape(text: str) -> Shape:
    if not (parts := re.fullmatch(r"([0-9]+)x([0-9]+)(\+state)?", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not HIDDENxLAYERS or HIDDENxLAYERS+state")
    return Shape(_positive(parts[1]), _positive(parts[2]), parts[3] is not None)


if __name__ == "__main__":
    sys.exit(main())
