"""A scheduler stands between drafting and the target's forward: it chooses which drafts are verified.

Shape legend: B batch, N nodes.
"""

from __future__ import annotations

import copy
from typing import Protocol

from torch import Tensor

from headstart.eval.decoding.rows import Rows
from headstart.eval.tree import Tree


class Scheduler(Protocol):
    """Chooses, in every cycle, which nodes of which rows the target verifies.

    A node that is left out counts as not drafted, so verification stays lossless on one condition. Where a tree carries
    q, its tokens were drawn: whether a node is kept may then depend on the nodes above it and on q, but not on what was
    drawn at its own level or below. Otherwise the kept drafts are not distributed as q says. Trees without q allow any
    choice. Nodes that are left out are masked. With `rows`, they cost nothing.

    One scheduler serves one batch at a time: `start` resets it.

    Attributes:
        rows: roots and nodes that a forward computes, over the whole batch; every root is one of them. Of more kept
            nodes the last ones are left out too. The host knows the number before the drafts exist. None: the forward
            computes all nodes.
        captures: whether a CUDA graph can hold `choose`. It then asks nothing of the host, and reads only tensors of
            `state` and tensors that outlive the batch.
        state: (object, attribute) of every tensor that `choose` replaces. Their shapes do not change after `start`.
        row_state: those of `state` whose first dimension is the batch.
    """

    captures: bool

    @property
    def rows(self) -> int | None:
        return None

    @property
    def state(self) -> list[tuple[object, str]]:
        return []

    @property
    def row_state(self) -> list[tuple[object, str]]:
        return self.state

    def start(self, context: Rows) -> None:
        """Begin a batch: all context tokens, as the drafter gets them."""
        return None

    def aside(self) -> Scheduler:
        """One for a batch of one row, whose `row_state` then becomes that of one row here."""
        return copy.copy(self)

    def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor | None:
        """Which nodes are verified.

        Args:
            tree: the drafts, none in idle rows. `tree.score_BN`, where it is not None, says how sure the draft is.
            roots_B: int64, the trees' roots.
            active_B: bool, rows that are not finished.
        Returns: bool [B, N], True = verified, or None = all. A kept node's parent must be kept.
        """
        ...


class KeepAll(Scheduler):
    """Verifies everything that is drafted."""

    captures = True

    def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor | None:
        return None


#: all loops share this one, because captured cycles are looked up by their scheduler
KEEP_ALL = KeepAll()
