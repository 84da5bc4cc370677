"""The loss of drafted blocks: terms against data tokens and against the target's distribution.

Shape legend: A anchors, K drafts of a block, D target hidden, R rows of the pack, r rank of a correction, U draft
vocabulary, V target vocabulary, T loss terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads.ends import Teacher
from headstart.heads.losses.eager import LK_FLOOR
from headstart.heads.numerics import wide

#: terms of a slot with draft distribution q and the target's p:
#: ce, -log q(label); l1, Σ |q - p|; kl, Σ p log(p / q); lk, -log Σ min(p, q)
KINDS = ("ce", "l1", "kl", "lk")

#: D-PACE: a draft's probability counts as (1 - DPACE_FLOOR) · q(label) + DPACE_FLOOR
DPACE_FLOOR = 0.5


@dataclass(frozen=True)
class BlockLabels:
    """What the slots of drawn blocks learn from.

    Attributes:
        label_AK: int64, the data's tokens as draft-vocabulary ids, 0 where not active.
        active_AK: bool, slots that carry a loss: a prefix of each block.
        teacher_row_AK: int64, the pack's row whose distribution teaches the slot.
    """

    label_AK: Tensor
    active_AK: Tensor
    teacher_row_AK: Tensor


@dataclass(frozen=True)
class BlockLosses:
    """Sums over a pack.

    Attributes:
        sum_T: float32 [T], Σ weight · term, differentiable.
        weight_AK: float32, weights by which the divisor is counted.
        overlap_AK: float32, Σ min(p, q) of every slot, the rate at which it is accepted; no gradient.
        argmax_AK: int64, draft-vocabulary ids.
    """

    sum_T: Tensor
    weight_AK: Tensor
    overlap_AK: Tensor
    argmax_AK: Tensor


def block_loss(
    hidden_AKD: Tensor,
    output_UD: Tensor,
    low_AKr: Tensor | None,
    up_Ur: Tensor | None,
    labels: BlockLabels,
    weight_AK: Tensor,
    teacher_hidden_RD: Tensor,
    teacher: Teacher,
    draft_ids_U: Tensor | None,
    kinds: tuple[str, ...],
    dpace: bool = False,
) -> BlockLosses:
    """The loss of all slots, logits = hidden · outputᵀ + low · upᵀ.

    Args:
        output_UD: frozen. low_AKr, up_Ur: correction of the logits, or None.
        weight_AK: float32, weight of each slot in the sums, 0 where not active.
        teacher_hidden_RD: post-norm hidden states of the pack's rows. draft_ids_U: see Head.
        kinds: terms, in the order of KINDS.
        dpace: weigh slots by D-PACE instead: the weight of draft j is the sum over active m ≥ j of the probability of
            getting to m, Π_{i ≤ m} (0.5 q(label_i) + 0.5), without gradient.
    """
    logits_AKU = F.linear(hidden_AKD, output_UD.to(hidden_AKD.dtype))
    if low_AKr is not None and up_Ur is not None:
        logits_AKU = logits_AKU + F.linear(low_AKr, up_Ur.to(low_AKr.dtype))
    logq_AKU = wide(logits_AKU).log_softmax(-1)
    with torch.no_grad():
        p_AKU = teacher.logits(teacher_hidden_RD[labels.teacher_row_AK], draft_ids_U).softmax(-1)
    ce_AK = -logq_AKU.gather(-1, labels.label_AK[..., None])[..., 0]
    q_AKU = logq_AKU.exp()
    overlap_AK = torch.minimum(p_AKU, q_AKU).sum(-1)
    used_AK = dpace_weights(ce_AK, labels.active_AK) if dpace else weight_AK
    terms = {
        "ce": lambda: ce_AK,
        "l1": lambda: (q_AKU - p_AKU).abs().sum(-1),
        "kl": lambda: F.kl_div(logq_AKU, p_AKU, reduction="none").sum(-1),
        "lk": lambda: -(overlap_AK + LK_FLOOR).log(),
    }
    sums = [(torch.where(labels.active_AK, terms[kind](), 0) * used_AK).sum() for kind in kinds]
    return BlockLosses(torch.stack(sums), weight_AK, overlap_AK.detach(), logits_AKU.detach().argmax(-1))


def dpace_weights(ce_AK: Tensor, active_AK: Tensor) -> Tensor:
    """D-PACE's weight of every slot, no gradient. Args: ce_AK: -log q(label)."""
    p_AK = (1 - DPACE_FLOOR) * (-ce_AK.detach()).exp() + DPACE_FLOOR
    prefix_AK = torch.where(active_AK, p_AK, 1.0).cumprod(1) * active_AK
    return prefix_AK.flip(1).cumsum(1).flip(1) * active_AK
