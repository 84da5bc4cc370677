"""Heads that draft with decoder layers of their own, one row per drafted token: EAGLE-1, EAGLE-3 and P-EAGLE.

Shape legend: R rows of a pack, B batch, N rows of a decoding pass, D target hidden, k streams, H head hidden, U draft
vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.base import Head, HeadConfig
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.layers import Attend, DraftLayer, LaterLayer, Rope
from headstart.heads.numerics import compute_dtype
from headstart.heads.subsample import keep_fractions


@dataclass
class AutoregressiveConfig(HeadConfig):
    """Fields that EAGLE-1, EAGLE-3 and P-EAGLE share."""

    added: ClassVar[tuple[str, ...]] = ("row_fraction_first",)

    #: Part of the supervised rows that depth 1 trains on, drawn anew at every step. Losses are weighted so that
    #: gradients stay unbiased. A small part makes steps cheaper, so that more of them fit in the same time.
    row_fraction_first: float = 1.0
    #: Part of depth 1's rows that depth 2 trains on, its square at depth 3, and so on, weighted in the same way. 1
    #: trains on all of them.
    row_fraction: float = 1.0
    #: Smallest part of depth 1's rows that any depth trains on.
    row_fraction_min: float = 0.2
    #: Activation of the MLP, as transformers names it. null takes silu, the one that engines compute, or that of the
    #: head that training goes on from (start_from).
    hidden_act: str | None = None


class AutoregressiveHead(Head):
    """Row p reads the token x_{p+1} and a feature g_p at rope position p, and drafts x_{p+2}.

    Attributes:
        fc: input projection.
        keep_K: fraction of the supervised rows that train at each depth (heads/subsample.py); None = all.
    """

    fc: nn.Linear
    config: AutoregressiveConfig

    def __init__(self, config: AutoregressiveConfig, dims: HeadDims):
        super().__init__(config, dims)
        self.keep_K = keep_fractions(
            config.depth, config.row_fraction, config.row_fraction_min, config.row_fraction_first
        )
        self.rope = Rope(dims)

    @property
    def layer(self) -> DraftLayer:
        """The first decoder layer. Families name it as their file format does."""
        raise NotImplementedError

    @property
    def later_layers(self) -> Sequence[LaterLayer]:
        """The decoder layers that stand on the first one, in their order."""
        return ()

    @property
    def draft_layers(self) -> Sequence[DraftLayer]:
        return (self.layer, *self.later_layers)

    @property
    def recycles_norm(self) -> bool:
        """Whether `recycled` is the norm that `logits` begins with."""
        return False

    def recycled(self, out: Tensor) -> Tensor:
        """Output of the last layer [..., H] → g of the next step."""
        return out

    @property
    def longest_chain(self) -> int | None:
        return None

    @property
    def hidden_act(self) -> str:
        return self.config.hidden_act or self.dims.hidden_act

    @property
    def replaced(self) -> tuple[int, Tensor] | None:
        """(token, its embedding [H]): the one embedding that is the head's own and not the target's; None without."""
        return None

    def choose_rows(self, batch: FeatureBatch, seed: int) -> FeatureBatch:
        return batch if self.keep_K is None else batch.subsampled(self.keep_K, seed)

    def chosen_anchors(self, rows: float, anchors: float) -> float:
        return anchors * self.config.row_fraction_first

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [...] → embeddings [..., H] in the compute dtype."""
        dtype = compute_dtype(self.fc.weight)
        found = F.embedding(tokens, self.bound_ends().embed_VD).to(dtype)
        if self.replaced is None:
            return found
        token, own_H = self.replaced
        return torch.where((tokens == token)[..., None], own_H.to(dtype), found)

    @abstractmethod
    def fuse(self, hidden: Tensor, streams: Tensor | None) -> Tensor:
        """The target's features → g [..., H]. Args: hidden: [..., D], post-norm; streams: [..., k, D], pre-norm."""

    @abstractmethod
    def mix(self, embedding: Tensor, g: Tensor) -> Tensor:
        """Embedding and feature [..., H] → input of the layer's attention [..., I]."""

    @abstractmethod
    def residual(self, x: Tensor, g: Tensor) -> Tensor:
        """Start of the layer's residual stream [..., H]. Args: x: from `mix`."""

    @abstractmethod
    def logits(self, g: Tensor) -> Tensor:
        """Output of the last layer [..., H] → draft logits [..., U]."""

    def step(self, tokens_BN: Tensor, g_BNH: Tensor, position_BN: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One decoding pass over N rows per sequence.

        Args:
            tokens_BN: int64, the token that each row reads (x_{p+1}).
            g_BNH: features: `fuse` of the target's at p, or the g that the previous pass returned.
            position_BN: int64, rope position p.
            attend: stores the rows' keys and values in the caller's cache and attends. It is called once for each
                decoder layer, in their order.
        Returns: (g for the next pass [B, N, H], logits [B, N, U]).
        """
        x = self.mix(self.embed(tokens_BN), g_BNH.to(compute_dtype(self.fc.weight)))
        residual = self.residual(x, g_BNH.to(x.dtype))
        cos, sin = self.rope(position_BN)
        out = self.layer.decode(x, residual, cos, sin, attend)
        for layer in self.later_layers:
            out = layer.decode(layer.input_layernorm(out), out, cos, sin, attend)
        return self.recycled(out), self.logits(out)

    def target_ids(self, draft: Tensor) -> Tensor:
        """Draft-vocabulary ids → target ids."""
        return draft if self.draft_ids_U is None else self.draft_ids_U[draft]

    def next_tokens(self, batch: FeatureBatch) -> Tensor:
        """x_{t+1} of every row, int64 [R]. At a document's last row it is another token, which no loss depends on."""
        return torch.roll(batch.tokens_R, -1)
