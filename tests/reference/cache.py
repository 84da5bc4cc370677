"""Serving with a real `step`: a plain list cache, one sequence, rows fed in calls of any size."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.heads.families.autoregressive import AutoregressiveHead
from reference.documents import Document


class ListCache:
    """Keys and values of one sequence, of every layer.

    `attend` is called for one layer after the other. It appends the new rows to the layer's, and lets row n see
    everything up to itself.
    """

    def __init__(self, layers: int = 1) -> None:
        self.layers: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(layers)]
        self._calls = 0

    def attend(self, q_BhNd: Tensor, k_BgNd: Tensor, v_BgNd: Tensor) -> Tensor:
        keys, values = self.layers[self._calls % len(self.layers)]
        self._calls += 1
        _, heads, rows, width = q_BhNd.shape
        share = heads // k_BgNd.shape[1]
        contexts = []
        for n in range(rows):
            keys.append(k_BgNd[0, :, n])
            values.append(v_BgNd[0, :, n])
            k_hTd = torch.stack(keys, dim=1).repeat_interleave(share, dim=0)
            v_hTd = torch.stack(values, dim=1).repeat_interleave(share, dim=0)
            scores_hT = torch.einsum("hd,htd->ht", q_BhNd[0, :, n], k_hTd) / width**0.5
            contexts.append(torch.einsum("ht,htd->hd", scores_hT.softmax(-1), v_hTd))
        return torch.stack(contexts, dim=1)[None]

    def cut(self, rows: int) -> None:
        """Forget everything after the first `rows` rows."""
        for keys, values in self.layers:
            del keys[rows:], values[rows:]


def run_step(
    head: AutoregressiveHead, cache: ListCache, tokens: list[int], g_NH: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """Rows at positions first, first + 1, … → (g [N, H], logits [N, U])."""
    position = torch.arange(first, first + len(tokens))
    g, logits = head.step(torch.tensor([tokens]), g_NH[None], position[None], cache.attend)
    return g[0], logits[0]


def fused(head: AutoregressiveHead, document: Document, rows: slice) -> Tensor:
    return head.fuse(document.hidden_TD[None, rows], document.streams_TkD[None, rows])[0]


def rows_by_steps(head: AutoregressiveHead, document: Document, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """Context rows 0, 1, … (row p: x_{p+1} and the target's feature at p) in calls of `cuts` rows."""
    cache, start, outputs = ListCache(len(head.draft_layers)), 0, []
    for size in cuts:
        tokens = document.tokens[start + 1 : start + size + 1]
        outputs.append(run_step(head, cache, tokens, fused(head, document, slice(start, start + size)), start))
        start += size
    return torch.cat([g for g, _ in outputs]), torch.cat([logits for _, logits in outputs])


def chain_by_steps(head: AutoregressiveHead, document: Document, consumed: int, fed: list[int]) -> Tensor:
    """Logits [len(fed), U] of a draft after the target consumed x_0 … x_{consumed-1}; fed[0] is the root."""
    cache = ListCache(len(head.draft_layers))
    following = [*document.tokens[1:consumed], fed[0]]
    g, logits = run_step(head, cache, following, fused(head, document, slice(0, consumed)), 0)
    out, g = [logits[-1]], g[-1:]
    for position, token in enumerate(fed[1:], start=consumed):
        g, logits = run_step(head, cache, [token], g, position)
        out.append(logits[0])
    return torch.stack(out)
