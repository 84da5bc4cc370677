"""Drafts several trees in the same places of the same answers, to compare what the target would accept of them."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.rows import Rows
from headstart.eval.drafters import Drafter
from headstart.eval.tree import Tree
from headstart.eval.tuning.profile import Recorder


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
