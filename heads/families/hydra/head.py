"""Hydra and Hydra++: draft heads that also read the tokens drafted before theirs (arXiv 2402.05109).

Heads are counted from 1 here, as in the paper; head d has the output matrix of depth d - 1 (families/outputs.py).
Shape legend: R rows of a pack, A anchors, N rows of any kind, B batch, D target hidden, d depth of a head, V target
vocabulary, K depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.base import MAX_LAYERS, Loss
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.families.hydra.prefix import PrefixLayer
from headstart.heads.families.outputs import OutputConfig, OutputMatrices
from headstart.heads.kernels.attention import TrainAttention
from headstart.heads.layers import Attend, DraftLayer


@dataclass
class HydraConfig(OutputConfig):
    """Recipe node `head` for Hydra. Hydra++ sets prefix_layer, four layers and dropout."""

    structure: ClassVar[tuple[str, ...]] = ("num_layers", "lm_head", "rank", "depth", "prefix_layer")
    limits: ClassVar[dict[str, int]] = {**OutputConfig.limits, "num_layers": MAX_LAYERS}

    type: str = "hydra"
    #: Number of heads (K); head d drafts the token d + 1 places ahead.
    depth: int = 4
    #: The loss of head d weighs depth_decay ^ (d - 1). The authors weigh all heads equally.
    depth_decay: float = 1.0
    #: Residual blocks per head.
    num_layers: int = 1
    #: Give the heads a decoder layer of their own that reads the features of the whole context (Hydra++).
    prefix_layer: bool = False
    #: Share of a block's inputs, and of the output matrix's, that training sets to zero.
    dropout: float = 0.0


class HydraBlocks(nn.Module):
    """Residual blocks of head d: R x + SiLU(L x) from (d + 1) · D inputs to D, then x + SiLU(L x).

    They start so that the first D inputs, the feature, come out unchanged: R is the identity on them and 0 elsewhere,
    every L is 0. The output matrix is a copy of the target's and expects that feature. The reference starts R at
    random, so its heads first have to learn to pass the feature on.
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


