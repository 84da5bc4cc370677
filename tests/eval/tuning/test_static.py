"""Profiles of static trees: by hand, and against trees that are really drafted, cycle by cycle.

The ranks of some drafters depend on the drafted path: `FollowerDrafter` is one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from beside import Beside
from eval_help import FAMILY_TREES, VOCAB, Trained, run
from torch import Tensor

from headstart.eval.config import EvalConfig, TreeConfig, TuneConfig
from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.rows import Rows
from headstart.eval.drafters import DRAFTERS, Drafter, Drafting, build_drafter
from headstart.eval.kernels.linear import Linear
from headstart.eval.measuring.metrics import acceptance
from headstart.eval.tree import Tree, published_paths, static_paths, static_shape
from headstart.eval.tuning.profile import Recorder
from headstart.eval.tuning.ranks import NEVER, UNKNOWN
from headstart.eval.tuning.static import (
    RECORDED_PARENTS,
    StaticProfile,
    published_tree,
    recorded_ranks,
    recorded_tree,
    static_facts,
)
from headstart.eval.tuning.tune import tune
from headstart.heads.targets.target import Target

LENGTH = 26


class FollowerDrafter:
    """Candidates of a node are the tokens that most often follow its parent's token in some answers.

    After every third token the first two are exchanged, so that no path of best ranks is always right.
    """

    name, spec, captures, prepare_s, state = "follower", None, False, 0.0, []  # noqa: RUF012

    def __init__(self, tree: TreeConfig, answers: list[Answer]):
        follows_VV = torch.zeros(VOCAB, VOCAB)
        for answer in answers:
            for before, after in zip(answer.tokens, answer.tokens[1:], strict=False):
                follows_VV[before, after] += 1
        self.ranked_VR = follows_VV.argsort(dim=1, descending=True, stable=True)[:, :10]
        self.ranked_VR[::3, :2] = self.ranked_VR[::3, :2].flip(1)
        chain = [(0,) * (level + 1) for level in range(tree.depth)]
        self.shape = static_shape(static_paths(tree, tree.depth) if tree.kind == "static" else chain)
        self.max_nodes = len(self.shape.parent_N)

    def products(self, batch: int) -> list[tuple[list[Linear], int]]:
        return []

    def start(self, context: Rows, capacity: int) -> None:
        pass

    def commit(self, accepted: Rows) -> None:
        pass

    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        shape, tokens = self.shape, list[Tensor]()
        for parent, rank in zip(shape.parent_N.tolist(), shape.rank_N.tolist(), strict=True):
            tokens.append(self.ranked_VR[roots_B if parent < 0 else tokens[parent], rank])
        tokens_BN = torch.stack(tokens, 1)
        parent_BN, depth_BN = (x.expand_as(tokens_BN) for x in (shape.parent_N, shape.depth_N))
        valid_BN = torch.ones_like(tokens_BN).bool()
        return Tree(tokens_BN, parent_BN, depth_BN, valid_BN, shape.levels, linear=shape.levels == self.max_nodes)


def test_static_by_hand() -> None:
    profile = StaticProfile(np.array([[0, 0, 1], [0, NEVER, 0], [1, 0, 0], [0, 2, NEVER]]))
    # hits: (0) three times, (1) once, (0, 0) once
    assert profile.tau(TreeConfig("static", 3, paths=[[0], [1], [0, 0]])) == pytest.approx(1 + 5 / 4)
    assert profile.tau(TreeConfig("static", 1, paths=[[0], [1], [0, 0]])) == pytest.approx(1 + 4 / 4)
    assert profile.tau(TreeConfig("static", 3, total_tokens=2, paths=[[0], [1], [0, 0]])) == pytest.approx(1 + 3 / 4)
    # (0, 0): half of what follows (0) in general, where ranks 0 and 2 follow
    assert profile.best_paths(3) == [[0], [0, 0], [1]]
    assert all(len(profile.best_paths(nodes)) == nodes for nodes in (1, 7, 15))
    by_path, by_head = profile.estimates(TreeConfig("static", 1, paths=[[0], [1]])).values()
    # one level: both are the counts
    assert by_path == by_head == pytest.approx(2.0)


def test_the_recorded_tree() -> None:
    spine = recorded_tree(3, 4, shared=True)
    assert sorted(spine.paths) == sorted([*[0] * level, rank] for level in range(3) for rank in range(4))
    bush = recorded_tree(4, 10, shared=False)
    assert len(bush.paths) == 10 * RECORDED_PARENTS == bush.total_tokens - 1
    parents = {tuple(path[:-1]) for path in bush.paths}
    # every path with at most one rank of 1 or 2, and no other one
    assert parents >= {(), (0,), (0, 0), (0, 0, 0), (1, 0, 0), (0, 0, 1), (2, 0, 0)} and (1, 1) not in parents
    for tree in (spine, bush, recorded_tree(1, 10, shared=False), recorded_tree(20, 2, shared=False)):
        shape = static_shape(static_paths(tree, tree.depth))
        assert len(shape.parent_N) == len(tree.paths) and shape.levels == tree.depth


def whole_cycles(proposals: list[list[tuple[int, np.ndarray]]], levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Which cycles have a continuation of all levels: in the order of `recorded_ranks`, and in that of `Beside.would`.

    The first leaves out cycles without any continuation.
    """
    offsets = [offset for cycles in proposals for offset, _ in cycles]
    whole = np.array([offset + 1 + levels <= LENGTH for offset in offsets])
    any_known = np.array([offset + 2 <= LENGTH for offset in offsets])
    by_cycle = np.argsort([cycle for cycles in proposals for cycle in range(len(cycles))], kind="stable")
    return whole[any_known], whole[by_cycle]


