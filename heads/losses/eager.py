"""Readable losses through plain autograd: what fused.py is tested against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads.numerics import wide


def soft_ce(
    hidden_AH: Tensor, weight_UH: Tensor, teacher_TU: Tensor, teacher_row_A: Tensor, row_weight_A: Tensor
) -> tuple[Tensor, Tensor]:
    """Soft cross-entropy of `softmax(hidden · weightᵀ)` against `softmax(teacher)`, summed over weighted rows.

    Args:
        hidden_AH: input of the output matrix.
        weight_UH: output matrix.
        teacher_TU: teacher logits of T distinct rows over the same U tokens; constants.
        teacher_row_A: int64 [A], each row's teacher.
        row_weight_A: float32 [A]; 0 leaves a row out.
    Returns: (loss sum, float32 scalar; argmax over U, int64 [A]).
    """
    logits_AU = wide(F.linear(hidden_AH, weight_UH))
    target_AU = wide(teacher_TU[teacher_row_A]).softmax(-1)
    loss_A = -(target_AU * logits_AU.log_softmax(-1)).sum(-1)
    return (loss_A * row_weight_A).sum(), logits_AU.detach().argmax(-1)


def entropy(teacher_TU: Tensor, chunk: int = 1024) -> Tensor:
    """Entropy in nats of each teacher row, float32 [T]: KL = soft cross-entropy − entropy."""
    parts = []
    for logits in teacher_TU.split(chunk):
        logq = wide(logits).log_softmax(-1)
        parts.append(-(logq.exp() * logq).sum(-1))
    return torch.cat(parts) if parts else teacher_TU.new_zeros(0, dtype=torch.float32)


def hard_ce(hidden_AH: Tensor, weight_UH: Tensor, label_A: Tensor, row_weight_A: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy against token ids; arguments and results as `soft_ce`."""
    logits_AU = wide(F.linear(hidden_AH, weight_UH))
    loss_A = F.cross_entropy(logits_AU, label_A, reduction="none")
    return (loss_A * row_weight_A).sum(), logits_AU.detach().argmax(-1)
