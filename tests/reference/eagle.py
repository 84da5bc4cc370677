"""EAGLE-1 (Li et al. 2024, methods §3): one decoder layer that predicts the next feature."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from reference.documents import DIVERGENCES, Document, Ends, Sums, sum_over_positions, supervised_depth
from reference.llama import Row, Shape, Weights, attend, mlp, project, rms_norm

ATTENTION = "layers.0.self_attn."


def layer_input(weights: Weights, ends: Ends, token: int, f_D: Tensor) -> Tensor:
    """fc(cat(emb(token), feature)): embedding first."""
    x_D = weights["fc.weight"] @ torch.cat([ends.embed_VD[token], f_D])
    return x_D + weights["fc.bias"] if "fc.bias" in weights else x_D


def row_keys(weights: Weights, ends: Ends, shape: Shape, token: int, f_D: Tensor, position: int) -> Row:
    """What a row shows to others; the layer has no input norm."""
    return project(weights, ATTENTION, layer_input(weights, ends, token, f_D), position, shape)


def row_output(
    weights: Weights, ends: Ends, shape: Shape, token: int, f_D: Tensor, row: Row, seen: list[Row]
) -> Tensor:
    """g [D] of a row that sees `seen` (itself included): the prediction of the next post-norm feature."""
    x_D = layer_input(weights, ends, token, f_D)
    x_D = x_D + attend(weights, ATTENTION, row, seen, shape)
    normed_D = rms_norm(x_D, weights["layers.0.post_attention_layernorm.weight"], shape.eps)
    return x_D + mlp(weights, "layers.0.mlp.", normed_D, shape)


def all_rows(weights: Weights, ends: Ends, shape: Shape, document: Document) -> list[Row]:
    """Row s, of x_{s+1} and f_s at rope position s, wherever there is a next token."""
    count = len(document.tokens) - 1
    return [row_keys(weights, ends, shape, document.tokens[s + 1], document.hidden_TD[s], s) for s in range(count)]


def predicted_feature(
    weights: Weights, ends: Ends, shape: Shape, document: Document, t: int, rows: list[Row] | None = None
) -> Tensor:
    """g_t, from rows 0 … t."""
    rows = (rows or all_rows(weights, ends, shape, document))[: t + 1]
    return row_output(weights, ends, shape, document.tokens[t + 1], document.hidden_TD[t], rows[t], rows)


def smooth_l1(a: Tensor, b: Tensor) -> Tensor:
    """Mean over the width of ½x² where |x| < 1, |x| - ½ elsewhere."""
    terms = []
    for x in a - b:
        terms.append(0.5 * x * x if x.abs() < 1 else x.abs() - 0.5)
    return torch.stack(terms).mean()


def harmonised_features(
    weights: Weights, ends: Ends, shape: Shape, document: Document, t: int, passes: int, rows: list[Row]
) -> list[Tensor]:
    """Predictions of f_{t+1} … f_{t+passes} of row t (HASS).

    Pass i + 1 feeds the document's x_{t+i+1} with the prediction of f_{t+i} by pass i, cut off from the graph.
    `rows` are `all_rows`: what the target's own features show.
    """
    predictions = [predicted_feature(weights, ends, shape, document, t, rows)]
    own: list[Row] = []
    for i in range(1, passes):
        token, f_D = document.tokens[t + i + 1], predictions[-1].detach()
        row = row_keys(weights, ends, shape, token, f_D, t + i)
        own.append(row)
        predictions.append(row_output(weights, ends, shape, token, f_D, row, rows[: t + 1] + own))
    return predictions


def eagle_loss(
    weights: Weights,
    ends: Ends,
    documents: list[Document],
    shape: Shape,
    hidden_weight: float = 1.0,
    logit_weight: float = 0.1,
    depth: int = 1,
    kind: str = "soft_ce",
    top_weight: float = 0.0,
    top_tokens: int = 10,
) -> Sums:
    """1.0 · SmoothL1(g, f_{t+d}) + 0.1 · softCE(lm_head(g), p at t + d), on positions supervised at depth d.

    `kind`: another divergence in the place of softCE. `top_weight`: of the cross-entropy's terms of the `top_tokens`
    tokens of largest p alone, once more (HASS, second stage).
    """
    features: dict[tuple[int, int], list[Tensor]] = {}
    parts = {"feature_loss": 0.0, "logit_loss": 0.0}
    rows = {id(document): all_rows(weights, ends, shape, document) for document in documents}

    def draft(document: Document, t: int) -> list[Tensor]:
        passes = supervised_depth(document, t, depth)
        predictions = harmonised_features(weights, ends, shape, document, t, passes, rows[id(document)])
        features[id(document), t] = predictions
        return [ends.logits(g_D) for g_D in predictions]

    def loss(document: Document, t: int, d: int, logits: Tensor) -> Tensor:
        next_D = document.hidden_TD[t + d]
        p_V = torch.softmax(ends.logits(next_D), dim=0)
        distance = smooth_l1(features[id(document), t][d - 1], next_D)
        of_logits = logit_weight * DIVERGENCES[kind](p_V, logits)
        logq_V = logits - torch.logsumexp(logits, dim=0)
        for token in sorted(range(len(p_V)), key=lambda token: -p_V[token].item())[:top_tokens] if top_weight else []:
            of_logits = of_logits - top_weight * p_V[token] * logq_V[token]
        parts["feature_loss"] += hidden_weight * distance.item()
        parts["logit_loss"] += of_logits.item()
        return hidden_weight * distance + of_logits

    sums = sum_over_positions(documents, depth, draft, loss, ends)
    return replace(sums, more={name: (part, sum(sums.count)) for name, part in parts.items()})


def chain_logits(
    weights: Weights, ends: Ends, shape: Shape, tokens: list[int], hidden_TD: Tensor, fed: list[int]
) -> list[Tensor]:
    """Serving: logits [V] of depths 1 … len(fed).

    `tokens` are the consumed x_0 … x_t, whose features are `hidden_TD` [t+1, D]; `fed[0]` is the root x_{t+1}, the
    rest what is drafted (or forced). Depth i recycles the row's own prediction as the feature.
    """
    last = len(tokens) - 1
    following = [*tokens[1:], fed[0]]
    seen = [row_keys(weights, ends, shape, following[s], hidden_TD[s], s) for s in range(len(tokens))]
    g_D = row_output(weights, ends, shape, fed[0], hidden_TD[last], seen[last], seen)
    out = [ends.logits(g_D)]
    for i, token in enumerate(fed[1:], start=2):
        row = row_keys(weights, ends, shape, token, g_D, last + i - 1)
        seen = [*seen, row]
        g_D = row_output(weights, ends, shape, token, g_D, row, seen)
        out.append(ends.logits(g_D))
    return out
