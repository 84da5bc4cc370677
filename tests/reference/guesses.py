"""A drafter of the tests that knows the answers, and is wrong now and then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headstart.eval.decoding.rows import Rows
from headstart.eval.tree import Tree, chain
from headstart.heads.batch import FeatureSpec


class Guesses:
    """Drafts the tokens of known answers, some of them wrong; a row in four drafts nothing."""

    name, spec, captures, prepare_s, max_nodes = "guesses", FeatureSpec((1, 2)), False, 0.0, 4
    state: tuple[tuple[object, str], ...] = ()

    def __init__(self, answers: list[list[int]], lengths: list[int]):
        self.answers, self.lengths = answers, torch.tensor(lengths)  # on the host, as the noise
        self.noise = torch.Generator().manual_seed(3)

    def products(self, batch: int) -> list[Any]:
        return []

    def start(self, context: Rows, capacity: int) -> None:
        self.said_B = context.count_B.cpu() - self.lengths

    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        rows = []
        for answer, said in zip(self.answers, self.said_B.tolist(), strict=True):
            known = answer[said + 1 : said + 1 + self.max_nodes]
            rows.append(known + [5] * (self.max_nodes - len(known)))
        tokens_BK = torch.tensor(rows)
        wrong_BK = torch.rand(tokens_BK.shape, generator=self.noise) < 0.3
        drafts_B1 = torch.rand((len(rows), 1), generator=self.noise) < 0.75
        tokens_BK = torch.where(wrong_BK, (tokens_BK + 1) % 97, tokens_BK)
        return chain(tokens_BK.to(roots_B.device), drafts_B1.expand_as(tokens_BK).to(roots_B.device))

    def commit(self, accepted: Rows) -> None:
        self.said_B = self.said_B + accepted.count_B.cpu()
