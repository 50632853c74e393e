"""Tensor parallelism over torch.distributed (Shoeybi et al. 2019, Megatron-LM): a process a rank.

Queries, keys, the MLP's width and the vocabulary are split; the two sums of a layer, the embedding and the logits go
through collectives. Rank 0 has the engine. Each step it sends its plan, which the others carry out with a runner like
its own; ids that are sampled follow by a broadcast between devices, never in a plan.
"""

from __future__ import annotations

import dataclasses
import datetime
import pickle
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

from engine.kv_cache import KVSlotPool
from engine.memory import fitting_pages
from engine.models.decoder import DecoderConfig, DecoderModel
from engine.runner import LaunchedStep, ModelRunner
from engine.sampling import Sampled
from engine.scheduler import StepPlan
from engine.sequence import SequenceTable

_MEETING = datetime.timedelta(minutes=5)
_PATIENCE = datetime.timedelta(days=365)  # an idle rank waits for a plan; a dead peer closes its connections


class Ranks:
    """This process's place among the ranks, and what they say to each other."""

    def __init__(self, rank: int, size: int, address: str, device: torch.device | str) -> None:
        """Meets the others at `address` (host:port, where rank 0 listens). Only one such object a process."""
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.processes: list[Any] = []  # of the other ranks, where this one started them
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        host, _, port = address.rpartition(":")
        store = TCPStore(host, int(port), size, rank == 0, timeout=_MEETING)
        dist.init_process_group(backend, store=store, world_size=size, rank=rank, timeout=_PATIENCE)

    def close(self) -> None:
        dist.destroy_process_group()

    def add(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place."""
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' columns of x [N, C], side by side, at rank 0; nothing [N, 0] at the others."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x, parts)
        return torch.cat(parts, dim=1) if parts is not None else x[:, :0]

    def share(self, x: Tensor) -> Tensor:
        """Rank 0's x, in place."""
        dist.broadcast(x, 0)
        return x

    def smallest(self, value: int) -> int:
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def send(self, message: object) -> None:
        """Give every other rank an object, which it gets from `receive`."""
        content = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        dist.broadcast(torch.tensor(len(content)), 0)
        dist.broadcast(content, 0)

    def receive(self) -> Any:
        length = torch.tensor(0)
        dist.broadcast(length, 0)
        content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, 0)
        return pickle.loads(content.numpy().tobytes())

    # The parts of a model

    def config(self, config: DecoderConfig) -> DecoderConfig:
        """This rank's part of a decoder. Raises ValueError for what can't be divided."""
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.intermediate_size
        for name, value in (("num_heads", heads), ("intermediate_size", width)):
            if value % self.size:
                raise ValueError(f"{name} {value} can't be divided among {self.size} ranks")
        if kv_heads % self.size and self.size % kv_heads:
            raise ValueError(f"num_kv_heads {kv_heads} can't be divided among {self.size} ranks, nor they among them")
        start, end = self._range(config.vocab_size)
        return dataclasses.replace(
            config,
            vocab_size=end - start,
            num_heads=heads // self.size,
            num_kv_heads=max(1, kv_heads // self.size),
            intermediate_size=width // self.size,
        )

    def part(self, name: str, tensor: Tensor, config: DecoderConfig) -> Tensor:
        """What this rank has of a tensor of the whole model, by its Hugging Face name; `config` is the whole's too."""
        cut = self._cut(name, config)
        return tensor if cut is None else tensor.narrow(cut[0], cut[1], cut[2] - cut[1])

    def shape(self, name: str, shape: tuple[int, ...], config: DecoderConfig) -> tuple[int, ...]:
        """Of that part, or of the whole where that is too small to have it."""
        cut = self._cut(name, config)
        if cut is None or len(shape) <= cut[0] or shape[cut[0]] < cut[2]:
            return shape
        return (*shape[: cut[0]], cut[2] - cut[1], *shape[cut[0] + 1 :])

    def _cut(self, name: str, config: DecoderConfig) -> tuple[int, int, int] | None:
        """Dimension, start, end."""
        *_, module, leaf = name.split(".")
        if module in ("embed_tokens", "lm_head"):
            return (0, *self._range(config.vocab_size))
        if module in ("k_proj", "v_proj"):
            # fewer heads than ranks: several ranks have the same one
            heads = max(1, config.num_kv_heads // self.size)
            start = self.rank * config.num_kv_heads // self.size * config.head_dim
            return 0, start, start + heads * config.head_dim
        sizes = {
            "q_proj": config.num_heads * config.head_dim,
            "o_proj": config.num_heads * config.head_dim,
            "gate_proj": config.intermediate_size,
            "up_proj": config.intermediate_size,
            "down_proj": config.intermediate_size,
        }
        if module not in sizes:
            return None
        by_columns = module in ("o_proj", "down_proj")
        if by_columns and leaf == "bias":
            return None
        width = sizes[module] // self.size
        return int(by_columns), self.rank * width, (self.rank + 1) * width

    def _range(self, vocab_size: int) -> tuple[int, int]:
        rows = -(-vocab_size // self.size)
        return min(self.rank * rows, vocab_size), min((self.rank + 1) * rows, vocab_size)

    def connect(self, model: DecoderModel, vocab_size: int) -> None:
        """Put the collectives into a model of this rank's parts; `vocab_size` is the whole one."""
        for layer in model.model.layers:
            layer.self_attn.o_proj = _SummedLinear(layer.self_attn.o_proj, self)
            layer.mlp.down_proj = _SummedLinear(layer.mlp.down_proj, self)
        start, _ = self._range(vocab_size)
        model.model.embed_tokens = _SplitEmbedding(model.model.embed_tokens, self, start)  # type: ignore[assignment]
        model.lm_head = _SplitHead(model.lm_head, self, vocab_size)
        model.vocab_size, model.ranks = vocab_size, self


class _SummedLinear(nn.Module):
    """A linear of which each rank has some of the columns."""

    def __init__(self, linear: Any, ranks: Ranks) -> None:
        super().__init__()
        self.linear, self.ranks = linear, ranks
        if linear.bias is not None and ranks.rank:
            linear.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks.add(self.linear(x))


class _SplitEmbedding(nn.Module):
    def __init__(self, embedding: nn.Embedding, ranks: Ranks, start: int) -> None:
        super().__init__()
        self.embedding, self.ranks, self.start = embedding, ranks, start

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.start
        here = (local >= 0) & (local < self.embedding.num_embeddings)
        return self.ranks.add(self.embedding(local * here) * here[:, None])


class _SplitHead(nn.Module):
    def __init__(self, linear: Any, ranks: Ranks, vocab_size: int) -> None:
        super().__init__()
        self.linear, self.ranks, self.vocab_size = linear, ranks, vocab_size

    def forward(self, x: Tensor) -> Tensor:
        logits = self.linear(x)
        rows = -(-self.vocab_size // self.ranks.size)
        padded = nn.functional.pad(logits, (0, rows - logits.shape[1]))
        return self.ranks.gather(padded)[:, : self.vocab_size]


# Rank 0's steps at the others


@dataclass(slots=True)
class Setup:
    """What an engine is built with: arguments of `fitting_pages`, and of the table."""

    sizes: dict[str, Any]
    dtype: torch.dtype
    rows: int


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    page_table: np.ndarray  # int32 [B, P], of the runs' rows
    prompt_lens: np.ndarray  # int64 [B]
    num_prompt_logprobs: np.ndarray  # int64 [B]
    ids: np.ndarray  # int32: tokens that the host made: prompts, drafts, those of preempted sequences
    places: np.ndarray  # int64 [2, n]: their rows and positions


def _step_message(plan: StepPlan, table: SequenceTable, page_table: np.ndarray, prompt_logprobs: np.ndarray) -> _Step:
    """All that another rank needs of a plan."""
    rows = plan.rows
    within = np.arange(plan.counts.sum()) - np.repeat(np.cumsum(plan.counts) - plan.counts, plan.counts)
    places = np.stack((np.repeat(rows, plan.counts), np.repeat(plan.starts, plan.counts) + within))
    drafted = within >= np.repeat(plan.counts - plan.drafts, plan.counts)
    places = places[:, drafted | (places[1] < table.placed[places[0]])]
    width = int(np.max(table.num_pages[rows], initial=0))
    return _Step(
        dataclasses.replace(plan, masked=False),
        page_table[rows, :width],
        table.prompt_len[rows],
        prompt_logprobs[rows],
        table.tokens[places[0], places[1]],
        places,
    )


class LeadingRunner(ModelRunner):
    """Rank 0's runner: sends each plan before it carries it out, and what it chose after that."""

    chooses_in_graphs = False  # ids are shared in between

    def launch(self, plan: StepPlan) -> LaunchedStep:
        prompt_logprobs = self.sampler.table.num_prompt_logprobs
        self.model.ranks.send(_step_message(plan, self.table, self.page_table, prompt_logprobs))
        return super().launch(plan)

    def _sample(self, plan: StepPlan, hidden: Tensor) -> tuple[Sampled, Tensor]:
        sampled, states = super()._sample(plan, hidden)
        self.model.ranks.share(sampled.ids)
        return sampled, states


class _Listener:
    """Stands for the sampler where nothing is sampled: ids come from rank 0."""

    fused = False

    def __init__(self, ranks: Ranks, rows: int, vocab_size: int) -> None:
        self.ranks, self.vocab_size, self.table = ranks, vocab_size, self
        self.num_prompt_logprobs = np.full(rows, -1)

    def __call__(self, logits: Tensor, rows: np.ndarray, *_: Any) -> Sampled:
        return Sampled(self.ranks.share(torch.empty(len(rows), dtype=torch.int64, device=logits.device)))

    def with_logprobs(self, logits: Tensor, ids: Tensor, count: int) -> Sampled:
        return Sampled(ids)


def follow(model: DecoderModel, ranks: Ranks) -> None:
    """Carry out rank 0's steps until its engine is unloaded. Raises what a collective does when a rank is lost."""
    setup: Setup | None = ranks.receive()
    if setup is None:
        return
    model = model.to(device=ranks.device, dtype=setup.dtype).eval()
    if setup.dtype != torch.float32:
        model.pack()
    sizes = setup.sizes
    page_size, max_seq_len = sizes["page_size"], sizes["max_seq_len"]
    num_pages = ranks.smallest(fitting_pages(model, **sizes))
    pool = KVSlotPool(model, num_pages, page_size, dtype=setup.dtype, enable_prefix_cache=False)
    table = SequenceTable(setup.rows, max_seq_len, -(-max_seq_len // page_size), ranks.device)
    listener: Any = _Listener(ranks, setup.rows, model.vocab_size)
    runner = ModelRunner(model, pool, table, listener, table.page_table)
    while (step := ranks.receive()) is not None:
        rows = step.plan.rows
        table.page_table[rows, : step.page_table.shape[1]] = step.page_table
        table.prompt_len[rows], listener.num_prompt_logprobs[rows] = step.prompt_lens, step.num_prompt_logprobs
        table.write(step.places[0], step.places[1], step.ids)
        runner.launch(step.plan)


def follow_at(rank: int, size: int, address: str, device: str, path: str, options: dict[str, Any]) -> None:
    """The life of a rank in a process of its own: load its part, and follow. `options` are those of `load_model`."""
    from engine.models.loader import load_model

    ranks = Ranks(rank, size, address, device)
    model = load_model(path, device=ranks.device, ranks=ranks, **options)
    assert isinstance(model, DecoderModel)
    follow(model, ranks)
    ranks.close()


def start_ranks(size: int, device: str, path: str | Path, **options: Any) -> Ranks:
    """Start the other ranks as processes of this machine, one a device; returns this one's place, which is 0.

    They end with rank 0's engine (`unload_model`), or with this process. `options` are those of `load_model`.
    """
    if device == "cuda" and torch.cuda.device_count() < size:
        raise ValueError(f"{size} ranks need a device each, there are {torch.cuda.device_count()}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"

    def place(rank: int) -> str:
        return f"cuda:{rank}" if device == "cuda" else device

    context = mp.get_context("forkserver")  # imports once, however many ranks there are
    context.set_forkserver_preload([__name__, "engine.models.loader", "transformers"])
    processes = [
        context.Process(target=follow_at, args=(rank, size, address, place(rank), str(path), options), daemon=True)
        for rank in range(1, size)
    ]
    for process in processes:
        process.start()
    ranks = Ranks(0, size, address, place(0))
    ranks.processes = processes
    return ranks
