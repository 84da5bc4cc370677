"""Chooses the tokens of a chain level by level, where a draft depends on the ones before it.

Shape legend: B batch, K drafts, N nodes, U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headstart.eval.decoding.sampling import Sampling, add_seen, draw, logit_of_largest, most_likely, probabilities
from headstart.eval.drafters.draft_vocabulary import in_draft_vocabulary, in_target_vocabulary
from headstart.eval.tree import Tree


class OneByOne:
    """The drafts of a chain, chosen so far. A repetition penalty counts the drafts before each one too.

    Args:
        sampled: whether tokens are drawn; else the most likely ones are taken.
        says: whether it is wanted how sure the draft is of them.
        seen_BV: tokens of the context; None without a penalty.
        ids_U: see Head.draft_ids_U.
    """

    def __init__(
        self,
        sampling: Sampling,
        sampled: bool,
        says: bool,
        seen_BV: Tensor | None,
        ids_U: Tensor | None,
        generator: torch.Generator | None,
    ):
        self.sampling, self.sampled, self.says, self.generator = sampling, sampled, says, generator
        self.seen_BV, self.ids_U = seen_BV, ids_U
        self.tokens: list[Tensor] = []
        self._qs: list[Tensor] = []
        self._logits: list[Tensor] = []

    def choose(self, logits_BU: Tensor) -> Tensor:
        """The next draft, target ids int64 [B]."""
        if self.tokens:
            self.seen_BV = add_seen(self.seen_BV, self.tokens[-1][:, None])
        seen_BU = in_draft_vocabulary(self.seen_BV, self.ids_U)
        if self.sampled:
            self._qs.append(probabilities(logits_BU, self.sampling, seen_BU))
            drawn_B = draw(self._qs[-1], self.generator)
            self.tokens.append(drawn_B if self.ids_U is None else self.ids_U[drawn_B])
        else:
            best_B, logit_B = most_likely(logits_BU, self.sampling, seen_BU, self.ids_U, self.says)
            self.tokens.append(best_B)
            if logit_B is not None:
                self._logits.append(logit_B)
        return self.tokens[-1]

    def all(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(drafts int64 [B, K]; the distributions [B, K, U] that they were drawn from, None where the most likely ones
        are taken; with `says` how sure the draft is, see Tree.confidence_BN)."""
        q_BKU = torch.stack(self._qs, 1) if self._qs else None
        confidence_BK = torch.stack(self._logits, 1) if self._logits else None
        if self.says and q_BKU is not None:
            confidence_BK = logit_of_largest(q_BKU)
        return torch.stack(self.tokens, 1), q_BKU, confidence_BK

    def fill(self, chain: Tree, vocab: int) -> Tree:
        """A chain with these drafts. Args: chain: of as many levels or more. vocab: V."""
        tokens_BK, q_BKU, confidence_BK = self.all()
        q_BNV = None if q_BKU is None else in_target_vocabulary(q_BKU, self.ids_U, vocab)
        return replace(chain.first(len(self.tokens)), tokens_BN=tokens_BK, q_BNV=q_BNV, confidence_BN=confidence_BK)
