"""What of the drafts is verified: a scheduler stands between drafting and the target's forward.

Shape legend: B batch, N nodes.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headstart.eval.decoding.rows import Rows
from headstart.eval.tree import Tree


class Scheduler(Protocol):
    """Chooses, in every cycle, which nodes of which rows the target verifies.

    A node that is left out counts as not drafted, so what is committed stays the target's own choice. Trees that are a
    function of the context allow any choice. Where a tree carries q, its tokens were drawn: whether a node is kept may
    then depend on the nodes above it and on q, but not on what was drawn at its own level or below. Otherwise what
    remains is no longer distributed as q says. What is left out is masked: the forward has a place for it still.

    One scheduler serves one batch at a time: `start` resets it.

    Attributes:
        captures: whether `choose` asks nothing of the host, so that a CUDA graph can hold it. It then reads only the
            tensors at `state` and such as outlive the batch.
        state: (object, attribute) where the tensors stand that `choose` changes; their shapes stay from `start` on.
    """

    captures: bool

    @property
    def state(self) -> list[tuple[object, str]]: ...

    def start(self, context: Rows) -> None:
        """A new batch: all context tokens, as the drafter gets them."""
        ...

    def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor | None:
        """Which nodes are verified.

        Args:
            tree: what was drafted, nothing in idle rows; `tree.score_BN`, where it is not None, says how sure the draft
                is of each node.
            roots_B: int64, the tokens that the trees follow.
            active_B: bool, rows that go on.
        Returns: bool [B, N], True = verified, or None = all. A node may be kept only with its parent.
        """
        ...


class KeepAll:
    """Verifies everything that is drafted."""

    captures = True
    state: list[tuple[object, str]] = []  # noqa: RUF012

    def start(self, context: Rows) -> None:
        pass

    def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor | None:
        return None


#: one for all loops: captured cycles are known by their scheduler
KEEP_ALL = KeepAll()
