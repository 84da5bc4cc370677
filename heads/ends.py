"""The target's two frozen ends: its input embedding and its output head.

Shape legend: A rows, D target hidden, V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headstart.heads.numerics import wide


@dataclass
class Teacher:
    """The target's frozen output head: post-norm hidden state → next-token logits.

    Attributes:
        weight_VD: lm_head weight (the tied embedding where the target ties).
        bias_V: lm_head bias, or None.
        softcap: Gemma-style final logit soft-cap, or None.
        scale: multiplier applied to the logits (Cohere/Granite style), 1 elsewhere.
        norm_D: the factor of the target's final RMSNorm, or None; heads with a norm of their own start from it.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    norm_D: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether the logits are the product with `weight_VD` and nothing else."""
        return self.bias_V is None and self.softcap is None and self.scale == 1.0

    @property
    def more_than_matrix(self) -> str | None:
        """What makes the logits more than a product and its scale, in words for messages; None if nothing does."""
        if self.bias_V is not None:
            return "a bias"
        return None if self.softcap is None else f"a soft-cap of {self.softcap}"

    def logits(self, hidden_AD: Tensor, ids_U: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """[A, V] (or [A, U], the columns of ids_U), float32 or `dtype`."""
        weight = self.weight_VD if ids_U is None else self.weight_VD[ids_U]
        bias = self.bias_V if self.bias_V is None or ids_U is None else self.bias_V[ids_U]
        logits = nn.functional.linear(hidden_AD.to(weight.dtype), weight, bias)
        if self.scale == 1.0 and self.softcap is None:
            return wide(logits) if dtype is None else logits.to(dtype)
        logits = wide(logits) * self.scale
        logits = logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap
        return logits if dtype is None else logits.to(dtype)


@dataclass(frozen=True)
class TargetEnds:
    """What a head may take from the target it drafts for.

    Attributes:
        embed_VD: input embedding weight, unscaled.
        teacher: the output head.
        model: the whole model, for heads that hold a module of it or change it; None where only the ends are loaded.
    """

    embed_VD: Tensor
    teacher: Teacher
    model: nn.Module | None = None
