"""EAGLE-3 (Li et al. 2025, methods §4): training-time test, one row and one step at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.documents import (
    Document,
    Ends,
    Sums,
    greedy_choice,
    mixed,
    sum_over_positions,
    supervised_depth,
)
from reference.llama import Row, Shape, Weights, attend, mlp, project, rms_norm

#: keys and values of the rows so far, of every layer
Caches = list[list[Row]]


def prefixes_of_layers(weights: Weights) -> list[str]:
    """Where the tensors of the layers begin, in their order."""
    later = {name.split(".")[1] for name in weights if name.startswith("layers.")}
    return ["midlayer.", *(f"layers.{n}." for n in sorted(later, key=int))]


def embed(weights: Weights, ends: Ends, token: int) -> Tensor:
    """The head's own table where it has one (H ≠ D), else the target's."""
    table = weights.get("embed_tokens.weight", ends.embed_VD)
    return table[token]


def fuse(weights: Weights, shape: Shape, streams_kD: Tensor) -> Tensor:
    """g [H] of step 1: fc over the streams, lowest layer first; before it one norm each, one over all, or none."""
    streams = list(streams_kD)
    if "fc_norm.0.weight" in weights:
        streams = [rms_norm(x_D, weights[f"fc_norm.{n}.weight"], shape.eps) for n, x_D in enumerate(streams)]
    features = torch.cat(streams)
    if "input_norm.weight" in weights:
        features = rms_norm(features, weights["input_norm.weight"], shape.eps)
    return weights["fc.weight"] @ features


def run_row(
    weights: Weights, ends: Ends, shape: Shape, token: int, g_H: Tensor, position: int, caches: Caches
) -> Tensor:
    """Output [H] of one row after all layers, which also joins the layers' caches.

    The first layer's attention reads cat(input_layernorm(emb), hidden_norm(g)), and its residual is the un-normed g.
    """
    residual_H = g_H
    for prefix, cache in zip(prefixes_of_layers(weights), caches, strict=True):
        input_norm = weights[f"{prefix}input_layernorm.weight"]
        if prefix == "midlayer.":
            normed_e = rms_norm(embed(weights, ends, token), input_norm, shape.eps)
            x = torch.cat([normed_e, rms_norm(g_H, weights["midlayer.hidden_norm.weight"], shape.eps)])
        else:
            x = rms_norm(residual_H, input_norm, shape.eps)
        row = project(weights, f"{prefix}self_attn.", x, position, shape)
        cache.append(row)
        x_H = residual_H + attend(weights, f"{prefix}self_attn.", row, cache, shape)
        normed_H = rms_norm(x_H, weights[f"{prefix}post_attention_layernorm.weight"], shape.eps)
        residual_H = x_H + mlp(weights, f"{prefix}mlp.", normed_H, shape)
    return residual_H


def recycled(weights: Weights, shape: Shape, out_H: Tensor, norm_output: bool) -> Tensor:
    """g of the next step: the output of the last layer, or its norm."""
    return rms_norm(out_H, weights["norm.weight"], shape.eps) if norm_output else out_H


def vocabulary_logits(weights: Weights, ends: Ends, g_H: Tensor, shape: Shape) -> Tensor:
    """norm, then the head's own U rows."""
    return weights["lm_head.weight"] @ rms_norm(g_H, weights["norm.weight"], shape.eps)


def first_step(
    weights: Weights, ends: Ends, shape: Shape, document: Document, rows: int | None = None
) -> tuple[list[Tensor], Caches]:
    """Outputs of step 1 of the first `rows` rows (of all that have a next token), and what they show to later ones."""
    count = len(document.tokens) - 1 if rows is None else rows
    caches: Caches = [[] for _ in prefixes_of_layers(weights)]
    outputs = []
    for s in range(count):
        g_H = fuse(weights, shape, document.streams_TkD[s])
        outputs.append(run_row(weights, ends, shape, document.tokens[s + 1], g_H, s, caches))
    return outputs, caches


def ttt_logits(
    weights: Weights,
    ends: Ends,
    shape: Shape,
    document: Document,
    p: int,
    steps: int,
    step_1: tuple[list[Tensor], Caches] | None = None,
    norm_output: bool = False,
) -> list[Tensor]:
    """Logits [U] of steps 1 … `steps` of row p, fed with the document's own tokens."""
    outputs, shown = step_1 or first_step(weights, ends, shape, document)
    caches = [rows[: p + 1] for rows in shown]
    out_H = outputs[p]
    found = [vocabulary_logits(weights, ends, out_H, shape)]
    for i in range(2, steps + 1):
        g_H = recycled(weights, shape, out_H, norm_output)
        out_H = run_row(weights, ends, shape, document.tokens[p + i], g_H, p + i - 1, caches)
        found.append(vocabulary_logits(weights, ends, out_H, shape))
    return found


def eagle3_loss(
    weights: Weights,
    ends: Ends,
    documents: list[Document],
    shape: Shape,
    depth: int,
    draft_ids: list[int] | None = None,
    kind: str = "soft_ce",
    norm_output: bool = False,
    mix: tuple[float, float] = (0.0, 0.0),
    temperature: float = 1.0,
) -> Sums:
    """The divergence `kind` of every depth from the teacher renormalised over the draft vocabulary.

    mix: weights of LK and L1 beside it.
    A position whose target argmax is outside the draft vocabulary carries no loss at that depth, and is a miss.
    """
    ids = list(range(ends.lm_head_VD.shape[0])) if draft_ids is None else draft_ids

    step_1 = {id(document): first_step(weights, ends, shape, document) for document in documents}

    def draft(document: Document, t: int) -> list[Tensor]:
        steps = supervised_depth(document, t, depth)
        return ttt_logits(weights, ends, shape, document, t, steps, step_1[id(document)], norm_output)

    def loss(document: Document, t: int, d: int, logits: Tensor) -> Tensor | None:
        if greedy_choice(ends, document, t, d) not in ids:
            return None
        p_U = torch.softmax(ends.logits(document.hidden_TD[t + d]) / temperature, dim=0)[ids]
        return mixed(kind, p_U / p_U.sum(), logits, *mix)

    return sum_over_positions(documents, depth, draft, loss, ends, ids)


def chain_logits(
    weights: Weights,
    ends: Ends,
    shape: Shape,
    tokens: list[int],
    streams_TkD: Tensor,
    fed: list[int],
    norm_output: bool = False,
) -> list[Tensor]:
    """Serving: logits [U] of depths 1 … len(fed) after the target consumed `tokens`; fed[0] is the root.

    A chain of ordinary cached rows: context rows from real features, then one row per drafted token.
    """
    following = [*tokens[1:], fed[0]]
    caches: Caches = [[] for _ in prefixes_of_layers(weights)]
    for s, token in enumerate(following):
        out_H = run_row(weights, ends, shape, token, fuse(weights, shape, streams_TkD[s]), s, caches)
    out = [vocabulary_logits(weights, ends, out_H, shape)]
    for position, token in enumerate(fed[1:], start=len(tokens)):
        g_H = recycled(weights, shape, out_H, norm_output)
        out_H = run_row(weights, ends, shape, token, g_H, position, caches)
        out.append(vocabulary_logits(weights, ends, out_H, shape))
    return out
