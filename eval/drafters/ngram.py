"""Prompt lookup (methods §9): match the last n tokens earlier in the context, copy what followed. Training-free."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from headstart.eval.decoding.drafter import Drafter
from headstart.eval.decoding.rows import Rows
from headstart.eval.kernels.linear import Linear
from headstart.eval.tree import Tree, chain
from headstart.heads.batch import FeatureSpec


class NgramIndex:
    """One context, with the latest position after every n-gram that something follows."""

    def __init__(self, shortest: int, longest: int):
        self.sizes = range(longest, shortest - 1, -1)
        self.tokens: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        position = len(self.tokens)
        # the n-grams that end just before the new token are now followed by it
        for size in self.sizes:
            if size <= position:
                self.after[tuple(self.tokens[position - size :])] = position
        self.tokens.append(token)

    def continuation(self, length: int) -> list[int]:
        """Up to `length` tokens that followed the longest matching suffix (most recent match)."""
        for size in self.sizes:
            if size <= len(self.tokens):
                start = self.after.get(tuple(self.tokens[-size:]))
                if start is not None:
                    return self.tokens[start : start + length]
        return []


class NgramDrafter:
    """Drafts a chain by lookup; a row without a match drafts nothing."""

    name = "ngram"
    spec: FeatureSpec | None = None
    captures = False
    prepare_s = 0.0
    state: list[tuple[object, str]] = []  # noqa: RUF012

    def __init__(self, depth: int, shortest: int = 1, longest: int = 4):
        self.max_nodes, self.shortest, self.longest = depth, shortest, longest
        self.rows: list[NgramIndex] = []

    def products(self, batch: int) -> list[tuple[list[Linear], int]]:
        return []

    def aside(self) -> NgramDrafter:
        return copy.copy(self)

    def take_row(self, row: int, aside: Drafter, slots: int) -> None:
        assert isinstance(aside, NgramDrafter)
        self.rows[row] = aside.rows[0]

    def start(self, context: Rows, capacity: int) -> None:
        self.rows = [NgramIndex(self.shortest, self.longest) for _ in range(context.tokens_BJ.shape[0])]
        self._append(context)

    def commit(self, accepted: Rows) -> None:
        # the first committed token is the root, which `propose` has appended already
        self._append(accepted, skip=1)

    def _append(self, rows: Rows, skip: int = 0) -> None:
        counts = rows.count_B.tolist()
        for index, tokens, count in zip(self.rows, rows.tokens_BJ.tolist(), counts, strict=True):
            for token in tokens[skip:count]:
                index.append(token)

    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        lines = []
        for index, root in zip(self.rows, roots_B.tolist(), strict=True):
            index.append(root)
            lines.append(index.continuation(self.max_nodes))
        tokens = [line + [0] * (self.max_nodes - len(line)) for line in lines]
        valid = [[n < len(line) for n in range(self.max_nodes)] for line in lines]
        return chain(torch.tensor(tokens, device=roots_B.device), torch.tensor(valid, device=roots_B.device))
