"""What the target hands on: the result of a forward, and tokens with their features.

Shape legend: B batch, M tokens of a forward, J tokens handed on, D hidden, k streams, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.eval.kernels.rows import take_rows


@dataclass
class Step:
    """Result of one target forward: logits [B, M or 1, V] as the model gives them, and features of all M tokens."""

    logits_BMV: Tensor
    hidden_BMD: Tensor | None
    streams_BMkD: Tensor | None


@dataclass
class Rows:
    """Tokens whose target KV now exist, with their features: what a drafter is fed.

    Attributes:
        tokens_BJ: int64, left-aligned; row b has `count_B[b]` of them (0 = nothing new, the row is idle).
        count_B: int64.
        hidden_BJD: f, last hidden state after the final norm, or None when the drafter reads no features.
        streams_BJkD: pre-norm residual streams at FeatureSpec.layer_ids, or None.
    """

    tokens_BJ: Tensor
    count_B: Tensor
    hidden_BJD: Tensor | None = None
    streams_BJkD: Tensor | None = None

    def padded(self, columns: int) -> Rows:
        """The same tokens in so many columns; what is added holds zeros."""
        more = columns - self.tokens_BJ.shape[1]
        hidden, streams = self.hidden_BJD, self.streams_BJkD
        return Rows(
            F.pad(self.tokens_BJ, (0, more)),
            self.count_B,
            None if hidden is None else F.pad(hidden, (0, 0, 0, more)),
            None if streams is None else F.pad(streams, (0, 0, 0, 0, 0, more)),
        )

    def at(self, column_B1: Tensor) -> Rows:
        """One token of each row."""
        hidden, streams = self.hidden_BJD, self.streams_BJkD
        return Rows(
            self.tokens_BJ.gather(1, column_B1),
            torch.ones_like(column_B1[:, 0]),
            None if hidden is None else take_rows(hidden, column_B1),
            None if streams is None else take_rows(streams, column_B1),
        )

    def zeros(self, columns: int) -> Rows:
        """No tokens: so many columns of zeros, with the features that these have."""
        tokens_BJ, hidden, streams = self.tokens_BJ, self.hidden_BJD, self.streams_BJkD
        batch = tokens_BJ.shape[0]
        return Rows(
            tokens_BJ.new_zeros((batch, columns)),
            torch.zeros_like(self.count_B),
            None if hidden is None else hidden.new_zeros((batch, columns, *hidden.shape[2:])),
            None if streams is None else streams.new_zeros((batch, columns, *streams.shape[2:])),
        )
