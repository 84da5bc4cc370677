"""Attention of drafted blocks: every slot sees a stretch of the pack's rows and all slots of its own block.

Shape legend: R rows of the pack, A blocks, B slots of a block, M = A · B slots, h query heads, g key heads, D head
width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.numerics import wide


@dataclass(frozen=True)
class BlockRows:
    """What the slots of each block see.

    Attributes:
        start_A, stop_A: int64 [A], the context rows [start, stop) of the pack that each block sees.
        size: B.
    """

    start_A: Tensor
    stop_A: Tensor
    size: int


def block_attention(
    q_MhD: Tensor, k_RgD: Tensor, v_RgD: Tensor, own_k_MgD: Tensor, own_v_MgD: Tensor, blocks: BlockRows
) -> Tensor:
    """Context [M, h, D] of every slot, differentiable in q, k, v and the slots' own keys and values.

    Args: k, v: of the pack's rows. own_k, own_v: of the slots.
    """
    return block_attention_eager(q_MhD, k_RgD, v_RgD, own_k_MgD, own_v_MgD, blocks)


def block_attention_eager(
    q_MhD: Tensor, k_RgD: Tensor, v_RgD: Tensor, own_k_MgD: Tensor, own_v_MgD: Tensor, blocks: BlockRows
) -> Tensor:
    """As `block_attention`, with explicit scores; any device and dtype."""
    size, repeat, scale = blocks.size, q_MhD.shape[1] // k_RgD.shape[1], q_MhD.shape[2] ** -0.5
    q, k, v, own_k, own_v = (wide(x) for x in (q_MhD, k_RgD, v_RgD, own_k_MgD, own_v_MgD))
    k, v, own_k, own_v = (x.repeat_interleave(repeat, dim=1) for x in (k, v, own_k, own_v))
    row_R = torch.arange(k.shape[0], device=k.device)
    seen_AR = (row_R >= blocks.start_A[:, None]) & (row_R < blocks.stop_A[:, None])
    scores_MhR = torch.einsum("mhd,rhd->mhr", q, k) * scale
    scores_MhR = scores_MhR.masked_fill(~seen_AR.repeat_interleave(size, dim=0)[:, None], -torch.inf)
    q_ABhD, own_k_ABhD, own_v_ABhD = (x.unflatten(0, (-1, size)) for x in (q, own_k, own_v))
    own_MhB = (torch.einsum("abhd,achd->abhc", q_ABhD, own_k_ABhD) * scale).flatten(0, 1)
    weights, own_weights = torch.cat((scores_MhR, own_MhB), -1).softmax(-1).split((k.shape[0], size), -1)
    context = torch.einsum("mhr,rhd->mhd", weights, v)
    own = torch.einsum("abhc,achd->abhd", own_weights.unflatten(0, (-1, size)), own_v_ABhD)
    return (context + own.flatten(0, 1)).to(q_MhD.dtype)
