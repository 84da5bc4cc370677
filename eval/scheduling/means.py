"""Means in which older values count less, and what is made of them: how long cycles take, and whether drafting pays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headstart.eval.decoding.scheduler import CycleShape

#: rows whose drafts are averaged: the estimate of a small batch needs several cycles, that of a large one hardly any
RECENT = 48
#: the same of what is kept for long: how shapes compare, and whether drafting pays at all
LASTING = 8192
#: cycles over which their times are averaged, and cycles after which that mean is trusted
PACED, TRUSTED = 32, 4
#: cycles after which what a shape took is no longer trusted: it may have been held up, and would never run again
STALE = 64
#: a cycle that took this share more or less than it should have was held up by something else
ODD = 0.5
#: what drafting is believed to gain before anything is known, and how many rows and cycles that belief counts as: the
#: first contexts of a small batch may be harder than the others
BELIEF, BELIEVED_ROWS, BELIEVED_CYCLES = 1.05, 384, 8
#: first cycles, and their rows at most, whose gain does not count: the first choices are poor
SETTLED, SETTLED_ROWS = 24, 384


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


class Times:
    """Seconds of whole cycles: profiled before the first one, then as they were measured.

    Contexts grow, and the host takes time too, so that cycles take longer than those that were profiled. A shape
    that has not run lately is expected to take what was profiled, and as much more as the others took.
    """

    def __init__(self) -> None:
        self.profiled: dict[CycleShape, float] = {}
        self._cycles = 0
        # of each shape: the cycle in which it ran last, how often it ran since it was stale, its mean
        self._measured: dict[CycleShape, tuple[int, int, Mean]] = {}
        # how much longer cycles take than was profiled, of all shapes
        self._late = Mean(PACED)

    def of(self, shape: CycleShape) -> float:
        """Infinite while nothing is known."""
        count, mean = self._lately(shape)
        if count >= TRUSTED:
            return mean.value
        late = self._late.value if self._late.weight else 0.0
        return self.profiled.get(shape, math.inf) + late

    def took(self, shape: CycleShape, seconds: float) -> None:
        """How long a cycle took, the host included."""
        self._cycles += 1
        if shape not in self.profiled or abs(seconds - self.of(shape)) > ODD * self.of(shape):
            return
        count, mean = self._lately(shape)
        mean.add(seconds, 1)
        self._measured[shape] = self._cycles, count + 1, mean
        self._late.add(seconds - self.profiled[shape], 1)

    def _lately(self, shape: CycleShape) -> tuple[int, Mean]:
        """(How often the shape ran since it was stale, what it took on average)."""
        last, count, mean = self._measured.get(shape, (0, 0, Mean(PACED)))
        return (count, mean) if self._cycles - last <= STALE else (0, Mean(PACED))

    def clear(self) -> None:
        """Contexts have become much longer or shorter."""
        self.profiled.clear()
        self._measured.clear()
        self._late = Mean(PACED)


class Gain:
    """What drafting commits, over what plain decoding commits in that time. Args: batch: its size."""

    def __init__(self, batch: int):
        self.batch, self._cycles, self._rows, self._mean = batch, 0, 0, Mean(LASTING)
        self._settled = min(SETTLED, SETTLED_ROWS // batch)

    def add(self, gain: float, rows: int) -> None:
        """Of a cycle. Args: rows: that decoded."""
        self._cycles += 1
        if self._cycles > self._settled:
            self._rows += rows
            self._mean.add(gain, rows)

    @property
    def lost(self) -> bool:
        """Whether plain decoding is faster than what was drafted."""
        count, believed = min(self._rows, LASTING), BELIEVED_ROWS + BELIEVED_CYCLES * self.batch
        return bool(count) and count * self._mean.value + believed * BELIEF < count + believed
