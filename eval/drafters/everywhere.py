"""Greedy drafts after many rows of known texts at once, for teacher-forced acceptance (measuring/teacher_forced.py).

Shape legend: B documents, T tokens, A rows of a document that drafts begin after, K depth, D target hidden, k streams,
H head hidden, h heads, g kv heads, d head dim, U draft vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from headstart.heads.families.autoregressive import AutoregressiveHead
from headstart.heads.families.medusa.head import MedusaHead
from headstart.heads.families.peagle.head import PEagleHead

#: (drafts of a pass [B, A], g that it gave [B, A, H]) → tokens and g that the next pass reads
Following = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def medusa_everywhere(
    head: MedusaHead, tokens_BT: Tensor, hidden_BTD: Tensor, streams_BTkD: Tensor | None, row_BA: Tensor, depth: int
) -> Tensor:
    """int64 [B, A, K], all depths from the feature of the row. Args: see Drafting.draft_everywhere."""
    batch_B1 = torch.arange(len(row_BA), device=row_BA.device)[:, None]
    hidden_AD = hidden_BTD[batch_B1, row_BA].flatten(0, 1)
    # a few rows at a time: logits are large
    parts = [head.draft_logits(part)[:, :depth].argmax(-1) for part in hidden_AD.split(256)]
    return torch.cat(parts).unflatten(0, row_BA.shape)


def autoregressive_everywhere(
    head: AutoregressiveHead,
    tokens_BT: Tensor,
    hidden_BTD: Tensor,
    streams_BTkD: Tensor | None,
    row_BA: Tensor,
    depth: int,
) -> Tensor:
    """int64 [B, A, K]. A row drafts on from its own drafts; these see the context up to the row, and each other.

    Args: see Drafting.draft_everywhere.
    """
    return _pass_after_pass(head, tokens_BT, hidden_BTD, streams_BTkD, row_BA, depth, lambda drafts, g: (drafts, g))


def parallel_everywhere(
    head: PEagleHead, tokens_BT: Tensor, hidden_BTD: Tensor, streams_BTkD: Tensor | None, row_BA: Tensor, depth: int
) -> Tensor:
    """int64 [B, A, K]. Behind a row, masked places see the context up to the row, and each other.

    A place sees none behind it, so one pass for each place gives what one pass over all of them gives.
    Args: see Drafting.draft_everywhere.
    """
    mask_BA, g_H = torch.full_like(row_BA, head.mask_token), head.mask_feature()
    g_BAH = g_H.expand(*row_BA.shape, -1)
    return _pass_after_pass(head, tokens_BT, hidden_BTD, streams_BTkD, row_BA, depth, lambda *_: (mask_BA, g_BAH))


def _pass_after_pass(
    head: AutoregressiveHead,
    tokens_BT: Tensor,
    hidden_BTD: Tensor,
    streams_BTkD: Tensor | None,
    row_BA: Tensor,
    depth: int,
    following: Following,
) -> Tensor:
    """int64 [B, A, K]: a pass over the contexts, then one for each further row behind every row of `row_BA`."""
    batch, rows = tokens_BT.shape
    device = tokens_BT.device
    batch_B1 = torch.arange(batch, device=device)[:, None]
    # of every layer: keys and values of the context, then those of each step; a step calls one layer after the other
    stored: list[list[tuple[Tensor, Tensor]]] = [[] for _ in head.draft_layers]
    next_layer = itertools.cycle(stored)

    def attend_context(q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor) -> Tensor:
        next(next_layer).append((_widen(k_BgTd, q_BhTd), _widen(v_BgTd, q_BhTd)))
        return attend_earlier(q_BhTd, k_BgTd, v_BgTd)

    def attend_rollout(q_BhAd: Tensor, k_BgAd: Tensor, v_BgAd: Tensor) -> Tensor:
        seen = next(next_layer)
        seen.append((_widen(k_BgAd, q_BhAd), _widen(v_BgAd, q_BhAd)))
        hidden_BAT = torch.arange(rows, device=device) > row_BA[:, :, None]
        return _weigh(q_BhAd, *seen[0], hidden_BAT[:, None], seen[1:])

    next_BT, position_BT = torch.roll(tokens_BT, -1, dims=1), torch.arange(rows, device=device).expand(batch, rows)
    g_BTH, logits_BTU = head.step(next_BT, head.fuse(hidden_BTD, streams_BTkD), position_BT, attend_context)
    g_BAH, choice_BA = g_BTH[batch_B1, row_BA], logits_BTU[batch_B1, row_BA].argmax(-1)
    del logits_BTU
    drafts = [head.target_ids(choice_BA)]
    for step in range(1, depth):
        g_BAH, logits_BAU = head.step(*following(drafts[-1], g_BAH), row_BA + step, attend_rollout)
        drafts.append(head.target_ids(logits_BAU.argmax(-1)))
    return torch.stack(drafts, -1)


def attend_earlier(q_BhTd: Tensor, k_BgTd: Tensor, v_BgTd: Tensor) -> Tensor:
    """Attention of every row of a document to itself and to the rows before it: [B, h, T, d]."""
    rows = q_BhTd.shape[2]
    later_TT = torch.ones((rows, rows), dtype=torch.bool, device=q_BhTd.device).triu(1)
    return _weigh(q_BhTd, _widen(k_BgTd, q_BhTd), _widen(v_BgTd, q_BhTd), later_TT, [])


def _widen(x_BgNd: Tensor, q_BhNd: Tensor) -> Tensor:
    """A key or value for every query head."""
    return x_BgNd.repeat_interleave(q_BhNd.shape[1] // x_BgNd.shape[1], dim=1)


def _weigh(q_BhNd: Tensor, k_BhTd: Tensor, v_BhTd: Tensor, hidden: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention over the context's keys, except `hidden` ones, and over each row's own keys; in float32."""
    scale = q_BhNd.shape[-1] ** -0.5
    scores = (q_BhNd.float() @ k_BhTd.float().transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
    own_scores = [(q_BhNd.float() * k.float()).sum(-1, keepdim=True) * scale for k, _ in own]
    weights = torch.cat([scores, *own_scores], -1).softmax(-1)
    context = weights[..., : k_BhTd.shape[2]] @ v_BhTd.float()
    for n, (_, v) in enumerate(own):
        context = context + weights[..., k_BhTd.shape[2] + n, None] * v.float()
    return context.to(q_BhNd.dtype)
