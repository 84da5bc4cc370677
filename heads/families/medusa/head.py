"""Medusa-1: K residual heads that each predict one later token from the same feature (arXiv 2401.10774; methods §1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from headstart.heads.base import MAX_LAYERS, Loss, depth_terms
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.families.outputs import OutputConfig, OutputMatrices, TeacherRows

LOSSES = ("kl", "ce")


@dataclass
class MedusaConfig(OutputConfig):
    """Recipe node `head` for Medusa."""

    structure: ClassVar[tuple[str, ...]] = ("num_layers", "lm_head", "rank", "depth")
    limits: ClassVar[dict[str, int]] = {**OutputConfig.limits, "num_layers": MAX_LAYERS}

    type: str = "medusa"
    #: Number of heads (K); head d drafts the token d + 1 places ahead.
    depth: int = 4
    #: λ: the loss of head d weighs λ^d.
    depth_decay: float = 0.8
    #: Residual blocks per head.
    num_layers: int = 1
    #: What a head learns: kl (the target's distribution, for answers of the target itself) or ce (the tokens of the
    #: data).
    loss: str = "kl"


class ResidualBlocks(nn.Module):
    """`num_layers` independent blocks h + SiLU(W h + b). W and b start at zero: a new block changes nothing."""

    def __init__(self, size: int, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(num_layers))
        for layer in self.layers:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = h + nn.functional.silu(layer(h))
        return h


class MedusaHead(OutputMatrices):
    """Head d reads f_t (post-norm) and predicts x_{t+1+d}."""

    family = "medusa"
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, dims: HeadDims):
        super().__init__(config, dims)
        # λ^d with d = 1 for the first head (Medusa, §2.2.1)
        self.terms = depth_terms(config.depth, config.depth_decay, first=1)
        if config.loss not in LOSSES:
            raise ConfigError(f"head.loss: found {config.loss!r}, expected one of {list(LOSSES)}")
        self.blocks = nn.ModuleList(ResidualBlocks(dims.hidden_size, config.num_layers) for _ in range(config.depth))
        self.make_matrices()

    def draft_logits(self, hidden_BD: Tensor) -> Tensor:
        """Post-norm hidden states [B, D] → logits [B, K, V]."""
        hidden_BD = hidden_BD.to(self.compute_dtype())
        return self.logits([block(hidden_BD) for block in self.blocks])

    def multiply_adds(self, rows: float, counts: Sequence[float]) -> float:
        blocks = sum(p.numel() for p in self.blocks.parameters())
        return (blocks + self.output_multiply_adds() * self.depth) * counts[0]

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        anchors, dtype = batch.anchors, self.compute_dtype()
        hidden_AD = batch.hidden_RD.to(dtype)[anchors.row_A]
        soft = TeacherRows.of(teacher, batch.teacher_hidden(), dtype) if self.config.loss == "kl" else None
        losses, hits, weights = [], [], anchors.weights()
        for d, count in enumerate(anchors.count_K):
            x_AD, weight_A = self.blocks[d](hidden_AD[:count]), weights[d]
            teacher_row_A = anchors.teacher_AK[:count, d]
            if soft is not None:
                loss, argmax_A = self.soft_loss(d, x_AD, soft, teacher_row_A, weight_A, scale_T)
            else:
                label_A = batch.tokens_R[(anchors.row_A[:count] + d + 2).clamp(max=batch.tokens_R.shape[0] - 1)]
                loss, argmax_A = self.hard_loss(d, x_AD, label_A, weight_A, scale_T)
            losses.append(loss)
            hits.append((argmax_A == batch.teacher_argmax_A[teacher_row_A]) & (weight_A > 0))
        return Loss.per_depth(torch.stack(losses), weights, hits, weights, len(self.terms))
