"""The block drafter's loss, one block and one token at a time."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from reference.documents import Document, Ends, Sums, greedy_choice, is_supervised, sum_over_positions
from reference.llama import Shape, Weights, attend, mlp, project, rms_norm
from torch import Tensor


@dataclass
class BlockSums(Sums):
    """Two terms; every supervised row carries a loss."""

    @property
    def numerators(self) -> list[float]:
        return [*self.correct, self.total[0], *(numerator for numerator, _ in self.more.values())]


def block(weights: Weights, ends: Ends, shape: Shape, f_D: Tensor, root: int, size: int, layers: int) -> list[Tensor]:
    """Rows of one block, after the final norm."""
    x_D = weights["fc.weight"] @ torch.cat((ends.embed_VD[root], f_D))
    rows = [x_D + weights["place_BD"][b] for b in range(size)]
    for i in range(layers):
        normed = [rms_norm(x, weights[f"input_norms.{i}.weight"], shape.eps) for x in rows]
        prefix = f"layers.{i}."
        made = [project(weights, f"{prefix}self_attn.", x, b, shape) for b, x in enumerate(normed)]
        rows = [x + attend(weights, f"{prefix}self_attn.", row, made, shape) for x, row in zip(rows, made, strict=True)]
        for b, x in enumerate(rows):
            y = rms_norm(x, weights[f"{prefix}post_attention_layernorm.weight"], shape.eps)
            rows[b] = x + mlp(weights, f"{prefix}mlp.", y, shape)
    return [rms_norm(x, weights["norm.weight"], shape.eps) for x in rows]


def miniblock_loss(head: Any, weights: Weights, ends: Ends, documents: list[Document]) -> Sums:
    """Term 1: -log q(x_{t+1+d}) over all positions of blocks. Term 2: whether a block's first token is right."""
    dims, config = head.dims, head.config
    shape = Shape(
        dims.num_heads, dims.num_kv_heads, dims.head_dim, dims.rms_norm_eps, dims.hidden_act, dims.rope_parameters
    )
    confidence: list[Tensor] = []
    right = 0

    def draft(document: Document, t: int) -> list[Tensor]:
        nonlocal right
        f_D, root = document.hidden_TD[t], document.tokens[t + 1]
        rows = block(weights, ends, shape, f_D, root, config.depth, config.num_layers)
        logits = [ends.logits(row) for row in rows]
        hit = int(logits[0].argmax()) == greedy_choice(ends, document, t, 1)
        z = (weights["confidence.weight"] @ rows[0] + weights["confidence.bias"])[0]
        confidence.append(torch.log1p(torch.exp(-z if hit else z)))
        right += bool(z > 0) == hit
        supervised = sum(is_supervised(document.turns, t, d) for d in range(1, config.depth + 1))
        return logits[:supervised]

    def loss(document: Document, t: int, d: int, logits: Tensor) -> Tensor:
        return torch.logsumexp(logits, dim=0) - logits[document.tokens[t + 1 + d]]

    sums = sum_over_positions(documents, config.depth, draft, loss, ends)
    zero = torch.zeros((), dtype=ends.lm_head_VD.dtype)
    values = {field.name: getattr(sums, field.name) for field in fields(sums)}
    values["loss"] = [sum(sums.loss, zero), sum(confidence, zero)]
    values["count"] = [sum(sums.count), len(confidence)]
    values["more"] = {"confidence_right": (right, len(confidence))}
    return BlockSums(**values)
