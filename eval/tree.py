"""Draft trees: tokens, parents, depths, and what follows from them (methods §1, §3). Pure functions.

The root (the token the target just sampled) is not a node of the tree: a node whose parent is the root has
parent -1 and depth 1. Nodes stand in topological order: a parent's index is below its children's.
Shape legend: B batch, N nodes without the root, K levels, V target vocabulary, M stored candidates, R ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headstart.eval.config import TreeConfig
from headstart.heads.errors import ConfigError
from headstart.heads.numerics import wide

#: Medusa's published tree for 7B targets (63 nodes, 10/28/23/2 per depth): path of a node → number of its children,
#: which are its best-ranked candidates. Nodes that are not named here have none.
PUBLISHED_CHILDREN: dict[tuple[int, ...], int] = {
    (): 10,
    (0,): 10, (1,): 7, (2,): 3, (3,): 2, **{(rank,): 1 for rank in range(4, 10)},
    (0, 0): 10, (0, 1): 3, (0, 2): 2, **{(0, rank): 1 for rank in range(3, 8)}, (1, 0): 2, (2, 0): 1,
    (0, 0, 0): 2,
}  # fmt: skip
#: candidates per head that the published tree uses
PUBLISHED_RANKS = 10

#: fields of a tree that hold something of every node
CUT = ("tokens_BN", "parent_BN", "depth_BN", "valid_BN", "q_BNV", "score_BN", "confidence_BN", "rate_BN")


@dataclass(frozen=True)
class Tree:
    """Drafts of a batch.

    Attributes:
        tokens_BN: int64, drafted token ids.
        parent_BN: int64, index of the parent node, -1 = the root.
        depth_BN: int64, 1 for children of the root.
        valid_BN: bool, False = padding (ragged rows; a row may draft nothing). A valid node's parent is valid.
        levels: host int, an upper bound of depth (0 when N = 0).
        q_BNV: the distribution that each node's token was drawn from; None = point mass (the tree is a function of the
            context). Siblings share one q and were drawn without replacement, in index order.
        linear: whether every node's parent is the node before it (a chain): accepted KV is then in its place already.
        score_BN: how sure the draft is of each node, or None. Dynamic trees and trees over marginals give the
            cumulative log-probability that they chose their nodes by; it is never above the parent's.
        confidence_BN: float32, logit of the probability that a node is accepted if its ancestors are, as the draft says
            it: of a confidence head, else its own probability of the token. Where tokens are drawn, that is the
            largest probability of any token, which does not tell what was drawn, so a scheduler may choose by it. None
            where it was not asked (drafter.ConfidentDrafter) or where the drafter has none.
        rate_BN: float32, probability that a node is accepted if its ancestors are. Synthetic acceptance takes it in
            place of a rate per level; None where nobody gave it. Lossless rules and schedulers do not read it.
    """

    tokens_BN: Tensor
    parent_BN: Tensor
    depth_BN: Tensor
    valid_BN: Tensor
    levels: int
    q_BNV: Tensor | None = None
    linear: bool = False
    score_BN: Tensor | None = None
    confidence_BN: Tensor | None = None
    rate_BN: Tensor | None = None

    @property
    def nodes(self) -> int:
        return self.tokens_BN.shape[1]

    @property
    def mask_BNN(self) -> Tensor:
        return ancestor_mask(self.parent_BN, self.levels)

    def keep(self, kept_BN: Tensor) -> Tree:
        """The same tree without the nodes where `kept_BN` (bool, [B, N] or [B, 1]) is False."""
        return replace(self, valid_BN=self.valid_BN & kept_BN)

    def or_chain(self) -> Tree:
        """The same tree; one of a single node as the chain that it is, which the target verifies faster."""
        return replace(self, levels=min(self.levels, 1), linear=True) if self.nodes == 1 else self

    def first(self, levels: int) -> Tree:
        """The tree's first levels: a chain loses its other nodes, other trees only their validity."""
        if levels >= self.levels:
            return self
        if not self.linear:
            return self.keep(self.depth_BN <= levels)
        cut: dict[str, Any] = {
            name: None if (value := getattr(self, name)) is None else value[:, :levels]
            for name in CUT
        }
        return replace(self, levels=levels, **cut)


def empty(batch: int, device: torch.device | str = "cpu") -> Tree:
    """A tree without nodes: plain decoding."""
    none = torch.zeros((batch, 0), dtype=torch.int64, device=device)
    return Tree(none, none, none, none.bool(), levels=0, linear=True)


