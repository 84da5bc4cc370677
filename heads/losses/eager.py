"""The losses in readable form, by plain autograd. Tests compare fused.py with them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads.numerics import wide

#: losses between the draft's distribution q and the teacher's p: see `divergence`
SOFT_LOSSES = ("soft_ce", "kl", "lk")

#: added to the acceptance rate before its log: the rate is 0 where min(p, q) is 0 in float32 for every token
LK_FLOOR = 1e-30


#: weights of LK and of L1 beside the loss that `kind` names; nothing is added by default
Mix = tuple[float, float]
PURE: Mix = (0.0, 0.0)


def divergence(logits_AU: Tensor, teacher_AU: Tensor, kind: str, mix: Mix = PURE) -> Tensor:
    """Loss of each row, [A] in at least float32, with q = softmax(logits) and p = softmax(teacher).

    Args:
        kind: "soft_ce", -Σ p log q; "kl", Σ p log(p / q): the same gradient, and 0 at best;
            "lk", -log Σ min(p, q): minus the log of the rate at which speculative sampling accepts a draft from q
            (LK loss, arXiv 2602.23881).
        mix: (weight of the LK loss, weight of L1, Σ |p - q|), which are added to "soft_ce" or "kl".
    """
    if any(mix):
        q_AU, p_AU = wide(logits_AU).softmax(-1), wide(teacher_AU).softmax(-1)
        distance_A = 2.0 * (1.0 - torch.where(q_AU < p_AU, q_AU, p_AU).sum(-1))
        added_A = mix[0] * divergence(logits_AU, teacher_AU, "lk") + mix[1] * distance_A
        return divergence(logits_AU, teacher_AU, kind) + added_A
    logq_AU, p_AU = wide(logits_AU).log_softmax(-1), wide(teacher_AU).softmax(-1)
    if kind == "soft_ce":
        return -(p_AU * logq_AU).sum(-1)
    if kind == "kl":
        return F.kl_div(logq_AU, p_AU, reduction="none").sum(-1)
    q_AU = logq_AU.exp()
    return -(torch.where(q_AU < p_AU, q_AU, p_AU).sum(-1) + LK_FLOOR).log()


def output_logits(hidden_AH: Tensor, weight_UH: Tensor, update: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """hidden · weightᵀ, [A, U]. Args: update: (low_AL, up_UL), whose product low · upᵀ is added."""
    logits_AU = F.linear(hidden_AH, weight_UH)
    return logits_AU if update is None else logits_AU + F.linear(*update)


def soft_loss(
    hidden_AH: Tensor,
    weight_UH: Tensor,
    teacher_TU: Tensor,
    teacher_row_A: Tensor,
    row_weight_A: Tensor,
    kind: str = "soft_ce",
    update: tuple[Tensor, Tensor] | None = None,
    mix: Mix = PURE,
) -> tuple[Tensor, Tensor]:
    """Divergence of `softmax(hidden · weightᵀ)` from `softmax(teacher)`, summed over weighted rows.

    Args:
        hidden_AH: input of the output matrix.
        weight_UH: output matrix.
        teacher_TU: teacher logits of T distinct rows over the same U tokens; constants.
        teacher_row_A: int64 [A], each row's teacher.
        row_weight_A: float32 [A]; 0 leaves a row out.
        kind, mix: see `divergence`.
        update: see `output_logits`.
    Returns: (loss sum, float32 scalar; argmax over U, int64 [A]).
    """
    logits_AU = output_logits(hidden_AH, weight_UH, update)
    loss_A = divergence(logits_AU, teacher_TU[teacher_row_A], kind, mix)
    return (loss_A * row_weight_A).sum(), logits_AU.detach().argmax(-1)


def hard_ce(
    hidden_AH: Tensor,
    weight_UH: Tensor,
    label_A: Tensor,
    row_weight_A: Tensor,
    update: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy against token ids. Arguments and results as `soft_loss`."""
    logits_AU = wide(output_logits(hidden_AH, weight_UH, update))
    loss_A = F.cross_entropy(logits_AU, label_A, reduction="none")
    return (loss_A * row_weight_A).sum(), logits_AU.detach().argmax(-1)
