"""P-EAGLE's training pass: all rows (p, d) of a pack at once, through autograd (arXiv 2602.01469, families §2).

    d = 0   every row p reads the embedding of x_{p+1} and the target's feature at p. In every layer it makes keys and
            values. In the layers below the last, all rows run; in the last one, the anchors alone.
    d ≥ 1   the anchors that run at depth d + 1 read the mask token's embedding and the mask feature, at rope position
            p + d. In each layer, row (p, d) attends to the rows (s, 0) with s ≤ p of its document, and to (p, 1 … d).

No row reads what another one drafted. So all depths pass through a layer side by side. On a GPU an anchor's places are
one block that is causal within itself (`Blocks`). Elsewhere the attention is called once per depth.

Shape legend: R rows, A anchors, M = Σ_d count_d, N = M - A rows of masked places, H hidden, W = (h + 2 g) · d packed
projections, B = K - 1 slots of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads.batch import FeatureBatch
from headstart.heads.families.eagle3.ttt_autograd import LayerRun, first_step, input_norm, packed
from headstart.heads.kernels.attention import TrainAttention
from headstart.heads.kernels.block_attention import BlockAttention, BlockRows
from headstart.heads.kernels.block_attention_kernels import MAX_WIDTH
from headstart.heads.kernels.device import wants_kernel
from headstart.heads.kernels.rows import put_rows
from headstart.heads.layers import DraftLayer, RMSNorm, Rope


def rollout(
    batch: FeatureBatch,
    layers: Sequence[DraftLayer],
    hidden_norm: RMSNorm,
    rope: Rope,
    e_RH: Tensor,
    g_RH: Tensor,
    mask_e_H: Tensor,
    mask_g_H: Tensor,
) -> Tensor:
    """The last layer's outputs for every depth's anchors, laid end to end: [M, H], `anchors.count_K` rows each.

    Args:
        layers: the first one's attention input is cat(e, hidden_norm(g)), and its residual stream starts from g. The
            others are `LaterLayer`s.
        e_RH: normed embeddings of each row's next token, in the compute dtype. mask_e_H: that of the mask token.
        g_RH: each row's feature, in the compute dtype. mask_g_H: that of a masked place.
    """
    hidden, later = g_RH.shape[1], batch.anchors.count_K[1:]
    runs = [LayerRun(layer, packed(layer, g_RH.dtype)) for layer in layers]
    e_WH, g_WH = runs[0].weight_WH.split((hidden, runs[0].weight_WH.shape[1] - hidden), dim=1)
    runs[0].weight_WH = g_WH
    attend = TrainAttention(batch).attend
    out_AH = first_step(batch, attend, runs, hidden_norm, rope, F.linear(e_RH, e_WH), g_RH)
    if not later:
        return out_AH
    position_A = batch.position_R[batch.anchors.row_A]
    cos, sin = rope(torch.cat([position_A[:count] + d for d, count in enumerate(later, start=1)]))
    # all masked places read the same, so the first layer projects one row
    packed_NW = (F.linear(mask_e_H, e_WH) + F.linear(hidden_norm(mask_g_H), g_WH)).expand(sum(later), -1)
    out_NH = mask_g_H.expand(sum(later), -1)
    blocks = Blocks(batch, later) if in_blocks(g_RH, layers[0].self_attn.head_dim) and later[0] else None
    for n, run in enumerate(runs):
        if n > 0:
            packed_NW = F.linear(input_norm(run)(out_NH), run.weight_WH)
        assert run.k_RgD is not None and run.v_RgD is not None
        k_NgD, v_NgD = run.keys_values(packed_NW[:, run.queries :], cos, sin)
        q_NhD = run.rotated_queries(packed_NW[:, : run.queries], cos, sin)
        if blocks is not None:
            context_NhD = blocks.attend(q_NhD, run.k_RgD, run.v_RgD, k_NgD, v_NgD)
        else:
            own_k, own_v = k_NgD.split(later), v_NgD.split(later)
            context = [
                attend(q_AhD, run.k_RgD, run.v_RgD, own_k[:d], own_v[:d])
                for d, q_AhD in enumerate(q_NhD.split(later), start=1)
            ]
            context_NhD = torch.cat(context)
        out_NH = run.layer.finish(context_NhD, out_NH)
    return torch.cat((out_AH, out_NH))


def in_blocks(g_RH: Tensor, head_dim: int) -> bool:
    """Whether the kernel of blocks runs the masked places."""
    return wants_kernel(g_RH) and g_RH.dtype in (torch.bfloat16, torch.float16) and head_dim <= MAX_WIDTH


class Blocks:
    """The masked places of each anchor as one block, for the attention of block heads: one call for all depths.

    Slots of depths that an anchor does not run hold zeros. They stand behind those that run, which do not see them.

    Args of the constructor: later: anchors that run at depths 2 … K.
    """

    def __init__(self, batch: FeatureBatch, later: Sequence[int]):
        anchors, size = batch.anchors, len(later)
        # anchors that are not drawn may be among the first ones: they see their rows too, so that blocks ascend
        row_A, real_A = anchors.row_A[: later[0]], anchors.supervised_AK()[: later[0], 0]
        blocks, order_A = BlockRows.behind(row_A, real_A, batch.position_R, size, causal=True).ascending()
        place_A = torch.empty_like(order_A).scatter_(0, order_A, torch.arange(len(order_A), device=order_A.device))
        self._attention = BlockAttention(blocks, len(batch.tokens_R))
        self._slots = later[0] * size
        self._slot_N = torch.cat([place_A[:count] * size + d for d, count in enumerate(later)])

    def attend(self, q_NhD: Tensor, k_RgD: Tensor, v_RgD: Tensor, own_k_NgD: Tensor, own_v_NgD: Tensor) -> Tensor:
        """Context [N, h, d] of the masked places of all depths, differentiable in all arguments."""
        q, own_k, own_v = (_Place.apply(x, self._slot_N, self._slots) for x in (q_NhD, own_k_NgD, own_v_NgD))
        return _Pick.apply(self._attention.attend(q, k_RgD, v_RgD, own_k, own_v), self._slot_N)


def _placed(x: Tensor, row_n: Tensor, rows: int) -> Tensor:
    """`rows` rows of zeros, with those of x at the places row_n."""
    into = x.new_zeros(rows, *x.shape[1:])
    put_rows(into, row_n, x)
    return into


class _Place(torch.autograd.Function):
    """`_placed`, differentiable in x. No two places are the same."""

    @staticmethod
    def forward(ctx, x: Tensor, row_n: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(row_n)
        return _placed(x, row_n, rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (row_n,) = ctx.saved_tensors
        return grad.index_select(0, row_n), None, None


class _Pick(torch.autograd.Function):
    """x[row_n], for places that differ: its gradient is a copy, where indexing would add."""

    @staticmethod
    def forward(ctx, x: Tensor, row_n: Tensor) -> Tensor:
        ctx.save_for_backward(row_n)
        ctx.rows = x.shape[0]
        return x.index_select(0, row_n)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (row_n,) = ctx.saved_tensors
        return _placed(grad.contiguous(), row_n, ctx.rows), None
