"""Hydra and Hydra++ (Ankner et al. 2024, families.md §4), one head and one position at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.documents import DIVERGENCES, Document, Ends, Sums, sum_over_positions, supervised_depth
from reference.llama import Row, Shape, Weights, attend, mlp, project, rms_norm

LAYER = "prefix.layer."


def prefix_outputs(weights: Weights, shape: Shape, hidden_TD: Tensor) -> list[Tensor]:
    """What the heads read in the place of f_0 … f_{T-1}: norm(layer(f)), where row t sees rows 0 … t."""
    seen: list[Row] = []
    outputs = []
    for position, f_D in enumerate(hidden_TD):
        normed_D = rms_norm(f_D, weights["prefix.input_layernorm.weight"], shape.eps)
        seen.append(project(weights, LAYER + "self_attn.", normed_D, position, shape))
        x_D = f_D + attend(weights, LAYER + "self_attn.", seen[-1], seen, shape)
        normed_D = rms_norm(x_D, weights[LAYER + "post_attention_layernorm.weight"], shape.eps)
        x_D = x_D + mlp(weights, LAYER + "mlp.", normed_D, shape)
        outputs.append(rms_norm(x_D, weights["prefix.norm.weight"], shape.eps))
    return outputs


def features(weights: Weights, shape: Shape, hidden_TD: Tensor) -> list[Tensor]:
    """What the heads read at every position: the prefix layer's outputs where there is one, else f_t itself."""
    return prefix_outputs(weights, shape, hidden_TD) if "prefix.norm.weight" in weights else list(hidden_TD)


def head_logits(
    weights: Weights, ends: Ends, embed_scale: float, f_D: Tensor, tokens: list[int], num_layers: int, lm_head: str
) -> Tensor:
    """Logits [V] of head d = len(tokens), given the feature and x_{t+1} … x_{t+d}.

    embed_scale: factor on the target's embeddings; it is saved with the head.
    lm_head: "own" (a matrix per head), "shared" (the target's output head), "lowrank" (the target's plus up · down).
    """
    block = f"blocks.{len(tokens) - 1}."
    x_D = torch.cat([f_D, *(embed_scale * ends.embed_VD[token] for token in tokens)])
    for j in range(num_layers):
        skipped_D = x_D
        if j == 0:
            skipped_D = weights[block + "residual.weight"] @ x_D + weights[block + "residual.bias"]
        inner_D = weights[f"{block}layers.{j}.weight"] @ x_D + weights[f"{block}layers.{j}.bias"]
        x_D = skipped_D + inner_D * torch.sigmoid(inner_D)
    d = len(tokens)
    if lm_head == "own":
        return weights[f"lm_heads.{d - 1}.weight"] @ x_D
    if lm_head == "lowrank":
        return ends.logits(x_D) + weights[f"up.{d - 1}.weight"] @ (weights[f"down.{d - 1}.weight"] @ x_D)
    return ends.logits(x_D)


def hydra_loss(
    weights: Weights,
    ends: Ends,
    documents: list[Document],
    shape: Shape,
    embed_scale: float,
    depth: int,
    num_layers: int = 1,
    lm_head: str = "own",
    kind: str = "kl",
) -> Sums:
    """kind "ce": -log q(x_{t+1+d}); "kl": KL(p ‖ q) with p the target's distribution at index t + d.

    Head d reads the document's own x_{t+1} … x_{t+d}.
    """
    read = {id(document): features(weights, shape, document.hidden_TD) for document in documents}

    def draft(document: Document, t: int) -> list[Tensor]:
        made = []
        for d in range(1, supervised_depth(document, t, depth) + 1):
            tokens = document.tokens[t + 1 : t + 1 + d]
            f_D = read[id(document)][t]
            made.append(head_logits(weights, ends, embed_scale, f_D, tokens, num_layers, lm_head))
        return made

    def loss(document: Document, t: int, d: int, logits: Tensor) -> Tensor:
        if kind == "ce":
            return torch.logsumexp(logits, dim=0) - logits[document.tokens[t + 1 + d]]
        return DIVERGENCES[kind](torch.softmax(ends.logits(document.hidden_TD[t + d]), dim=0), logits)

    return sum_over_positions(documents, depth, draft, loss, ends)
