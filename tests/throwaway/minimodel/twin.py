"""The draft model's loss, one token at a time."""

from __future__ import annotations

from typing import Any

import torch
from reference.documents import Document, Ends, Sums, sum_over_positions
from reference.llama import Shape, Weights, attend, mlp, project, rms_norm
from torch import Tensor


def next_token_logits(weights: Weights, ends: Ends, shape: Shape, tokens: list[int], layers: int) -> list[Tensor]:
    """Logits [V] after every token of one document."""
    own, up = weights["model.model.embed_tokens.own.weight"], weights["model.model.embed_tokens.up.weight"]
    rows = [own[token] + up @ ends.embed_VD[token] for token in tokens]
    for i in range(layers):
        prefix = f"model.model.layers.{i}."
        normed = [rms_norm(x, weights[f"{prefix}input_layernorm.weight"], shape.eps) for x in rows]
        made = [project(weights, f"{prefix}self_attn.", x, t, shape) for t, x in enumerate(normed)]
        for t, x in enumerate(rows):
            x = x + attend(weights, f"{prefix}self_attn.", made[t], made[: t + 1], shape)
            y = rms_norm(x, weights[f"{prefix}post_attention_layernorm.weight"], shape.eps)
            rows[t] = x + mlp(weights, f"{prefix}mlp.", y, shape)
    return [weights["model.lm_head.weight"] @ rms_norm(x, weights["model.model.norm.weight"], shape.eps) for x in rows]


def minimodel_loss(head: Any, weights: Weights, ends: Ends, documents: list[Document]) -> Sums:
    """-log q(x_{t+2}) where row t is supervised at depth 1."""
    dims = head.dims
    shape = Shape(dims.num_heads, dims.num_kv_heads, dims.head_dim, dims.rms_norm_eps, "silu", dims.rope_parameters)
    logits_of = {id(d): next_token_logits(weights, ends, shape, d.tokens, head.config.num_layers) for d in documents}

    def loss(document: Document, t: int, d: int, logits: Tensor) -> Tensor:
        return torch.logsumexp(logits, dim=0) - logits[document.tokens[t + 2]]

    return sum_over_positions(documents, 1, lambda document, t: [logits_of[id(document)][t + 1]], loss, ends)
