"""Logits → the distribution that is sampled from: the one rule of distillation, drafting and verification."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headstart.heads.numerics import wide

#: `logit_of` keeps probabilities at least this far from 0 and 1, so that logits stay within ±FARTHEST but for rounding
NEAREST = 1e-6
FARTHEST = math.log((1 - NEAREST) / NEAREST)


def distribution(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Distribution [..., V] after temperature, top-k, top-p and min-p, in this order; float32 (float64 stays).

    Args:
        logits: [..., V], any float dtype.
        temperature: 0 gives a one-hot argmax.
        top_k: tokens kept; 0 = all. Tokens as likely as the k-th stay too, as in transformers and vLLM.
        top_p: the fewest tokens, most likely first (equals by id), whose probability reaches it are kept; 1 = all.
        min_p: tokens less likely than this × the most likely one go; 0 = none.
    The most likely token always stays, so no row is empty.
    """
    logits = wide(logits)
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if top_p < 1:
        sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
        sorted_p = sorted_logits.softmax(-1)
        before = sorted_p.cumsum(-1) - sorted_p
        drop = before >= top_p
        drop[..., 0] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
    p = logits.softmax(-1)
    if min_p > 0:
        p = torch.where(p < min_p * p.amax(-1, keepdim=True), 0.0, p)
        p = p / p.sum(-1, keepdim=True)
    return p


def logit_of(q: Tensor) -> Tensor:
    """logit(q) of probabilities, in float32 (float64 stays), finite for 0 and 1 too."""
    return torch.logit(wide(q).clamp(NEAREST, 1 - NEAREST))


def logit_of_best(logits: Tensor) -> Tensor:
    """logit(q) of the most likely token at temperature 1, within ±FARTHEST: […, V] → […], float32 (float64 stays).

    It is the largest logit minus the logsumexp of the others, so no 1 - q is rounded. Where the largest logit is not
    finite, it is -FARTHEST.
    """
    logits = wide(logits)
    top, place = logits.max(-1, keepdim=True)
    others = (logits - top).exp().scatter(-1, place, 0.0).sum(-1)
    logit = (-others.log()).clamp(-FARTHEST, FARTHEST)
    return torch.where(top[..., 0].isfinite(), logit, -FARTHEST)
