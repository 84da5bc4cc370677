"""Medusa-1: K residual heads that each predict one later token from the same feature (arXiv 2401.10774; methods §1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from headstart.heads.base import MAX_LAYERS, MAX_SIZE, Head, HeadConfig, Loss, depth_terms
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.losses import fused
from headstart.heads.numerics import compute_dtype

LM_HEADS = ("own", "shared", "lowrank")
LOSSES = ("kl", "ce")


@dataclass
class MedusaConfig(HeadConfig):
    """Recipe node `head` for Medusa."""

    structure: ClassVar[tuple[str, ...]] = ("num_layers", "lm_head", "rank", "depth")
    limits: ClassVar[dict[str, int]] = {**HeadConfig.limits, "num_layers": MAX_LAYERS, "rank": MAX_SIZE}

    type: str = "medusa"
    #: Number of heads (K); head d drafts the token d + 1 places ahead.
    depth: int = 4
    #: λ: the loss of head d weighs λ^d.
    depth_decay: float = 0.8
    #: Residual blocks per head.
    num_layers: int = 1
    #: Output matrix: own (one per head, V × D, started from the target's), shared (the target's, frozen) or lowrank
    #: (the target's plus a trained low-rank update per head).
    lm_head: str = "own"
    #: Rank of the update under head.lm_head=lowrank.
    rank: int = 64
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


class MedusaHead(Head):
    """Head d reads f_t (post-norm) and predicts x_{t+1+d}."""

    family = "medusa"
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, dims: HeadDims):
        super().__init__(config, dims)
        # λ^d with d = 1 for the first head (Medusa, §2.2.1)
        self.terms = depth_terms(config.depth, config.depth_decay, first=1)
        for name, value, allowed in (("lm_head", config.lm_head, LM_HEADS), ("loss", config.loss, LOSSES)):
            if value not in allowed:
                raise ConfigError(f"head.{name}: found {value!r}, expected one of {list(allowed)}")
        size, vocab = dims.hidden_size, dims.vocab_size
        self.blocks = nn.ModuleList(ResidualBlocks(size, config.num_layers) for _ in range(config.depth))
        if config.lm_head == "own":
            self.lm_heads = nn.ModuleList(nn.Linear(size, vocab, bias=False) for _ in range(config.depth))
        elif config.lm_head == "lowrank":
            self.down = nn.ModuleList(nn.Linear(size, config.rank, bias=False) for _ in range(config.depth))
            self.up = nn.ModuleList(nn.Linear(config.rank, vocab, bias=False) for _ in range(config.depth))
            for up in self.up:
                nn.init.zeros_(up.weight)

    def bind(self, ends: TargetEnds) -> None:
        """As the base class's. Raises: ConfigError for a target with a bias or a soft-cap on its logits."""
        teacher = ends.teacher
        if teacher.bias_V is not None or teacher.softcap is not None:
            what = "a bias" if teacher.bias_V is not None else f"a soft-cap of {teacher.softcap}"
            raise ConfigError(
                f"head.type: medusa needs a target whose lm_head is a plain matrix, this one has {what}; "
                "use head.type=eagle3"
            )
        super().bind(ends)

    def initialise(self, ends: TargetEnds, draft_ids_U: Tensor | None = None) -> None:
        """As the base class's. With lm_head=own, the heads' output matrices start as copies of the target's."""
        super().initialise(ends, draft_ids_U)
        if self.config.lm_head == "own":
            with torch.no_grad():
                for lm_head in self.lm_heads:
                    lm_head.weight.copy_(self.target_weight())

    def target_weight(self) -> Tensor:
        """The target's output matrix [V, D], times the scale of its logits."""
        weight_VD = self.teacher.weight_VD
        return weight_VD if self.teacher.scale == 1.0 else weight_VD * self.teacher.scale

    def output_weight(self, d: int) -> Tensor:
        """Output matrix of head d (0-based) [V, D]. With `lowrank` it is the sum of the target's and the update."""
        if self.config.lm_head == "own":
            return self.lm_heads[d].weight
        weight_VD = self.target_weight()
        if self.config.lm_head == "shared":
            return weight_VD
        return weight_VD + (self.up[d].weight @ self.down[d].weight).to(weight_VD.dtype)

    def draft_logits(self, hidden_BD: Tensor) -> Tensor:
        """Post-norm hidden states [B, D] → logits [B, K, V]."""
        hidden = hidden_BD.to(compute_dtype(self.blocks[0].layers[0].weight))
        inputs = [block(hidden) for block in self.blocks]
        if self.config.lm_head == "own":
            outputs = [lm(x.to(lm.weight.dtype)) for lm, x in zip(self.lm_heads, inputs, strict=True)]
            return torch.stack(outputs, dim=1)
        # one product with the target's matrix for all heads; low-rank updates are added to the logits
        weight_VD = self.teacher.weight_VD
        logits = nn.functional.linear(torch.stack(inputs, dim=1).to(weight_VD.dtype), weight_VD)
        if self.teacher.scale != 1.0:
            logits = logits * self.teacher.scale
        if self.config.lm_head == "lowrank":
            updates = [up(down(x)) for up, down, x in zip(self.up, self.down, inputs, strict=True)]
            logits = logits + torch.stack(updates, dim=1).to(logits.dtype)
        return logits

    def multiply_adds(self, rows: float, counts: Sequence[float]) -> float:
        own = sum(p.numel() for p in self.parameters())
        shared = 0 if self.config.lm_head == "own" else self.teacher.weight_VD.numel()
        return (own + shared * self.depth) * counts[0]

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        anchors = batch.anchors
        hidden_RD = batch.hidden_RD.to(compute_dtype(self.blocks[0].layers[0].weight))
        hidden_AD = hidden_RD[anchors.row_A]
        teacher_AV = None
        if self.config.loss == "kl":
            with torch.no_grad():
                teacher_AV = teacher.logits(batch.teacher_hidden()).to(hidden_AD.dtype)
        losses, hits, weights = [], [], anchors.weights()
        for d, count in enumerate(anchors.count_K):
            out = self.blocks[d](hidden_AD[:count])
            teacher_row = anchors.teacher_AK[:count, d]
            weight = weights[d]
            if teacher_AV is not None:
                loss, argmax = fused.soft_loss(out, self.output_weight(d), teacher_AV, teacher_row, weight, "kl")
            else:
                label = batch.tokens_R[(anchors.row_A[:count] + d + 2).clamp(max=batch.tokens_R.shape[0] - 1)]
                loss, argmax = fused.hard_ce(out, self.output_weight(d), label, weight)
            losses.append(loss)
            hits.append((argmax == batch.teacher_argmax_A[teacher_row]) & (weight > 0))
        return Loss.per_depth(torch.stack(losses), weights, hits, weights, len(self.terms))
