"""A head, features and packs small enough to check by hand."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from headstart.data.features import FeatureSource
from headstart.heads.base import Head, HeadConfig, Loss
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import Teacher
from headstart.train.loop import Observers, Validate
from headstart.train.step import LossModule, accumulate_window, window_counts
from headstart.train.stream import Pack, TrainData, Window

DIMS = HeadDims(
    hidden_size=8, vocab_size=13, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=16
)


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeHead(Head):
    """K linear heads with a bias on the last hidden state; cross-entropy to x_{t+1+d}. `noise` draws like EAGLE's."""

    family = "fake"

    def __init__(self, depth: int = 3, noise: float = 0.0, seed: int = 0):
        super().__init__(HeadConfig("fake", depth, 0.8), DIMS)
        generator = torch.Generator().manual_seed(seed)
        self.heads = nn.ModuleList(nn.Linear(DIMS.hidden_size, DIMS.vocab_size) for _ in range(depth))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
        self.noise = noise

    def loss_counts(self, batch: FeatureBatch) -> Tensor:
        return torch.tensor(batch.anchors.count_K, dtype=torch.float32)

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        hidden_RD = batch.hidden_RD
        if self.noise and self.training:
            hidden_RD = hidden_RD + self.noise * torch.rand_like(hidden_RD)
        losses, hits, weights = [], [], batch.anchors.weights()
        for d, head in enumerate(self.heads, start=1):
            row = batch.anchors.row_A[: batch.anchors.count_K[d - 1]]
            if not len(row):  # as real heads may: this depth's parameters get no gradient
                losses.append(torch.zeros(()))
                hits.append(torch.zeros(0, dtype=torch.bool))
                continue
            logits = head(hidden_RD[row])
            label = batch.tokens_R[row + 1 + d]
            losses.append(nn.functional.cross_entropy(logits.double(), label, reduction="sum").to(logits.dtype))
            hits.append(logits.argmax(-1) == label)
        return Loss.per_depth(torch.stack(losses), weights, hits, weights, len(self.terms))


def make_documents(count: int = 12, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """(tokens, turns) of lengths 5 … 16; the last third is the assistant's turn."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for _ in range(count):
        length = int(torch.randint(5, 17, (1,), generator=generator))
        tokens = torch.randint(0, DIMS.vocab_size, (length,), generator=generator)
        turn = torch.where(torch.arange(length) >= length // 3, 0, -1)
        documents.append((tokens, turn))
    return documents


class FakeSource(FeatureSource):
    """Features that depend on the document only; `pad` rows of padding, `poison` = a sample with a NaN feature."""

    def __init__(self, documents: list[tuple[Tensor, Tensor]], depth: int = 3, pad: int = 0, poison: int | None = None):
        self.documents, self.depth, self.pad, self.poison = documents, depth, pad, poison
        self.asked: list[list[int]] = []

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens, _ in self.documents]

    def get(self, pack: list[int]) -> FeatureBatch:
        self.asked.append(pack)
        rows = sum(self.lengths[i] for i in pack)
        ids = tuple(f"sample-{i}" for i in pack)
        batch = FeatureBatch.pack([self.documents[i] for i in pack], self.depth, rows + self.pad, ids)
        hidden = []
        for i in pack:
            generator = torch.Generator().manual_seed(1000 + i)
            hidden.append(torch.randn(self.lengths[i], DIMS.hidden_size, generator=generator))
            if i == self.poison:
                hidden[-1][:] = float("nan")
        hidden.append(torch.full((self.pad, DIMS.hidden_size), 7.0))
        batch.hidden_RD = torch.cat(hidden)
        return batch


def data_of(source: FakeSource, **more) -> TrainData:
    """Packs of at most 20 tokens, in the order that training uses."""
    return TrainData(source, **{"pack_tokens": 20, **more})


def pairs_of(source: FakeSource) -> TrainData:
    """Packs of two documents, unshuffled."""
    return data_of(source, make_packs=in_order)


def quiet(validate: Validate | None = None, **more) -> Observers:
    return Observers(validate, progress=False, **more)


def teacher() -> Teacher:
    return Teacher(torch.zeros(DIMS.vocab_size, DIMS.hidden_size))


def in_order(lengths, budget, seed, epoch) -> list[list[int]]:
    """Two documents per pack, unshuffled."""
    return [list(range(i, min(i + 2, len(lengths)))) for i in range(0, len(lengths), 2)]


def window_gradient(
    packs: list[list[int]], pad: int = 0, rank: int = 0, size: int = 1, head: FakeHead | None = None, wrap=None
):
    """(gradients by name, loss of this rank) of one window made of `packs`."""
    head = head or FakeHead()
    source = FakeSource(make_documents(), pad=pad)
    places = list(range(rank, len(packs), size))
    numbered = [Pack(0, place, tuple(pack)) for place, pack in enumerate(packs)]
    window = Window(numbered, places, [source.get(packs[place]) for place in places])
    counts_T = window_counts(head, window.batches, torch.device("cpu"))
    if size > 1:
        torch.distributed.all_reduce(counts_T)
    module = LossModule(head, teacher(), None)
    module = wrap(module) if wrap else module
    no_sync = module.no_sync if wrap else None
    sums = accumulate_window(
        module, window, counts_T, head.term_weights(), size, len(packs), 0, lambda loss: loss.backward(),
        *([no_sync] if no_sync else []),
    )  # fmt: skip
    return {name: p.grad for name, p in head.named_parameters()}, sums


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def forked(work: Callable[[], None], stderr: Path) -> ForkProcess:
    """Start `work` in a process that shares what is imported; exit code 0, or 1 with the traceback in `stderr`.

    For what needs a process of its own (ranks, kill -9) without the seconds that importing torch takes.
    """

    def main() -> None:
        with open(stderr, "w") as file:
            os.dup2(file.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        torch.set_num_threads(1)
        AcceleratorState._reset_state(reset_partial_state=True)  # the parent's process group is not the child's
        code = 0
        try:
            work()
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    return process


def be_rank(rank: int, port: int) -> None:
    """Make this process one of two ranks on this machine."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}


def on_two_ranks(work: Callable[[int], Any], out: Path) -> list[Any]:
    """What `work(rank)` returns on each of two ranks, which are processes of their own."""
    port = free_port()

    def rank_work(rank: int) -> None:
        be_rank(rank, port)
        torch.save(work(rank), out / f"rank{rank}.pt")

    processes = [forked(lambda r=r: rank_work(r), out / f"err{r}") for r in range(2)]
    for rank, process in enumerate(processes):
        process.join(timeout=200)
        assert process.exitcode == 0, (out / f"err{rank}").read_text()
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
