"""The loss of drafted blocks in readable form, by plain autograd. Tests compare block.py with it.

Shape legend: see block.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads.ends import Teacher
from headstart.heads.losses.block import BlockLabels, BlockLosses, dpace_weights
from headstart.heads.losses.eager import LK_FLOOR
from headstart.heads.numerics import wide


def block_loss(
    hidden_AKD: Tensor,
    output_UD: Tensor,
    low_AKr: Tensor | None,
    up_Ur: Tensor | None,
    labels: BlockLabels,
    teacher_hidden_RD: Tensor,
    teacher: Teacher,
    draft_ids_U: Tensor | None,
    kinds: tuple[str, ...],
    dpace: bool = False,
    scale_T: Tensor | None = None,
    overlap: bool = False,
) -> BlockLosses:
    """As block.block_loss, which forms gradients by `scale_T`; these take any upstream gradient."""
    logits_AKU = F.linear(hidden_AKD, output_UD.to(hidden_AKD.dtype))
    if low_AKr is not None and up_Ur is not None:
        logits_AKU = logits_AKU + F.linear(low_AKr, up_Ur.to(low_AKr.dtype))
    logq_AKU = wide(logits_AKU).log_softmax(-1)
    with torch.no_grad():
        p_AKU = teacher.logits(teacher_hidden_RD[labels.teacher_row_AK], draft_ids_U, hidden_AKD.dtype)
        p_AKU = wide(p_AKU).softmax(-1)
    ce_AK = -logq_AKU.gather(-1, labels.label_AK[..., None])[..., 0]
    q_AKU = logq_AKU.exp()
    overlap_AK = torch.minimum(p_AKU, q_AKU).sum(-1)
    used_AK = dpace_weights(ce_AK, labels.active_AK) if dpace else labels.weight_AK
    terms = {
        "ce": lambda: ce_AK,
        "l1": lambda: (q_AKU - p_AKU).abs().sum(-1),
        "kl": lambda: F.kl_div(logq_AKU, p_AKU, reduction="none").sum(-1),
        "lk": lambda: -(overlap_AK + LK_FLOOR).log(),
    }
    sums = [(torch.where(labels.active_AK, terms[kind](), 0) * used_AK).sum() for kind in kinds]
    measured_AK = torch.where(labels.supervised_AK, overlap_AK.detach(), 0)
    argmax_AK = torch.where(labels.supervised_AK, logits_AKU.detach().argmax(-1), 0)
    reads = overlap or bool(set(kinds) - {"ce"})
    return BlockLosses(torch.stack(sums), measured_AK if reads else None, argmax_AK)
