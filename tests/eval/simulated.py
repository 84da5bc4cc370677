"""A simulated batch: rows whose drafts are accepted with probabilities that vary, and cycles that take given times.

Shape legend: B rows, K levels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from headstart.eval.decoding.loop import COUNT
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.scheduler import CycleShape
from headstart.eval.scheduling.estimates import kept
from headstart.eval.scheduling.throughput import ThroughputScheduler

Seconds = Callable[[CycleShape, int], float]


#: of an answer
TOKENS = 100


class SilentDrafter:
    """As much of a drafter as a scheduler looks at. It drafts chains, level after level or all at once."""

    spec = object()
    levels: int | None = None
    nodes: int | None = None
    levels_before: int | None = None

    def __init__(self, depth: int, by_level: bool):
        self.max_nodes, self.by_level = depth, by_level


class Batch:
    """Rows of contexts, one after the other, some easy and some hard. What the contexts are does not depend on draws.

    Args: mean: logit of a draft's acceptance. spread: its deviation between contexts. noise: within one.
    """

    def __init__(self, rows: int, depth: int, mean: float, spread: float, noise: float, contexts: int, seed: int = 0):
        self.rows, self.depth, self.noise = rows, depth, noise
        self.rng = np.random.default_rng(seed)
        levels = np.random.default_rng(seed + 1).normal(mean, spread, contexts + rows)
        self.waiting = deque(levels[rows:].tolist())
        self.level_B = levels[:rows].copy()
        self.left_B = np.full(rows, TOKENS)

    def drafts(self) -> NDArray[np.float64]:
        """Logits of acceptance of the next drafts, [B, K]."""
        return self.level_B[:, None] + self.rng.normal(0, self.noise, (self.rows, self.depth))

    def accept(self, logit_BK: NDArray[np.float64], kept_BK: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Accepted drafts of each row; contexts that end make place for others."""
        hit_BK = self.rng.random(logit_BK.shape) < 1 / (1 + np.exp(-logit_BK))
        count_B = (hit_BK & kept_BK).cumprod(1).sum(1)
        self.left_B -= 1 + count_B
        for row in np.flatnonzero(self.left_B <= 0):
            if self.waiting:
                self.level_B[row], self.left_B[row] = self.waiting.popleft(), TOKENS
        return count_B


def context(rows: int) -> Rows:
    return Rows(torch.zeros((rows, 1), dtype=torch.int64), torch.full((rows,), 100))


def tokens_per_second(
    scheduler: ThroughputScheduler, batch: Batch, seconds: Seconds, said: Callable[..., object]
) -> float:
    """Decode until no context waits, as captured cycles run: a table is known when the next one already runs.

    Args: said: logits of acceptance → what the draft says.
    """
    scheduler.start(context(batch.rows))
    for shape in scheduler.shapes():
        if scheduler.wants_time(shape):
            scheduler.timed(shape, seconds(shape, batch.rows))
    tokens, time, under_way = 0, 0.0, deque()
    while batch.waiting:
        shape = scheduler.next_shape()
        levels = batch.depth if shape.levels is None else shape.levels
        logit_BK = batch.drafts()[:, :levels]
        both = np.zeros((2, batch.rows, levels), np.float32)
        kept_BK = np.ones((batch.rows, levels), bool)
        if levels:
            scale_K, bias_K = (x.numpy() for x in scheduler.numbers)
            both[0] = said(logit_BK)
            both[1] = -np.logaddexp(0, -(scale_K[:levels] * both[0] + bias_K[:levels])).cumsum(1)
            kept_BK = kept(np.exp(both[1]), None if shape.rows is None else shape.rows - batch.rows)
        waiting = len(batch.waiting)
        count_B = batch.accept(logit_BK, kept_BK)
        if waiting > len(batch.waiting):
            for row in np.flatnonzero(batch.left_B == TOKENS).tolist():
                scheduler.admitted(row)
        table = np.zeros((batch.rows, levels + 5), np.int64)
        table[:, COUNT] = 1 + count_B
        tokens, time = tokens + int(table[:, COUNT].sum()), time + seconds(shape, batch.rows)
        under_way.append((shape, table, both if levels and shape.says else None, seconds(shape, batch.rows)))
        if len(under_way) > 1:
            scheduler.learn(*under_way.popleft())
    return tokens / time


class Fixed(ThroughputScheduler):
    """Always one shape."""

    shape: CycleShape

    def next_shape(self) -> CycleShape:
        super().next_shape()
        return self.shape
