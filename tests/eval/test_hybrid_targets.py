"""Heads on a target with recurrent states: every family drafts chains losslessly, and nothing tries a tree."""

from __future__ import annotations

from typing import Any

import pytest
from eval_help import FAMILY_TREES, run, tokens_of, train_briefly, tree_of

from headstart.bench.architectures import random_model
from headstart.eval.config import EvalConfig, TreeConfig, TuneConfig
from headstart.eval.decoding.decode import Answer
from headstart.eval.drafters import build_drafter
from headstart.eval.measuring.benchmark import evaluate
from headstart.eval.tuning.tune import tune
from headstart.heads.batch import FeatureSpec
from headstart.heads.errors import ConfigError
from headstart.heads.targets.target import Target
from headstart.serving_check import compare_features

CHAINS = [family for family, kind in FAMILY_TREES if kind == "chain"]
#: a family that drafts trees as well
TREES = next(family for family, kind in FAMILY_TREES if kind == "dynamic")


@pytest.fixture(scope="module")
def hybrid() -> Target:
    return Target.from_model(random_model("LFM2"))


@pytest.fixture(scope="module")
def answers(hybrid: Target) -> list[Answer]:
    return run(hybrid, None)


@pytest.mark.parametrize("family", CHAINS)
def test_chains_of_every_family_are_lossless(hybrid: Target, answers: list[Answer], family: str) -> None:
    head = train_briefly(hybrid, answers, family).head
    found = run(hybrid, build_drafter(head, EvalConfig(tree=tree_of("chain"))))
    assert tokens_of(found) == tokens_of(answers)
    assert sum(cycle.accepted for answer in found for cycle in answer.cycles) > 5


def test_nothing_tries_trees(hybrid: Target, answers: list[Answer], prompts: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("headstart.eval.tuning.costs.CYCLE_TOKENS", 12)
    head: Any = train_briefly(hybrid, answers, TREES).head
    config = EvalConfig(data=prompts, max_new_tokens=8, warmup_tokens=0)
    search = TuneConfig(batch_sizes=[2], depth=1, k=[2], total_tokens=[4], prompts=2, repeats=1)
    found = tune(hybrid, head, config, search)
    assert found.choices[0].scheduled is None
    assert "nothing was scheduled: the target has layers with recurrent states" in found.notes
    assert set(found.cycles) == {"chain"} and all("chain" in name for name in found.taus)
    config.tree = TreeConfig(kind="dynamic")
    with pytest.raises(ConfigError, match=r"eval\.tree\.kind: found 'dynamic', but lfm2 .*one order of tokens.*=chain"):
        evaluate(hybrid, head, config)
    config.tree = TreeConfig()
    config.scheduler = True
    with pytest.raises(ConfigError, match=r"eval\.scheduler: found true, but layers of lfm2 hold .*=false"):
        evaluate(hybrid, head, config)
    config.scheduler = False
    # tune says nothing of the recipe's tree, and prompt lookup drafts chains
    assert evaluate(hybrid, None, EvalConfig(**{**vars(config), "drafter": "ngram"})).tau >= 1


def test_features_of_the_decode_loop_are_those_of_training(hybrid: Target) -> None:
    sequences = [[(7 * n + 3) % 90 + 3 for n in range(23)], [(5 * n) % 90 + 3 for n in range(14)]]
    found = compare_features(hybrid, FeatureSpec((1, 3, 6)), sequences)
    assert found.passed and found.rows == 23 + 11
