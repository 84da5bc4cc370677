"""A block drafter in miniature: from one feature and the root it predicts the next tokens all at once.

Shape legend: A anchors, B block (tokens drafted at once), D target hidden, V target vocabulary, T loss terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.base import MAX_LAYERS, Head, HeadConfig, Loss, LossTerm
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import Teacher
from headstart.heads.layers import DraftLayer, RMSNorm, Rope
from headstart.heads.numerics import compute_dtype


@dataclass
class MiniBlockConfig(HeadConfig):
    """Recipe node `head` of the block drafter; `depth` is the length of a block."""

    structure: ClassVar[tuple[str, ...]] = ("num_layers", "depth")
    limits: ClassVar[dict[str, int]] = {**HeadConfig.limits, "num_layers": MAX_LAYERS}

    type: str = "miniblock"
    #: Tokens that are drafted at once.
    depth: int = 3
    #: Decoder layers.
    num_layers: int = 2
    #: Part of the blocks that a step trains.
    block_fraction: float = 1.0
    #: Weight of the confidence's loss.
    confidence_weight: float = 0.5


class MiniBlockHead(Head):
    """Row b of a block drafts x_{t+2+b}; the rows of a block see each other, and the target's feature at t."""

    family = "miniblock"
    config: MiniBlockConfig

    def __init__(self, config: MiniBlockConfig, dims: HeadDims):
        super().__init__(config, dims)
        self.terms = (LossTerm("tokens", 1.0), LossTerm("confidence", config.confidence_weight))
        hidden = dims.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.place_BD = nn.Parameter(torch.randn(config.depth, hidden))
        self.layers = nn.ModuleList(
            DraftLayer(hidden, hidden, dims.intermediate_size, dims, self.hidden_act) for _ in range(config.num_layers)
        )
        self.input_norms = nn.ModuleList(RMSNorm(hidden, dims.rms_norm_eps) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, dims.rms_norm_eps)
        self.confidence = nn.Linear(hidden, 1)
        self.rope = Rope(dims)

    @property
    def draft_layers(self) -> Sequence[DraftLayer]:
        return tuple(self.layers)

    @property
    def hidden_act(self) -> str:
        return self.dims.hidden_act

    def choose_rows(self, batch: FeatureBatch, seed: int) -> FeatureBatch:
        part = self.config.block_fraction
        return batch if part == 1 else batch.subsampled((part,) * self.depth, seed)

    def metrics(self, depths: int) -> tuple[str, ...]:
        """Besides those of every head, how often the confidence is right about the first token of a block."""
        return (*super().metrics(depths), "confidence_right")

    def multiply_adds(self, rows: float, counts: Sequence[float]) -> float:
        output = self.dims.vocab_size * self.dims.hidden_size
        return self.depth * (sum(p.numel() for p in self.parameters()) + output) * counts[0]

    def blocks(self, hidden_AD: Tensor, root_A: Tensor) -> Tensor:
        """The target's feature at t and the token x_{t+1} → [A, B, D], after the final norm."""
        embedding_AD = F.embedding(root_A, self.embed_VD)
        dtype = compute_dtype(self.fc.weight)
        x_AD = self.fc(torch.cat((embedding_AD.to(dtype), hidden_AD.to(dtype)), -1))
        x_ABD = x_AD[:, None] + self.place_BD.to(x_AD.dtype)
        cos_BW, sin_BW = self.rope(torch.arange(self.depth, device=x_ABD.device))
        for layer, norm in zip(self.layers, self.input_norms, strict=True):
            x_ABD = layer.decode(norm(x_ABD), x_ABD, cos_BW, sin_BW, attend)
        return self.norm(x_ABD)

    def draft_logits(self, hidden_AD: Tensor, root_A: Tensor) -> Tensor:
        """[A, B, V]. Args: see `blocks`."""
        return self.teacher.logits(self.blocks(hidden_AD, root_A))

    def loss_counts(self, batch: FeatureBatch) -> Tensor:
        """Tokens that are predicted, and blocks."""
        count_K = batch.anchors.active_counts()
        return torch.stack((count_K.sum(), count_K[0]))

    def covered_rows(self, batch: FeatureBatch) -> Tensor:
        return batch.anchors.active_counts()[0]

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        anchors, weights = batch.anchors, batch.anchors.weights()
        row_A = anchors.row_A[: anchors.count_K[0]]
        blocks_ABD = self.blocks(batch.hidden_RD[row_A], token_after(batch, row_A, 1))
        losses, hits = [], []
        for b, (count, weight_A) in enumerate(zip(anchors.count_K, weights, strict=True)):
            logits_AV = teacher.logits(blocks_ABD[:count, b])
            loss_A = F.cross_entropy(logits_AV, token_after(batch, row_A[:count], b + 2), reduction="none")
            choice_A = batch.teacher_argmax_A[anchors.teacher_AK[:count, b]]
            losses.append((loss_A * weight_A).sum())
            hits.append((logits_AV.argmax(-1) == choice_A) & (weight_A > 0))
        doubt_A = self.confidence(blocks_ABD[:, 0])[:, 0]
        confidence_A = F.binary_cross_entropy_with_logits(doubt_A, hits[0].to(doubt_A.dtype), reduction="none")
        loss_K = torch.stack(losses)
        loss = Loss.per_depth(loss_K, weights, hits, weights, len(losses))
        loss = replace(
            loss,
            sum_T=torch.stack((loss_K.sum(), (confidence_A * weights[0]).sum())),
            count_T=self.loss_counts(batch),
        )
        right = (((doubt_A > 0) == hits[0]) * weights[0]).sum()
        return loss.with_metrics([right], [weights[0].sum()])


def token_after(batch: FeatureBatch, row_A: Tensor, distance: int) -> Tensor:
    """x_{t+distance}; some token where the pack ends before it, which no loss counts."""
    return batch.tokens_R[(row_A + distance).clamp(max=batch.tokens_R.shape[0] - 1)]


def attend(q_AhBd: Tensor, k_AgBd: Tensor, v_AgBd: Tensor) -> Tensor:
    """All rows of a block see each other."""
    return F.scaled_dot_product_attention(q_AhBd, k_AgBd, v_AgBd, enable_gqa=True)