class HydraHead(OutputMatrices):
    """Head d reads f_t (post-norm) and the embeddings of x_{t+1} … x_{t+d}, and predicts x_{t+1+d}.

    With a prefix layer it reads that layer's output at t in the place of f_t. In training the tokens are the
    document's, in drafting the root and the drafts on the way to the node.

    Attributes:
        prefix: the prefix layer; None without.
        embed_scale: float32 scalar, a power of two: factor on the target's embeddings. They are far smaller than
            features (SmolLM2: 0.11 against 1.9), so without it their part of R and L would learn far more slowly. It is
            saved with the head.
    """

    family = "hydra"
    config: HydraConfig
    embed_scale: Tensor

    def __init__(self, config: HydraConfig, dims: HeadDims):
        super().__init__(config, dims)
        if not 0 <= config.dropout < 1:
            raise ConfigError(f"head.dropout: found {config.dropout}, expected a share: 0 (off) or more, less than 1")
        self.register_buffer("embed_scale", torch.ones(()))
        self.prefix = PrefixLayer(dims) if config.prefix_layer else None
        self.blocks = nn.ModuleList(
            HydraBlocks(dims.hidden_size, d, config.num_layers, config.dropout) for d in range(1, config.depth + 1)
        )
        self.make_matrices()

    @property
    def draft_layers(self) -> Sequence[DraftLayer]:
        return () if self.prefix is None else (self.prefix.layer,)

    @property
    def hidden_act(self) -> str | None:
        return None if self.prefix is None else self.dims.hidden_act

    def initialise(self, ends: TargetEnds, draft_ids_U: Tensor | None = None) -> None:
        """As the base class's. Embeddings get the scale of features, and the prefix layer passes features through."""
        super().initialise(ends, draft_ids_U)
        self.embed_scale.copy_(embedding_scale(ends))
        if self.prefix is not None:
            self.prefix.initialise(ends.teacher.norm_D)

    # one head, in training and in drafting

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [...] → the target's embeddings [..., D], times embed_scale; no gradient."""
        dtype = self.compute_dtype()
        return F.embedding(tokens, self.bound_ends().embed_VD).to(dtype) * self.embed_scale.to(dtype)

    def prefix_states(self, hidden_BND: Tensor, position_BN: Tensor, attend: Attend) -> Tensor:
        """What the heads read in the place of f_t, of N new rows of each context: [B, N, D].

        Args:
            hidden_BND: features f_t. position_BN: int64, rope positions t.
            attend: stores the rows' keys and values in the caller's cache and attends; unused without a prefix layer.
        """
        hidden_BND = hidden_BND.to(self.compute_dtype())
        return hidden_BND if self.prefix is None else self.prefix.decode(hidden_BND, position_BN, attend)

    def block_input(self, d: int, f_ND: Tensor, tokens_Nd: Tensor) -> Tensor:
        """[f_t ; e(x_{t+1}) ; … ; e(x_{t+d})] of head d: [N, (d + 1) · D].

        Args:
            f_ND: from `prefix_states`. tokens_Nd: int64 [N, d], x_{t+1} … x_{t+d}.
        """
        return torch.cat((f_ND.to(self.compute_dtype()), self.embed(tokens_Nd).flatten(1)), dim=1)

    def state(self, d: int, f_ND: Tensor, tokens_Nd: Tensor) -> Tensor:
        """What the output matrix of head d reads: [N, D]. Args: as `block_input`."""
        return self.blocks[d - 1](self.block_input(d, f_ND, tokens_Nd))

    def draft_logits(self, d: int, f_ND: Tensor, tokens_Nd: Tensor) -> Tensor:
        """Logits of head d for x_{t+1+d}: [N, V]. Args: as `block_input`."""
        return self.depth_logits(d - 1, self.state(d, f_ND, tokens_Nd))

    # training

    def anchor_features(self, batch: FeatureBatch) -> Tensor:
        """What the heads read in the place of f_t, at every anchor: [A, D]."""
        row_A, hidden_RD = batch.anchors.row_A, batch.hidden_RD.to(self.compute_dtype())
        if self.prefix is None:
            return hidden_RD[row_A]
        return self.prefix.rows(hidden_RD, batch.position_R, row_A, TrainAttention(batch).attend)

    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        anchors, last = batch.anchors, batch.tokens_R.shape[0] - 1
        f_AD = self.anchor_features(batch)
        # x_{t+1} … x_{t+K} of every anchor; clamped only where the depth is not supervised
        ahead_K = torch.arange(1, len(anchors.count_K) + 1, device=anchors.row_A.device)
        tokens_AK = batch.tokens_R[(anchors.row_A[:, None] + ahead_K).clamp(max=last)]

        def input_of(depth: int, count: int) -> Tensor:  # depths are counted from 0, heads from 1
            return self.state(depth + 1, f_AD[:count], tokens_AK[:count, : depth + 1])

        return self.loss_over_depths(batch, teacher, input_of, scale_T)

    # costs

    def multiply_adds(self, rows: float, counts: Sequence[float]) -> float:
        """Head d runs on the rows supervised at depth d, the prefix layer's keys and values on all rows."""
        total = 0.0 if self.prefix is None else self.prefix.multiply_adds(rows, counts[0])
        for blocks, count in zip(self.blocks, counts, strict=False):
            matrices = sum(p.numel() for p in blocks.parameters() if p.dim() == 2)
            total += count * (matrices + self.output_multiply_adds())
        return total

    def kept_numbers(self, rows: float, anchors: float, recompute: bool) -> float:
        """The output matrices' numbers, the prefix layer's, and per head: the inputs of its blocks, the output of every
        L, and the gradient of the output matrix's input, which a low-rank matrix keeps as well.

        Dropout keeps a mask of one byte, half a number, per input.
        """
        config, size = self.config, self.dims.hidden_size
        inputs = sum(d + 1 for d in range(1, self.depth + 1)) + self.depth * (config.num_layers - 1)
        masks = (inputs + self.depth) / 2 if config.dropout else 0.0
        lowrank = config.lm_head == "lowrank"
        per_anchor = size * (inputs + masks + self.depth * (config.num_layers + 1 + lowrank))
        prefix = 0.0 if self.prefix is None else self.prefix.kept_numbers(rows, anchors, recompute)
        return anchors * per_anchor + rows * 2 * size + prefix + self.output_numbers(anchors)


def embedding_scale(ends: TargetEnds) -> Tensor:
    """The power of two that brings the target's embeddings nearest to its features in size (root mean square)."""
    norm_D = ends.teacher.norm_D
    features = torch.ones(()) if norm_D is None else norm_D.float().square().mean().sqrt()
    embeddings = ends.embed_VD.detach().float().square().mean().sqrt()
    return torch.exp2((features.to(embeddings.device) / embeddings).log2().round())
