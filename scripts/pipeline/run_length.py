"""How many steps a run of epochs has, asked as soon as its data are known."""

from __future__ import annotations

import math

from headstart.heads.errors import ConfigError
from headstart.pipeline.data import counted_samples
from headstart.pipeline.run import Run
from headstart.refusals import planned_training
from headstart.train.optim import Budget
from headstart.train.short_runs import check_steps
from headstart.train.stages import Stages
from headstart.train.stream import PackStream


def require_steps(run: Run) -> None:
    """Refuse, before features are made, a run of epochs that has too few steps. Without epochs `Run.check` did.

    Raises: ConfigError as training would.
    """
    recipe, config, room = run.recipe, run.recipe.train, run.recipe.data.pack_size
    if config.epochs is None:
        return
    stages, samples = planned_training(recipe, run.planned).stages, counted_samples(run)
    lengths = [len(sample) for sample in samples]

    def check(packs: int) -> None:
        budget = Budget.of(config, packs)
        check_steps(config, Stages(stages, budget))

    try:  # with as few packs as there can be: to pack many epochs takes a while
        check(max(math.floor(config.epochs * sum(min(length, room) for length in lengths) / room) - 1, 1))
    except ConfigError:
        supervised = [sample.supervised for sample in samples]
        check(PackStream(lengths, room, config.seed, supervised=supervised).count(config.epochs))
