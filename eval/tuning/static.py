"""Profiles of static trees: what the drafter ranks where, and with that the acceptance of every static tree.

All nodes of a static tree are candidates of known ranks, so one run with a tree that holds many of them tells how often
every path of ranks is right.
Shape legend: C cycles, N nodes, K levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.decode import Answer
from headstart.eval.tree import PUBLISHED_RANKS, StaticShape, published_paths, static_paths, zipf_cost
from headstart.eval.tuning.choice import is_published, tree_name
from headstart.eval.tuning.costs import node_count
from headstart.eval.tuning.ranks import NEVER, UNKNOWN, PathRates, best_tree

#: nodes whose children are recorded, where the candidates depend on the drafted path
RECORDED_PARENTS = 16
#: cycles below which a tuning says that they are few: from 460 of them, a calibrated tree of 63 nodes was no better
#: than the published one (ranks.py)
FEW_CYCLES = 1000


@dataclass(frozen=True)
class StaticProfile:
    """rank_CK: as in `PathRates`. ranks: candidates per level.

    A static tree accepts the longest prefix of a row that is a path of the tree.
    """

    rank_CK: NDArray[np.int64]
    ranks: int = PUBLISHED_RANKS

    @property
    def cycles(self) -> int:
        return len(self.rank_CK)

    @cached_property
    def rates(self) -> PathRates:
        return PathRates(self.rank_CK, self.ranks)

    def _paths(self, tree: TreeConfig) -> list[tuple[int, ...]]:
        return static_paths(tree, min(tree.depth, self.rank_CK.shape[1]))

    def tau(self, tree: TreeConfig) -> float:
        """τ of the recorded cycles. Paths that they do not tell of are estimated (`PathRates.observed`)."""
        return 1.0 + sum(map(self.rates.observed, self._paths(tree)))

    def estimates(self, tree: TreeConfig) -> dict[str, float]:
        """τ by both estimates of `PathRates`."""
        paths = self._paths(tree)
        return {
            name: 1.0 + sum(map(rate, paths))
            for name, rate in (("by_path", self.rates.by_path), ("by_head", self.rates.by_head))
        }

    def best_paths(self, nodes: int) -> list[list[int]]:
        """The calibrated tree of at most `nodes` nodes, its best nodes first."""
        return [list(path) for path in self.rates.tree(self.rates.by_path, nodes)]


def recorded_tree(levels: int, ranks: int, shared: bool) -> TreeConfig:
    """The static tree that ranks are recorded with.

    Args: shared: whether all nodes of a level choose from one list of candidates. Then the children of the best path
        hold every candidate. Otherwise a candidate's rank is known only below nodes that were drafted: the tree holds
        all children of those RECORDED_PARENTS nodes that are likeliest by Zipf's law (`zipf_cost`).
    """
    if shared:
        parents = [(0,) * level for level in range(levels)]
    else:
        inner = max(levels, RECORDED_PARENTS) - 1
        parents = [(), *best_tree(lambda path: 1 / zipf_cost(path), inner, levels - 1, ranks)]
    paths = [[*parent, rank] for parent in parents for rank in range(ranks)]
    return TreeConfig("static", levels, total_tokens=len(paths) + 1, paths=paths)


def recorded_ranks(
    shape: StaticShape, proposals: list[list[tuple[int, NDArray[np.int64]]]], answers: list[Answer], shared: bool
) -> NDArray[np.int64]:
    """`StaticProfile.rank_CK` of a batch that drafted `recorded_tree`s.

    At the end of an answer the target's tokens are unknown, and so are the ranks of the levels that reach beyond it.

    Args:
        shape, shared: of the tree.
        proposals: `Recorder.proposals`.
        answers: of the same rows.
    """
    nodes = _Nodes(shape.parent_N.cpu().numpy(), shape.depth_N.cpu().numpy(), shape.rank_N.cpu().numpy(), shape.levels)
    rows = [
        (nodes.by_level if shared else nodes.along_path)(token_N, answer.tokens[offset + 1 :][: shape.levels])
        for answer, cycles in zip(answers, proposals, strict=True)
        for offset, token_N in cycles
    ]
    known = [row for row in rows if row[0] != UNKNOWN]
    return np.stack(known) if known else np.zeros((0, shape.levels), dtype=np.int64)


@dataclass(frozen=True)
class _Nodes:
    """Ranks of one cycle, from the tokens of its nodes and those that the target says next (at most one per level)."""

    parent_N: NDArray[np.int64]
    depth_N: NDArray[np.int64]
    rank_N: NDArray[np.int64]
    levels: int

    def by_level(self, token_N: NDArray[np.int64], following: list[int]) -> NDArray[np.int64]:
        row_K = np.full(self.levels, UNKNOWN)
        for level, token in enumerate(following):
            right_N = (self.depth_N == level + 1) & (token_N == token)
            row_K[level] = self.rank_N[right_N][0] if right_N.any() else NEVER
        return row_K

    def along_path(self, token_N: NDArray[np.int64], following: list[int]) -> NDArray[np.int64]:
        row_K = np.full(self.levels, UNKNOWN)
        node = -1
        for level, token in enumerate(following):
            child_N = self.parent_N == node
            if not child_N.any():
                break
            (right,) = np.nonzero(child_N & (token_N == token))
            if not len(right):
                row_K[level] = NEVER
                break
            node = right[0]
            row_K[level] = self.rank_N[node]
        return row_K


def published_tree(levels: int, candidates: int) -> TreeConfig | None:
    """The published tree, cut to the levels that a drafter has, as the reference of the calibrated ones.

    Args: candidates: tokens that the drafter can draft. Returns: None where they are fewer than the tree's ranks.
    """
    if candidates < PUBLISHED_RANKS:
        return None
    paths = published_paths()
    return TreeConfig("static", min(levels, max(map(len, paths))), total_tokens=len(paths) + 1)


def static_facts(profile: StaticProfile, trees: list[TreeConfig], levels: int) -> dict[str, Any]:
    """What a `Tuning` says of static trees and of the heads' ranks. Args: trees: that were compared, of any kind."""
    static = [tree for tree in trees if tree.kind == "static"]
    published = next(filter(is_published, static), None)
    notes, whole = [], max(map(len, published_paths()))
    if published is None:
        notes.append(
            f"the published static tree needs {PUBLISHED_RANKS} candidates per head, here are {profile.ranks}: it is "
            "left out"
        )
    elif levels < whole:
        notes.append(
            f"the published static tree has {whole} levels, here {levels} are drafted: its {node_count(published)} "
            "nodes of these levels are compared"
        )
    if profile.cycles < FEW_CYCLES:
        notes.append(
            f"static trees were calibrated on {profile.cycles} cycles, and fewer than {FEW_CYCLES} tell little of deep "
            "paths: give more prompts (tune.prompts) or longer answers (eval.max_new_tokens)"
        )
    entries = [
        {"name": tree_name(tree), "nodes": node_count(tree), "levels": tree.depth, "tau": profile.tau(tree),
         **profile.estimates(tree), "paths": [list(path) for path in static_paths(tree, tree.depth)]}
        for tree in static
    ]  # fmt: skip
    return {"rank_accuracy": profile.rates.heads.to_json(), "static_trees": entries, "notes": notes}
