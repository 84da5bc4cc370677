"""The scheduler: in every cycle it drafts and verifies what is expected to give the most tokens per time.

Which shape a cycle has, the host decides from the times of all shapes and from what earlier cycles said of their drafts
(estimates.py). Which nodes take the rows of that shape, the device decides from the current drafts: those that are most
likely reached. Where no draft pays, cycles are plain.
Shape legend: B batch, N nodes, K levels.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.drafter import ConfidentDrafter, Drafter, SizedDrafter
from headstart.eval.decoding.loop import COUNT
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.scheduler import KEEP_ALL, PLAIN, CycleShape, Scheduler
from headstart.eval.kernels.reach import reach
from headstart.eval.scheduling.calibrating import Calibrating, ChainLogistic, LevelShares
from headstart.eval.scheduling.estimates import Estimates, silent
from headstart.eval.scheduling.logistic import BIAS, SLOPE
from headstart.eval.scheduling.shapes import shapes_of
from headstart.eval.tree import Tree

#: rows that must have been learned from before the first choice
FIRST = 48
#: cycles that draft at the beginning of a batch, and of a context in a batch of one, where so far no draft paid
AGAIN = 2
#: the first EVERY cycles are all learned from, of later ones one in STRIDE
EVERY, STRIDE = 32, 16
#: some cycles draft a little more than is thought best, because these alone tell what longer drafts would give:
#: LOOK_AFTER cycles lie between the first two of them, then twice as many each time, up to LOOK_SELDOM
LOOK_AFTER, LOOK_SELDOM = 8, 256
#: a change of the contexts' mean length, as a factor, after which cycles are timed again
LONGER = 1.5


def scheduler_for(drafter: Drafter, tree: TreeConfig) -> ThroughputScheduler:
    """The scheduler of a drafter. Args: tree: the largest that it drafts."""
    linear = tree.kind == "chain"
    return ThroughputScheduler(drafter, min(tree.depth, drafter.max_nodes) if linear else tree.depth, linear)


class ThroughputScheduler(Scheduler):
    """Serves one drafter. It goes on learning from batch to batch.

    Args:
        drafter: in some cycles it says how sure it is of its drafts, where it can.
        levels: deepest level that it drafts.
        linear: whether it drafts chains.

    Attributes:
        numbers: float32 [2, K] on the device: scale and bias by which logits become probabilities (reach.py).
        verified: roots and nodes of sequences that were not idle, summed over all cycles.
        cycles: of sequences that were not idle, which `verified` was summed over.
    """

    captures = True

    def __init__(self, drafter: Drafter, levels: int, linear: bool):
        self.drafter, self.levels, self.linear = drafter, levels, linear
        source = "draft_probability"
        if isinstance(drafter, ConfidentDrafter):
            source = drafter.confidence_source
        begin = (1.0, 0.0) if source == "confidence" else (SLOPE, BIAS)
        self.calibrating: Calibrating = ChainLogistic(levels, *begin) if linear else LevelShares(levels)
        self.books: dict[int, Estimates] = {}
        self.verified = self.cycles = 0
        self._pause = LOOK_AFTER
        self._lengths: dict[int, float] = {}
        self._said: Tensor | None = None
        self.numbers: Tensor | None = None

    @property
    def said(self) -> Tensor | None:
        """float32: logit and log-reach of every node, [2, B, N]; of trees [3, B, N] with the depths."""
        return self._said

    def start(self, context: Rows) -> None:
        batch, device = context.tokens_BJ.shape[0], context.tokens_BJ.device
        if self.numbers is None:
            self.numbers = torch.stack([self.calibrating.scale_K, self.calibrating.bias_K]).to(device)
        if batch not in self.books:
            by_level = isinstance(self.drafter, SizedDrafter) and self.drafter.by_level
            shapes = shapes_of(batch, self.drafter.max_nodes, self.levels, self.linear, by_level)
            self.books[batch] = Estimates(shapes, batch, self.drafter.max_nodes, self.levels)
            self._lengths[batch] = 0.0
        self.book = self.books[batch]
        length = float(context.count_B.float().mean())
        if not 1 / LONGER < length / max(self._lengths[batch], 1.0) < LONGER:
            self.book.times.clear()
            self._lengths[batch] = length
        self._cycle, self._look, self._off = 0, self._pause, False
        # rows that the drafter knows in spite of plain cycles
        self._known: set[int] = set()
        # of the cycles whose tables are not yet known: whether their shape was thought the best one
        self._under_way: deque[bool] = deque()
        self._best: CycleShape | None = None

    def aside(self) -> Scheduler:
        return KEEP_ALL

    def shapes(self) -> list[CycleShape]:
        return list(dict.fromkeys([*self.book.shapes, *map(silent, self.book.shapes)]))

    def wants_time(self, shape: CycleShape) -> bool:
        return shape not in self.book.times.profiled

    def timed(self, shape: CycleShape, seconds: float) -> None:
        self.book.times.profiled[shape] = seconds
        self._best = None

    def prepare(self, shape: CycleShape) -> None:
        self._said = None
        if isinstance(self.drafter, ConfidentDrafter):
            self.drafter.says_confidence = shape.says

    def reach(self, tree: Tree) -> Tensor:
        assert self.numbers is not None
        found = reach(tree, *self.numbers)
        self._said = found.both_2BN
        if not self.linear:
            self._said = torch.cat([found.both_2BN, tree.depth_BN[None].to(found.both_2BN.dtype)])
        return found.log_reach_BN

    def next_shape(self) -> CycleShape:
        shape, meant = self._next()
        self._under_way.append(meant)
        # what was learned changes slowly: most cycles need not say how sure the drafts are
        return silent(shape) if meant and self.book.cycles > EVERY and self._cycle % STRIDE else shape

    def admitted(self, row: int) -> None:
        """After plain cycles the drafter lacks what a row committed. It has read all of a context that begins. Once it
        knows all rows again, drafting is tried again: this happens in a batch of one row alone."""
        self._known.add(row)
        if self._off and len(self._known) == self.book.batch:
            self._off, self._cycle, self._look = False, 0, self._pause

    def _next(self) -> tuple[CycleShape, bool]:
        """(the shape, whether it is thought the best one)."""
        self._cycle += 1
        book = self.book
        if self._off:
            self._known.clear()
        if self._off or not book.times.profiled:
            return PLAIN, True
        # found while the card works, in `learn`
        best = self._best = self._best or book.best()
        if best is None or book.rows < FIRST:
            return book.fastest(max(book.members)), False
        if self._cycle > AGAIN and book.gain.lost:
            self._off = True
            return PLAIN, True
        if self._cycle >= self._look and (larger := book.larger(best)) is not None:
            self._look, self._pause = self._cycle + self._pause, min(2 * self._pause, LOOK_SELDOM)
            return larger, False
        return best, True

    def learn(
        self,
        shape: CycleShape,
        table: NDArray[np.int64],
        said: NDArray[np.float32] | None,
        seconds: float | None = None,
    ) -> None:
        meant = self._under_way.popleft()
        active_B = table[:, COUNT] > 0
        rows = int(active_B.sum())
        places = rows * (1 + self._nodes(shape))
        # of a shape with cuts, idle rows take one place each
        self.verified += places if shape.rows is None else min(places, shape.rows - (len(table) - rows))
        self.cycles += rows
        self.book.ran[replace(shape, says=True)] += 1
        if seconds is not None:
            self.book.times.took(shape, seconds)
        if shape == PLAIN or not rows:
            return
        accepted_B = np.where(active_B, table[:, COUNT] - 1, 0)
        self.book.took(shape, accepted_B[active_B])
        if meant:
            self.book.gained(shape, accepted_B[active_B])
        # of cut shapes it is said in every cycle, and the host saves its own time
        if said is None or (self.book.cycles > EVERY and shape.rows is not None and self._cycle % STRIDE):
            return
        reach_BN = np.where(active_B[:, None], np.exp(said[1], dtype=np.float64), 0.0)
        depth_BN = said[2] if len(said) > 2 else np.broadcast_to(np.arange(1.0, said.shape[2] + 1), said.shape[1:])
        kept_BN = self.book.learn(shape, reach_BN, depth_BN, accepted_B[active_B])
        self._best = self.book.best()
        if self.calibrating.learn(said, active_B, accepted_B, kept_BN):
            self._send()

    def _nodes(self, shape: CycleShape) -> int:
        """Nodes of a row that the shape drafts."""
        levels, nodes = self.book.size(shape)
        return levels if self.linear else min(nodes, self.drafter.max_nodes)

    def _send(self) -> None:
        """Copy the numbers to the device: the next cycle that is launched reads them."""
        assert self.numbers is not None
        new_2K = torch.stack([self.calibrating.scale_K, self.calibrating.bias_K])
        self.numbers.copy_(new_2K.pin_memory() if self.numbers.is_cuda else new_2K, non_blocking=True)

    def to_json(self) -> dict[str, Any]:
        """What was found at each batch size, for reports."""
        return {
            str(batch): {
                "rows": book.rows, "correction": book.correction,
                "shapes": [
                    {**asdict(s), "cycles": book.ran[s], "ms": book.seconds(s) * 1e3, "tokens_per_s": book.rate(s)}
                    for s in book.shapes if s in book.times.profiled
                ],
            }
            for batch, book in self.books.items()
        }  # fmt: skip
