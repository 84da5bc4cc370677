"""The target's own term of joint training, in chunks of rows (families §5).

Shape legend: R rows of a pack, C rows of a chunk, D target hidden, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.heads.ends import Teacher
from headstart.heads.losses import fused
from headstart.heads.numerics import compute_dtype


def target_loss(
    teacher: Teacher, hidden_RD: Tensor, label_R: Tensor, weight_R: Tensor, original_RD: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The tuned target's loss on its next tokens. Logits exist for one chunk of rows at a time.

    Args:
        hidden_RD: post-norm, of the tuned target. Gradients flow into it.
        label_R: int64, the next token of every row. weight_R: float32, 1 where it carries a loss, else 0.
        original_RD: post-norm, of the target without its adapter: the loss is KL(original ‖ tuned). None = the
            cross-entropy of the labels.
    Returns: (the weighted sum, a scalar; the tuned target's choice, int64 [R]; what it should have chosen, int64 [R]:
        the original target's choice, or the label).
    """
    weight_VD = teacher.weight_VD
    if teacher.scale != 1.0:
        hidden_RD = hidden_RD * teacher.scale
    chunk = fused.chunk_rows(len(label_R), len(weight_VD))
    total, choices, wanted = hidden_RD.new_zeros((), dtype=torch.float32), [], []
    for start in range(0, len(label_R), chunk):
        part = slice(start, start + chunk)
        hidden_CD, weight_C = hidden_RD[part], weight_R[part]
        if original_RD is None:
            loss, choice_C = fused.hard_ce(hidden_CD, weight_VD, label_R[part], weight_C)
            wanted_C = label_R[part]
        else:
            with torch.no_grad():
                original_CV = teacher.logits(original_RD[part], dtype=compute_dtype(weight_VD))
                wanted_C = original_CV.argmax(-1)
            row_C = torch.arange(len(weight_C), device=weight_C.device)
            loss, choice_C = fused.soft_loss(hidden_CD, weight_VD, original_CV, row_C, weight_C, "kl")
            del original_CV
        total = total + loss
        choices.append(choice_C)
        wanted.append(wanted_C)
    return total, torch.cat(choices), torch.cat(wanted)
