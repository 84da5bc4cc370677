"""What the target hands on: the result of a forward, and tokens with their features.

Shape legend: B batch, M tokens of a forward, J tokens handed on, D hidden, k streams, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
