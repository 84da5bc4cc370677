"""Causal attention inside the documents of a pack, for every row at once.

Two backends compute the same function:
    flash    the fused kernel over all documents. CUDA, bf16 or fp16. It reads the edges on the device, so that a
             captured graph can run packs of other documents.
    sdpa     torch's attention, one document after the other; any device and dtype.

Shape legend: R rows of the pack, h query heads, g key heads, D head width, E edges between documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads.batch import FeatureBatch


@dataclass(frozen=True)
class PackRows:
    """Where the documents of a pack are; see FeatureBatch."""

    edges_E: Tensor
    longest: int
    doc_lengths: tuple[int, ...]

    @classmethod
    def of(cls, batch: FeatureBatch) -> PackRows:
        return cls(batch.edges_E, batch.longest, batch.doc_lengths)


def fused(x: Tensor) -> bool:
    """Whether attention over inputs like `x` runs as one kernel."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def packed_attention(q_RhD: Tensor, k_RgD: Tensor, v_RgD: Tensor, rows: PackRows, scale: float) -> Tensor:
    """Context [R, h, D] of every row, from the rows of its document up to itself. Differentiable in q, k and v.

    What padding rows get is finite and means nothing.
    """
    kind = q_RhD.device.type
    if torch.is_autocast_enabled(kind):  # a model in float32 has rotated its queries and keys in float32
        q_RhD, k_RgD, v_RgD = (x.to(torch.get_autocast_dtype(kind)) for x in (q_RhD, k_RgD, v_RgD))
    if fused(q_RhD):
        edges = rows.edges_E
        return torch.ops.aten._flash_attention_forward(
            q_RhD, k_RgD, v_RgD, edges, edges, rows.longest, rows.longest, 0.0, True, False, scale=scale
        )[0]
    pieces, start = [], 0
    for length in rows.doc_lengths:
        part = slice(start, start + length)
        q, k, v = (x[part].transpose(0, 1)[None] for x in (q_RhD, k_RgD, v_RgD))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        pieces.append(context[0].transpose(0, 1))
        start += length
    padding = q_RhD[start:] * 0  # part of the graph even in a pack without documents
    return torch.cat((*pieces, padding[..., : v_RgD.shape[-1]]))