def check_profile(
    target: Target, build: Callable[[TreeConfig], Drafter], shared: bool, trees: list[list[list[int]]],
    answers: list[Answer],
) -> StaticProfile:  # fmt: skip
    """τ by the profile is what trees would have had accepted that were drafted in the same places."""
    largest = recorded_tree(3, 6, shared)
    shape = static_shape(static_paths(largest, 3))
    smaller = [TreeConfig("static", 3, total_tokens=99, paths=paths) for paths in trees]
    beside = Beside(build(largest), [build(tree) for tree in smaller], answers)
    found = run(target, beside, max_new_tokens=LENGTH)
    ranks = recorded_ranks(shape, beside.proposals, found, shared)
    in_ranks, in_would = whole_cycles(beside.proposals, 3)
    profile = StaticProfile(ranks[in_ranks], 6)
    assert 10 < profile.cycles == in_would.sum() < len(ranks)
    for tree, accepted in zip(smaller, beside.would, strict=True):
        assert profile.tau(tree) == pytest.approx(1 + np.mean(np.array(accepted)[in_would])), tree.paths
    # the tree that was decoded with: its own cycles
    cycles = [cycle for answer in found for cycle in answer.cycles]
    own = np.array([cycle.accepted for answer in found for cycle in answer.cycles])
    assert acceptance(cycles).tau > 1.1 and own.max() >= 2
    starts = [offset + 1 + 3 <= LENGTH for rows in beside.proposals for offset, _ in rows]
    if shared:
        assert profile.tau(largest) == pytest.approx(1 + own[starts].mean())
    return profile


SPREAD = [[0], [1], [3], [0, 0], [0, 2], [1, 0], [0, 0, 1]]
NARROW = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1], [1, 3], [1, 1, 0]]


@pytest.mark.parametrize("family", [family for family, kind in FAMILY_TREES if kind == "static"])
def test_every_static_tree_follows_from_the_recorded_one(
    family: str, target: Target, trained: Callable[[str], Trained], long_answers: list[Answer]
) -> None:
    """Of every family that drafts them, as it says whether its candidates depend on the path."""

    def build(tree: TreeConfig) -> Drafter:
        made = build_drafter(trained(family).head, EvalConfig(tree=tree))
        assert made is not None
        return made

    shared = DRAFTERS[family].shared_candidates
    profile = check_profile(target, build, shared, [SPREAD, NARROW], long_answers)
    best = profile.best_paths(8)
    check_profile(target, build, shared, [best, best[:3]], long_answers)
    # closed under parents, and no worse than another of its size
    static_shape([tuple(path) for path in best])
    assert profile.tau(TreeConfig("static", 3, paths=best[:7])) >= profile.tau(TreeConfig("static", 3, paths=SPREAD))