def chain(tokens_BK: Tensor, valid_BK: Tensor | None = None, q_BKV: Tensor | None = None) -> Tree:
    """A tree of width 1. `valid_BK`, if given, must be True for the first nodes of a row and False for the others."""
    index_K = torch.arange(tokens_BK.shape[1], device=tokens_BK.device)
    parent_BK, depth_BK = (index_K - 1).expand_as(tokens_BK), (index_K + 1).expand_as(tokens_BK)
    valid_BK = torch.ones_like(tokens_BK, dtype=torch.bool) if valid_BK is None else valid_BK
    return Tree(tokens_BK, parent_BK, depth_BK, valid_BK, tokens_BK.shape[1], q_BNV=q_BKV, linear=True)


def ancestor_mask(parent_BN: Tensor, levels: int) -> Tensor:
    """bool [B, N, N]: entry (n, m) is True iff m is n or an ancestor of n."""
    nodes = parent_BN.shape[1]
    index_N = torch.arange(nodes, device=parent_BN.device)
    mask_BNN = (index_N[:, None] == index_N).expand(parent_BN.shape[0], nodes, nodes).clone()
    current_BN = parent_BN
    for _ in range(levels - 1):
        mask_BNN |= current_BN[:, :, None] == index_N
        current_BN = torch.where(current_BN >= 0, parent_BN.gather(1, current_BN.clamp(min=0)), -1)
    return mask_BNN


def with_root(mask_BNN: Tensor) -> Tensor:
    """bool [B, N+1, N+1]: the ancestor mask with the root, which every node sees, as row and column 0."""
    batch, nodes, _ = mask_BNN.shape
    full = torch.zeros((batch, nodes + 1, nodes + 1), dtype=torch.bool, device=mask_BNN.device)
    full[:, :, 0] = True
    full[:, 1:, 1:] = mask_BNN
    return full


@dataclass(frozen=True)
class StaticShape:
    """A static tree: node n takes candidate `rank_N[n]` of the head at its depth.

    In Medusa's trees all nodes of a depth share the candidates; other heads have candidates below each parent.

    Attributes: parent_N, depth_N, rank_N: int64 [N]; levels, ranks: host ints, depths and candidates per head it needs.
    """

    parent_N: Tensor
    depth_N: Tensor
    rank_N: Tensor
    levels: int
    ranks: int

    def to(self, device: torch.device) -> StaticShape:
        return replace(
            self, parent_N=self.parent_N.to(device), depth_N=self.depth_N.to(device), rank_N=self.rank_N.to(device)
        )

    def fill(self, candidates_BKR: Tensor) -> Tree:
        """The tree with tokens from the top-R candidates of K heads."""
        return self.tree(self.of_nodes(candidates_BKR))

    def of_nodes(self, candidates_BKR: Tensor) -> Tensor:
        """What belongs to each node's candidate, [B, N]."""
        return candidates_BKR[:, self.depth_N - 1, self.rank_N]

    def tree(self, tokens_BN: Tensor) -> Tree:
        """The tree with these tokens."""
        parent_BN, depth_BN = (x.expand_as(tokens_BN) for x in (self.parent_N, self.depth_N))
        valid_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        linear = self.levels == tokens_BN.shape[1]
        return Tree(tokens_BN, parent_BN, depth_BN, valid_BN, self.levels, linear=linear)


def static_shape(paths: list[tuple[int, ...]]) -> StaticShape:
    """Build the shape from rank paths, e.g. [(0,), (1,), (0, 0)]. Raises ConfigError when a parent is missing."""
    ordered = sorted(set(paths), key=lambda path: (len(path), path))
    index = {path: n for n, path in enumerate(ordered)}
    if not ordered or () in index:
        raise ConfigError(f"static tree: found {ordered[:1]}, expected at least one path and no empty path")
    for path in ordered:
        if len(path) > 1 and path[:-1] not in index:
            raise ConfigError(f"static tree: path {list(path)} lacks its parent {list(path[:-1])}: add it")
    parent_N = torch.tensor([index.get(path[:-1], -1) for path in ordered], dtype=torch.int64)
    depth_N = torch.tensor([len(path) for path in ordered], dtype=torch.int64)
    rank_N = torch.tensor([path[-1] for path in ordered], dtype=torch.int64)
    return StaticShape(parent_N, depth_N, rank_N, int(depth_N.max()), int(rank_N.max()) + 1)


def zipf_cost(path: tuple[int, ...]) -> int:
    """Π (rank + 1) of a path of ranks. By Zipf's law, a path is right with a probability of about 1 / this."""
    return math.prod(rank + 1 for rank in path)


