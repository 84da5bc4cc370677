"""What the target's forwards give to drafters: the result of one forward, and tokens with their features.

Shape legend: B batch, M tokens of a forward, F flat rows, J tokens for the drafter, D hidden, k streams, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.eval.kernels.flat import FlatRows
from headstart.eval.kernels.rows import take_rows


@dataclass
class Step:
    """Result of one target forward.

    Attributes:
        logits: as the model gives them, [B, M or 1, V]; of flat rows [F, V].
        hidden, streams: features of all M tokens, [B, M, D] and [B, M, k, D]; of flat rows [F, D] and [F, k, D]. None
            where they were not asked for.
        flat: the rows that were computed, where these are not all places.
    """

    logits: Tensor
    hidden: Tensor | None
    streams: Tensor | None
    flat: FlatRows | None = None

    @property
    def roots_BV(self) -> Tensor:
        """Logits of the first token of each row."""
        return self.logits[:, 0] if self.flat is None else self.logits[: len(self.flat.kept_BM)]

    @cached_property
    def logits_BMV(self) -> Tensor:
        """Logits of all places, those of cut ones not to be read. Flat rows are copied for it, as for the next two."""
        return self._places(self.logits)

    @cached_property
    def hidden_BMD(self) -> Tensor | None:
        return None if self.hidden is None else self._places(self.hidden)

    @cached_property
    def streams_BMkD(self) -> Tensor | None:
        return None if self.streams is None else self._places(self.streams)

    def _places(self, x: Tensor) -> Tensor:
        return x if self.flat is None else self.flat.places(x)

    def rows(self, tokens_BJ: Tensor, count_B: Tensor, column_BJ: Tensor) -> Rows:
        """Tokens of this forward with their features: token j of row b stood in column `column_BJ[b, j]`."""
        take = take_rows if self.flat is None else self.flat.columns
        features = (None if x is None else take(x, column_BJ) for x in (self.hidden, self.streams))
        return Rows(tokens_BJ, count_B, *features)


@dataclass
class Rows:
    """Tokens that the target has read (their KV exist), with their features. Drafters read these.

    Attributes:
        tokens_BJ: int64, left-aligned.
        count_B: int64, tokens of each row; 0 = nothing new, the row is idle.
        hidden_BJD: f, last hidden state after the final norm, or None when the drafter reads no features.
        streams_BJkD: pre-norm residual streams at FeatureSpec.layer_ids, or None.
    """

    tokens_BJ: Tensor
    count_B: Tensor
    hidden_BJD: Tensor | None = None
    streams_BJkD: Tensor | None = None

    def features(self) -> Tensor:
        """f of every token, [B, J, D]. Raises: ValueError where there are none."""
        if self.hidden_BJD is None:
            raise ValueError("the rows carry no features: give the engine the drafter's spec")
        return self.hidden_BJD

    def last_features(self) -> Tensor:
        """f of the last token of each row, [B, D]; of an idle row its first column's. Raises: as `features`."""
        hidden_BJD = self.features()
        return hidden_BJD[torch.arange(len(hidden_BJD), device=hidden_BJD.device), (self.count_B - 1).clamp(min=0)]

    def _with(self, tokens_BJ: Tensor, count_B: Tensor, change: Callable[[Tensor], Tensor]) -> Rows:
        """Other tokens, with `change` applied to the features that there are."""
        features = (None if x is None else change(x) for x in (self.hidden_BJD, self.streams_BJkD))
        return Rows(tokens_BJ, count_B, *features)

    def padded(self, columns: int) -> Rows:
        """The same tokens, with columns of zeros added up to `columns`."""
        more = columns - self.tokens_BJ.shape[1]

        def pad(x: Tensor) -> Tensor:
            return F.pad(x, (0, 0) * (x.dim() - 2) + (0, more))

        return self._with(pad(self.tokens_BJ), self.count_B, pad)

    def at(self, column_B1: Tensor) -> Rows:
        """One token of each row."""
        return self._with(
            self.tokens_BJ.gather(1, column_B1), torch.ones_like(column_B1[:, 0]), lambda x: take_rows(x, column_B1)
        )

    def zeros(self, columns: int) -> Rows:
        """No tokens: `columns` columns of zeros, with features of the same kinds."""

        def none(x: Tensor) -> Tensor:
            return x.new_zeros((x.shape[0], columns, *x.shape[2:]))

        return self._with(none(self.tokens_BJ), torch.zeros_like(self.count_B), none)
