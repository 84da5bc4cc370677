"""DDTree (arXiv 2604.12989): the best tree over the marginals of a draft whose depths do not depend on each other.

A node is a path of ranks: rank r at depth d is the r-th most likely token there, whatever stands before it. Its score
is Σ log p of the path. The paper pops the best node of a heap again and again. Here the levels grow one after the
other, each in one step, and the result is the same tree:

- A level's nodes are ordered by score, the best first; of equal scores, the node whose parent stands first in its own
  level comes first, and of siblings the one with the lower rank. Nodes of different levels with one score: the
  shallower comes first.
- The child with rank r of a level's i-th node (both from 0) has (i + 1)(r + 1) - 1 nodes of its own level before it:
  those whose parent and rank are at most these. It also has an ancestor on each of the d - 1 levels above. So it is
  among the best N nodes only if (i + 1)(r + 1) ≤ N - d + 1. Only these children are scored, about N ln N per level.
- The N - d + 1 best of them are kept, and in the end the best N of all levels. No score is above its parent's.

On CUDA a level takes one Triton kernel, and nothing depends on values on the device. The eager twin sorts.
Shape legend: B batch, L levels, R ranks, U draft vocabulary, N nodes, P children scored on a level, S nodes stored on
all levels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.eval.config import TreeConfig
from headstart.eval.kernels.candidates import Stored, select_eager, select_kernel, top_log_p
from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.eval.tree import Tree
from headstart.heads.kernels.device import wants_kernel

#: children of a program, and those that it compares them with at a time
BLOCK_CHILDREN, CHUNK_CHILDREN = 32, 128


@dataclass(frozen=True)
class Level:
    """What is scored on a level, the same for every sequence.

    Attributes:
        place_P, rank_P: int64, a child's parent (its place among those kept on the level before) and its rank, in the
            order of parents and then of ranks.
        kept: how many children are kept.
        before, filled: where the level before and this one begin among the stored nodes.
    """

    place_P: Tensor
    rank_P: Tensor
    kept: int
    before: int
    filled: int


@dataclass(frozen=True)
class MarginalTree:
    """Sizes of a tree over marginals. Attributes: nodes: N; ranks: R, candidates per depth; levels: L of them."""

    nodes: int
    ranks: int
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, depth: int, nodes: int, tokens: int) -> MarginalTree:
        """Args: depth: levels that the drafter has. nodes: of a tree, at most. tokens: how many it can draft."""
        levels: list[Level] = []
        width, filled = 1, 0
        for number in range(min(depth, nodes)):
            most = nodes - number
            pairs = [(i, r) for i in range(min(width, most)) for r in range(min(tokens, most // (i + 1)))]
            place_P, rank_P = torch.tensor(pairs, dtype=torch.int64).t().contiguous().unbind()
            before, filled = filled, filled + (levels[-1].kept if levels else 0)
            width = min(most, len(pairs))
            levels.append(Level(place_P, rank_P, width, before, filled))
        return cls(min(nodes, filled + width), min(nodes, tokens), tuple(levels))

    @property
    def stored(self) -> int:
        """S"""
        return self.levels[-1].filled + self.levels[-1].kept

    def first(self, levels: int) -> MarginalTree:
        """The best tree of as many nodes on the first levels alone. It shares this one's tensors."""
        if levels >= len(self.levels):
            return self
        last = self.levels[levels - 1]
        return replace(self, nodes=min(self.nodes, last.filled + last.kept), levels=self.levels[:levels])

    def to(self, device: torch.device) -> MarginalTree:
        return replace(
            self,
            levels=tuple(
                replace(level, place_P=level.place_P.to(device), rank_P=level.rank_P.to(device))
                for level in self.levels
            ),
        )

    def marginals(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(log p at temperature 1, never above 0; int64 draft-vocabulary ids) of the best tokens: […, U] → […, R]."""
        return top_log_p(logits, self.ranks)

    def tree(self, marginals: tuple[Tensor, Tensor], draft_ids_U: Tensor | None, nodes: int | None = None) -> Tree:
        """The best tree, of target ids.

        Args:
            marginals: log p and ids, [B, ≥ L, R] each.
            draft_ids_U: target id of each draft id; None = they are the same.
            nodes: of the tree, where they are to be fewer than N.
        """
        log_p_BLR, token_BLR = marginals
        score_BS = log_p_BLR.new_empty((len(log_p_BLR), self.stored))
        stored = Stored(score_BS, *(torch.empty_like(score_BS, dtype=torch.int64) for _ in range(3)))
        kernels = wants_kernel(log_p_BLR)
        for number, level in enumerate(self.levels):
            (level_kernel if kernels else level_eager)(
                stored, level, number, log_p_BLR[:, number], token_BLR[:, number]
            )
        return (select_kernel if kernels else select_eager)(
            stored, min(nodes or self.nodes, self.nodes), len(self.levels), draft_ids_U
        )


def drafted_marginals(tree: TreeConfig, depth: int, tokens: int) -> MarginalTree | None:
    """What a drafter drafts of a tree over marginals; None for a tree of another kind.

    Args: depth: levels that the drafter has. tokens: that it can draft.
    """
    return MarginalTree.of(depth, tree.total_tokens - 1, tokens) if tree.kind == "ddtree" else None


def level_eager(stored: Stored, level: Level, number: int, log_p_BR: Tensor, token_BR: Tensor) -> None:
    """Store the best children of a level. Args: number: of levels above it; log_p_BR, token_BR: at its depth."""
    score_BP = log_p_BR[:, level.rank_P]
    if number:
        score_BP = stored.score_BS[:, level.before + level.place_P] + score_BP
    best_BK = torch.sort(score_BP, dim=1, descending=True, stable=True).indices[:, : level.kept]
    here = slice(level.filled, level.filled + level.kept)
    stored.score_BS[:, here] = score_BP.gather(1, best_BK)
    stored.token_BS[:, here] = token_BR.gather(1, level.rank_P[best_BK])
    stored.parent_BS[:, here] = level.before + level.place_P[best_BK] if number else -1
    stored.depth_BS[:, here] = number + 1


def level_kernel(stored: Stored, level: Level, number: int, log_p_BR: Tensor, token_BR: Tensor) -> None:
    """As level_eager."""
    (batch, total), children = stored.score_BS.shape, len(level.place_P)
    launch(_level_kernel, (batch, triton.cdiv(children, BLOCK_CHILDREN)),
        log_p_BR, token_BR, level.place_P, level.rank_P,
        stored.score_BS, stored.token_BS, stored.parent_BS, stored.depth_BS,
        log_p_BR.stride(0), log_p_BR.stride(1), token_BR.stride(0), token_BR.stride(1),
        children, level.kept, level.before, level.filled, total, number,
        FIRST=number == 0, BLOCK=BLOCK_CHILDREN, CHUNK=CHUNK_CHILDREN, num_warps=4,
        **launch_options(stored.score_BS.device),
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _scores(log_p, places, ranks, up, child, children, rank_stride, FIRST: tl.constexpr):
        """Scores of some children; -inf where there is none."""
        real = child < children
        rank = tl.load(ranks + child, mask=real, other=0)
        score = tl.load(log_p + rank * rank_stride, mask=real, other=float("-inf"))
        if not FIRST:
            place = tl.load(places + child, mask=real, other=0)
            score = tl.load(up + place, mask=real, other=0.0) + score
        return score

    @triton.jit(do_not_specialize=["children", "kept", "before", "filled", "total", "number"])
    def _level_kernel(
        log_p, token, places, ranks, score_out, token_out, parent_out, depth_out,
        log_p_stride, log_p_rank_stride, token_stride, token_rank_stride,
        children, kept, before, filled, total, number,
        FIRST: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Some of one sequence's children: those among the `kept` first of a stable sort go to their places.

        It reads the scores of the level before and writes this level's, which stand apart.
        """
        await_previous(OVERLAP)
        batch = tl.program_id(0).to(tl.int64)
        log_p += batch * log_p_stride
        up = score_out + batch * total + before
        child = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        own = _scores(log_p, places, ranks, up, child, children, log_p_rank_stride, FIRST)
        ahead = tl.zeros((CHUNK, BLOCK), tl.int32)
        for first in range(0, children, CHUNK):
            other = first + tl.arange(0, CHUNK)
            their = _scores(log_p, places, ranks, up, other, children, log_p_rank_stride, FIRST)
            tied = (their[:, None] == own[None, :]) & (other[:, None] < child[None, :])
            ahead += ((their[:, None] > own[None, :]) | tied).to(tl.int32)
        place = tl.sum(ahead, 0)
        chosen = (child < children) & (place < kept)
        rank = tl.load(ranks + child, mask=chosen, other=0)
        spot = batch * total + filled + place
        own_token = tl.load(token + batch * token_stride + rank * token_rank_stride, mask=chosen, other=0)
        parent = tl.full((BLOCK,), -1, tl.int64)
        if not FIRST:
            parent = before + tl.load(places + child, mask=chosen, other=0)
        tl.store(score_out + spot, own, mask=chosen)
        tl.store(token_out + spot, own_token, mask=chosen)
        tl.store(parent_out + spot, parent, mask=chosen)
        tl.store(depth_out + spot, tl.zeros((BLOCK,), tl.int64) + number + 1, mask=chosen)
