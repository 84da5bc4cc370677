"""Which rows train, at which depth, and where their teacher sits: the one home of every shift rule.

Worked example: two turns of one conversation, K = 3 (`.` is a prompt token, `A`/`B` assistant tokens)

    row t          0   1   2   3   4   5   6   7   8
    token          .   .   A0  A1  A2  .   .   B0  B1
    turn_t        -1  -1   0   0   0  -1  -1   1   1
    depths_t       0   2   1   0   0   0   1   0   0

    next_t         0   1   1   1   0   0   1   1   0
    drafted_t      0   0   0   1   2   0   0   0   1

Row t is *supervised at depth d* iff x_{t+1}, …, x_{t+1+d} are tokens of one assistant turn of one
document. Row 1 is the last prompt token: its feature is what serving has when the root A0 was just
sampled, so it drafts A1 (depth 1) and A2 (depth 2). Row 2 drafts A2 after the root A1. Row 6 drafts B1.
The label of row t at depth d is x_{t+1+d}; its teacher is the target's distribution at row t + d.
Supervised rows at depth d + 1 are a subset of those at depth d. What the target itself learns needs no draft: row t
*predicts a supervised token* (`next_t`) iff x_{t+1} is one, of its document. These are the rows supervised at depth 1,
and the row before the last token of every turn. Seen from the tokens: x_t is the label of `drafted_t` rows, each at
another depth. A2 is the label of row 1 at depth 2 and of row 2 at depth 1; A0 and B0 are roots, which no row drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from headstart.heads.subsample import Draw
from headstart.heads.transfer import to_device


def supervised_depths(turn_R: Tensor, doc_R: Tensor, max_depth: int) -> Tensor:
    """Number of depths (0 … max_depth) at which each row is supervised (methods §0).

    Args:
        turn_R: int64 [R], assistant turn of token x_t (unique within its document), -1 = unsupervised.
        doc_R: int64 [R], document of the row, -1 = padding.
        max_depth: K ≥ 1.
    Returns: int64 [R].
    """
    rows = turn_R.shape[0]
    same = torch.zeros(rows, dtype=torch.bool, device=turn_R.device)
    if rows > 1:
        same[:-1] = (turn_R[1:] >= 0) & (turn_R[1:] == turn_R[:-1]) & (doc_R[1:] == doc_R[:-1])
    same &= doc_R >= 0
    # same[r]: x_r and x_{r+1} belong to one turn. Row t reaches depth d iff same[t+1 … t+d] and x_t is in the document.
    depths_R = torch.zeros(rows, dtype=torch.int64, device=turn_R.device)
    alive = torch.zeros_like(same)
    if rows > 1:
        alive[:-1] = (doc_R[1:] == doc_R[:-1]) & (doc_R[:-1] >= 0)
    for d in range(1, max_depth + 1):
        ahead = torch.zeros_like(same)
        ahead[: max(rows - d, 0)] = same[d:]
        alive = alive & ahead
        depths_R += alive
    return depths_R


def predicting_rows(turn_R: Tensor, doc_R: Tensor) -> Tensor:
    """bool [R]: x_{t+1} is a supervised token of the row's document (`next_t` above). Args as supervised_depths."""
    found = torch.zeros_like(turn_R, dtype=torch.bool)
    found[:-1] = (turn_R[1:] >= 0) & (doc_R[1:] == doc_R[:-1]) & (doc_R[:-1] >= 0)
    return found


def drafted_depths(turn_R: Tensor, doc_R: Tensor, max_depth: int) -> Tensor:
    """At how many depths (0 … max_depth) each token is a label (`drafted_t` above). Args as supervised_depths.

    Returns: int64 [R].
    """
    depths_R = supervised_depths(turn_R, doc_R, max_depth)
    # the labels of row t are tokens t + 2 … t + 1 + depths_t: one more from the first on, one fewer behind the last
    first_R = torch.arange(2, len(depths_R) + 2, device=depths_R.device)
    change = torch.zeros(len(depths_R) + 3 + max_depth, dtype=torch.int64, device=depths_R.device)
    change.index_add_(0, first_R, torch.ones_like(depths_R))
    change.index_add_(0, first_R + depths_R, torch.full_like(depths_R, -1))
    return change.cumsum(0)[: len(depths_R)]