def published_paths() -> list[tuple[int, ...]]:
    """Rank paths of the default static tree, PUBLISHED_CHILDREN, the best first.

    Rank r (from 0) is taken to be right with a probability proportional to 1 / (r + 1), as measured accuracies of ranks
    nearly are (Zipf's law). So a path is worth 1 / `zipf_cost`; of equal paths, the shallower one stands first, and
    then that with the lower first ranks. A parent is worth at least as much as its children, so it stands before them.
    """
    paths = [(*parent, rank) for parent, children in PUBLISHED_CHILDREN.items() for rank in range(children)]
    return sorted(paths, key=lambda path: (zipf_cost(path), len(path), path))


def drafted_shape(tree: TreeConfig, depth: int, tokens: int) -> StaticShape | None:
    """What a drafter drafts of a static tree; None for a tree of another kind.

    Args: depth: levels that the drafter has. tokens: that it can draft.
    Raises: ConfigError for a rank that no token has.
    """
    if tree.kind != "static":
        return None
    shape = static_shape(static_paths(tree, depth))
    if shape.ranks > tokens:
        raise ConfigError(
            f"eval.tree.paths: found rank {shape.ranks - 1}, the vocabulary has {tokens} tokens: ranks count from 0"
        )
    return shape


def static_paths(tree: TreeConfig, depth: int) -> list[tuple[int, ...]]:
    """`tree.paths`, by default `published_paths`, cut to `depth` levels and `tree.total_tokens - 1` nodes."""
    paths = published_paths() if tree.paths is None else [tuple(path) for path in tree.paths]
    return [path for path in paths if len(path) <= depth][: tree.total_tokens - 1]


@dataclass(frozen=True)
class Expansion:
    """One level of a dynamic tree (EAGLE-2): k·k children of the frontier (the k nodes expanded last).

    Attributes:
        tokens_BM, score_BM: children (M = k · k), cumulative log-probability.
        parent_BM: index of each child's parent within the frontier (0 … k-1).
        frontier_Bk: indices into M of the best k children, best first: the next frontier.
    """

    tokens_BM: Tensor
    score_BM: Tensor
    parent_BM: Tensor
    frontier_Bk: Tensor


def expand(logits_BfU: Tensor, score_Bf: Tensor, k: int) -> Expansion:
    """Score the top-k children of every frontier node (methods §3). Token ids are draft-vocabulary indices.

    Args: logits_BfU: of each frontier node, taken at temperature 1; score_Bf: its cumulative log-probability.
    """
    batch, frontier, _ = logits_BfU.shape
    width = min(k, logits_BfU.shape[-1])
    values_Bfw, index_Bfw = logits_BfU.topk(width, dim=-1)
    logp_Bfw = wide(values_Bfw) - wide(logits_BfU).logsumexp(-1, keepdim=True)
    # a log-probability never above 0, even by rounding, keeps a child's score at or below its parent's
    score_BM = (score_Bf[:, :, None] + logp_Bfw.clamp(max=0.0)).reshape(batch, -1)
    parent_BM = torch.arange(frontier, device=score_BM.device).repeat_interleave(width).expand(batch, -1)
    best = torch.sort(score_BM, dim=1, descending=True, stable=True).indices[:, :k]
    return Expansion(index_Bfw.reshape(batch, -1), score_BM, parent_BM, best)


def select(score_BM: Tensor, parent_BM: Tensor, depth_BM: Tensor, tokens_BM: Tensor, nodes: int, levels: int) -> Tree:
    """Keep the best `nodes` stored candidates; exact ties prefer the shallower node.

    Args: candidates in order of depth; `parent_BM` indexes into M (-1 = root); a score is never above the parent's;
        `levels` is the greatest depth.
    The stable sort places every parent before its children, so every kept node's parent is kept.
    """
    keep = min(nodes, score_BM.shape[1])
    order = torch.sort(score_BM, dim=1, descending=True, stable=True).indices[:, :keep]
    kept_BN = order.sort(dim=1).values
    rank_BM = torch.full_like(parent_BM, -1)
    rank_BM = rank_BM.scatter(1, kept_BN, torch.arange(keep, device=kept_BN.device).expand_as(kept_BN))
    parent_kept = parent_BM.gather(1, kept_BN)
    parent_BN = torch.where(parent_kept >= 0, rank_BM.gather(1, parent_kept.clamp(min=0)), -1)
    tokens_BN, depth_BN = tokens_BM.gather(1, kept_BN), depth_BM.gather(1, kept_BN)
    score_BN = score_BM.gather(1, kept_BN)
    return Tree(tokens_BN, parent_BN, depth_BN, torch.isfinite(score_BN), levels, score_BN=score_BN).or_chain()
