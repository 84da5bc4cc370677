"""Acceptance profiles: by hand, and against smaller trees that are really drafted, cycle by cycle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from beside import Beside
from eval_help import DRAFTING_HEADS, HEAD_TREES, Trained, run

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Answer
from headstart.eval.drafters import DRAFTERS, Drafter, build_drafter
from headstart.eval.tree import Tree
from headstart.eval.tuning.profile import (
    ChainProfile,
    DynamicProfile,
    follow,
    path_ranks,
    ranks_by_depth,
)
from headstart.eval.tuning.ranks import NEVER
from headstart.heads.targets.target import Target

#: heads that draft trees over marginals
MARGINALS = [name for name, kind in HEAD_TREES if kind == "ddtree"]


def test_chain_by_hand() -> None:
    profile = ChainProfile(np.array([0, 1, 3, 3]))
    assert [profile.tau(TreeConfig("chain", depth)) for depth in (1, 2, 3, 9)] == [1.75, 2.25, 2.75, 2.75]


def tree_by_hand() -> Tree:
    """Children of the root: a (-0.2), b (-1); of a: c (-0.5), d (-3); of c: e (-0.5); the last node is padding."""
    parent = torch.tensor([[-1, -1, 0, 0, 2, 0]])
    depth = torch.tensor([[1, 1, 2, 2, 3, 2]])
    score = torch.tensor([[-0.2, -1.0, -0.5, -3.0, -0.5, -torch.inf]])
    return Tree(torch.tensor([[5, 6, 7, 8, 9, 0]]), parent, depth, torch.isfinite(score), 3, score_BN=score)


def test_ranks_by_hand() -> None:
    """Among levels up to 2: a c b d; with level 3: a, then c and e (a tie that goes to the shallower), b, d."""
    ranks = ranks_by_depth(tree_by_hand())[0]
    assert ranks[0, :2].tolist() == [0, 1]
    assert ranks[1, :4].tolist() == [0, 2, 1, 3]
    assert ranks[2, :5].tolist() == [0, 3, 1, 4, 2]
    path = follow([-1, -1, 0, 0, 2, 0], [5, 6, 7, 8, 9, 0], [5, 7, 9])
    assert path == [0, 2, 4]
    found = path_ranks(ranks.numpy(), path)
    assert found.tolist() == [[0, 0, 0], [NEVER, 1, 1], [NEVER, NEVER, 2]]


def test_dynamic_by_hand() -> None:
    """Two cycles: the path of above, and one that accepted nothing."""
    ranks = ranks_by_depth(tree_by_hand())[0].numpy()
    profile = DynamicProfile(np.stack([path_ranks(ranks, [0, 2, 4]), path_ranks(ranks, [])]))
    taus = {(d, n): profile.tau(TreeConfig("dynamic", d, 2, n + 1)) for d in (1, 2, 3) for n in (1, 2, 3)}
    assert taus == {
        (1, 1): 1.5, (1, 2): 1.5, (1, 3): 1.5,
        (2, 1): 1.5, (2, 2): 2.0, (2, 3): 2.0,
        (3, 1): 1.5, (3, 2): 2.0, (3, 3): 2.5,
    }  # fmt: skip


def record(target: Target, drafter: Any) -> list[Answer]:
    return run(target, drafter, max_new_tokens=16)


def test_smaller_dynamic_trees_follow_from_the_largest(
    target: Target, eagle3: Trained, long_answers: list[Answer]
) -> None:
    def drafter(tree: TreeConfig) -> Drafter:
        made = build_drafter(eagle3.head, EvalConfig(tree=tree))
        assert made is not None
        return made

    sizes = [(1, 2), (2, 4), (2, 6), (3, 5), (3, 9), (4, 12)]
    trees = [TreeConfig("dynamic", depth, 3, nodes + 1) for depth, nodes in sizes]
    beside = Beside(drafter(TreeConfig("dynamic", 4, 3, 16)), [drafter(tree) for tree in trees], long_answers)
    answers = record(target, beside)
    assert [answer.tokens for answer in answers] == [answer.tokens[:16] for answer in long_answers]
    profile = beside.dynamic_profile()
    assert profile.cycles == len(beside.would[0]) > 15
    for tree, accepted in zip(trees, beside.would, strict=True):
        assert profile.tau(tree) == pytest.approx(1 + np.mean(accepted)), tree
    # the sizes tell trees apart, else the comparison shows little
    assert len({round(profile.tau(tree), 6) for tree in trees}) >= 4


@pytest.mark.parametrize("name", MARGINALS)
def test_smaller_trees_over_marginals_follow_from_the_largest(
    target: Target, trained: Callable[[str], Trained], name: str, long_answers: list[Answer]
) -> None:
    """Cycle by cycle: what `tune` learns of every size from one run. A chain or a static tree accepts no more."""
    head, sizes = trained(name).head, (2, 5, 9, 15)

    def drafter(tree: TreeConfig) -> Drafter:
        made = build_drafter(head, EvalConfig(tree=tree))
        assert made is not None
        return made

    static = "static" in DRAFTERS[DRAFTING_HEADS[name]].kinds
    trees = [TreeConfig("ddtree", 3, total_tokens=nodes + 1) for nodes in sizes]
    others = [TreeConfig("chain", 3), *([TreeConfig("static", 3, total_tokens=10)] if static else [])]
    drafters = [drafter(tree) for tree in (*trees, *others)]
    beside = Beside(drafter(TreeConfig("ddtree", 3, total_tokens=16)), drafters, long_answers)
    answers = record(target, beside)
    assert [answer.tokens for answer in answers] == [answer.tokens[:16] for answer in long_answers]
    profile = beside.dynamic_profile()
    means = [float(np.mean(accepted)) for accepted in beside.would]
    for tree, mean in zip(trees, means, strict=False):
        assert profile.tau(tree) == pytest.approx(1 + mean), tree
    assert means[: len(sizes)] == sorted(means[: len(sizes)]) and means[0] < means[3]
    # of nine nodes
    assert all(means[2] >= mean for mean in means[len(sizes) :])
    # some heads know nearly all of these answers
    assert means[3] > means[len(sizes)] or means[len(sizes)] > 2.8


def test_shorter_chains_follow_from_the_longest(target: Target, eagle3: Trained, long_answers: list[Answer]) -> None:
    drafters = [build_drafter(eagle3.head, EvalConfig(tree=TreeConfig("chain", depth))) for depth in (1, 2, 3, 4)]
    beside = Beside(drafters[-1], drafters[:-1], long_answers)
    record(target, beside)
    profile = beside.chain_profile()
    for depth, accepted in zip((1, 2, 3), beside.would, strict=True):
        assert profile.tau(TreeConfig("chain", depth)) == pytest.approx(1 + np.mean(accepted))
