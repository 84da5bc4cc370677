"""Medusa-1: K residual heads that each predict one later token from the same feature (arXiv 2401.10774; methods §1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from headstart.heads.base import MAX_LAYERS, Loss, depth_terms
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import Teacher
from headstart.heads.families.outputs import OutputConfig, OutputMatrices


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
        self.blocks = nn.ModuleList(ResidualBlocks(dims.hidden_size, config.num_layers) for _ in range(config.depth))
        self.make_matrices()

    def draft_logits(self, hidden_BD: Tensor, heads: int | None = None) -> Tensor:
        """Post-norm hidden states [B, D] → logits [B, K, V]. Args: heads: K, the first heads; None = all."""
        hidden_BD = hidden_BD.to(self.compute_dtype())
        return self.logits([block(hidden_BD) for block in self.blocks[:heads]])

    def multiply_adds(self, rows: float, counts: Sequence[float]) -> float:
        blocks = sum(p.numel() for p in self.blocks.parameters())
        return (blocks + self.output_multiply_adds() * self.depth) * counts[0]

    def kept_numbers(self, rows: float, anchors: float, recompute: bool) -> float:
        """The features of anchors and teacher; per block what its SiLU read, and its output or the gradient of that.

        A low-rank matrix keeps its input as well.
        """
        size, config = self.dims.hidden_size, self.config
        per_head = 2 * config.num_layers + (config.lm_head == "lowrank")
        return anchors * size * (2 + config.depth * per_head) + self.output_numbers(anchors)

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        hidden_AD = batch.hidden_RD.to(self.compute_dtype())[batch.anchors.row_A]
        return self.loss_over_depths(batch, teacher, lambda d, count: self.blocks[d](hidden_AD[:count]), scale_T)
