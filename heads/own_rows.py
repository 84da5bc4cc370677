"""Triton kernels for the own-row part of training-time-test attention (attention.py): J keys per row and head, fused.

Shapes: A rows, h query heads, g key heads (h = g · r), J own keys per row, D head width.
Every tensor is contiguous; own keys and values are [J, A, g, D].
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without Triton; the eager backend runs there
    triton = None

if triton is not None:

    @triton.jit
    def _tile(row, group, heads, groups, width, REPEAT: tl.constexpr, WIDTH: tl.constexpr):
        """Offsets and mask of the [r, D] block of query heads that share one key head, and of its [D] key."""
        head, column = tl.arange(0, REPEAT), tl.arange(0, WIDTH)
        repeat = heads // groups
        query = (row * heads + group * repeat + head[:, None]) * width + column[None, :]
        query_mask = (head[:, None] < repeat) & (column[None, :] < width)
        key = (row * groups + group) * width + column
        return query, query_mask, key, column < width, row * heads + group * repeat + head, head < repeat

    @triton.jit
    def _join_kernel(
        q, own_k, own_v, out, lse, joint_out, joint_lse, rows, heads, groups, width, scale,
        J: tl.constexpr, REPEAT: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        """(out, lse) of the shared keys and the own keys → joint softmax output and log-sum-exp."""
        row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
        query, query_mask, key, key_mask, scalar, scalar_mask = _tile(row, group, heads, groups, width, REPEAT, WIDTH)
        queries = tl.load(q + query, mask=query_mask, other=0.0).to(tl.float32)
        shared = tl.load(lse + scalar, mask=scalar_mask, other=0.0)
        top = shared
        for j in tl.static_range(J):
            k = tl.load(own_k + j * rows * groups * width + key, mask=key_mask, other=0.0).to(tl.float32)
            top = tl.maximum(top, tl.sum(queries * k[None, :], 1) * scale)
        total = tl.exp(shared - top)
        mixed = tl.load(out + query, mask=query_mask, other=0.0).to(tl.float32) * total[:, None]
        for j in tl.static_range(J):
            k = tl.load(own_k + j * rows * groups * width + key, mask=key_mask, other=0.0).to(tl.float32)
            v = tl.load(own_v + j * rows * groups * width + key, mask=key_mask, other=0.0).to(tl.float32)
            weight = tl.exp(tl.sum(queries * k[None, :], 1) * scale - top)
            total += weight
            mixed += weight[:, None] * v[None, :]
        tl.store(joint_out + query, (mixed / total[:, None]).to(joint_out.dtype.element_ty), mask=query_mask)
        tl.store(joint_lse + scalar, top + tl.log(total), mask=scalar_mask)

    @triton.jit
    def _grad_kernel(
        q, own_k, own_v, out, lse, grad, dq, dk, dv, rows, heads, groups, width, scale,
        J: tl.constexpr, REPEAT: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        """Gradients of the own keys' part, given the joint output and log-sum-exp."""
        row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
        query, query_mask, key, key_mask, scalar, scalar_mask = _tile(row, group, heads, groups, width, REPEAT, WIDTH)
        queries = tl.load(q + query, mask=query_mask, other=0.0).to(tl.float32)
        upstream = tl.load(grad + query, mask=query_mask, other=0.0).to(tl.float32)
        joint = tl.load(lse + scalar, mask=scalar_mask, other=0.0)
        delta = tl.sum(upstream * tl.load(out + query, mask=query_mask, other=0.0).to(tl.float32), 1)
        d_queries = tl.zeros_like(queries)
        for j in tl.static_range(J):
            place = j * rows * groups * width + key
            k = tl.load(own_k + place, mask=key_mask, other=0.0).to(tl.float32)
            v = tl.load(own_v + place, mask=key_mask, other=0.0).to(tl.float32)
            weight = tl.exp(tl.sum(queries * k[None, :], 1) * scale - joint)
            weight = tl.where(scalar_mask, weight, 0.0)
            ds = weight * (tl.sum(upstream * v[None, :], 1) - delta) * scale
            d_queries += ds[:, None] * k[None, :]
            tl.store(dk + place, tl.sum(ds[:, None] * queries, 0).to(dk.dtype.element_ty), mask=key_mask)
            tl.store(dv + place, tl.sum(weight[:, None] * upstream, 0).to(dv.dtype.element_ty), mask=key_mask)
        tl.store(dq + query, d_queries.to(dq.dtype.element_ty), mask=query_mask)


def _blocks(q_AhD: Tensor, own_JAgD: Tensor) -> dict[str, int]:
    repeat = q_AhD.shape[1] // own_JAgD.shape[2]
    return {
        "J": own_JAgD.shape[0],
        "REPEAT": triton.next_power_of_2(repeat),
        "WIDTH": triton.next_power_of_2(q_AhD.shape[2]),
    }


def join(
    q_AhD: Tensor, own_k_JAgD: Tensor, own_v_JAgD: Tensor, out_AhD: Tensor, lse_Ah: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Add the own keys to a finished softmax: (output, float32 log-sum-exp) over both parts."""
    rows, heads, width = q_AhD.shape
    groups = own_k_JAgD.shape[2]
    joint_AhD, joint_Ah = torch.empty_like(out_AhD), torch.empty_like(lse_Ah)
    if rows:
        _join_kernel[(rows, groups)](
            q_AhD, own_k_JAgD, own_v_JAgD, out_AhD, lse_Ah, joint_AhD, joint_Ah, rows, heads, groups, width, scale,
            **_blocks(q_AhD, own_k_JAgD), num_warps=1,
        )  # fmt: skip
    return joint_AhD, joint_Ah


def join_backward(
    q_AhD: Tensor,
    own_k_JAgD: Tensor,
    own_v_JAgD: Tensor,
    joint_AhD: Tensor,
    joint_Ah: Tensor,
    grad_AhD: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq of the own part, d own_k, d own_v)."""
    rows, heads, width = q_AhD.shape
    groups = own_k_JAgD.shape[2]
    dq, dk, dv = torch.empty_like(q_AhD), torch.empty_like(own_k_JAgD), torch.empty_like(own_v_JAgD)
    if rows:
        _grad_kernel[(rows, groups)](
            q_AhD, own_k_JAgD, own_v_JAgD, joint_AhD, joint_Ah, grad_AhD, dq, dk, dv, rows, heads, groups, width, scale,
            **_blocks(q_AhD, own_k_JAgD), num_warps=1,
        )  # fmt: skip
    return dq, dk, dv
