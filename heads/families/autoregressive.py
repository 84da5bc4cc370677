"""Heads that draft one token after another through one decoder layer: EAGLE-1 and EAGLE-3."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.base import Head, HeadConfig
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.layers import Attend, DraftLayer, Rope
from headstart.heads.numerics import compute_dtype
from headstart.heads.subsample import keep_fractions


@dataclass
class AutoregressiveConfig(HeadConfig):
    """Fields of the heads below."""

    #: Part of the supervised rows that depth 2 trains on, its square at depth 3, and so on. Losses are weighted so that
    #: gradients stay unbiased. 1 trains on all rows.
    row_fraction: float = 1.0
    #: Smallest part of the rows that any depth trains on.
    row_fraction_min: float = 0.2
    #: Activation of the MLP, as transformers names it. null takes silu, the one that engines compute, or that of the
    #: head that training goes on from (start_from).
    hidden_act: str | None = None


class AutoregressiveHead(Head):
    """Row p consumes the token x_{p+1} and a feature g_p at rope position p, and drafts x_{p+2}.

    Attributes:
        fc: input projection.
        keep_K: fraction of the supervised rows that training runs at every depth, None = all (heads/subsample.py).
    """

    fc: nn.Linear
    config: AutoregressiveConfig

    def __init__(self, config: AutoregressiveConfig, dims: HeadDims):
        super().__init__(config, dims)
        self.keep_K = keep_fractions(config.depth, config.row_fraction, config.row_fraction_min)
        self.rope = Rope(dims)

    @property
    def layer(self) -> DraftLayer:
        """The decoder layer, under the name its file format wants."""
        raise NotImplementedError

    @property
    def draft_layers(self) -> Sequence[DraftLayer]:
        return (self.layer,)

    @property
    def longest_chain(self) -> int | None:
        return None

    @property
    def hidden_act(self) -> str:
        return self.config.hidden_act or self.dims.hidden_act

    def choose_rows(self, batch: FeatureBatch, seed: int) -> FeatureBatch:
        return batch if self.keep_K is None else batch.subsampled(self.keep_K, seed)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [...] → embeddings [..., H] in the compute dtype."""
        if self.embed_VD is None:
            raise RuntimeError("the head is not bound to a target: call bind(target.ends) first")
        return F.embedding(tokens, self.embed_VD).to(compute_dtype(self.fc.weight))

    @abstractmethod
    def fuse(self, hidden: Tensor, streams: Tensor | None) -> Tensor:
        """Target features → g: hidden [..., D] (post-norm) and streams [..., k, D] (pre-norm) → [..., H]."""

    @abstractmethod
    def mix(self, embedding: Tensor, g: Tensor) -> Tensor:
        """Embedding and feature [..., H] → attention input of the layer [..., in]."""

    @abstractmethod
    def residual(self, x: Tensor, g: Tensor) -> Tensor:
        """What the layer's residual stream starts from: [..., H]."""

    @abstractmethod
    def logits(self, g: Tensor) -> Tensor:
        """Layer output [..., H] → draft logits [..., U]."""

    def step(self, tokens_BN: Tensor, g_BNH: Tensor, position_BN: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One decoding pass over N rows per sequence.

        Args:
            tokens_BN: int64, the token each row consumes (x_{p+1}).
            g_BNH: features: `fuse` of the target's at p, or the g a previous step returned.
            position_BN: int64, rope position p.
            attend: stores the rows' keys and values in the caller's cache and attends.
        Returns: (g for the next step [B, N, H], logits [B, N, U]).
        """
        x = self.mix(self.embed(tokens_BN), g_BNH.to(compute_dtype(self.fc.weight)))
        residual = self.residual(x, g_BNH.to(x.dtype))
        cos, sin = self.rope(position_BN)
        out = self.layer.decode(x, residual, cos, sin, attend)
        return out, self.logits(out)

    def target_ids(self, draft: Tensor) -> Tensor:
        """Draft-vocabulary ids → target ids."""
        return draft if self.draft_ids_U is None else self.draft_ids_U[draft]

    def next_tokens(self, batch: FeatureBatch) -> Tensor:
        """x_{t+1} of every row, int64 [R]; the last row of a document gets a token nobody's loss can see."""
        return torch.roll(batch.tokens_R, -1)
