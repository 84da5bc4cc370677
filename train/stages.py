"""The stages of a run: where each begins, and how much of it is done.

Worked example: two stages of half the budget each, 10 steps.

    step             0   1   2   3   4   5   6   7   8   9
    stage            0   0   0   0   0   1   1   1   1   1
    step in it       0   1   2   3   4   0   1   2   3   4

The rate climbs and falls once in every stage. Under a limit of time, a stage begins at the first step after its share
of the seconds; under both limits, at whichever comes first. Where it began is in the run's state, so that a resumed run
goes on in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.heads.base import Stage
from headstart.heads.counting import counted
from headstart.heads.errors import ConfigError
from headstart.train.optim import Budget
from headstart.train.standing import RunState


@dataclass(frozen=True)
class StageProgress:
    """Where a run is within its stage.

    Attributes:
        budget: of the stage: its steps and seconds.
        step, elapsed: since the stage began.
    """

    budget: Budget
    step: int
    elapsed: float

    @property
    def part(self) -> float:
        """Part of the stage that is done when the next step is made, 0 … 1."""
        return self.budget.fraction(self.step + 1, self.elapsed)


class Stages:
    """The stages of one run.

    Args:
        stages: see Head.stages. budget: of the whole run.
    Raises: ConfigError where a stage would get no step.
    """

    def __init__(self, stages: Sequence[Stage], budget: Budget):
        self.stages, self.budget = stages, budget
        share, ends = 0.0, []
        for stage in stages[:-1]:
            share += stage.share
            ends.append(share)
        self._share_ends = [*ends, 1.0]
        steps = budget.steps
        self._step_ends = None if steps is None else [*(round(end * steps) for end in ends), steps]
        short = [stage.name for stage, length in zip(stages, self.lengths or [], strict=False) if length == 0]
        if short and len(stages) > 1:
            raise ConfigError(
                f"train.{budget.by}: found a run of {counted(steps or 0, 'steps')}, in which the stage {short[0]!r} "
                "gets none: train longer"
            )

    @property
    def lengths(self) -> list[int] | None:
        """Steps of every stage; None where a clock alone ends them."""
        if self._step_ends is None:
            return None
        return [last - first for first, last in zip([0, *self._step_ends], self._step_ends, strict=False)]

    def due(self, state: RunState, elapsed: float) -> int | None:
        """The stage that begins before the next step; None where the run stays in its stage."""
        found = state.stage
        for number, end in enumerate(self._share_ends[:-1], start=1):
            by_step = self._step_ends is not None and state.step >= self._step_ends[number - 1]
            by_time = self.budget.seconds is not None and elapsed >= end * self.budget.seconds
            if by_step or by_time:
                found = max(found, number)
        return found if found > state.stage else None

    def begin(self, number: int, state: RunState, elapsed: float) -> None:
        """Note in the run's state that this stage begins."""
        state.stage, state.stage_step, state.stage_elapsed = number, state.step, elapsed

    def progress(self, state: RunState, elapsed: float) -> StageProgress:
        """How far the state's stage is."""
        if len(self.stages) == 1:
            return StageProgress(self.budget, state.step, elapsed)
        steps = None if self._step_ends is None else max(self._step_ends[state.stage] - state.stage_step, 1)
        seconds = self.budget.seconds
        if seconds is not None:
            seconds = max(self._share_ends[state.stage] * seconds - state.stage_elapsed, 1e-9)
        budget = Budget(steps, None, seconds, self.budget.by)
        return StageProgress(budget, state.step - state.stage_step, elapsed - state.stage_elapsed)

    def say(self, number: int, say: Callable[[str], None]) -> None:
        """Tell which stage trains, in a run of several."""
        if len(self.stages) > 1:
            say(f"stage {number + 1} of {len(self.stages)}: {self.stages[number].name}")
