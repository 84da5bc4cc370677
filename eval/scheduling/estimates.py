"""How many drafts a cycle of each shape gets accepted, by what earlier cycles said of their drafts.

DSpark's scheduler as engines run it (arXiv 2607.05147, §5.2): of all shapes the one with the most expected tokens per
time wins, without an early stop. What is said is some cycles old, so that the choice depends on no current draft.
Shape legend: B rows, N nodes, K levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headstart.eval.decoding.scheduler import PLAIN, CycleShape

Floats = NDArray[np.float32]
#: rows whose drafts are averaged: the estimate of a small batch needs several cycles, that of a large one none
AVERAGED = 48
#: how much a cycle's accepted drafts still count after the next one, where they correct what was expected
KEEP = 0.98
#: accepted drafts that count as expected and as accepted before any was
PRIOR = 8.0


class Estimates:
    """Tokens per second of every shape at one batch size.

    Attributes:
        seconds: of a whole cycle of each shape, where it is known.
        cycles: that were learned from.
    """

    def __init__(self, shapes: Sequence[CycleShape], batch: int, levels: int):
        self.shapes, self.batch, self.levels = list(shapes), batch, levels
        self.seconds: dict[CycleShape, float] = {}
        self.cycles = 0
        # of each shape: weighted sum of the expected accepted drafts per active row, and the weights
        self._sums: dict[CycleShape, tuple[float, float]] = dict.fromkeys(shapes, (0.0, 0.0))
        self._expected = self._accepted = PRIOR

    @property
    def drafting(self) -> list[CycleShape]:
        """The shapes that draft and whose time is known."""
        return [shape for shape in self.shapes if shape != PLAIN and shape in self.seconds]

    def learn(
        self, ran: CycleShape, reach_BN: Floats, depth_BN: Floats, active: int, accepted: int
    ) -> NDArray[np.bool_]:
        """Take what a cycle said of its drafts.

        Args:
            reach_BN: probability that each node is reached, 0 where none is.
            active: rows that decoded. accepted: their accepted drafts.
        Returns: kept_BN, the nodes that were verified.
        """
        kept_BN = self._kept(ran, reach_BN)
        self.cycles += 1
        if not active:
            return kept_BN
        share = 1 - math.exp(-active / AVERAGED)
        drafted = self.levels if ran.levels is None else ran.levels
        order: dict[int, Floats] = {}
        for shape in self.shapes:
            levels = self.levels if shape.levels is None else shape.levels
            if shape == PLAIN or levels > drafted:
                continue
            if levels not in order:
                within = reach_BN if levels == drafted else np.where(depth_BN <= levels, reach_BN, 0.0)
                order[levels] = np.cumsum(-np.sort(-within, axis=None))
            budget = order[levels].size if shape.rows is None else min(shape.rows - self.batch, order[levels].size)
            found = float(order[levels][budget - 1]) / active
            total, weight = self._sums[shape]
            self._sums[shape] = (1 - share) * total + share * found, (1 - share) * weight + share
        self._expected = KEEP * self._expected + (1 - KEEP) * PRIOR + float(reach_BN[kept_BN].sum())
        self._accepted = KEEP * self._accepted + (1 - KEEP) * PRIOR + accepted
        return kept_BN

    def _kept(self, ran: CycleShape, reach_BN: Floats) -> NDArray[np.bool_]:
        kept_BN = reach_BN > 0
        if ran.rows is None or (budget := ran.rows - self.batch) >= int(kept_BN.sum()):
            return kept_BN
        order = np.argsort(-reach_BN, axis=None, kind="stable")[:budget]
        kept_F = np.zeros(reach_BN.size, dtype=bool)
        kept_F[order] = True
        return kept_F.reshape(reach_BN.shape) & kept_BN

    @property
    def correction(self) -> float:
        """Accepted drafts per expected one."""
        return self._accepted / self._expected

    def drafts(self, shape: CycleShape) -> float | None:
        """Accepted drafts per row and cycle to expect; None while nothing is known."""
        total, weight = self._sums[shape]
        return None if weight == 0 else self.correction * total / weight

    def rate(self, shape: CycleShape) -> float:
        """Tokens per second of a row to expect; 0 while nothing is known."""
        if shape not in self.seconds:
            return 0.0
        if shape == PLAIN:
            return 1 / self.seconds[shape]
        drafts = self.drafts(shape)
        return 0.0 if drafts is None else (1 + drafts) / self.seconds[shape]

    def best(self) -> CycleShape | None:
        """The drafting shape with the highest rate; None while no rate is known."""
        known = [shape for shape in self.drafting if self.drafts(shape) is not None]
        return max(known, key=self.rate, default=None)
