"""Stages of a run: where each begins, how its rate runs, and that ranks and resumed runs agree on it."""

from __future__ import annotations

import pytest

from headstart.heads.base import Stage
from headstart.heads.errors import ConfigError
from headstart.train.config import TrainConfig
from headstart.train.optim import Budget, lr_factor
from headstart.train.stages import Stages
from headstart.train.standing import RunState

TWO = (Stage("first", 0.5), Stage("second", 0.5))
THREE = (Stage("a", 0.2), Stage("b", 0.3), Stage("c", 0.5))


def walk(stages: Stages, clock: list[float]) -> list[tuple[int, int, float]]:
    """(stage, step in it, part of it that is done after the step) of every step; `clock`: seconds before each."""
    state, found = RunState(), []
    for step, elapsed in enumerate(clock):
        state.step = step
        if (number := stages.due(state, elapsed)) is not None:
            stages.begin(number, state, elapsed)
        progress = stages.progress(state, elapsed)
        found.append((state.stage, progress.step, progress.part))
    return found


def test_steps_are_divided_as_the_example_says():
    found = walk(Stages(TWO, Budget(10, None, None)), [0.0] * 10)
    assert [stage for stage, _, _ in found] == [0] * 5 + [1] * 5
    assert [step for _, step, _ in found] == [0, 1, 2, 3, 4] * 2
    assert [part for _, _, part in found] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0] * 2)


def test_three_stages_of_unequal_length():
    found = walk(Stages(THREE, Budget(10, None, None)), [0.0] * 10)
    assert [stage for stage, _, _ in found] == [0] * 2 + [1] * 3 + [2] * 5
    assert found[-1][2] == 1.0


def test_seconds_are_divided_and_the_clock_goes_on_within_a_stage():
    stages = Stages(TWO, Budget(None, None, 100.0))
    found = walk(stages, [0.0, 20.0, 49.0, 52.0, 76.0, 99.0])
    assert [stage for stage, _, _ in found] == [0, 0, 0, 1, 1, 1]
    # the second stage has the 48 seconds that were left when it began
    assert [part for _, _, part in found] == pytest.approx([0.0, 0.4, 0.98, 0.0, 0.5, 47 / 48])


def test_under_both_limits_the_first_that_is_reached_ends_a_stage():
    stages = Stages(TWO, Budget(100, None, 10.0))
    found = walk(stages, [0.0, 2.0, 6.0, 8.0])
    assert [stage for stage, _, _ in found] == [0, 0, 1, 1]
    assert found[3][2] == pytest.approx(max(2 / 98, 2 / 4))
    assert [stage for stage, _, _ in walk(stages, [0.0] * 60)] == [0] * 50 + [1] * 10


def test_one_stage_is_the_run_itself():
    budget = Budget(7, None, None)
    stages = Stages((Stage(),), budget)
    progress = stages.progress(RunState(step=3), 1.5)
    assert (progress.budget, progress.step, progress.elapsed) == (budget, 3, 1.5)
    assert stages.due(RunState(step=7), 0.0) is None


def test_the_rate_climbs_and_falls_in_every_stage():
    config, stages = TrainConfig(steps=12, warmup_steps=2), Stages(TWO, Budget(12, None, None))
    state, rates = RunState(), []
    for step in range(12):
        state.step = step
        if (number := stages.due(state, 0.0)) is not None:
            stages.begin(number, state, 0.0)
        progress = stages.progress(state, 0.0)
        rates.append(lr_factor(config, progress.budget, progress.step, progress.elapsed))
    alone = [lr_factor(config, Budget(6, None, None), step, 0.0) for step in range(6)]
    assert rates == alone * 2 and rates[0] == 0.5 and rates[5] < 0.2


def test_a_stage_without_a_step_is_refused():
    with pytest.raises(ConfigError, match=r"train.steps: found a run of 1 step.*'first'"):
        Stages(TWO, Budget(1, None, None))
    Stages((Stage(),), Budget(1, None, None))
