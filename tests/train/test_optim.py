import math

import pytest
import torch
from torch import nn

from headstart.heads.errors import ConfigError, TrainingError
from headstart.train.config import TrainConfig
from headstart.train.optim import Budget, build_optimizer, lr_factor


def factors(config: TrainConfig, count: int, packs: int | None = None) -> list[float]:
    budget = Budget.of(config, packs)
    return [lr_factor(config, budget, step, 0.0) for step in range(count)]


def test_cosine_by_steps_at_hand_computed_points():
    found = factors(TrainConfig(steps=10, warmup_steps=2), 10)
    assert found[:3] == [0.5, 1.0, 1.0]
    assert found[6] == pytest.approx(0.5)  # half of the eight decay steps
    assert found[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert found == pytest.approx(factors(TrainConfig(steps=10, warmup_ratio=0.2), 10))


def test_min_ratio_and_constant():
    assert factors(TrainConfig(steps=4, warmup_steps=0, min_lr_ratio=0.2), 3) == pytest.approx(
        [1.0, 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)), 0.6]
    )
    assert factors(TrainConfig(steps=4, warmup_steps=2, schedule="constant"), 4) == [0.5, 1, 1, 1]


def test_linear_and_constant_then_linear():
    shared = dict(steps=10, warmup_steps=2)
    assert factors(TrainConfig(schedule="linear", **shared), 10) == pytest.approx(
        [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    )
    held = factors(TrainConfig(schedule="wsd", decay_ratio=0.5, min_lr_ratio=0.1, **shared), 10)
    assert held == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.5, 0.1 + 0.9 * 0.25])
    timed, budget = TrainConfig(max_seconds=100, warmup_ratio=0.0, schedule="wsd"), Budget(None, None, 100.0)
    assert [lr_factor(timed, budget, 3, t) for t in (0.0, 80.0, 90.0, 100.0)] == pytest.approx([1, 1, 0.5, 0])


def test_timed_run_follows_the_clock_and_not_the_step():
    config = TrainConfig(max_seconds=100, warmup_ratio=0.1)
    budget = Budget.of(config, None)
    at = lambda seconds, step=7: lr_factor(config, budget, step, seconds)  # noqa: E731
    assert at(0.0) == pytest.approx(0.01)
    assert at(5.0) == pytest.approx(0.5)
    assert at(10.0) == pytest.approx(1.0)
    assert at(55.0) == pytest.approx(0.5)
    assert at(100.0) == pytest.approx(0.0)
    assert at(55.0, step=5000) == at(55.0, step=1)


def test_whichever_budget_comes_first():
    config = TrainConfig(steps=100, epochs=1, max_seconds=50, accumulation=4)
    budget = Budget.of(config, 41)
    assert (budget.steps, budget.packs, budget.by) == (11, 41, "epochs")
    assert budget.finished(10, 0) is None
    assert budget.finished(11, 0) == "epochs"
    assert budget.finished(3, 50) == "seconds"
    assert budget.fraction(1, 25) == 0.5
    assert Budget.of(TrainConfig(steps=3, epochs=1), 41).by == "steps"


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2)
        self.frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)


def test_only_matrices_decay_and_frozen_parameters_stay_out():
    module = Small()
    optimizer = build_optimizer(module, TrainConfig(steps=1, weight_decay=0.1))
    decayed, free = optimizer.param_groups
    assert [id(p) for p in decayed["params"]] == [id(module.linear.weight)] and decayed["weight_decay"] == 0.1
    assert {id(p) for p in free["params"]} == {id(module.linear.bias), id(module.norm.weight), id(module.norm.bias)}
    assert free["weight_decay"] == 0.0


def test_half_precision_master_weights_are_refused():
    with pytest.raises(TrainingError, match="master weights must be float32.*linear.weight"):
        build_optimizer(Small().to(torch.bfloat16), TrainConfig(steps=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "no budget is set"),
        ({"steps": 0}, "train.steps: found 0"),
        ({"steps": 1, "schedule": "step"}, "train.schedule: found 'step', expected one of cosine, linear, wsd, const"),
        ({"steps": 1, "decay_ratio": 0.0}, "train.decay_ratio: found 0.0"),
        ({"steps": 1, "optimizer": "sgd"}, "train.optimizer: found 'sgd', expected one of adamw, muon"),
        ({"steps": 1, "average_decay": 1.0}, "train.average_decay: found 1.0"),
        ({"steps": 1, "rounds": 0}, "train.rounds: found 0, expected 1 or more"),
        ({"steps": 1, "token_weight_decay": -0.1}, "train.token_weight_decay: found -0.1"),
        ({"steps": 1, "token_rate": -0.1}, "train.token_rate: found -0.1, expected 0 or more"),
        ({"steps": 1, "betas": [0.9]}, "train.betas"),
        ({"steps": 1, "betas": [0.9, {"lr": 1}]}, "train.betas"),
        ({"steps": 1, "warmup_ratio": 1.5}, "train.warmup_ratio"),
        ({"steps": 1, "accumulation": 0}, "train.accumulation"),
        ({"steps": 1, "tracker": "mlflow"}, "train.tracker"),
        ({"steps": 1, "lr": 1e38}, "train.lr: found 1e\\+38, expected 1000 at most"),
        ({"epochs": float("inf")}, "train.epochs: found inf, expected a finite number"),
        ({"steps": 1, "weight_decay": float("inf")}, "train.weight_decay: found inf"),
        ({"steps": 1, "eps": float("inf")}, "train.eps: found inf"),
        ({"steps": 1, "clip_norm": float("nan")}, "train.clip_norm: found nan"),
    ],
)
def test_bad_configuration_names_the_field(change, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**change).check()
