"""What the scheduler decides, in simulated batches whose costs and acceptance are known."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from numpy.typing import NDArray
from simulated import TOKENS, Batch, Fixed, Seconds, SilentDrafter, context, tokens_per_second

from headstart.eval.decoding.scheduler import PLAIN, CycleShape
from headstart.eval.scheduling.means import TRUSTED
from headstart.eval.scheduling.throughput import ThroughputScheduler

DEPTH = 7
#: logit of acceptance of a context's drafts: mean, deviation between contexts, deviation within one
MIXED, HARD, EASY = (0.3, 1.2, 1.0), (-1.5, 0.8, 0.8), (1.5, 1.5, 1.0)


def costs(by_level: bool, row: float) -> Seconds:
    """Seconds of a cycle. Args: row: of a row of the forward."""

    def seconds(shape: CycleShape, batch: int) -> float:
        rows = shape.rows or batch * (1 + (shape.levels or 0))
        drafting = 0.0 if shape == PLAIN else 5e-5 + 6e-5 * (shape.levels or 0) if by_level else 3e-4
        return 4.5e-4 + row * rows + drafting + (4e-5 if shape.rows else 0.0)

    return seconds


def rates(batch: int, by_level: bool, row: float, kind: tuple[float, float, float], contexts: int) -> tuple[float, ...]:
    """Tokens per second: (plain, the best fixed chain, scheduled)."""
    seconds, noise = costs(by_level, row), np.random.default_rng(5)

    def said(logit_BK: NDArray[np.float64]) -> NDArray[np.float64]:
        """A draft that is too sure of itself, and not always right."""
        return logit_BK * 1.2 + 0.3 + noise.normal(0, 0.7, logit_BK.shape)

    def run(scheduler: ThroughputScheduler, contexts: int = contexts, seed: int = 1) -> float:
        return tokens_per_second(scheduler, Batch(batch, DEPTH, *kind, contexts, seed), seconds, said)

    fixed = []
    for depth in (0, 1, 2, 3, 5, DEPTH):
        scheduler = Fixed(SilentDrafter(DEPTH, by_level), DEPTH, True)
        scheduler.shape = CycleShape(depth)
        fixed.append(run(scheduler))
    scheduler = ThroughputScheduler(SilentDrafter(DEPTH, by_level), DEPTH, True)
    run(scheduler, batch // 2, 9)
    return fixed[0], max(fixed[1:]), run(scheduler)


def choices(scheduler: ThroughputScheduler) -> list[CycleShape]:
    """The shapes that it chooses from now on, in a list that grows."""
    ran: list[CycleShape] = []
    choose = scheduler.next_shape

    def next_shape() -> CycleShape:
        ran.append(choose())
        return ran[-1]

    scheduler.next_shape = next_shape  # type: ignore[method-assign]
    return ran


@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize("by_level", [True, False])
@pytest.mark.parametrize(("kind", "row"), [(MIXED, 6e-6), (EASY, 1.2e-5), (HARD, 6e-6)])
def test_it_is_no_slower_than_the_better_of_plain_and_fixed(
    batch: int, by_level: bool, kind: tuple[float, float, float], row: float
) -> None:
    plain, fixed, scheduled = rates(batch, by_level, row, kind, 10 * batch)
    # the simulation's own noise: runs draw different numbers
    assert scheduled > 0.975 * max(plain, fixed)
    if kind == HARD:
        # drafting pays nowhere here, and it is given up at once
        assert fixed < 0.95 * plain and scheduled > 0.99 * plain


def test_where_rows_are_dear_and_levels_are_not_the_cut_gains() -> None:
    """A block drafter at a batch of 32: which rows draft matters more than how deep all of them do."""
    plain, fixed, scheduled = rates(32, False, 1e-5, EASY, 400)
    assert scheduled > 1.05 * max(plain, fixed)


def test_drafting_is_taken_up_again_by_the_next_batch() -> None:
    """Where no draft paid, a new batch drafts for a few cycles: its contexts may be others."""
    seconds = costs(True, 6e-6)
    scheduler = ThroughputScheduler(SilentDrafter(DEPTH, True), DEPTH, True)
    ran = choices(scheduler)
    tokens_per_second(scheduler, Batch(8, DEPTH, *HARD, 80, 1), seconds, lambda logit_BK: logit_BK)
    assert ran[-1] == PLAIN
    ran.clear()
    tokens_per_second(scheduler, Batch(8, DEPTH, *HARD, 8, 2), seconds, lambda logit_BK: logit_BK)
    assert [shape != PLAIN for shape in ran[:3]] == [True, True, False] and set(ran[3:]) == {PLAIN}


def test_a_shape_that_was_held_up_when_it_ran_is_tried_again() -> None:
    """The best chain was slow when it ran, as in a process that still warms up. It is not given up for good."""
    seconds = costs(True, 6e-6)
    scheduler = ThroughputScheduler(SilentDrafter(DEPTH, True), DEPTH, True)
    scheduler.start(context(8))
    for shape in scheduler.shapes():
        scheduler.timed(shape, seconds(shape, 8))
    for _ in range(TRUSTED):
        scheduler.book.times.took(CycleShape(1, says=False), 1.3 * seconds(CycleShape(1), 8))
    ran = choices(scheduler)
    tokens_per_second(scheduler, Batch(8, DEPTH, -0.2, 0.5, 0.5, 160, 1), seconds, lambda logit_BK: logit_BK)
    assert sum(shape.levels == 1 for shape in ran) > 0.8 * len(ran)


def test_times_are_taken_again_when_contexts_are_much_longer() -> None:
    scheduler = ThroughputScheduler(SilentDrafter(DEPTH, True), DEPTH, True)
    rows = context(4)
    scheduler.start(rows)
    for shape in scheduler.shapes():
        assert scheduler.wants_time(shape)
        scheduler.timed(shape, 1.0)
    rows.count_B += 20
    scheduler.start(rows)
    assert not any(map(scheduler.wants_time, scheduler.shapes()))
    rows.count_B += 100
    scheduler.start(rows)
    assert all(map(scheduler.wants_time, scheduler.shapes()))


def test_a_single_row_is_drafted_again_when_it_begins_another_context() -> None:
    """Plain cycles leave the drafter behind. A context that begins is read by it, and may be an easier one."""
    scheduler, batch = ThroughputScheduler(SilentDrafter(DEPTH, True), DEPTH, True), Batch(1, DEPTH, *HARD, 1)
    batch.level_B[:] = -3.0
    batch.waiting = deque([-3.0] * 8 + [3.0] * 16)
    ran: list[tuple[float, bool]] = []
    choose = scheduler.next_shape

    def next_shape() -> CycleShape:
        shape = choose()
        ran.append((float(batch.level_B[0]), shape != PLAIN))
        return shape

    scheduler.next_shape = next_shape  # type: ignore[method-assign]
    tokens_per_second(scheduler, batch, costs(True, 6e-6), lambda logit_BK: logit_BK)
    hard, easy = ([drafts for level, drafts in ran if level == wanted] for wanted in (-3.0, 3.0))
    assert not all(hard[: 3 * TOKENS]) and sum(hard[3 * TOKENS :]) < 0.1 * len(hard[3 * TOKENS :])
    assert any(easy) and all(easy[-TOKENS // 4 :])
