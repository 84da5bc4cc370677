"""Walked acceptance: the cycles of a greedy chain over known answers, without decoding.

A cycle begins at a row. It commits the right drafts up to the first wrong one, then the target's own token, where the
next cycle begins. A mean over all rows would be another number, as it also counts rows where no cycle begins.

Worked example: one answer of 6 tokens a … f after the prompt's last token, chains of 2

    row              .   a   b   c   d   e   f
    root             a   b   c   d   e   f
    left             5   4   3   2   1   0       answer tokens after the root
    right drafts     2   0   0   1   0           of the chain that starts at the row
    kept             3   1   1   2   1   0       min(right drafts + 1, left)
    a cycle begins   x           x               5 tokens in 2 cycles: τ = 2.5
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.heads.batch import FeatureBatch


def find_cycles(hits_R: Tensor, left_R: Tensor, first_R: Tensor) -> tuple[Tensor, Tensor]:
    """The cycles of the decode loop: (tokens that a cycle at each row would commit, int64 [R]; rows where one begins).

    Captured steps run this, so nothing waits for the device and the number of operations depends on R alone.

    Args:
        hits_R: int64 [R], right drafts in a row of the chain that starts at each row.
        left_R: int64 [R], answer tokens after each row's root; 0 where no cycle can begin.
        first_R: bool [R], rows whose root is an answer's first token. Row t + left_R[t] exists for each row t.
    """
    rows = hits_R.shape[0]
    kept_R = torch.minimum(hits_R + 1, left_R)
    next_R = torch.arange(rows, device=hits_R.device) + kept_R
    seen_R = first_R.to(torch.int32)
    # pointer doubling. After n rounds: the rows reached in fewer than 2^n cycles, and where 2^n cycles lead from a row
    for _ in range(rows.bit_length()):
        seen_R = (torch.zeros_like(seen_R).index_add_(0, next_R, seen_R) + seen_R > 0).to(torch.int32)
        next_R = next_R[next_R]
    return kept_R, (seen_R > 0) & (left_R > 0)


def answer_rows(answer_R: Tensor, doc_R: Tensor) -> tuple[Tensor, Tensor]:
    """(left_R, first_R) of `find_cycles` for a pack.

    Args:
        answer_R: int64 [R], assistant turn of token x_t (unique within its document), -1 = not part of an answer.
        doc_R: int64 [R], document of the row, -1 = padding.
    """
    rows, device = answer_R.shape[0], answer_R.device
    row_R = torch.arange(rows, device=device)
    ahead_R = (row_R + 1).clamp(max=rows - 1)
    # whether the next row is in the same document, and whether its token is in the same answer
    inside_R = (doc_R[ahead_R] == doc_R) & (doc_R >= 0) & (row_R < rows - 1)
    same_R = inside_R & (answer_R >= 0) & (answer_R[ahead_R] == answer_R)
    # the last row of the answer that holds each row's token
    end_R = row_R.masked_fill(same_R, rows).flip(0).cummin(0).values.flip(0)
    rooted_R = inside_R & (answer_R[ahead_R] >= 0)
    left_R = (end_R[ahead_R] - ahead_R).masked_fill(~rooted_R, 0)
    begins_R = torch.ones_like(inside_R)
    begins_R[1:] = ~inside_R[:-1]
    # an answer at a document's start has no row before its first token: its walk begins at its second token
    return left_R, rooted_R & (~same_R | begins_R)


def walk(run_A: Tensor, batch: FeatureBatch, depth: int) -> Tensor:
    """(tokens, cycles) of greedy chains of length `depth` over the answers of a pack, float32 [2].

    The decode loop has the same cycles if the answers are the target's own greedy ones. Both are 0 where rows are
    subsampled: a cycle may begin at any row, so every row must have run at every depth.

    Args:
        run_A: see Loss.
        depth: drafts of the chain. Drafts beyond the anchors' depths do not count.
    """
    anchors = batch.anchors
    if anchors.weight_AK is not None:
        return torch.zeros(2, device=batch.tokens_R.device)
    hits_R = torch.zeros_like(batch.tokens_R).index_copy_(0, anchors.row_A, run_A.clamp(max=depth))
    answer_R = batch.turn_R if batch.answer_R is None else batch.answer_R
    kept_R, starts_R = find_cycles(hits_R, *answer_rows(answer_R, batch.doc_R))
    return torch.stack([(kept_R * starts_R).sum(), starts_R.sum()]).float()
