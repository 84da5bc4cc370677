"""Whose text the answers are: the share of their tokens that the target itself would choose.

A head learns to guess the target. Where another model or a person wrote the answers, it learns to guess the target in
texts that the target never writes: acceptance measured on such text promises what decoding does not hold.

Letters: A anchors (supervised rows), R rows of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from headstart.data.features import extract
from headstart.data.samples import Sample
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.targets.target import Target

#: tokens of the samples that `own_choice_of` looks at: some seconds with a small target on two CPU cores
SAMPLE_TOKENS = 4096
#: fewer answer tokens say too little to advise anything
ENOUGH_TOKENS = 64
#: below this share the text is hardly the target's. SmolLM2-135M on its own greedy answers: 0.99 of 1,600 tokens; on
#: its answers sampled at temperature 0.8: 0.56 … 0.60 (one of 16 below 0.5), at temperature 1: 0.45; on text and code
#: of people: 0.36 … 0.40
FOREIGN = 0.5
#: above this share the text is the target's, decoded greedily, but for ties and rounding
GREEDY = 0.9


@dataclass(frozen=True)
class OwnChoice:
    """How many of `tokens` answer tokens are the target's own greedy choice after the tokens before them.

    The first token of an answer is not counted: no head drafts it.

    Attributes:
        inside: how many of the target's choices there are in the draft vocabulary; 0 where that was not asked.
    """

    own: int = 0
    tokens: int = 0
    inside: int = 0

    def __add__(self, other: OwnChoice) -> OwnChoice:
        return OwnChoice(self.own + other.own, self.tokens + other.tokens, self.inside + other.inside)

    @property
    def share(self) -> float:
        return self.own / self.tokens if self.tokens else 0.0

    @property
    def foreign(self) -> bool:
        """Whether the text looks as if the target had not written it, not even by sampling."""
        return self.tokens >= ENOUGH_TOKENS and self.share < FOREIGN

    def line(self) -> str:
        """The share in words, with advice where the target may not have written the text."""
        said = f"{self.share:.1%} of {self.tokens} answer tokens are the target's own greedy choice"
        if self.tokens < ENOUGH_TOKENS or self.share >= GREEDY:
            return said
        remedy = "let the target answer the prompts itself (data.distill.prompts)"
        if not self.foreign:
            return f"{said}: it sampled these answers, or another model wrote them. If so, {remedy}"
        return (
            f"WARNING: {said}, less than {FOREIGN:.0%}: another model or a person wrote these answers, or they were "
            f"sampled at a high temperature. Acceptance measured on them does not hold in decoding: {remedy}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {"own": self.own, "tokens": self.tokens, "share": self.share, "foreign": self.foreign}


def answer_choices(batch: FeatureBatch) -> tuple[Tensor, Tensor]:
    """(what the data says, what the target chooses), int64, at the rows of answers that are supervised at depth 1.

    An anchor at row t is supervised at depth 1: its label is token t + 2, its teacher the target's choice after t + 1.
    Both are empty where the target did not run. Args: batch: a pack with all its anchors.
    """
    choice_A = batch.teacher_argmax_A
    if choice_A is None:
        return batch.tokens_R[:0], batch.tokens_R[:0]
    label_A = batch.anchors.row_A + 2
    if batch.answer_R is not None:  # prompts are supervised too, and nobody expects the target to have written them
        turn_A = batch.answer_R[label_A]
        on_A = (turn_A >= 0) & (turn_A == batch.answer_R[label_A - 1])
        label_A, choice_A = label_A[on_A], choice_A[on_A]
    return batch.tokens_R[label_A], choice_A


def own_choice(batch: FeatureBatch, draftable_V: Tensor | None = None) -> OwnChoice:
    """Count the answers of one pack, whose anchors are all there. 0 tokens where the target did not run.

    Args: draftable_V: bool [V], the draft vocabulary, to count `inside`.
    """
    said_A, choice_A = answer_choices(batch)
    inside = 0 if draftable_V is None else int(draftable_V.to(choice_A.device)[choice_A].sum())
    return OwnChoice(int((said_A == choice_A).sum()), len(said_A), inside)


def own_choice_of(
    target: Target,
    samples: Sequence[Sample],
    seed: int,
    sample_tokens: int = SAMPLE_TOKENS,
    draftable_V: Tensor | None = None,
) -> OwnChoice:
    """Run the target over a few random samples and count, as `own_choice`. The same seed takes the same samples."""
    order = np.random.default_rng(seed).permutation(len(samples)).tolist()
    seen, found = 0, OwnChoice()
    while order and seen < sample_tokens:
        sample = samples[order.pop()]
        seen += len(sample)
        found += own_choice(extract(target, [sample], FeatureSpec()), draftable_V)
    return found
