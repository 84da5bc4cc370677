"""P-EAGLE (arXiv 2602.01469, families §2): the rows of true features and of masked places, one at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.documents import Document, Ends, Sums, greedy_choice, mixed, sum_over_positions, supervised_depth
from reference.eagle3 import Caches, first_step, fuse, prefixes_of_layers, run_row, vocabulary_logits
from reference.llama import Shape, Weights


def with_mask_row(weights: Weights, ends: Ends, mask: int) -> Weights:
    """The weights with a whole table of embeddings: the target's, but for the mask token's."""
    if "mask_embedding" not in weights:
        return weights  # it has embeddings of its own
    rows = [weights["mask_embedding"] if token == mask else row for token, row in enumerate(ends.embed_VD)]
    return {**weights, "embed_tokens.weight": torch.stack(rows)}


def masked_feature(weights: Weights, shape: Shape) -> Tensor:
    """g [H] of a masked place: what three streams become."""
    return fuse(weights, shape, weights["mask_hidden"].reshape(3, -1))


def parallel_logits(
    weights: Weights,
    ends: Ends,
    shape: Shape,
    mask: int,
    document: Document,
    p: int,
    depths: int,
    committed: tuple[list[Tensor], Caches] | None = None,
) -> list[Tensor]:
    """Logits [U] of depths 1 … `depths` of row p. Args: weights: from `with_mask_row`; committed: of `first_step`."""
    outputs, shown = committed or first_step(weights, ends, shape, document)
    caches = [rows[: p + 1] for rows in shown]
    found = [vocabulary_logits(weights, ends, outputs[p], shape)]
    g_H = masked_feature(weights, shape)
    for d in range(1, depths):
        out_H = run_row(weights, ends, shape, mask, g_H, p + d, caches)
        found.append(vocabulary_logits(weights, ends, out_H, shape))
    return found


def peagle_loss(
    weights: Weights,
    ends: Ends,
    documents: list[Document],
    shape: Shape,
    mask: int,
    depth: int,
    draft_ids: list[int] | None = None,
    kind: str = "kl",
    mix: tuple[float, float] = (0.0, 0.0),
    temperature: float = 1.0,
) -> Sums:
    """The divergence `kind` of every depth from the teacher renormalised over the draft vocabulary.

    A position whose target argmax is outside the draft vocabulary carries no loss at that depth, and is a miss.
    """
    weights = with_mask_row(weights, ends, mask)
    ids = list(range(ends.lm_head_VD.shape[0])) if draft_ids is None else draft_ids
    committed = {id(document): first_step(weights, ends, shape, document) for document in documents}

    def draft(document: Document, t: int) -> list[Tensor]:
        depths = supervised_depth(document, t, depth)
        return parallel_logits(weights, ends, shape, mask, document, t, depths, committed[id(document)])

    def loss(document: Document, t: int, d: int, logits: Tensor) -> Tensor | None:
        if greedy_choice(ends, document, t, d) not in ids:
            return None
        p_U = torch.softmax(ends.logits(document.hidden_TD[t + d]) / temperature, dim=0)[ids]
        return mixed(kind, p_U / p_U.sum(), logits, *mix)

    return sum_over_positions(documents, depth, draft, loss, ends, ids)


def chain_logits(
    weights: Weights, ends: Ends, shape: Shape, mask: int, tokens: list[int], streams_TkD: Tensor, root: int, depth: int
) -> list[Tensor]:
    """Serving: logits [U] of depths 1 … `depth` after the target consumed `tokens` and said `root`."""
    weights = with_mask_row(weights, ends, mask)
    caches: Caches = [[] for _ in prefixes_of_layers(weights)]
    out_H = torch.empty(0)
    for position, token in enumerate([*tokens[1:], root]):
        out_H = run_row(weights, ends, shape, token, fuse(weights, shape, streams_TkD[position]), position, caches)
    found, g_H = [vocabulary_logits(weights, ends, out_H, shape)], masked_feature(weights, shape)
    for position in range(len(tokens), len(tokens) + depth - 1):
        out_H = run_row(weights, ends, shape, mask, g_H, position, caches)
        found.append(vocabulary_logits(weights, ends, out_H, shape))
    return found
