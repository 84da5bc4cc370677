"""What a server's counters say about acceptance: Prometheus text → counts → the cycles behind τ.

Engines count tokens that a request's last forward made beyond a stop token or the length limit; methods §0 does not.
`cycles_from_counts` takes them out again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headstart.eval.decode import Cycle

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    """One line of a Prometheus exposition."""

    name: str
    labels: dict[str, str]
    value: float


def parse_metrics(text: str) -> list[Sample]:
    """Samples of a Prometheus text exposition; comments and lines of other kinds are left out."""
    found = []
    for line in text.splitlines():
        match = SAMPLE.fullmatch(line.strip())
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        found.append(Sample(name, dict(LABEL.findall(labels or "")), number))
    return found


class Metrics:
    """Samples of one model: of those that carry a `model_name`, the ones that name it.

    Args:
        model: served model name.
    """

    def __init__(self, samples: list[Sample], model: str):
        self.samples = [s for s in samples if s.labels.get("model_name", model) == model]

    def has(self, name: str) -> bool:
        """Whether a counter or gauge is exposed (`_total` is what Prometheus appends to counters)."""
        return any(s.name in (name, f"{name}_total") for s in self.samples)

    def total(self, name: str) -> float:
        """Sum over all label sets (data-parallel engines, finish reasons)."""
        return sum(s.value for s in self.samples if s.name in (name, f"{name}_total"))

    def mean(self, name: str) -> float | None:
        """Mean over label sets of a gauge; None where it is missing or not a number."""
        values = [s.value for s in self.samples if s.name == name and math.isfinite(s.value)]
        return sum(values) / len(values) if values else None

    def by_position(self, name: str) -> list[int]:
        """Totals by the label `position`, in order of position."""
        totals: dict[int, float] = {}
        for s in self.samples:
            if s.name in (name, f"{name}_total") and s.labels.get("position", "").isdigit():
                position = int(s.labels["position"])
                totals[position] = totals.get(position, 0.0) + s.value
        return [round(totals[position]) for position in sorted(totals)]


def cycles_from_counts(drafts: int, reached: Sequence[int], committed: int, last: int | None = None) -> list[Cycle]:
    """Cycles of the requests that stand behind a difference of counters.

    Args:
        drafts: target forwards that verified a draft.
        reached: drafts accepted at depth d = 1 … K at least (per-position counters).
        committed: tokens the requests received after each one's first.
        last: tokens the last forward of a single request kept, where that was seen; it tells which forward was cut.
    Returns: cycles whose committed tokens add up to `committed`. Forwards that verified nothing committed one token
        each, and are as many as are missing. Without `last` the most successful forwards are shortened, so that τ is
        exact and acceptance by position is the engine's own.

    >>> [(c.accepted, c.committed) for c in cycles_from_counts(3, [2, 1], 6)]
    [(0, 1), (1, 2), (2, 3)]
    >>> [(c.accepted, c.committed) for c in cycles_from_counts(2, [2, 1], 4, last=2)]  # the token after two drafts cut
    [(1, 2), (2, 2)]
    """
    depth = len(reached)
    exactly = [more - fewer for more, fewer in pairwise([drafts, *reached, 0])]
    if min(exactly) < 0:
        raise ValueError(f"counters: {drafts} drafts and {list(reached)} accepted by position contradict each other")
    cycles = [Cycle(depth, accepted, accepted + 1) for accepted, count in enumerate(exactly) for _ in range(count)]
    beyond = sum(cycle.committed for cycle in cycles) - committed
    if beyond < 0:
        return cycles + [Cycle(0, 0, 1)] * -beyond
    whole = Cycle(depth, last + beyond - 1, last + beyond) if last is not None and beyond else None
    if whole in cycles and last is not None:
        cycles.remove(whole)
        return [*cycles, Cycle(depth, min(whole.accepted, last), last)]
    for _ in range(beyond):
        place = max(range(len(cycles)), key=lambda n: cycles[n].committed)
        longest = cycles[place]
        if longest.committed == 1:
            raise ValueError(f"counters: {drafts} drafts for {committed} tokens contradict each other")
        cycles[place] = Cycle(depth, longest.accepted, longest.committed - 1)
    return cycles


def cycles_of_steps(steps: Sequence[int], depth: int) -> list[Cycle]:
    """Cycles of one request whose every forward after prefill was seen, from the tokens each of them gave."""
    return [Cycle(depth, kept - 1, kept) for kept in steps]


def cycles_without_positions(forwards: int, committed: int) -> list[Cycle]:
    """Cycles that say τ and nothing about positions: as many as there were forwards, tokens spread evenly."""
    if forwards < 1:
        return []
    each, more = divmod(committed, forwards)
    return [Cycle(0, 0, each + (n < more)) for n in range(forwards)]


def reached_of_histogram(histogram: Sequence[int], depth: int) -> tuple[int, list[int]]:
    """Counts of forwards by accepted drafts → (forwards, drafts accepted at depth 1 … K at least).

    >>> reached_of_histogram([1, 2, 1], 3)
    (4, [3, 1, 0])
    """
    reached = [sum(histogram[d:]) for d in range(1, max(depth, len(histogram) - 1) + 1)]
    return sum(histogram), reached
