"""A family that exists for the contract suites alone: it drafts blocks, and its loss is unlike every other family's.

Two terms with normalisers of their own (every token of a block; whether the block begins with the root's own token, per
block), anchors chosen per step without weights, a metric of its own, and no chain that its loss could walk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters import Drafting, MedusaDrafter
from headstart.eval.drafters.everywhere import medusa_everywhere
from headstart.heads.base import Head, HeadConfig, Loss, LossTerm
from headstart.heads.batch import FeatureBatch
from headstart.heads.checkpoints.head_files import HeadFiles
from headstart.heads.dims import HeadDims
from headstart.heads.ends import Teacher
from headstart.heads.families import Family
from headstart.heads.families.paper import Paper
from reference.documents import Document, Ends, supervised_depth
from reference.families import Example, Reference
from reference.llama import Weights


@dataclass
class BlockConfig(HeadConfig):
    type: str = "block"
    depth: int = 3
    #: part of the anchors that a step trains
    part: float = 1.0


class BlockHead(Head):
    """depth tokens at once from one feature, and how sure it is that the block repeats the root."""

    family = "block"
    config: BlockConfig

    def __init__(self, config: BlockConfig, dims: HeadDims):
        super().__init__(config, dims)
        self.terms = (LossTerm("block", 0.5), LossTerm("repeat", 3.0))
        self.predict = nn.Linear(dims.hidden_size, config.depth * dims.vocab_size)
        self.confide = nn.Linear(dims.hidden_size, 1)

    def draft_logits(self, hidden_BD: Tensor) -> Tensor:
        """[B, D] → [B, K, V]."""
        return self.predict(hidden_BD).unflatten(-1, (self.depth, self.dims.vocab_size))

    def choose_rows(self, batch: FeatureBatch, seed: int) -> FeatureBatch:
        return batch if self.config.part == 1.0 else batch.subsampled((self.config.part,) * self.depth, seed)

    def metrics(self, depths: int) -> tuple[str, ...]:
        return ("right_per_block",)

    def _active(self, batch: FeatureBatch) -> list[Tensor]:
        anchors = batch.anchors
        return [(anchors.depths_A[:count] > d).float() for d, count in enumerate(anchors.count_K[: self.depth])]

    def loss_counts(self, batch: FeatureBatch) -> Tensor:
        rows = [active_A.sum() for active_A in self._active(batch)]
        return torch.stack((sum(rows), rows[0]))

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        row_A = batch.anchors.row_A[: batch.anchors.count_K[0]]
        hidden_AD = batch.hidden_RD[row_A]
        logits_AKV, active = self.draft_logits(hidden_AD), self._active(batch)
        block = right = hidden_AD.new_zeros(())
        for d, active_A in enumerate(active):
            logits_AV, label_A = logits_AKV[: len(active_A), d], _token(batch, row_A[: len(active_A)] + d + 2)
            block = block + (F.cross_entropy(logits_AV, label_A, reduction="none") * active_A).sum()
            right = right + ((logits_AV.argmax(-1) == label_A) * active_A).sum()
        repeats_A = (_token(batch, row_A + 2) == _token(batch, row_A + 1)).to(hidden_AD.dtype)
        doubt_A = F.binary_cross_entropy_with_logits(self.confide(hidden_AD)[:, 0], repeats_A, reduction="none")
        count_T = self.loss_counts(batch)
        return Loss(torch.stack((block, (doubt_A * active[0]).sum())), count_T, right[None], count_T[1:])


def _token(batch: FeatureBatch, row_A: Tensor) -> Tensor:
    return batch.tokens_R[row_A.clamp(max=len(batch.tokens_R) - 1)]


@dataclass
class BlockSums:
    """As `documents.Sums`, for two terms and one metric."""

    loss: list[Tensor]
    count: list[int]
    right: int
    prefix = None
    metrics = ("right_per_block",)

    @property
    def numerators(self) -> list[int]:
        return [self.right]

    @property
    def denominators(self) -> list[int]:
        return [self.count[1]]


def block_loss(head: BlockHead, weights: Weights, ends: Ends, documents: list[Document]) -> BlockSums:
    """One position after another."""
    zero = torch.zeros((), dtype=torch.float64)
    sums = BlockSums([zero, zero], [0, 0], 0)
    for document in documents:
        for t in range(len(document.tokens)):
            f_D, x = document.hidden_TD[t], document.tokens
            depths = supervised_depth(document, t, head.depth)
            for d in range(depths):
                rows = slice(d * head.dims.vocab_size, (d + 1) * head.dims.vocab_size)
                logits_V = weights["predict.weight"][rows] @ f_D + weights["predict.bias"][rows]
                sums.loss[0] = sums.loss[0] + torch.logsumexp(logits_V, 0) - logits_V[x[t + 2 + d]]
                sums.right += int(logits_V.argmax()) == x[t + 2 + d]
            if depths:
                doubt = (weights["confide.weight"] @ f_D + weights["confide.bias"])[0]
                sign = 1 if x[t + 2] == x[t + 1] else -1
                sums.loss[1] = sums.loss[1] + torch.log1p(torch.exp(-sign * doubt))
                sums.count[1] += 1
            sums.count[0] += depths
    return sums


FAMILY = Family("block", Paper("Block", "Blocks", "Doe, Jane", "2501.00001"), BlockConfig, BlockHead, HeadFiles())
REFERENCE = Reference(
    twin=block_loss,
    examples={"blocks of three": Example(BlockConfig())},
    random=BlockConfig(part=0.5),
    small=lambda vocab: BlockConfig(),
    steps=30,
    tolerance=1e-10,
)
DRAFTING = Drafting(
    ("chain",),
    lambda head, config: MedusaDrafter(head, config.tree, Sampling.from_config(config)),
    medusa_everywhere,
)
