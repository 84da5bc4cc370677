"""EAGLE-3 (Li et al. 2025, methods §4): training-time test, one row and one step at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.documents import (
    DIVERGENCES,
    Document,
    Ends,
    Sums,
    greedy_choice,
    sum_over_positions,
    supervised_depth,
)
from reference.llama import Row, Shape, Weights, attend, mlp, project, rms_norm

ATTENTION = "midlayer.self_attn."


def embed(weights: Weights, ends: Ends, token: int) -> Tensor:
    """The head's own table where it has one (H ≠ D), else the target's."""
    table = weights.get("embed_tokens.weight", ends.embed_VD)
    return table[token]


def fuse(weights: Weights, streams_kD: Tensor) -> Tensor:
    """g [H] of step 1: fc over the streams, lowest layer first."""
    return weights["fc.weight"] @ torch.cat(list(streams_kD))


def row_keys(weights: Weights, ends: Ends, shape: Shape, token: int, g_H: Tensor, position: int) -> Row:
    """q, k, v from cat(input_layernorm(emb), hidden_norm(g))."""
    normed_embedding = rms_norm(embed(weights, ends, token), weights["midlayer.input_layernorm.weight"], shape.eps)
    normed_g = rms_norm(g_H, weights["midlayer.hidden_norm.weight"], shape.eps)
    return project(weights, ATTENTION, torch.cat([normed_embedding, normed_g]), position, shape)


def row_output(weights: Weights, shape: Shape, g_H: Tensor, row: Row, seen: list[Row]) -> Tensor:
    """Pre-norm output [H]; the residual is the un-normed g."""
    x_H = g_H + attend(weights, ATTENTION, row, seen, shape)
    normed_H = rms_norm(x_H, weights["midlayer.post_attention_layernorm.weight"], shape.eps)
    return x_H + mlp(weights, "midlayer.mlp.", normed_H, shape)


def vocabulary_logits(weights: Weights, ends: Ends, g_H: Tensor, shape: Shape) -> Tensor:
    """norm, then the head's own U rows."""
    return weights["lm_head.weight"] @ rms_norm(g_H, weights["norm.weight"], shape.eps)


def first_step_rows(weights: Weights, ends: Ends, shape: Shape, document: Document) -> tuple[list[Tensor], list[Row]]:
    """Step 1 of every row that has a next token: g = fc(streams at s), and what it shows to rows ≥ s."""
    count = len(document.tokens) - 1
    g1 = [fuse(weights, document.streams_TkD[s]) for s in range(count)]
    return g1, [row_keys(weights, ends, shape, document.tokens[s + 1], g1[s], s) for s in range(count)]


def ttt_logits(
    weights: Weights,
    ends: Ends,
    shape: Shape,
    document: Document,
    p: int,
    steps: int,
    step_1: tuple[list[Tensor], list[Row]] | None = None,
) -> list[Tensor]:
    """Logits [U] of steps 1 … `steps` of row p, fed with the document's own tokens."""
    x = document.tokens
    g1, rows = step_1 or first_step_rows(weights, ends, shape, document)
    first_step = rows[: p + 1]
    g_H = row_output(weights, shape, g1[p], first_step[p], first_step)
    out = [vocabulary_logits(weights, ends, g_H, shape)]
    own_rows: list[Row] = []
    for i in range(2, steps + 1):
        row = row_keys(weights, ends, shape, x[p + i], g_H, p + i - 1)
        own_rows.append(row)
        g_H = row_output(weights, shape, g_H, row, first_step + own_rows)
        out.append(vocabulary_logits(weights, ends, g_H, shape))
    return out


def eagle3_loss(
    weights: Weights,
    ends: Ends,
    documents: list[Document],
    shape: Shape,
    depth: int,
    draft_ids: list[int] | None = None,
    kind: str = "soft_ce",
) -> Sums:
    """The divergence `kind` of every depth from the teacher renormalised over the draft vocabulary.

    A position whose target argmax is outside the draft vocabulary carries no loss at that depth, and is a miss.
    """
    ids = list(range(ends.lm_head_VD.shape[0])) if draft_ids is None else draft_ids

    step_1 = {id(document): first_step_rows(weights, ends, shape, document) for document in documents}

    def draft(document: Document, t: int) -> list[Tensor]:
        steps = supervised_depth(document, t, depth)
        return ttt_logits(weights, ends, shape, document, t, steps, step_1[id(document)])

    def loss(document: Document, t: int, d: int, logits: Tensor) -> Tensor | None:
        if greedy_choice(ends, document, t, d) not in ids:
            return None
        p_U = torch.softmax(ends.logits(document.hidden_TD[t + d]), dim=0)[ids]
        return DIVERGENCES[kind](p_U / p_U.sum(), logits)

    return sum_over_positions(documents, depth, draft, loss, ends, ids)


def chain_logits(
    weights: Weights, ends: Ends, shape: Shape, tokens: list[int], streams_TkD: Tensor, fed: list[int]
) -> list[Tensor]:
    """Serving: logits [U] of depths 1 … len(fed) after the target consumed `tokens`; fed[0] is the root.

    A chain of ordinary cached rows: context rows from real features, then one row per drafted token.
    """
    last = len(tokens) - 1
    following = [*tokens[1:], fed[0]]
    g1 = [fuse(weights, streams_TkD[s]) for s in range(last + 1)]
    cache = [row_keys(weights, ends, shape, following[s], g1[s], s) for s in range(last + 1)]
    g_H = row_output(weights, shape, g1[last], cache[last], cache)
    out = [vocabulary_logits(weights, ends, g_H, shape)]
    for position, token in enumerate(fed[1:], start=last + 1):
        cache.append(row_keys(weights, ends, shape, token, g_H, position))
        g_H = row_output(weights, shape, g_H, cache[-1], cache)
        out.append(vocabulary_logits(weights, ends, g_H, shape))
    return out
