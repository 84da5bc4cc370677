"""Hydra and Hydra++: draft heads that also read the tokens drafted before theirs (arXiv 2402.05109).

Shape legend: R rows of a pack, A anchors, N rows of any kind, B batch, D target hidden, d depth of a head (from 1),
g kv heads, h query heads, V target vocabulary, K depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.base import MAX_LAYERS, MAX_SIZE, Head, HeadConfig, Loss
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.families.hydra.prefix import PrefixLayer
from headstart.heads.kernels.attention import TrainAttention
from headstart.heads.layers import Attend, DraftLayer
from headstart.heads.losses import fused
from headstart.heads.numerics import compute_dtype

LM_HEADS = ("own", "shared", "lowrank")
LOSSES = ("kl", "ce")


@dataclass
class HydraConfig(HeadConfig):
    """Recipe node `head` for Hydra. Hydra++ sets prefix_layer, four layers and dropout."""

    structure: ClassVar[tuple[str, ...]] = ("num_layers", "lm_head", "rank", "depth", "prefix_layer")
    limits: ClassVar[dict[str, int]] = {**HeadConfig.limits, "num_layers": MAX_LAYERS, "rank": MAX_SIZE}

    type: str = "hydra"
    #: Number of heads (K); head d drafts the token d + 1 places ahead.
    depth: int = 4
    #: The loss of head d weighs depth_decay ^ (d - 1). The authors weigh all heads equally.
    depth_decay: float = 1.0
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
    #: Give the heads a decoder layer of their own that reads the features of the whole context (Hydra++).
    prefix_layer: bool = False
    #: Share of a block's inputs, and of the output matrix's, that training sets to zero.
    dropout: float = 0.0


class HydraBlocks(nn.Module):
    """Residual blocks of head d: R x + SiLU(L x) from (d + 1) · D inputs to D, then x + SiLU(L x).

    They start so that the first D inputs, the feature, come out unchanged: R is the identity on them and 0 elsewhere,
    every L is 0. The reference starts R at random, so its heads first have to find the feature again that their output
    matrix, a copy of the target's, expects.
    """

    def __init__(self, size: int, d: int, num_layers: int, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.residual = nn.Linear((d + 1) * size, size)
        widths = [(d + 1) * size, *[size] * (num_layers - 1)]
        self.layers = nn.ModuleList(nn.Linear(width, size) for width in widths)
        for layer in (self.residual, *self.layers):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        nn.init.eye_(self.residual.weight)  # [I 0 … 0]

    def forward(self, x: Tensor) -> Tensor:
        """[N, (d + 1) · D] → [N, D]. In training, dropout acts before every block and on the result."""
        x = self.drop(x)
        x = self.residual(x) + F.silu(self.layers[0](x))
        for layer in list(self.layers)[1:]:
            x = self.drop(x)
            x = x + F.silu(layer(x))
        return self.drop(x)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class HydraHead(Head):
    """Head d reads f_t (post-norm) and the embeddings of x_{t+1} … x_{t+d}, and predicts x_{t+1+d}.

    With a prefix layer it reads that layer's output at t in the place of f_t (`context_feature` below). In training the
    tokens are the document's, in drafting the root and the drafts on the way to the node.

    Attributes:
        prefix: the prefix layer; None without.
    """

    family = "hydra"
    config: HydraConfig

    def __init__(self, config: HydraConfig, dims: HeadDims):
        super().__init__(config, dims)
        for name, value, allowed in (("lm_head", config.lm_head, LM_HEADS), ("loss", config.loss, LOSSES)):
            if value not in allowed:
                raise ConfigError(f"head.{name}: found {value!r}, expected one of {list(allowed)}")
        if not 0 <= config.dropout < 1:
            raise ConfigError(f"head.dropout: found {config.dropout}, expected a share: 0 (off) or more, less than 1")
        size, vocab, depths = dims.hidden_size, dims.vocab_size, range(1, config.depth + 1)
        self.prefix = PrefixLayer(dims) if config.prefix_layer else None
        self.blocks = nn.ModuleList(HydraBlocks(size, d, config.num_layers, config.dropout) for d in depths)
        if config.lm_head == "own":
            self.lm_heads = nn.ModuleList(nn.Linear(size, vocab, bias=False) for _ in depths)
        elif config.lm_head == "lowrank":
            self.down = nn.ModuleList(nn.Linear(size, config.rank, bias=False) for _ in depths)
            self.up = nn.ModuleList(nn.Linear(config.rank, vocab, bias=False) for _ in depths)
            for up in self.up:
                nn.init.zeros_(up.weight)

    @property
    def draft_layers(self) -> Sequence[DraftLayer]:
        return () if self.prefix is None else (self.prefix.layer,)

    @property
    def hidden_act(self) -> str | None:
        return None if self.prefix is None else self.dims.hidden_act

    def bind(self, ends: TargetEnds) -> None:
        """As the base class's. Raises: ConfigError for a target with a bias or a soft-cap on its logits."""
        teacher = ends.teacher
        if teacher.bias_V is not None or teacher.softcap is not None:
            what = "a bias" if teacher.bias_V is not None else f"a soft-cap of {teacher.softcap}"
            raise ConfigError(
                f"head.type: hydra needs a target whose lm_head is a plain matrix, this one has {what}; "
                "use head.type=eagle3"
            )
        super().bind(ends)

    def initialise(self, ends: TargetEnds, draft_ids_U: Tensor | None = None) -> None:
        """As the base class's. With lm_head=own, the heads' output matrices start as copies of the target's."""
        super().initialise(ends, draft_ids_U)
        if self.prefix is not None:
            self.prefix.initialise(ends.teacher.norm_D)
        if self.config.lm_head == "own":
            with torch.no_grad():
                for lm_head in self.lm_heads:
                    lm_head.weight.copy_(self.target_weight())

    def target_weight(self) -> Tensor:
        """The target's output matrix [V, D], times the scale of its logits."""
        weight_VD = self.teacher.weight_VD
        return weight_VD if self.teacher.scale == 1.0 else weight_VD * self.teacher.scale

    def output_weight(self, d: int) -> Tensor:
        """Output matrix of head d (from 1) [V, D]. With `lowrank` it is the sum of the target's and the update."""
        if self.config.lm_head == "own":
            return self.lm_heads[d - 1].weight
        weight_VD = self.target_weight()
        if self.config.lm_head == "shared":
            return weight_VD
        return weight_VD + (self.up[d - 1].weight @ self.down[d - 1].weight).to(weight_VD.dtype)

    # one head, in training and in drafting

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that activations run in."""
        return compute_dtype(self.blocks[0].residual.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [...] → the target's embeddings [..., D], without its scale if it has one; no gradient."""
        if self.embed_VD is None:
            raise RuntimeError("the head is not bound to a target: call bind(target.ends) first")
        return F.embedding(tokens, self.embed_VD).to(self.dtype)

    def prefix_states(self, hidden_BND: Tensor, position_BN: Tensor, attend: Attend) -> Tensor:
        """What the heads read in the place of f_t, of N new rows of each context: [B, N, D].

        Args:
            hidden_BND: features f_t. position_BN: int64, rope positions t.
            attend: stores the rows' keys and values in the caller's cache and attends; unused without a prefix layer.
        """
        hidden_BND = hidden_BND.to(self.dtype)
        return hidden_BND if self.prefix is None else self.prefix.decode(hidden_BND, position_BN, attend)

    def block_input(self, d: int, f_ND: Tensor, tokens_Nd: Tensor) -> Tensor:
        """[f_t ; e(x_{t+1}) ; … ; e(x_{t+d})] of head d (from 1): [N, (d + 1) · D].

        Args:
            f_ND: from `prefix_states`. tokens_Nd: int64 [N, d], x_{t+1} … x_{t+d}.
        """
        return torch.cat((f_ND.to(self.dtype), self.embed(tokens_Nd).flatten(1)), dim=1)

    def state(self, d: int, f_ND: Tensor, tokens_Nd: Tensor) -> Tensor:
        """What the output matrix of head d (from 1) reads: [N, D]. Args: as `block_input`."""
        return self.blocks[d - 1](self.block_input(d, f_ND, tokens_Nd))

    def depth_logits(self, d: int, f_ND: Tensor, tokens_Nd: Tensor) -> Tensor:
        """Logits of head d (from 1) for x_{t+1+d}: [N, V]. Args: as `block_input`."""
        x_ND = self.state(d, f_ND, tokens_Nd)
        weight_VD = self.output_weight(d)
        return F.linear(x_ND.to(weight_VD.dtype), weight_VD)

    # training

    def anchor_features(self, batch: FeatureBatch) -> Tensor:
        """What the heads read in the place of f_t, at every anchor: [A, D]."""
        row_A, hidden_RD = batch.anchors.row_A, batch.hidden_RD.to(self.dtype)
        if self.prefix is None:
            return hidden_RD[row_A]
        return self.prefix.rows(hidden_RD, batch.position_R, row_A, TrainAttention(batch).attend)

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        anchors, last = batch.anchors, batch.tokens_R.shape[0] - 1
        f_AD = self.anchor_features(batch)
        teacher_AV = None
        if self.config.loss == "kl":
            with torch.no_grad():
                teacher_AV = teacher.logits(batch.teacher_hidden()).to(f_AD.dtype)
        # x_{t+1} … x_{t+1+K} of every anchor; clamped only where the depth is not supervised
        ahead_K = torch.arange(1, len(anchors.count_K) + 2, device=anchors.row_A.device)
        tokens_AK = batch.tokens_R[(anchors.row_A[:, None] + ahead_K).clamp(max=last)]
        losses, hits, weights = [], [], anchors.weights()
        for d, (count, weight) in enumerate(zip(anchors.count_K, weights, strict=True), start=1):
            x_AD = self.state(d, f_AD[:count], tokens_AK[:count, :d])
            teacher_row = anchors.teacher_AK[:count, d - 1]
            if teacher_AV is not None:
                loss, argmax = fused.soft_loss(x_AD, self.output_weight(d), teacher_AV, teacher_row, weight, "kl")
            else:
                loss, argmax = fused.hard_ce(x_AD, self.output_weight(d), tokens_AK[:count, d], weight)
            losses.append(loss)
            hits.append((argmax == batch.teacher_argmax_A[teacher_row]) & (weight > 0))
        return Loss.per_depth(torch.stack(losses), weights, hits, weights, len(self.terms))

    # costs

    def multiply_adds(self, rows: float, counts: Sequence[float]) -> float:
        """Head d runs on the rows supervised at depth d, the prefix layer's keys and values on all rows."""
        prefix = 0.0 if self.prefix is None else self.prefix.multiply_adds(rows, counts[0])
        shared = 0 if self.config.lm_head == "own" else self.teacher.weight_VD.numel()
        for d, count in enumerate(counts[: self.depth]):
            parts: list[nn.Module] = [self.blocks[d]]
            if self.config.lm_head == "own":
                parts.append(self.lm_heads[d])
            elif self.config.lm_head == "lowrank":
                parts += [self.down[d], self.up[d]]
            prefix += count * (shared + sum(p.numel() for part in parts for p in part.parameters()))
        return prefix
