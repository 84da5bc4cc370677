"""Acceptance profiles: by hand, and against smaller trees that are really drafted, cycle by cycle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from eval_help import CONTEXTS, Trained, run
from torch import Tensor

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.rows import Rows
from headstart.eval.drafters import Drafter, build_drafter
from headstart.eval.tree import Tree, static_paths, static_shape
from headstart.eval.tuning.profile import (
    NEVER,
    ChainProfile,
    DynamicProfile,
    Recorder,
    StaticProfile,
    follow,
    path_ranks,
    ranks_by_depth,
    spine,
)
from headstart.heads.targets.target import Target


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


def test_static_by_hand() -> None:
    profile = StaticProfile(np.array([[0, 0, 1], [0, NEVER, 0], [1, 0, 0], [0, 2, NEVER]]))
    assert profile.best_paths(3) == [[0], [1], [0, 0]]
    # hits: (0) three times, (1) once, (0, 0) once
    assert profile.tau(TreeConfig("static", 3, paths=[[0], [1], [0, 0]])) == pytest.approx(1 + 5 / 4)
    assert profile.tau(TreeConfig("static", 1, paths=[[0], [1], [0, 0]])) == pytest.approx(1 + 4 / 4)
    assert profile.tau(TreeConfig("static", 3, total_tokens=2, paths=[[0], [1], [0, 0]])) == pytest.approx(1 + 3 / 4)
    assert len(profile.best_paths(99)) == 7


class Beside(Recorder):
    """Also drafts smaller trees in the same places and notes how many of their nodes the target would accept."""

    def __init__(self, drafter: Drafter, others: list[Drafter], answers: list[Answer]):
        super().__init__(drafter)
        self.others, self.answers = others, answers
        self.would: list[list[int]] = [[] for _ in others]
        for other in others:
            # they are told of paths that are longer than their own
            other.width = getattr(drafter, "width", 0)  # type: ignore[attr-defined]

    def start(self, context: Rows, capacity: int) -> None:
        super().start(context, capacity)
        for other in self.others:
            other.start(context, capacity)

    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        self.smaller = [other.propose(roots_B) for other in self.others]
        return super().propose(roots_B, generator)

    def commit(self, accepted: Rows) -> None:
        for found, tree in zip(self.would, self.smaller, strict=True):
            for row, count in enumerate(accepted.count_B.tolist()):
                if count:
                    future = self.answers[row].tokens[self.offsets[row] + 1 :]
                    found.append(self.walk(tree, row, future))
        super().commit(accepted)
        for other in self.others:
            other.commit(accepted)

    @staticmethod
    def walk(tree: Tree, row: int, future: list[int]) -> int:
        node = -1
        for length, token in enumerate(future):
            children = [
                n
                for n in range(tree.nodes)
                if tree.valid_BN[row, n] and tree.parent_BN[row, n] == node and tree.tokens_BN[row, n] == token
            ]
            if not children:
                return length
            node = children[0]
        return len(future)


@pytest.fixture(scope="module")
def long_answers(target: Target) -> list[Answer]:
    # longer than what is decoded, so that no path is cut by the end of the answer
    return run(target, None, max_new_tokens=26)


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


def test_shorter_chains_follow_from_the_longest(target: Target, eagle3: Trained, long_answers: list[Answer]) -> None:
    drafters = [build_drafter(eagle3.head, EvalConfig(tree=TreeConfig("chain", depth))) for depth in (1, 2, 3, 4)]
    beside = Beside(drafters[-1], drafters[:-1], long_answers)
    record(target, beside)
    profile = beside.chain_profile()
    for depth, accepted in zip((1, 2, 3), beside.would, strict=True):
        assert profile.tau(TreeConfig("chain", depth)) == pytest.approx(1 + np.mean(accepted))


def test_every_static_tree_follows_from_the_spine(target: Target, medusa: Trained, long_answers: list[Answer]) -> None:
    def drafter(paths: list[list[int]]) -> Drafter:
        return of_tree(TreeConfig("static", 3, total_tokens=60, paths=paths))

    def of_tree(tree: TreeConfig) -> Drafter:
        made = build_drafter(medusa.head, EvalConfig(tree=tree))
        assert made is not None
        return made

    largest = spine(3, 6)
    shape = static_shape(static_paths(largest, 3))
    spread = [[0], [1], [3], [0, 0], [0, 2], [1, 0], [0, 0, 1]]
    recorder = Recorder(of_tree(largest))
    answers = run(target, recorder, max_new_tokens=26)
    profile = StaticProfile(recorder.static_ranks(shape, answers))
    best = profile.best_paths(8)
    beside = Beside(of_tree(largest), [drafter(spread), drafter(best)], long_answers)
    run(target, beside, max_new_tokens=26)
    whole = [
        offset + 1 + 3 <= 26 for proposals in beside.proposals for offset, _ in proposals
    ]  # cycles whose continuation the answers hold
    order = np.argsort([cycle for proposals in beside.proposals for cycle in range(len(proposals))], kind="stable")
    kept = np.array(whole)[order]
    assert 10 < profile.cycles == kept.sum() < len(kept)
    for paths, accepted in zip((spread, best), beside.would, strict=True):
        expected = 1 + np.mean(np.array(accepted)[kept])
        assert profile.tau(TreeConfig("static", 3, total_tokens=60, paths=paths)) == pytest.approx(expected)
    # closed under parents, and no worse than any other of its size
    static_shape([tuple(path) for path in best])
    assert profile.tau(TreeConfig("static", 3, paths=best[:7])) >= profile.tau(TreeConfig("static", 3, paths=spread))
    assert len(CONTEXTS) == len(beside.proposals)
