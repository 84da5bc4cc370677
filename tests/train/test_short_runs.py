"""A run with too few steps for its settings is refused before its first step, one with just enough is not."""

from __future__ import annotations

import pytest
from fake_runs import run

from headstart.heads.base import Stage
from headstart.heads.errors import ConfigError
from headstart.train.config import TrainConfig
from headstart.train.optim import Budget, lr_factor
from headstart.train.short_runs import check_steps
from headstart.train.stages import Stages

ONE, TWO = (Stage(),), (Stage("first", 0.25), Stage("second", 0.75))


def check(stages=ONE, packs=None, **settings) -> None:
    config = TrainConfig(**settings)
    check_steps(config, Stages(stages, Budget.of(config, packs)))


def peak(steps: int, **settings) -> float:
    """The largest rate of a run of so many steps, as a fraction of train.lr."""
    config = TrainConfig(steps=steps, **settings)
    return max(lr_factor(config, Budget.of(config, None), step, 0.0) for step in range(steps))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_a_warm_up_may_take_all_steps_and_no_more(schedule):
    check(steps=12, warmup_steps=12, schedule=schedule)
    assert peak(12, warmup_steps=12, schedule=schedule) == 1.0
    assert peak(12, warmup_steps=13, schedule=schedule) < 1.0
    with pytest.raises(ConfigError, match=r"^train.warmup_steps: found 13, expected 12 at most: .*\(train.steps\)"):
        check(steps=12, warmup_steps=13, schedule=schedule)


def test_the_warm_up_fits_the_shortest_stage():
    check(TWO, steps=12, warmup_steps=3)
    with pytest.raises(ConfigError, match="found 4, expected 3 at most: the stage 'first' has no more steps"):
        check(TWO, steps=12, warmup_steps=4)


def test_epochs_count_as_the_steps_that_they_take():
    check(packs=25, epochs=1.0, accumulation=2, warmup_steps=13)
    with pytest.raises(ConfigError, match=r"found 14, expected 13 at most: the run has no more steps \(train.epochs\)"):
        check(packs=25, epochs=1.0, accumulation=2, warmup_steps=14)
    with pytest.raises(ConfigError, match=r"found 14, expected 9 at most: the run has no more steps \(train.steps\)"):
        check(packs=25, epochs=1.0, steps=9, accumulation=2, warmup_steps=14)


def test_every_round_needs_a_step():
    check(steps=3, rounds=3)
    with pytest.raises(ConfigError, match=r"^train.rounds: found 4, expected 3 at most.*\(train.steps\)"):
        check(steps=3, rounds=4)


def test_patience_must_be_able_to_end_the_run():
    """Validations at 3, 6 and 9: two without a longer length end the run at step 9."""
    check(steps=10, eval_every=3, patience=2)
    with pytest.raises(ConfigError, match=r"^train.patience: found 2 with train.eval_every=3, .* step 9 .* has 9 "):
        check(steps=9, eval_every=3, patience=2)


def test_a_run_that_a_clock_alone_ends_is_not_judged():
    check(max_seconds=60.0, warmup_steps=10**6, rounds=50, patience=9, eval_every=10**6)


def test_training_refuses_before_its_first_step(tmp_path):
    with pytest.raises(ConfigError, match="train.warmup_steps: found 5, expected 4 at most"):
        run(tmp_path, steps=4, warmup_steps=5)
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "metrics.jsonl").exists()
