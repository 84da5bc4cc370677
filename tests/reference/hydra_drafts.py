"""What Hydra drafts, node by node: nothing is cached, every node reads the whole text again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.documents import Ends
from reference.hydra import features, head_logits
from reference.llama import Shape, Weights


@dataclass(frozen=True)
class Node:
    """parent: index of the parent node, -1 = the root. path: drafts from depth 1 to the node."""

    path: tuple[int, ...]
    parent: int

    @property
    def token(self) -> int:
        return self.path[-1]


@dataclass(frozen=True)
class NaiveDrafter:
    """hidden: consumed tokens x_0 … x_t → the target's features [t + 1, D].

    In what follows `tokens` are x_0 … x_{t+1}: the last one is the root, whose feature does not exist yet.
    """

    weights: Weights
    ends: Ends
    embed_scale: float
    shape: Shape
    num_layers: int
    lm_head: str
    hidden: Callable[[list[int]], Tensor]
    penalty: float = 1.0

    def logits(self, tokens: list[int], path: tuple[int, ...]) -> list[float]:
        """Of the head after a path of drafts. Every token before is penalised, the path's as well."""
        f_D = features(self.weights, self.shape, self.hidden(tokens[:-1]))[-1]
        fed = [tokens[-1], *path]
        of_head = self.num_layers, self.lm_head
        values = head_logits(self.weights, self.ends, self.embed_scale, f_D, fed, *of_head).tolist()
        for token in {*tokens, *path}:
            values[token] = values[token] / self.penalty if values[token] > 0 else values[token] * self.penalty
        return values

    def ranked(self, tokens: list[int], path: tuple[int, ...], count: int) -> list[int]:
        """The most likely tokens after a path; of equal ones the lower id comes first."""
        values = self.logits(tokens, path)
        return sorted(range(len(values)), key=lambda token: (-values[token], token))[:count]

    def chain(self, tokens: list[int], depth: int) -> list[Node]:
        nodes: list[Node] = []
        for n in range(depth):
            path = nodes[-1].path if nodes else ()
            nodes.append(Node((*path, *self.ranked(tokens, path, 1)), n - 1))
        return nodes

    def static(self, tokens: list[int], rank_paths: list[tuple[int, ...]]) -> list[Node]:
        """Nodes by depth, and by ranks within a depth."""
        ordered = sorted(rank_paths, key=lambda ranks: (len(ranks), ranks))
        nodes: list[Node] = []
        for ranks in ordered:
            parent = ordered.index(ranks[:-1]) if len(ranks) > 1 else -1
            path = nodes[parent].path if parent >= 0 else ()
            nodes.append(Node((*path, self.ranked(tokens, path, ranks[-1] + 1)[-1]), parent))
        return nodes

    def dynamic(self, tokens: list[int], k: int, depth: int, total: int) -> list[Node]:
        """EAGLE-2 by its definition (methods §3). Nodes by depth; of one depth, those of the best parent first."""
        stored: list[tuple[Node, float]] = []
        frontier = [-1]
        for _ in range(depth):
            level = []
            for parent in frontier:
                path, score = (stored[parent][0].path, stored[parent][1]) if parent >= 0 else ((), 0.0)
                values = self.logits(tokens, path)
                log_sum = float(torch.tensor(values, dtype=torch.float64).logsumexp(0))
                for token in self.ranked(tokens, path, k):
                    level.append(len(stored))
                    stored.append((Node((*path, token), parent), score + values[token] - log_sum))
            frontier = sorted(level, key=lambda n: (-stored[n][1], n))[:k]
        # stored by depth, so of equal scores the shallower one stands first
        kept = sorted(sorted(range(len(stored)), key=lambda n: (-stored[n][1], n))[:total])
        return [Node(stored[n][0].path, kept.index(p) if (p := stored[n][0].parent) >= 0 else -1) for n in kept]
