"""Refuses a run that has too few steps for what its settings ask.

Nobody knows how many steps a run makes that only a clock ends, so nothing is refused there.
"""

from __future__ import annotations

from headstart.heads.errors import ConfigError
from headstart.train.config import TrainConfig
from headstart.train.stages import Stages


def check_steps(config: TrainConfig, stages: Stages) -> None:
    """Raise ConfigError where the run's steps are too few for the warm-up, the rounds or the patience.

    Args: stages: of the run, with its budget.
    """
    steps, by = stages.budget.steps, stages.budget.by
    if steps is None:
        return
    _check_warmup(config, stages)
    if config.rounds > steps:
        raise ConfigError(
            f"train.rounds: found {config.rounds}, expected {steps} at most: the run has no more steps (train.{by}), "
            "and every round needs one. Lower it, or train longer"
        )
    first = config.eval_every * (config.patience + 1)  # the first validation is always the best so far
    if config.patience and first >= steps:
        raise ConfigError(
            f"train.patience: found {config.patience} with train.eval_every={config.eval_every}, which ends a run at "
            f"step {first} at the earliest, but this one has {steps} (train.{by}): lower train.eval_every, or set "
            "train.patience=0"
        )


def _check_warmup(config: TrainConfig, stages: Stages) -> None:
    """The rate climbs in every stage; where it cannot reach its peak, nothing was trained with `train.lr`."""
    lengths = stages.lengths or []
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    most = lengths[shortest]
    if config.warmup_steps is None or config.warmup_steps <= most:
        return
    where = f"the stage {stages.stages[shortest].name!r}" if len(lengths) > 1 else "the run"
    raise ConfigError(
        f"train.warmup_steps: found {config.warmup_steps}, expected {most} at most: {where} has no more steps "
        f"(train.{stages.budget.by}), so the rate would never reach train.lr. Set train.warmup_steps=null, which takes "
        f"train.warmup_ratio={config.warmup_ratio:g} of the run, or train longer"
    )
