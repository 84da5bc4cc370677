"""What the slots of drafted blocks learn from, and which of their drafts were right.

Shape legend: A anchors, K drafts of a block, R rows of a pack, U draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.heads.base import Loss
from headstart.heads.batch import FeatureBatch
from headstart.heads.losses.block import BlockLabels


def find_labels(batch: FeatureBatch, depth: int, decay: float, draft_ids_U: Tensor | None) -> BlockLabels:
    """The labels of all anchors' slots. A slot is active where it and all before it have a label that can be drafted.

    The slots of a row t that is supervised at depths 1 … 3, and whose third label cannot be drafted:

        depth k         1        2        3        4
        label           x_{t+2}  x_{t+3}  x_{t+4}  x_{t+5}
        supervised      yes      yes      yes      no
        active          yes      yes      no       no
        weight          1        decay    0        0
        teacher row     t + 1    t + 2    t + 3    t + 4

    Args:
        depth: K. decay: an active slot k weighs decay^(k - 1). draft_ids_U: see Head.
    """
    anchors, last = batch.anchors, batch.tokens_R.shape[0] - 1
    depth_K = torch.arange(1, depth + 1, device=anchors.row_A.device)
    row_AK = anchors.row_A[:, None] + depth_K
    label_AK = batch.tokens_R[(row_AK + 1).clamp(max=last)]
    supervised_AK = active_AK = anchors.depths_A[:, None] >= depth_K
    if draft_ids_U is not None:
        wanted_AK = label_AK
        label_AK = torch.searchsorted(draft_ids_U, wanted_AK).clamp(max=len(draft_ids_U) - 1)
        active_AK = (supervised_AK & (draft_ids_U[label_AK] == wanted_AK)).long().cumprod(1).bool()
    weight_AK = active_AK * decay ** (depth_K - 1).float()
    return BlockLabels(torch.where(active_AK, label_AK, 0), active_AK, weight_AK, row_AK.clamp(max=last), supervised_AK)


def measured(batch: FeatureBatch, labels: BlockLabels, draft_AK: Tensor, sum_T: Tensor, count_T: Tensor) -> Loss:
    """The loss with the metrics of `Head.metrics`. A draft is measured wherever it is supervised, active or not.

    Args: draft_AK: int64, the most likely token of each slot, target ids.
    """
    choice_AK = batch.argmax_by_row()[labels.teacher_row_AK]
    hit_AK = (draft_AK == choice_AK) & labels.supervised_AK
    weight_AK = batch.anchors.weight_AK
    on_AK = labels.supervised_AK.float() if weight_AK is None else labels.supervised_AK * weight_AK
    total_K, covered = on_AK.sum(0), (labels.active_AK[:, 0] * on_AK[:, 0]).sum()
    numerator_M = torch.cat(((hit_AK * on_AK).sum(0), covered[None]))
    return Loss(sum_T, count_T, numerator_M, torch.cat((total_K, total_K[:1])), hit_AK.long().cumprod(1).sum(1))
