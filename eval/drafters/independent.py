"""A chain whose drafts do not depend on each other but by the repetition penalty.

Shape legend: B batch, K drafts, n of them, U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.eval.decoding.sampling import Sampling, draw, logit_of_largest, most_likely, probabilities
from headstart.eval.drafters.one_by_one import OneByOne


def choose_each(
    logits_BKU: Tensor,
    sampling: Sampling,
    sampled: bool,
    seen_BV: Tensor | None,
    ids_U: Tensor | None,
    generator: torch.Generator | None,
    says: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(a token of every depth, target ids int64 [B, K]; what they were drawn from [B, K, U], None for the likeliest;
    with `says` how sure the draft is of them, see Tree.confidence_BN).

    A repetition penalty counts the drafts before each one too, as the target's does.

    Args: sampled: whether tokens are drawn. seen_BV: tokens of the context; None without a penalty. ids_U: see
        Head.draft_ids_U.
    """
    if seen_BV is not None:
        chosen = OneByOne(sampling, sampled, says, seen_BV, ids_U, generator)
        for logits_BU in logits_BKU.unbind(1):
            chosen.choose(logits_BU)
        return chosen.all()
    if not sampled:
        best_BK, logit_BK = most_likely(logits_BKU, sampling, None, ids_U, says)
        return best_BK, None, logit_BK
    q_BKU = probabilities(logits_BKU, sampling, None)
    drawn_BK = draw(q_BKU, generator)
    tokens_BK = drawn_BK if ids_U is None else ids_U[drawn_BK]
    return tokens_BK, q_BKU, logit_of_largest(q_BKU) if says else None