def test_ranks_that_depend_on_the_path(target: Target, long_answers: list[Answer]) -> None:
    """Every node's candidates are its own: what the spine would say of them is wrong."""

    def build(tree: TreeConfig) -> Drafter:
        return FollowerDrafter(tree, long_answers)

    profile = check_profile(target, build, False, [SPREAD, NARROW], long_answers)
    best = profile.best_paths(8)
    known = {tuple(path[:-1]) for path in recorded_tree(3, 6, False).paths}
    assert {tuple(path[:-1]) for path in best} <= known
    check_profile(target, build, False, [best], long_answers)
    spine = recorded_tree(3, 6, shared=True)
    recorder = Recorder(build(spine))
    answers = run(target, recorder, max_new_tokens=LENGTH)
    shape = static_shape(static_paths(spine, 3))
    wrong = StaticProfile(recorded_ranks(shape, recorder.proposals, answers, True), 6)
    tree = TreeConfig("static", 3, paths=best)
    assert abs(wrong.tau(tree) - profile.tau(tree)) > 0.05
    # read as what it is, the spine tells of its own path only
    honest = recorded_ranks(shape, recorder.proposals, answers, False)
    assert (honest[honest[:, 0] != 0][:, 1:] == UNKNOWN).all()


def answer(tokens: list[int]) -> Answer:
    return Answer(tokens, "length", [])


def test_ranks_of_one_cycle_by_hand() -> None:
    """Nodes: a, b; below a: c, d. In the place of a path, `shared` reads c and d as the candidates of level 2."""
    shape = static_shape([(0,), (1,), (0, 0), (0, 1)])
    drafted = np.array([5, 6, 7, 8])

    def ranks(shared: bool, *following: int) -> list[list[int]]:
        return recorded_ranks(shape, [[(0, drafted)]], [answer([9, *following])], shared).tolist()

    assert ranks(False, 5, 8) == ranks(True, 5, 8) == [[0, 1]]
    assert ranks(False, 5, 9) == ranks(True, 5, 9) == [[0, NEVER]]
    assert ranks(False, 6, 8) == [[1, UNKNOWN]] and ranks(True, 6, 8) == [[1, 1]]
    assert ranks(False, 9, 8) == [[NEVER, UNKNOWN]] and ranks(True, 9, 8) == [[NEVER, 1]]
    # the answer ends after one more token, or at once
    assert ranks(False, 5) == ranks(True, 5) == [[0, UNKNOWN]]
    assert ranks(False) == ranks(True) == []


def test_the_published_tree_for_other_heads() -> None:
    whole = published_tree(4, 10)
    assert whole is not None and static_paths(whole, 9) == published_paths() and whole.depth == 4
    deeper, shallow = published_tree(7, 61), published_tree(2, 61)
    assert deeper == whole and shallow is not None
    assert len(static_paths(shallow, shallow.depth)) == 38
    assert published_tree(4, 9) is None
    profile = StaticProfile(np.tile([[0, 1], [1, NEVER]], (500, 1)), 9)
    (without,) = static_facts(profile, [TreeConfig("static", 2, paths=[[0], [1]])], 4)["notes"]
    assert without == "the published static tree needs 10 candidates per head, here are 9: it is left out"
    profile = StaticProfile(np.tile([[0, 1], [1, NEVER]], (500, 1)), 10)
    (cut,) = static_facts(profile, [shallow], 2)["notes"]
    assert cut.startswith("the published static tree has 4 levels, here 2 are drafted: its 38 nodes")
    rank_CK = np.tile([[0, 1, 0, 0], [1, NEVER, 2, 1]], (500, 1))
    four = StaticProfile(rank_CK, 10)
    assert static_facts(four, [whole], 4)["notes"] == static_facts(four, [whole], 5)["notes"] == []
    (few,) = static_facts(StaticProfile(rank_CK[1:], 10), [whole], 4)["notes"]
    assert few.startswith("static trees were calibrated on 999 cycles, and fewer than 1000 tell little")


def test_a_tuning_where_ranks_depend_on_the_path(
    target: Target, medusa: Trained, prompts: str, long_answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.eval.tuning.costs.CYCLE_TOKENS", 6)
    drafting = Drafting(("chain", "static"), lambda head, config: FollowerDrafter(config.tree, long_answers))
    monkeypatch.setitem(DRAFTERS, medusa.head.family, drafting)
    config = EvalConfig(data=prompts, max_new_tokens=20, warmup_tokens=0)
    search = TuneConfig(batch_sizes=[1], depth=2, total_tokens=[4], prompts=3, repeats=1)
    found = tune(target, medusa.head, config, search)
    assert [tree["name"] for tree in found.static_trees][::2] == ["static n3", "published n38"]
    positions = [head["positions"] for head in found.rank_accuracy]
    # deeper ranks are known only where the path was drafted
    assert found.cycles["static"] == positions[0] > positions[1] > 0
    (choice,) = found.choices
    assert choice.calibrated is not None and choice.published is not None
