"""The scheduler: in every cycle it drafts and verifies what is expected to give the most tokens per time.

Which shape a cycle has, the host decides from the times of all shapes and from what earlier cycles said of their drafts
(estimates.py). Which nodes take the rows of that shape, the device decides from the current drafts: those that are most
likely reached. Where no draft pays, cycles are plain.
Shape legend: B batch, N nodes, K levels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.drafter import ConfidentDrafter, Drafter, LevelDrafter
from headstart.eval.decoding.loop import COUNT
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.scheduler import KEEP_ALL, PLAIN, CycleShape, Scheduler
from headstart.eval.kernels.reach import reach
from headstart.eval.scheduling.calibrating import Calibrating, ChainLogistic, LevelShares
from headstart.eval.scheduling.estimates import Estimates
from headstart.eval.scheduling.shapes import shapes_of
from headstart.eval.tree import Tree
from headstart.eval.tuning.logistic import BIAS, SLOPE

#: cycles that draft as many levels as there are, before the first choice
FIRST = 4
#: cycles of a batch that draft, where an earlier batch of that size found that no draft pays
AGAIN = 2
#: cycles that must have been learned from before drafting is given up
SURE = 12
#: cycles after which the deepest drafts are looked at again. Twice as many each time that this changed nothing
LOOK_AFTER, LOOK_SELDOM = 32, 1024


def budget_for(drafter: Drafter, tree: TreeConfig) -> Budget:
    """The scheduler of a drafter. Args: tree: the largest that it drafts; a method without a head drafts a chain."""
    linear = tree.kind == "chain" or drafter.spec is None
    return Budget(drafter, min(tree.depth, drafter.max_nodes) if linear else tree.depth, linear)


class Budget(Scheduler):
    """Serves one drafter. It goes on learning from batch to batch.

    Args:
        drafter: it says from now on how sure it is of its drafts, where it can.
        levels: deepest level that it drafts.
        linear: whether it drafts chains.

    Attributes:
        scale_K, bias_K: float32 on the device, by which logits become probabilities (reach.py).
        verified: roots and nodes of sequences that were not idle, summed over all cycles.
    """

    captures = True

    def __init__(self, drafter: Drafter, levels: int, linear: bool):
        self.drafter, self.levels, self.linear = drafter, levels, linear
        source = "draft_probability"
        if isinstance(drafter, ConfidentDrafter) and linear:
            drafter.says_confidence, source = True, drafter.confidence_source
        begin = (1.0, 0.0) if source == "confidence" else (SLOPE, BIAS)
        self.calibrating: Calibrating = ChainLogistic(levels, *begin) if linear else LevelShares(levels)
        self.books: dict[int, Estimates] = {}
        self.verified = 0
        self._said: Tensor | None = None
        self._numbers_2K: Tensor | None = None

    @property
    def said(self) -> Tensor | None:
        """float32: logit and log-reach of every node, [2, B, N]; of trees [3, B, N] with the depths."""
        return self._said

    def start(self, context: Rows) -> None:
        batch, device = context.tokens_BJ.shape[0], context.tokens_BJ.device
        if self._numbers_2K is None:
            self._numbers_2K = torch.stack([self.calibrating.scale_K, self.calibrating.bias_K]).to(device)
        if batch not in self.books:
            by_level = isinstance(self.drafter, LevelDrafter)
            shapes = shapes_of(batch, self.drafter.max_nodes, self.levels, self.linear, by_level)
            self.books[batch] = Estimates(shapes, batch, self.levels)
        self.book = self.books[batch]
        self._left = AGAIN if self._pays_not() else FIRST if not self.book.cycles else 0
        self._off = False
        self._since, self._after = 0, LOOK_AFTER

    def aside(self) -> Scheduler:
        return KEEP_ALL

    def shapes(self) -> list[CycleShape]:
        return self.book.shapes

    def wants_time(self, shape: CycleShape) -> bool:
        return shape not in self.book.seconds

    def timed(self, shape: CycleShape, seconds: float) -> None:
        self.book.seconds[shape] = seconds

    def reach(self, tree: Tree) -> Tensor:
        assert self._numbers_2K is not None
        found = reach(tree, *self._numbers_2K)
        self._said = found.both_2BN
        if not self.linear:
            self._said = torch.cat([found.both_2BN, tree.depth_BN[None].to(found.both_2BN.dtype)])
        return found.log_reach_BN

    def next_shape(self) -> CycleShape:
        best = None if self._off else self.book.best()
        if self._off or not self.book.drafting:
            return PLAIN
        if best is None or (self._left > 0 and self.book.cycles < FIRST):
            return self._deepest()
        if not self._left and self._pays_not():
            self._off = True
            return PLAIN
        if self._since >= self._after:
            self._since, self._after = 0, min(2 * self._after, LOOK_SELDOM)
            return self._deepest()
        return best

    def _deepest(self) -> CycleShape:
        """The fastest shape that drafts all levels: it says how likely drafts of any level are reached."""
        levels = max(shape.levels or 0 for shape in self.book.drafting)
        return min((s for s in self.book.drafting if s.levels == levels), key=self.book.seconds.__getitem__)

    def _pays_not(self) -> bool:
        """Whether plain decoding is faster than all drafts, as far as is known."""
        best = self.book.best()
        known = best is not None and PLAIN in self.book.seconds and self.book.cycles >= SURE
        return known and best is not None and self.book.rate(best) < self.book.rate(PLAIN)

    def learn(self, shape: CycleShape, table: list[list[int]], said: NDArray[np.float32] | None) -> None:
        lines = np.array(table)
        active_B = lines[:, COUNT] > 0
        self.verified += int(active_B.sum())
        if shape == PLAIN or said is None:
            return
        accepted_B = np.where(active_B, lines[:, COUNT] - 1, 0)
        reach_BN = np.exp(said[1])
        depth_BN = said[2] if len(said) > 2 else np.broadcast_to(np.arange(1.0, said.shape[2] + 1), said.shape[1:])
        kept_BN = self.book.learn(shape, reach_BN, depth_BN, int(active_B.sum()), int(accepted_B.sum()))
        self.verified += int(kept_BN.sum())
        self._left, self._since = max(self._left - 1, 0), self._since + 1
        if shape.levels == self.levels:
            self._since = 0
        if self.calibrating.learn(said, active_B, accepted_B, kept_BN):
            self._send()

    def _send(self) -> None:
        """Copy the numbers to the device: the next cycle that is launched reads them."""
        assert self._numbers_2K is not None
        new_2K = torch.stack([self.calibrating.scale_K, self.calibrating.bias_K])
        self._numbers_2K.copy_(new_2K.pin_memory() if self._numbers_2K.is_cuda else new_2K, non_blocking=True)

    def to_json(self) -> dict[str, Any]:
        """What was found at each batch size, for reports."""
        return {
            str(batch): {
                "cycles": book.cycles, "correction": book.correction,
                "shapes": [
                    {"levels": s.levels, "rows": s.rows, "ms": book.seconds[s] * 1e3, "tokens_per_s": book.rate(s)}
                    for s in book.shapes if s in book.seconds
                ],
            }
            for batch, book in self.books.items()
        }  # fmt: skip
