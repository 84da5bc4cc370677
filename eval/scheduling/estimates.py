"""How many drafts a cycle of each shape gets accepted, by what earlier cycles said of their drafts.

DSpark's scheduler as engines run it (arXiv 2607.05147, §5.2): of all shapes the one with the most expected tokens per
time wins, without an early stop. What is said is some cycles old, so that the choice depends on no current draft.
Shape legend: B rows, N nodes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headstart.eval.decoding.scheduler import PLAIN, CycleShape

Floats = NDArray[np.float32]
#: (levels, nodes of a row)
Size = tuple[int, int]
#: rows whose drafts are averaged: the estimate of a small batch needs several cycles, that of a large one hardly any
RECENT = 48
#: the same of what is kept for long: how shapes compare, and whether drafting pays at all
LASTING = 8192
#: what drafting is believed to gain before anything is known, and how many rows and cycles that belief counts as: the
#: first contexts of a small batch may be harder than the others
BELIEF, BELIEVED_ROWS, BELIEVED_CYCLES = 1.05, 256, 8
#: cycles that are learned from before what drafts gain is counted: the choices before that are poor
SETTLED = 24
#: cycles over which the time is averaged that they take more or less than was measured; a cycle that takes this share
#: more or less was held up by something else
PACED, ODD = 16, 0.5
#: how much a cycle's accepted drafts still count after the next one, where they correct what was expected
KEEP = 0.98
#: accepted drafts that count as expected and as accepted before any was
PRIOR = 8.0


@dataclass
class Mean:
    """A mean in which older values count less. Args: over: rows that it averages."""

    over: float
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, rows: int) -> None:
        """Args: value: the mean of so many rows."""
        share = 1 - math.exp(-rows / self.over)
        self.total = (1 - share) * self.total + share * value
        self.weight = (1 - share) * self.weight + share

    @property
    def value(self) -> float:
        return self.total / self.weight


@dataclass
class Ratio:
    """The quotient of two means over the same rows."""

    value: Mean = field(default_factory=lambda: Mean(LASTING))
    before: Mean = field(default_factory=lambda: Mean(LASTING))

    def add(self, value: float, before: float, rows: int) -> None:
        self.value.add(value, rows)
        self.before.add(before, rows)

    def of(self, before: float | None) -> float | None:
        """The value that goes with this one; None while nothing is known."""
        if before is None or not self.before.weight:
            return None
        return before * self.value.value / max(self.before.value, 1e-6)


class Estimates:
    """Tokens per second of every shape at one batch size.

    Args: nodes, levels: of the largest tree.

    Attributes:
        seconds: of a whole cycle of each shape, where it is known.
        late: seconds that cycles take more than was measured, on average: contexts have grown, or the host is slow.
        rows: that were learned from, over all cycles.
        ran: cycles of each shape, those that nothing was learned from too.
    """

    def __init__(self, shapes: Sequence[CycleShape], batch: int, nodes: int, levels: int):
        self.shapes, self.batch, self.most = list(shapes), batch, (levels, nodes)
        self.seconds: dict[CycleShape, float] = {}
        self.rows, self.late = 0, 0.0
        self.ran: Counter[CycleShape] = Counter()
        #: what shapes draft, (levels, nodes), in order
        self.sizes = sorted({self.size(shape) for shape in shapes if shape != PLAIN})
        # of each shape: expected accepted drafts per row
        self._recent = {shape: Mean(RECENT) for shape in shapes}
        # of each shape, and of each size as a whole: how its drafts compare to all those of the size before
        self._ratio: dict[CycleShape | Size, Ratio] = defaultdict(Ratio)
        self._expected = self._accepted = PRIOR
        self._meant = self._cycles = 0
        # what rows committed, over what plain decoding commits in that time
        self._gain = Mean(LASTING)

    def size(self, shape: CycleShape) -> Size:
        """(levels, nodes of a row) that it drafts."""
        levels, nodes = self.most
        return shape.levels if shape.levels is not None else levels, shape.nodes or nodes

    def fastest(self, size: Size) -> CycleShape:
        """Of the shapes that draft this much, the fastest: it says as much as the others of how likely drafts are."""
        return min((s for s in self.shapes if s != PLAIN and self.size(s) == size), key=self._time)

    def larger(self, shape: CycleShape) -> CycleShape | None:
        """The fastest shape that drafts a little more; None where there is none."""
        own = self.size(shape)
        more = [size for size in self.sizes if size[0] > own[0] or size[1] > own[1]]
        return self.fastest(more[0]) if more else None

    def _time(self, shape: CycleShape) -> float:
        return self.seconds.get(shape, math.inf)

    def learn(
        self, ran: CycleShape, reach_BN: Floats, depth_BN: Floats, accepted_R: NDArray[np.int64], meant: bool
    ) -> NDArray[np.bool_]:
        """Take what a cycle said of its drafts, and what was accepted.

        Args:
            reach_BN: probability that each node is reached, 0 where none is.
            accepted_R: accepted drafts of the rows that decoded, one or more.
            meant: whether the shape was thought the best one, not only looked at.
        Returns: kept_BN, the nodes that were verified.
        """
        rows, accepted = len(accepted_R), int(accepted_R.sum())
        self.rows += rows
        self._learn_reach(ran, reach_BN, depth_BN, rows)
        kept_BN = kept(reach_BN, None if ran.rows is None else ran.rows - self.batch)
        self._expected = KEEP * self._expected + (1 - KEEP) * PRIOR + float(reach_BN[kept_BN].sum())
        self._accepted = KEEP * self._accepted + (1 - KEEP) * PRIOR + accepted
        self._cycles += 1
        if meant and self._cycles > SETTLED and PLAIN in self.seconds and ran in self.seconds:
            self._meant += rows
            gain_R = (1 + accepted_R) * (self.seconds[PLAIN] + self.late) / (self.seconds[ran] + self.late)
            self._gain.add(float(gain_R.mean()), rows)
        return kept_BN

    def _learn_reach(self, ran: CycleShape, reach_BN: Floats, depth_BN: Floats, rows: int) -> None:
        """A size that is larger than what this cycle drafted gains over the one before it what it gained earlier."""
        levels, nodes = self.size(ran)
        before: float | None = None
        for size in self.sizes:
            told = size[0] <= levels and size[1] <= nodes
            sums = likeliest(reach_BN, depth_BN, *size) / rows if told else None
            members = [shape for shape in self.shapes if shape != PLAIN and self.size(shape) == size]
            whole = None
            both: list[CycleShape | Size] = [*members, size]
            for what in both:
                count = what.rows - self.batch if isinstance(what, CycleShape) and what.rows else None
                if sums is not None:
                    whole = float(sums[-1 if count is None else min(count, len(sums)) - 1])
                    if before is not None:
                        self._ratio[what].add(whole, before, rows)
                else:
                    whole = self._ratio[what].of(before)
                if whole is not None and isinstance(what, CycleShape):
                    self._recent[what].add(whole, rows)
            before = whole

    def took(self, shape: CycleShape, seconds: float) -> None:
        """How long a cycle took."""
        late = seconds - self.seconds.get(shape, math.inf)
        if abs(late) < ODD * self.seconds.get(shape, 0.0):
            self.late += (late - self.late) / PACED

    @property
    def pays_not(self) -> bool:
        """Whether plain decoding is faster than what was drafted."""
        count = min(self._meant, LASTING)
        believed = BELIEVED_ROWS + BELIEVED_CYCLES * self.batch
        return bool(count) and count * self._gain.value + believed * BELIEF < count + believed

    @property
    def correction(self) -> float:
        """Accepted drafts per expected one."""
        return self._accepted / self._expected

    def rate(self, shape: CycleShape) -> float:
        """Tokens per second of a row to expect; 0 while nothing is known."""
        if shape not in self.seconds:
            return 0.0
        if shape == PLAIN:
            return 1 / (self.seconds[shape] + self.late)
        mean = self._recent[shape]
        return (1 + self.correction * mean.value) / (self.seconds[shape] + self.late) if mean.weight else 0.0

    def best(self) -> CycleShape | None:
        """The shape that drafts and has the highest rate; None while no rate is known."""
        drafting = [shape for shape in self.shapes if shape != PLAIN]
        best = max(drafting, key=self.rate)
        return best if self.rate(best) else None


def likeliest(reach_BN: Floats, depth_BN: Floats, levels: int, nodes: int) -> Floats:
    """Sums of the largest probabilities of a batch, [n] = that of the n + 1 largest.

    Args: levels, nodes: of each row, those on other levels and beyond its likeliest ones are left out.
    """
    within = np.where(depth_BN <= levels, reach_BN, 0.0)
    if nodes < within.shape[1]:
        within = -np.partition(-within, nodes - 1, axis=1)[:, :nodes]
    return np.cumsum(-np.sort(-within, axis=None))


def kept(reach_BN: Floats, budget: int | None) -> NDArray[np.bool_]:
    """The likeliest nodes, as `flat.cut` keeps them. Args: budget: how many; None = all."""
    real_BN = reach_BN > 0
    if budget is None or budget >= int(real_BN.sum()):
        return real_BN
    kept_F = np.zeros(reach_BN.size, dtype=bool)
    kept_F[np.argsort(-reach_BN, axis=None, kind="stable")[:budget]] = True
    return kept_F.reshape(reach_BN.shape) & real_BN
