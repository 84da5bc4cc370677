"""A chain whose drafts do not depend on each other but by the repetition penalty.

Shape legend: B batch, K drafts, n of them, U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.eval.decoding.sampling import Sampling, add_seen, draw, logit_of_largest, most_likely, probabilities
from headstart.eval.drafters.draft_vocabulary import in_draft_vocabulary


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
    tokens: list[Tensor] = []
    qs: list[Tensor] = []
    logits: list[Tensor] = []
    for logits_BnU in [logits_BKU] if seen_BV is None else logits_BKU.split(1, dim=1):
        seen_BU = in_draft_vocabulary(seen_BV, ids_U)
        seen_B1U = None if seen_BU is None else seen_BU[:, None]
        if sampled:
            qs.append(probabilities(logits_BnU, sampling, seen_B1U))
            drawn_Bn = draw(qs[-1], generator)
            tokens.append(drawn_Bn if ids_U is None else ids_U[drawn_Bn])
        else:
            best_Bn, logit_Bn = most_likely(logits_BnU, sampling, seen_B1U, ids_U, says)
            tokens.append(best_Bn)
            if logit_Bn is not None:
                logits.append(logit_Bn)
        seen_BV = add_seen(seen_BV, tokens[-1])
    if sampled:
        q_BKU = torch.cat(qs, 1)
        return torch.cat(tokens, 1), q_BKU, logit_of_largest(q_BKU) if says else None
    return torch.cat(tokens, 1), None, torch.cat(logits, 1) if says else None
