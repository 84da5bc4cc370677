"""The loss of drafts that are chosen among the most likely tokens: cross-entropy over the candidates.

Candidates are the tokens that are most likely by the logits without a correction. A label that is none of them takes
the place of the least likely one, so that every slot teaches.

Shape legend: A anchors, K drafts of a block, M = A · K slots, C candidates, S slots of a chunk, D target hidden,
r rank of a correction, U draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads.losses.block import BlockLabels
from headstart.heads.losses.fused import chunk_elements
from headstart.heads.numerics import compute_dtype, wide


@torch.no_grad()
def candidates(hidden_MD: Tensor, output_UD: Tensor, count: int) -> Tensor:
    """The `count` most likely tokens of every slot, int64 [M, C], the most likely one first."""
    rows = max(1, chunk_elements(hidden_MD.device) // len(output_UD))
    matrix_UD = output_UD.to(hidden_MD.dtype)
    found = [(x_SD @ matrix_UD.t()).topk(count, -1).indices for x_SD in hidden_MD.split(rows)]
    return torch.cat(found) if found else hidden_MD.new_zeros((0, count), dtype=torch.int64)


def select_loss(
    hidden_AKD: Tensor, output_UD: Tensor, low_AKr: Tensor, up_Ur: Tensor, labels: BlockLabels, count: int
) -> tuple[Tensor, Tensor]:
    """(Σ weight · cross-entropy over the candidates, float32; the chosen tokens, int64 [A, K], 0 where not supervised).

    A candidate's score is its logit, output · hidden + up · low.

    Args: output_UD: frozen. count: C.
    """
    dtype = compute_dtype(hidden_AKD)
    with torch.autocast(hidden_AKD.device.type, enabled=False):
        hidden_MD, low_Mr = hidden_AKD.flatten(0, 1).to(dtype), low_AKr.flatten(0, 1).to(dtype)
        label_M = labels.label_AK.flatten()
        token_MC = candidates(hidden_MD.detach(), output_UD, count)

        def scores(token_MX: Tensor) -> Tensor:
            base = torch.einsum("mxd,md->mx", F.embedding(token_MX, output_UD.detach()).to(dtype), hidden_MD)
            return wide(base) + wide(torch.einsum("mxr,mr->mx", F.embedding(token_MX, up_Ur).to(dtype), low_Mr))

        score_MC, label_score_M1 = scores(token_MC), scores(label_M[:, None])
        held_M1 = (token_MC == label_M[:, None]).any(-1, keepdim=True)
        last_M1 = torch.where(held_M1, score_MC[:, -1:], label_score_M1)
        taught_MC = torch.cat((score_MC[:, :-1], last_M1), -1)
        ce_M = taught_MC.logsumexp(-1) - label_score_M1[:, 0]
        total = (ce_M * labels.weight_AK.flatten()).sum()
        chosen_M = token_MC.gather(1, score_MC.detach().argmax(-1, keepdim=True))[:, 0]
    return total, torch.where(labels.supervised_AK, chosen_M.view(labels.label_AK.shape), 0)


def among_likeliest(logits: Tensor, base: Tensor, count: int) -> Tensor:
    """`logits` [..., U] of the `count` tokens whose `base` logits [..., U] are largest; the others are -inf."""
    kept = base.topk(count, -1).indices
    return torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