@dataclass(frozen=True)
class Anchors:
    """The supervised rows of a pack, deepest first, so that the rows of depth d are a prefix.

    Attributes:
        row_A: int64 [A], row of the pack, ordered by (depths descending, row ascending; by chance when subsampled).
        depths_A: int64 [A], number of depths that run for the anchor (≥ 1): all that are supervised, or fewer when rows
            are subsampled.
        teacher_AK: int64 [A, K], `teacher_AK[a, d-1]` = index *into the anchors* whose depth-1 teacher row is
            row_A[a] + d, i.e. the anchor at row_A[a] + d - 1; 0 where depth d is not supervised.
        count_K: python ints, anchors that run at depth 1 … K: the rows of depth d are `[: count_K[d-1]]`
            (in a batch padded to fixed shapes: an upper bound, of which `depths_A >= d` are active).
        supervised_A: int64 [A], number of supervised depths, where it is not depths_A (subsampled rows).
        weight_AK: float32 [A, K], importance of a row that runs at depth d, None = 1 (nothing is subsampled).
        keep_K: fraction of the rows of each depth that is kept, None = all.
        emphasis_AK: float32 [A, K], how many times each draft counts in the loss, beside its weight (train/rounds.py);
            None = once. Counts and metrics do not depend on it.

    The depth-1 teacher rows `row_A + 1` are exactly the rows whose target distribution any depth needs,
    because x_{t+d}, x_{t+d+1} in one turn makes row t + d - 1 an anchor itself.
    """

    row_A: Tensor
    depths_A: Tensor
    teacher_AK: Tensor
    count_K: tuple[int, ...]
    supervised_A: Tensor | None = None
    weight_AK: Tensor | None = None
    keep_K: tuple[float, ...] | None = None
    emphasis_AK: Tensor | None = None

    def __len__(self) -> int:
        return self.row_A.shape[0]

    def supervised_AK(self) -> Tensor:
        """bool [A, K]: supervised at depth 1 … K, whether or not the row runs there."""
        depth_K = torch.arange(1, len(self.count_K) + 1, device=self.depths_A.device)
        return (self.depths_A if self.supervised_A is None else self.supervised_A)[:, None] >= depth_K

    def active_counts(self) -> Tensor:
        """float32 [K]: anchors supervised at each depth, on the anchors' device, without a host read."""
        return self.supervised_AK().sum(0, dtype=torch.float32)

    def weights(self) -> list[Tensor]:
        """Per depth, float32 [count_K[d-1]]: what each row counts for in a sum over the depth.

        1 where the row runs and 0 where it does not; a subsampled row stands for those of its kind that were dropped.
        """
        found = []
        for d, count in enumerate(self.count_K):
            active_A = (self.depths_A[:count] > d).float()
            found.append(active_A if self.weight_AK is None else active_A * self.weight_AK[:count, d])
        return found

    def emphasised(self, weights: list[Tensor]) -> list[Tensor]:
        """Per depth, the rows' weights in the loss. Args: weights: per depth, without the emphasis."""
        if self.emphasis_AK is None:
            return weights
        return [weight * self.emphasis_AK[: len(weight), d] for d, weight in enumerate(weights)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Anchors:
        return self.map(lambda x: to_device(x, device, non_blocking))

    def map(self, change: Callable[[Tensor], Tensor]) -> Anchors:
        """The same anchors with every tensor changed."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: change(x) for name, x in values.items() if isinstance(x, Tensor)})

    def padded(self, size: int, row: int) -> Anchors:
        """Fixed size: padding anchors sit at `row` with no supervised depth; every depth keeps the rows it may need."""
        extra = size - len(self)
        grown = self.map(lambda x: torch.cat((x, x.new_zeros(extra, *x.shape[1:]))))
        grown.row_A[len(self) :] = row
        # a draw keeps at most one row more than its share of every group, of which there are at most K
        share = [1.0] * len(self.count_K) if self.keep_K is None else self.keep_K
        counts = tuple(min(size, math.ceil(keep * size) + len(share)) for keep in share)
        return replace(grown, count_K=counts)

    def subsampled(self, draw: Draw) -> Anchors:
        """The anchors in the order of `draw` (of the same device), running as deep as it says.

        Raises: ValueError for anchors that are subsampled or padded already.
        """
        if self.weight_AK is not None or len(draw.order_A) != len(self):
            raise ValueError("anchors are subsampled once, with a draw of their own counts, before they are padded")
        place_A = torch.empty_like(draw.order_A)
        place_A[draw.order_A] = torch.arange(len(self), device=place_A.device)
        supervised_A = self.depths_A[draw.order_A]
        teacher_AK = place_A[self.teacher_AK[draw.order_A]]
        step_K = torch.arange(teacher_AK.shape[1], device=place_A.device)
        teacher_AK = torch.where(step_K < supervised_A[:, None], teacher_AK, 0)
        emphasis_AK = None if self.emphasis_AK is None else self.emphasis_AK[draw.order_A]
        return Anchors(
            self.row_A[draw.order_A], draw.depths_A, teacher_AK, draw.count_K, supervised_A, draw.weight_AK,
            draw.keep_K, emphasis_AK,
        )  # fmt: skip

    def drawn(self, index_A: Tensor) -> Anchors:
        """Some of the anchors, each at all its depths. Their teacher rows need not be anchors: teacher_AK says nothing.

        Args: index_A: int64, ascending. Raises: ValueError for anchors that are subsampled or padded already.
        """
        if self.weight_AK is not None:
            raise ValueError("anchors are drawn once, before they are padded")
        count, depths = len(index_A), len(self.count_K)
        depths_A = self.depths_A[index_A]
        weight_AK = torch.ones((count, depths), device=depths_A.device)
        # which of them run deep is known on the device alone
        counts = tuple(min(count, most) for most in self.count_K)
        teacher_AK = self.teacher_AK.new_zeros(count, depths)
        emphasis_AK = None if self.emphasis_AK is None else self.emphasis_AK[index_A]
        return Anchors(self.row_A[index_A], depths_A, teacher_AK, counts, None, weight_AK, None, emphasis_AK)


def find_anchors(turn_R: Tensor, doc_R: Tensor, max_depth: int) -> Anchors:
    """Anchors of a pack (CPU tensors in, CPU tensors out: no device synchronisation later)."""
    depths_R = supervised_depths(turn_R, doc_R, max_depth)
    row_A = torch.nonzero(depths_R > 0).squeeze(1)
    order = torch.argsort(depths_R[row_A], descending=True, stable=True)
    row_A = row_A[order]
    depths_A = depths_R[row_A]
    rank_R = torch.zeros(turn_R.shape[0] + max_depth, dtype=torch.int64, device=turn_R.device)
    rank_R[row_A] = torch.arange(row_A.shape[0], device=turn_R.device)
    step_K = torch.arange(max_depth, device=turn_R.device)
    teacher_AK = rank_R[row_A[:, None] + step_K[None, :]]
    teacher_AK = torch.where(step_K[None, :] < depths_A[:, None], teacher_AK, 0)
    count_K = tuple(int((depths_A >= d).sum()) for d in range(1, max_depth + 1))
    return Anchors(row_A, depths_A, teacher_AK, count_K)
