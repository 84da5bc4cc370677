"""Medusa-1 (Cai et al. 2024, methods §1), one head and one position at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.documents import Document, Ends, Sums, soft_cross_entropy, sum_over_positions, supervised_depth
from reference.llama import Weights


def head_logits(weights: Weights, ends: Ends, f_D: Tensor, d: int, num_layers: int, lm_head: str) -> Tensor:
    """Logits [V] of head d (1-based) on one post-norm feature.

    lm_head: "own" (a matrix per head), "shared" (the target's output head), "lowrank" (the target's plus up · down).
    """
    h_D = f_D
    for j in range(num_layers):
        weight, bias = weights[f"blocks.{d - 1}.layers.{j}.weight"], weights[f"blocks.{d - 1}.layers.{j}.bias"]
        h_D = h_D + torch.nn.functional.silu(weight @ h_D + bias)
    if lm_head == "own":
        return weights[f"lm_heads.{d - 1}.weight"] @ h_D
    if lm_head == "lowrank":
        return ends.logits(h_D) + weights[f"up.{d - 1}.weight"] @ (weights[f"down.{d - 1}.weight"] @ h_D)
    return ends.logits(h_D)


def medusa_loss(
    weights: Weights,
    ends: Ends,
    documents: list[Document],
    depth: int,
    num_layers: int = 1,
    lm_head: str = "own",
    kind: str = "ce",
) -> Sums:
    """kind "ce": -log q(x_{t+1+d}); "kl": KL(p ‖ q) with p the target's distribution at index t + d."""

    def draft(document: Document, t: int) -> list[Tensor]:
        depths = range(1, supervised_depth(document, t, depth) + 1)
        return [head_logits(weights, ends, document.hidden_TD[t], d, num_layers, lm_head) for d in depths]

    def loss(document: Document, t: int, d: int, logits: Tensor) -> Tensor:
        if kind == "ce":
            return torch.logsumexp(logits, dim=0) - logits[document.tokens[t + 1 + d]]
        p_V = torch.softmax(ends.logits(document.hidden_TD[t + d]), dim=0)
        entropy = -(p_V * p_V.log()).sum()
        return soft_cross_entropy(p_V, logits) - entropy

    return sum_over_positions(documents, depth, draft, loss, ends)
