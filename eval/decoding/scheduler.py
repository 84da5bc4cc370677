"""A scheduler stands between drafting and the target's forward: it chooses how much is drafted and what is verified.

Shape legend: B batch, N nodes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headstart.eval.decoding.rows import Rows
from headstart.eval.tree import Tree


@dataclass(frozen=True)
class CycleShape:
    """What a cycle drafts, and how much of it is verified. The host knows it before the cycle begins.

    Attributes:
        levels: levels that are drafted. None: all that the drafter has. 0: nothing, which is plain decoding.
        nodes: most nodes of a tree; None: all. Chains have a node per level.
        rows: roots and nodes that the target's forward computes, over the whole batch; every root is one of them.
            None: all nodes.
        says: whether the scheduler gets to know how sure the drafts are. Not saying it saves time. False only where
            `rows` is None, and only after a cycle that drafted no more levels: the drafter then reads fewer rows. The
            loop takes the same shape that says it after others, so `Scheduler.shapes` has both.
    """

    levels: int | None = None
    nodes: int | None = None
    rows: int | None = None
    says: bool = True


    def after(self, before: CycleShape) -> CycleShape:
        """This shape, or the same that says how sure the drafts are if the cycle before drafted more levels."""
        more = self.levels is not None and (before.levels is None or before.levels > self.levels)
        return replace(self, says=True) if more else self


WHOLE, PLAIN = CycleShape(), CycleShape(levels=0)


class Scheduler(Protocol):
    """Chooses the shape of every cycle, and which nodes the target verifies.

    A node that is left out counts as not drafted, so verification stays lossless on one condition. Where a tree carries
    q, its tokens were drawn: whether a node is kept may then depend on the nodes above it and on q, but not on what was
    drawn at its own level or below. Otherwise the kept drafts are not distributed as q says. Trees without q allow any
    choice. Nodes that `choose` leaves out are masked. Those beyond a shape's `rows` cost nothing.

    One scheduler serves one batch at a time: `start` resets it.

    Attributes:
        captures: whether a CUDA graph can hold `choose` and `reach`. They then ask nothing of the host, and read only
            tensors of `state` and tensors that outlive the batch.
        state: (object, attribute) of every tensor that `choose` replaces. Their shapes do not change after `start`.
        row_state: those of `state` whose first dimension is the batch.
        said: what the host gets beside a cycle's table, for `learn`; None = nothing.
    """

    captures: bool

    @property
    def state(self) -> list[tuple[object, str]]:
        return []

    @property
    def row_state(self) -> list[tuple[object, str]]:
        return self.state

    @property
    def said(self) -> Tensor | None:
        return None

    def start(self, context: Rows) -> None:
        """Begin a batch: all context tokens, as the drafter gets them."""
        return None

    def aside(self) -> Scheduler:
        """One for a batch of one row, whose `row_state` then becomes that of one row here."""
        return copy.copy(self)

    def admitted(self, row: int) -> None:
        """A row has begun another context. The drafter has read it."""
        return None

    def shapes(self) -> list[CycleShape]:
        """All shapes that cycles of this batch may have, after `start`. Each is captured before the first cycle."""
        return [WHOLE]

    def next_shape(self) -> CycleShape:
        """The shape of the next cycle.

        The drafter does not read what a cycle without drafts commits. So the cycles after one must be plain too, until
        `start`, or until all rows have begun other contexts (`admitted`).
        """
        return self.shapes()[0]

    def wants_time(self, shape: CycleShape) -> bool:
        """Whether a cycle of this shape is to be timed before the first cycle of the batch."""
        return False

    def timed(self, shape: CycleShape, seconds: float) -> None:
        """What a whole cycle of a shape takes, with its drafting."""
        return None

    def learn(
        self,
        shape: CycleShape,
        table: NDArray[np.int64],
        said: NDArray[np.float32] | None,
        seconds: float | None = None,
    ) -> None:
        """What came of a cycle. The next one already runs.

        Args:
            table: see Loop.verify. said: see `said`.
            seconds: between the end of the cycle before and its own, on the device; None where that is not known.
        """
        return None

    def prepare(self, shape: CycleShape) -> None:
        """A cycle of this shape comes next, captured or not."""
        return None

    def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor | None:
        """Which nodes are verified.

        Args:
            tree: the drafts, none in idle rows. `tree.score_BN`, where it is not None, says how sure the draft is.
            roots_B: int64, the trees' roots.
            active_B: bool, rows that are not finished.
        Returns: bool [B, N], True = verified, or None = all. A kept node's parent must be kept.
        """
        return None

    def reach(self, tree: Tree) -> Tensor | None:
        """How probable it is that each node is reached, float32 [B, N], as a logarithm. No node's value is above its
        parent's.

        Where a shape has fewer rows than there are nodes, those with the largest values are verified. It is asked in
        every cycle whose shape `says` so. None: the first nodes are verified.
        """
        return None


class KeepAll(Scheduler):
    """Verifies everything that is drafted."""

    captures = True


#: all loops share this one, because captured cycles are looked up by their scheduler
KEEP_ALL = KeepAll()
