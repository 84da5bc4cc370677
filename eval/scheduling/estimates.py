"""How many drafts a cycle of each shape gets accepted, by what earlier cycles said of their drafts.

DSpark's scheduler as engines run it (arXiv 2607.05147, §5.2): of all shapes the one with the most expected tokens per
time wins, without an early stop. What is said is some cycles old, so that the choice depends on no current draft.
Shape legend: B rows, N nodes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headstart.eval.decoding.scheduler import PLAIN, CycleShape
from headstart.eval.scheduling.means import LASTING, RECENT, Gain, Mean, Ratio, Times

Floats = NDArray[np.float32]
#: (levels, nodes of a row)
Size = tuple[int, int]
#: how much a cycle's accepted drafts still count after the next one, where they correct what was expected
KEEP = 0.98
#: accepted drafts that count as expected and as accepted before any was
PRIOR = 8.0
#: rows after which what a size gets accepted corrects its expectation as much as all sizes together do
SEEN = 256


def silent(shape: CycleShape) -> CycleShape:
    """The same without saying how sure drafts are, for whole chains. Other shapes stay as they are: where rows are cut,
    the device must know, and trees choose their nodes by it anyway."""
    whole_chain = shape != PLAIN and shape.nodes is None and shape.rows is None
    return replace(shape, says=False) if whole_chain else shape


class Estimates:
    """Tokens per second of every shape at one batch size.

    Args: nodes, levels: of the largest tree.

    Attributes:
        times: of whole cycles.
        cycles, rows: that were learned from.
        ran: cycles of each shape, those that nothing was learned from too.
    """

    def __init__(self, shapes: Sequence[CycleShape], batch: int, nodes: int, levels: int):
        self.shapes, self.batch, self.most = list(shapes), batch, (levels, nodes)
        self.times, self.gain, self.rows = Times(), Gain(batch), 0
        self.cycles = 0
        self.ran: Counter[CycleShape] = Counter()
        self._drafting = [shape for shape in shapes if shape != PLAIN]
        self._silent = {shape: silent(shape) for shape in shapes}
        #: what shapes draft, (levels, nodes), in order → those that draft so much
        self.members: dict[Size, list[CycleShape]] = {}
        for shape in sorted(self._drafting, key=self.size):
            self.members.setdefault(self.size(shape), []).append(shape)
        # of each shape: expected accepted drafts per row
        self._recent = {shape: Mean(RECENT) for shape in shapes}
        # of each shape, and of each size as a whole: accepted drafts, over those that the next smaller size gets
        self._ratio: dict[CycleShape | Size, Ratio] = defaultdict(Ratio)
        self._expected = self._accepted = PRIOR
        # of what was verified, a whole size or a shape that is cut: expected and accepted drafts per row
        self._said: dict[CycleShape | Size, Mean] = defaultdict(lambda: Mean(LASTING))
        self._got: dict[CycleShape | Size, Mean] = defaultdict(lambda: Mean(LASTING))

    def size(self, shape: CycleShape) -> Size:
        """(levels, nodes of a row) that it drafts."""
        levels, nodes = self.most
        return shape.levels if shape.levels is not None else levels, shape.nodes or nodes

    def fastest(self, size: Size) -> CycleShape:
        """Of the shapes that draft this much, the fastest: it says as much as the others of how likely drafts are."""
        return min(self.members[size], key=self.seconds)

    def larger(self, shape: CycleShape) -> CycleShape | None:
        """The fastest shape that drafts a little more; None where there is none."""
        own = self.size(shape)
        more = next((size for size in self.members if size[0] > own[0] or size[1] > own[1]), None)
        return None if more is None else self.fastest(more)

    def seconds(self, shape: CycleShape) -> float:
        """Of a cycle, as this shape mostly runs; infinite while that is not known."""
        return self.times.of(self._silent.get(shape, shape))

    def learn(
        self, ran: CycleShape, reach_BN: Floats, depth_BN: Floats, accepted_R: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Take what a cycle said of its drafts, and what was accepted.

        Args:
            reach_BN: probability that each node is reached, 0 where none is.
            accepted_R: accepted drafts of the rows that decoded, one or more.
        Returns: kept_BN, the nodes that were verified.
        """
        rows, accepted = len(accepted_R), int(accepted_R.sum())
        self.cycles, self.rows = self.cycles + 1, self.rows + rows
        self._learn_reach(ran, reach_BN, depth_BN, rows)
        kept_BN = kept(reach_BN, None if ran.rows is None else ran.rows - self.batch)
        expected = float(reach_BN[kept_BN].sum())
        self._expected = KEEP * self._expected + (1 - KEEP) * PRIOR + expected
        self._accepted = KEEP * self._accepted + (1 - KEEP) * PRIOR + accepted
        if ran.rows is not None:
            self._said[ran].add(expected / rows, rows)
        return kept_BN

    def _learn_reach(self, ran: CycleShape, reach_BN: Floats, depth_BN: Floats, rows: int) -> None:
        """A size that is larger than what this cycle drafted gains over the one before it what it gained earlier."""
        levels, nodes = self.size(ran)
        before: float | None = None
        for size, members in self.members.items():
            told = size[0] <= levels and size[1] <= nodes
            sums = likeliest(reach_BN, depth_BN, *size) / rows if told else None
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
            if told and whole is not None:
                self._said[size].add(whole, rows)
            before = whole

    def took(self, ran: CycleShape, accepted_R: NDArray[np.int64]) -> None:
        """What a cycle got accepted, of those too that said nothing. Args: as `learn`."""
        rows, own = len(accepted_R), self.size(ran)
        if ran.rows is not None:
            self._got[ran].add(float(accepted_R.mean()), rows)
            return
        for size in self.members:
            # the beginning of a chain is what a shorter one would have been; that of a tree is not
            if size == own or (ran.nodes is None and size[0] < own[0]):
                self._got[size].add(float(np.minimum(accepted_R, size[0]).mean()), rows)

    def gained(self, ran: CycleShape, accepted_R: NDArray[np.int64]) -> None:
        """What a cycle of the shape that was thought the best one committed. Args: as `learn`."""
        both = self.seconds(PLAIN), self.seconds(ran)
        if max(both) < math.inf:
            self.gain.add(float(1 + accepted_R.mean()) * both[0] / both[1], len(accepted_R))

    @property
    def correction(self) -> float:
        """Accepted drafts per expected one, of all shapes lately."""
        return self._accepted / self._expected

    def correction_of(self, shape: CycleShape) -> float:
        """Accepted drafts per expected one: the mean of all shapes, then more and more what its own size got."""
        found = self._towards(self.size(shape), self.correction)
        return found if shape.rows is None else self._towards(shape, found)

    def _towards(self, what: CycleShape | Size, believed: float) -> float:
        said, got = self._said.get(what), self._got.get(what)
        if said is None or got is None or said.value <= 0:
            return believed
        seen = LASTING * min(said.weight, got.weight)
        return (seen * got.value / said.value + SEEN * believed) / (seen + SEEN)

    def rate(self, shape: CycleShape) -> float:
        """Tokens per second of a row to expect; 0 while nothing is known."""
        if shape == PLAIN:
            return 1 / self.seconds(shape)
        mean = self._recent[shape]
        return (1 + self.correction_of(shape) * mean.value) / self.seconds(shape) if mean.weight else 0.0

    def best(self) -> CycleShape | None:
        """The shape that drafts and has the highest rate; None while no rate is known."""
        best = max(self._drafting, key=self.rate)
        return best if self.rate(best) else None


def likeliest(reach_BN: Floats, depth_BN: Floats, levels: int, nodes: int) -> Floats:
    """Sums of the largest probabilities of a batch, [n] = that of the n + 1 largest.

    Args: levels, nodes: of each row, those on other levels and beyond its likeliest ones are left out.
    """
    within = np.where(depth_BN <= levels, reach_BN, 0.0)
    if nodes < within.shape[1]:
        within = -np.partition(-within, nodes - 1, axis=1)[:, :nodes]
    return np.cumsum(-np.sort(-within, axis=None))


def kept(reach_BN: Floats, count: int | None) -> NDArray[np.bool_]:
    """The likeliest nodes, as `flat.cut` keeps them. Args: count: how many; None = all."""
    real_BN = reach_BN > 0
    if count is None or count >= int(real_BN.sum()):
        return real_BN
    kept_F = np.zeros(reach_BN.size, dtype=bool)
    kept_F[np.argsort(-reach_BN, axis=None, kind="stable")[:count]] = True
    return kept_F.reshape(reach_BN.shape) & real_BN
