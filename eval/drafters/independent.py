"""A chain whose drafts do not depend on each other but by the repetition penalty.

Shape legend: B batch, K drafts, n of them, U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.eval.decoding.sampling import Sampling, add_seen, draw, penalise, probabilities
from headstart.eval.drafters.draft_vocabulary import in_draft_vocabulary
from headstart.eval.kernels.argmax import argmax


def choose_each(
    logits_BKU: Tensor,
    sampling: Sampling,
    sampled: bool,
    seen_BV: Tensor | None,
    ids_U: Tensor | None,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor | None]:
    """(a token of every depth, target ids int64 [B, K]; what they were drawn from [B, K, U], None for the likeliest).

    A repetition penalty counts the drafts before each one too, as the target's does.

    Args: sampled: whether tokens are drawn. seen_BV: tokens of the context; None without a penalty. ids_U: see
        Head.draft_ids_U.
    """
    tokens: list[Tensor] = []
    qs: list[Tensor] = []
    for logits_BnU in [logits_BKU] if seen_BV is None else logits_BKU.split(1, dim=1):
        seen_BU = in_draft_vocabulary(seen_BV, ids_U)
        seen_B1U = None if seen_BU is None else seen_BU[:, None]
        if sampled:
            qs.append(probabilities(logits_BnU, sampling, seen_B1U))
            drawn_Bn = draw(qs[-1], generator)
            tokens.append(drawn_Bn if ids_U is None else ids_U[drawn_Bn])
        else:
            tokens.append(argmax(penalise(logits_BnU, sampling, seen_B1U), ids_U))
        seen_BV = add_seen(seen_BV, tokens[-1])
    return torch.cat(tokens, 1), torch.cat(qs, 1) if qs else None
