"""From a server's counters to the cycles behind τ: Prometheus text → counts → cycles.

Engines also count the tokens that a request's last forward made beyond a stop token or the length limit. Methods §0
does not: `cycles_from_counts` takes them out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from headstart.data.serving.checks import LARGEST, found
from headstart.eval.decoding.decode import Cycle
from headstart.heads.errors import ServerError

#: name, labels (their quotes may hold braces) and value; behind them an optional time and an optional exemplar
SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}\s*|\s+)([^\s#]\S*)(?:\s+-?[\d.]+)?(?:\s+#.*)?'
)
LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"\s*,?')
#: most draft depths, and most bins of a histogram, that a server may report
DEEPEST = 1024


@dataclass(frozen=True)
class Sample:
    """One line of a Prometheus exposition."""

    name: str
    labels: dict[str, str]
    value: float


def parse_metrics(text: str) -> list[Sample]:
    """Samples of a Prometheus text exposition; comments and lines of other kinds are left out."""
    samples = []
    for line in text.split("\n"):
        match = SAMPLE.fullmatch(line.strip())
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        samples.append(Sample(name, _labels(labels or ""), number))
    return samples


def _labels(text: str) -> dict[str, str]:
    """The labels up to the first that is malformed."""
    labels, place = {}, 0
    while (match := LABEL.match(text, place)) is not None:
        labels[match[1]] = match[2]
        place = match.end()
    return labels


class Metrics:
    """The samples of one model: those with its `model_name`, and those without any.

    Args:
        model: served model name.
        where: address of the page, for messages.
    Raises (its methods): ServerError for a counter that is not a whole number of at least 0, or too large to be exact.
    """

    def __init__(self, samples: list[Sample], model: str, where: str = "/metrics"):
        self.samples = [s for s in samples if s.labels.get("model_name", model) == model]
        named = {s.labels.get("model_name", model) for s in samples}
        #: models that the page names instead of this one
        self.others = [] if model in named else sorted(named)
        self.where = where

    def has(self, name: str) -> bool:
        """Whether a counter or gauge is exposed (`_total` is what Prometheus appends to counters)."""
        return any(s.name in (name, f"{name}_total") for s in self.samples)

    def total(self, name: str) -> int:
        """Sum over all label sets (data-parallel engines, finish reasons)."""
        return sum(self._count(s) for s in self.samples if s.name in (name, f"{name}_total"))

    def mean(self, name: str) -> float | None:
        """Mean over label sets of a gauge; None where it is missing or not a number."""
        values = [s.value for s in self.samples if s.name == name and math.isfinite(s.value)]
        return sum(values) / len(values) if values else None

    def by_position(self, name: str) -> list[int]:
        """Totals by the label `position` (0, 1, …)."""
        totals: dict[int, int] = {}
        for s in self.samples:
            if s.name in (name, f"{name}_total"):
                position = s.labels.get("position", "")
                if not re.fullmatch("[0-9]{1,4}", position):
                    raise ServerError(f"{self.where}: {name}: found position {found(position)}, expected 0, 1, …")
                totals[int(position)] = totals.get(int(position), 0) + self._count(s)
        if sorted(totals) != list(range(len(totals))) or len(totals) > DEEPEST:
            raise ServerError(
                f"{self.where}: {name}: found {len(totals)} positions up to {max(totals)}, expected 0, 1, … with no gap"
            )
        return [totals[position] for position in range(len(totals))]

    def _count(self, sample: Sample) -> int:
        if not 0 <= sample.value <= LARGEST or sample.value % 1:
            raise ServerError(
                f"{self.where}: {sample.name}: found {sample.value:g}, expected a whole number from 0 to {LARGEST}"
            )
        return int(sample.value)


def cycles_from_counts(drafts: int, reached: Sequence[int], committed: int, last: int | None = None) -> list[Cycle]:
    """The cycles of some requests, from what the counters grew by.

    Args:
        drafts: target forwards that verified a draft.
        reached: how many of them accepted depth d, for d = 1 … K (per-position counters).
        committed: tokens that the requests received, without the first of each.
        last: tokens that the last forward kept, known for a single request only: it tells which forward was cut.
    Returns: cycles whose committed tokens add up to `committed`. Missing tokens came from forwards without a draft, one
        token each. Tokens too many are cut from the forward that `last` tells, or else from the longest ones, so that τ
        is exact; acceptance by position stays the engine's.
    Raises: ValueError where the numbers contradict each other.

    >>> [(c.accepted, c.committed) for c in cycles_from_counts(3, [2, 1], 6)]
    [(0, 1), (1, 2), (2, 3)]
    >>> [(c.accepted, c.committed) for c in cycles_from_counts(2, [2, 1], 4, last=2)]  # the longest made 3, kept 2
    [(1, 2), (2, 2)]
    """
    depth = len(reached)
    exactly = [more - fewer for more, fewer in pairwise([drafts, *reached, 0])]
    if min(exactly) < 0:
        raise ValueError(f"counters: {drafts} drafts and {list(reached)} accepted by position contradict each other")
    if drafts > committed:  # before a list of so many cycles is made
        raise ValueError(f"counters: {drafts} drafts for {committed} tokens contradict each other")
    cycles = [Cycle(depth, accepted, accepted + 1) for accepted, count in enumerate(exactly) for _ in range(count)]
    beyond = sum(cycle.committed for cycle in cycles) - committed
    if beyond < 0:
        return cycles + [Cycle(0, 0, 1)] * -beyond
    if last is not None and beyond:
        uncut = Cycle(depth, last + beyond - 1, last + beyond)
        if uncut in cycles:
            cycles.remove(uncut)
            return [*cycles, Cycle(depth, min(uncut.accepted, last), last)]
    for _ in range(beyond):
        place = max(range(len(cycles)), key=lambda n: cycles[n].committed)
        longest = cycles[place]
        if longest.committed == 1:
            raise ValueError(f"counters: {drafts} drafts for {committed} tokens contradict each other")
        cycles[place] = Cycle(depth, longest.accepted, longest.committed - 1)
    return cycles


def cycles_of_steps(steps: Sequence[int], depth: int) -> list[Cycle]:
    """The cycles of one request. Args: steps: tokens of each of its forwards after prefill.

    Raises: ValueError for more tokens than a forward can give.
    """
    if max(steps, default=0) > depth + 1:
        raise ValueError(f"the stream: {max(steps)} tokens from one forward that drafted {depth} at most")
    return [Cycle(depth, kept - 1, kept) for kept in steps]


def cycles_without_positions(forwards: int, committed: int) -> list[Cycle]:
    """Cycles that give τ but no acceptance by position: one per forward, with the tokens spread evenly.

    Raises: ValueError for fewer tokens than forwards (each gives one at least), and for tokens without a forward.
    """
    if forwards > committed or (committed and forwards < 1):
        raise ValueError(f"{forwards} forwards for {committed} tokens contradict each other")
    if forwards < 1:
        return []
    each, more = divmod(committed, forwards)
    return [Cycle(0, 0, each + (n < more)) for n in range(forwards)]


def reached_of_histogram(histogram: Sequence[int], depth: int) -> tuple[int, list[int]]:
    """Forwards by number of accepted drafts → (all forwards, forwards that accepted depth d for d = 1 … K).

    >>> reached_of_histogram([1, 2, 1], 3)
    (4, [3, 1, 0])
    """
    at_least = list(accumulate(reversed(histogram)))[::-1]
    reached = at_least[1:] + [0] * (depth - len(histogram) + 1)
    return sum(histogram), reached
