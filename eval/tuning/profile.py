"""Acceptance profiles: from one run with a large tree, the accepted length of every smaller tree of its kind.

A run tells, for each of its cycles, what a smaller tree would have accepted. A shorter chain is a prefix of the longest
one. A smaller dynamic tree, or tree over marginals, keeps the candidates with the best scores, and a parent's score is
never below its children's. Static trees are told of in static.py.
Shape legend: B batch, N nodes, K levels, C cycles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.rows import Rows
from headstart.eval.drafters import Drafter
from headstart.eval.kernels.linear import Linear
from headstart.eval.tree import Tree
from headstart.eval.tuning.ranks import NEVER


class Profile(Protocol):
    """Acceptance of one kind of tree on the prompts of a run."""

    @property
    def cycles(self) -> int: ...

    def tau(self, tree: TreeConfig) -> float:
        """τ with this tree. Tokens of a last cycle that a stop token or the limit cuts off are counted as well."""
        ...


@dataclass(frozen=True)
class ChainProfile:
    """accepted_C: int [C], accepted drafts of each cycle of the longest chain."""

    accepted_C: NDArray[np.int64]

    @property
    def cycles(self) -> int:
        return len(self.accepted_C)

    def tau(self, tree: TreeConfig) -> float:
        return 1.0 + float(np.minimum(self.accepted_C, tree.depth).mean())


@dataclass(frozen=True)
class DynamicProfile:
    """Cycles of the largest dynamic tree with one `k`, or of the largest tree over marginals.

    Attributes:
        rank_CKK: int [C, K, K]: entry (c, j - 1, d - 1) is the rank (from 0) of the accepted node of level j among the
            verified nodes of levels 1 … d, best score first; NEVER where level j was not accepted or j > d.
    A tree with `total_tokens` = n + 1 and `depth` = d holds the n best candidates of levels 1 … d, so of the accepted
    nodes exactly those of rank below n. This holds while the large tree verified n nodes of those levels; where it
    verified fewer, the result is a lower bound.
    """

    rank_CKK: NDArray[np.int64]

    @property
    def cycles(self) -> int:
        return len(self.rank_CKK)

    def tau(self, tree: TreeConfig) -> float:
        depth = min(tree.depth, self.rank_CKK.shape[1])
        kept_CK = self.rank_CKK[:, :, depth - 1] < tree.total_tokens - 1
        return 1.0 + float(kept_CK.sum(1).mean())


class Recorder:
    """Wraps a drafter and records what is accepted of its trees. It records on the host, so cycles are not captured."""

    captures = False

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.name, self.spec, self.max_nodes = drafter.name, drafter.spec, drafter.max_nodes
        self.accepted: list[int] = []
        self.ranks: list[NDArray[np.int64]] = []
        #: per context, in the order in which they began: (tokens committed before, drafted tokens) of every cycle; see
        #: `recorded_ranks`
        self.proposals: list[list[tuple[int, NDArray[np.int64]]]] = []

    @property
    def state(self) -> list[tuple[object, str]]:
        return self.drafter.state

    @property
    def prepare_s(self) -> float:
        return self.drafter.prepare_s

    def products(self, batch: int) -> list[tuple[list[Linear], int]]:
        return self.drafter.products(batch)

    def start(self, context: Rows, capacity: int) -> None:
        self.offsets = [0] * context.tokens_BJ.shape[0]
        self.proposals = [[] for _ in self.offsets]
        self.contexts = list(range(len(self.offsets)))  # which one each row decodes
        self.drafter.start(context, capacity)

    def aside(self) -> Recorder:
        return Recorder(self.drafter.aside())

    def take_row(self, row: int, aside: Drafter, slots: int) -> None:
        assert isinstance(aside, Recorder)
        self.offsets[row], self.contexts[row] = 0, len(self.proposals)
        self.proposals.append([])
        self.drafter.take_row(row, aside.drafter, slots)

    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        self.tree = self.drafter.propose(roots_B, generator)
        return self.tree

    def commit(self, accepted: Rows) -> None:
        counts, tokens = accepted.count_B.tolist(), accepted.tokens_BJ.tolist()
        rank_BKN = None if self.tree.score_BN is None else ranks_by_depth(self.tree).cpu().numpy()
        parent, drafted = self.tree.parent_BN.tolist(), self.tree.tokens_BN.tolist()
        for row, count in enumerate(counts):
            if count == 0:
                continue
            self.accepted.append(count - 1)
            self.proposals[self.contexts[row]].append((self.offsets[row], np.array(drafted[row])))
            self.offsets[row] += count
            if rank_BKN is not None:
                path = follow(parent[row], drafted[row], tokens[row][1:count])
                self.ranks.append(path_ranks(rank_BKN[row], path))
        self.drafter.commit(accepted)

    def chain_profile(self) -> ChainProfile:
        return ChainProfile(np.array(self.accepted, dtype=np.int64))

    def dynamic_profile(self) -> DynamicProfile:
        return DynamicProfile(np.stack(self.ranks))


def ranks_by_depth(tree: Tree) -> Tensor:
    """int64 [B, K, N]: entry (b, d - 1, n) is node n's rank among the valid nodes of levels 1 … d, best score first.

    Deeper nodes rank last. Of equal scores the node that stands first, the shallower one, ranks first, as in `select`.
    """
    if tree.score_BN is None:
        raise ValueError("the tree carries no scores: only dynamic trees and trees over marginals do")
    ranks = []
    for depth in range(1, tree.levels + 1):
        inside_BN = tree.valid_BN & (tree.depth_BN <= depth)
        order_BN = torch.sort(
            tree.score_BN.masked_fill(~inside_BN, -torch.inf), dim=1, descending=True, stable=True
        ).indices
        ranks.append(order_BN.argsort(dim=1))
    return torch.stack(ranks, 1)


def follow(parent_N: list[int], token_N: list[int], accepted: list[int]) -> list[int]:
    """The nodes of an accepted path, found by their tokens: no two siblings share a token.

    >>> follow([-1, -1, 1], [7, 8, 9], [8, 9])
    [1, 2]
    """
    path, node = [], -1
    for token in accepted:
        node = next(n for n in range(len(parent_N)) if parent_N[n] == node and token_N[n] == token)
        path.append(node)
    return path


def path_ranks(rank_KN: NDArray[np.int64], path: list[int]) -> NDArray[np.int64]:
    """int64 [K, K]: see `DynamicProfile.rank_CKK`."""
    levels = rank_KN.shape[0]
    found_KK = np.full((levels, levels), NEVER)
    for level, node in enumerate(path):
        found_KK[level, level:] = rank_KN[level:, node]
    return found_KK
