# ruff: noqa: F811 - fixtures of another file are imported
"""Sampled decoding with the scheduler: thousands of rows against the target's exact distribution."""

from __future__ import annotations

from dataclasses import replace

import pytest
from eval_help import run
from test_distribution import CONTEXT, ROWS, TOKENS, deviation, enumerated, heads, small  # noqa: F401
from test_throughput import EveryShape
from torch import Tensor

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.scheduler import CycleShape, Scheduler
from headstart.eval.drafters import Drafter, build_drafter
from headstart.eval.scheduling.throughput import scheduler_for
from headstart.eval.tree import Tree
from headstart.heads.base import Head
from headstart.heads.sampling import logit_of
from headstart.heads.targets.target import Target

#: rows by which a scheduler that is told the draws is noticed
MANY = 3 * ROWS
CHAIN = TreeConfig("chain", 3)
STATIC = TreeConfig("static", 3, total_tokens=7, sample=False, paths=[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
#: chains have q, the others are functions of the context
WAYS = [
    ("eagle", CHAIN, "block"), ("eagle", CHAIN, "token"), ("medusa", CHAIN, "block"), ("dspark", CHAIN, "block"),
    ("medusa", STATIC, "block"), ("medusa", TreeConfig("ddtree", 3, total_tokens=7), "block"),
    ("eagle", TreeConfig("dynamic", 3, 2, 7), "block"),
]  # fmt: skip


class CutShapes(EveryShape):
    """Takes turns with the shapes that have fewer rows than there are nodes."""

    def shapes(self) -> list[CycleShape]:
        first, *others = super().shapes()
        return [first, *(shape for shape in others if shape.rows is not None)]


class TellsTheToken(CutShapes):
    """Not allowed: how sure the draft was of the token that it drew tells which one it drew."""

    def reach(self, tree: Tree) -> Tensor:
        assert tree.q_BNV is not None
        q_BN = tree.q_BNV.gather(2, tree.tokens_BN[:, :, None])[..., 0]
        return super().reach(replace(tree, confidence_BN=logit_of(q_BN).float()))


def drafter_of(head: Head, tree: TreeConfig) -> Drafter:
    drafter = build_drafter(head, EvalConfig(tree=tree, temperature=1.0))
    assert drafter is not None
    return drafter


def sampled(target: Target, drafter: Drafter, scheduler: Scheduler, rule: str, rows: int = ROWS) -> list[Answer]:
    sampling = Sampling(temperature=1.0, verification=rule)
    return run(
        target, drafter, [CONTEXT] * rows, TOKENS, sampling=sampling, seed=17, bucket=16, prefill_chunk=16,
        scheduler=scheduler,
    )  # fmt: skip


@pytest.mark.parametrize(("family", "tree", "rule"), WAYS)
def test_cut_shapes_keep_the_targets_distribution(
    small: Target, heads: dict[str, Head], family: str, tree: TreeConfig, rule: str
) -> None:
    drafter = drafter_of(heads[family], tree)
    scheduler = CutShapes(drafter, tree)
    answers = sampled(small, drafter, scheduler, rule, MANY if tree == CHAIN else ROWS)
    assert deviation(answers, enumerated(small, Sampling(temperature=1.0))) < 5
    assert scheduler.ran and all(shape.rows for shape in scheduler.ran)
    cycles = [cycle for answer in answers for cycle in answer.cycles]
    # some rows lost drafts to others, and some drafts were right
    assert len({cycle.drafted for cycle in cycles}) > 1 and max(cycle.accepted for cycle in cycles) > 0


@pytest.mark.parametrize(("family", "tree", "rule"), WAYS[:2])
def test_the_policy_keeps_the_targets_distribution(
    small: Target, heads: dict[str, Head], family: str, tree: TreeConfig, rule: str
) -> None:
    """The scheduler as it runs, which has learned in earlier batches."""
    drafter = drafter_of(heads[family], tree)
    scheduler = scheduler_for(drafter, tree)
    joint = enumerated(small, Sampling(temperature=1.0))
    for _ in range(2):
        answers = sampled(small, drafter, scheduler, rule)
        assert deviation(answers, joint) < 5
    assert max(cycle.accepted for answer in answers for cycle in answer.cycles) > 0


@pytest.mark.parametrize("rule", ["block", "token"])
def test_a_scheduler_that_is_told_the_draws_is_noticed(small: Target, heads: dict[str, Head], rule: str) -> None:
    drafter = drafter_of(heads["eagle"], CHAIN)
    answers = sampled(small, drafter, TellsTheToken(drafter, CHAIN), rule, MANY)
    assert deviation(answers, enumerated(small, Sampling(temperature=1.0))) > 5
