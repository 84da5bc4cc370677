"""DDTree as the paper writes it (arXiv 2604.12989): a heap over (score, depth, parent, rank), node after node."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Node:
    """Attributes: ranks: of the path from the root; tokens: the same as ids; score: Σ log p, float32."""

    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    score: np.float32


def ddtree(log_p_KU: np.ndarray[Any, Any], nodes: int) -> list[Node]:
    """The best nodes, the best first.

    Of equal scores the shallower node comes first, then the one whose parent comes first, then that of lower rank. Of
    equally likely tokens of a depth, the lower id has the lower rank.

    Args: log_p_KU: float32, log-probabilities of every token at every depth, whatever stands before it.
    """
    order_KU = np.argsort(-log_p_KU, axis=1, kind="stable")
    depth, vocab = log_p_KU.shape

    def entry(parent: tuple[Any, ...], score: np.float32, ranks: tuple[int, ...]) -> tuple[Any, ...]:
        """Compares as the order of nodes does. The last two are not compared: ranks and the parent tell all apart."""
        level = len(ranks) - 1
        own = np.float32(score + log_p_KU[level, order_KU[level, ranks[-1]]])
        return (-own, len(ranks), parent, ranks[-1], ranks, score)

    heap = [entry((), np.float32(0), (0,))]
    found: list[Node] = []
    while heap and len(found) < nodes:
        best = heapq.heappop(heap)
        ranks, score = best[4], np.float32(-best[0])
        found.append(Node(ranks, tuple(int(order_KU[d, r]) for d, r in enumerate(ranks)), score))
        if ranks[-1] + 1 < vocab:
            heapq.heappush(heap, entry(best[2], best[5], (*ranks[:-1], ranks[-1] + 1)))
        if len(ranks) < depth:
            heapq.heappush(heap, entry(best[:4], score, (*ranks, 0)))
    return found


def all_paths(log_p_KU: np.ndarray[Any, Any]) -> list[tuple[float, tuple[int, ...]]]:
    """(score, tokens) of every path of every length: a check of the heap itself, for small vocabularies."""
    paths: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    every: list[tuple[float, tuple[int, ...]]] = []
    for level in log_p_KU:
        paths = [(score + float(p), (*path, token)) for score, path in paths for token, p in enumerate(level)]
        every += paths
    return every
