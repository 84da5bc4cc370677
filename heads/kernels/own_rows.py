"""Triton kernels for training-time-test attention: each anchor's attention to its own keys of later steps.

attention.py computes the part over the step-1 keys; these kernels add the part over the own keys.
Shapes: R rows of the pack, A anchors, h query heads, g key heads (h = g · r), J own keys per anchor, D head width.
Queries, outputs and gradients are stored at their pack row (row_A). Own keys and values are [J, A, g, D] with
contiguous [A, g, D], where A may be a prefix of a longer axis.
"""

from __future__ import annotations

from torch import Tensor

from headstart.heads.kernels.device import tl, triton

if triton is not None:

    @triton.jit
    def _tile(anchor, row, rows, group, heads, groups, width, REPEAT: tl.constexpr, WIDTH: tl.constexpr):
        """Offsets and masks of the [r, D] block of query heads that share one key head, its [D] key, its [r] lse."""
        head, column = tl.arange(0, REPEAT), tl.arange(0, WIDTH)
        repeat = heads // groups
        query = (row * heads + group * repeat + head[:, None]) * width + column[None, :]
        query_mask = (head[:, None] < repeat) & (column[None, :] < width)
        key = (anchor * groups + group) * width + column
        return query, query_mask, key, column < width, (group * repeat + head) * rows + row, head < repeat

    @triton.jit
    def _join_kernel(
        q, own_k, own_v, out, lse, row_of_anchor, rows, heads, groups, width, stride, scale,
        J: tl.constexpr, REPEAT: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        """Turn (out, lse) over the shared (step-1) keys into those over shared and own keys, in place."""
        anchor, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
        row = tl.load(row_of_anchor + anchor)
        query, query_mask, key, key_mask, scalar, scalar_mask = _tile(
            anchor, row, rows, group, heads, groups, width, REPEAT, WIDTH
        )
        queries = tl.load(q + query, mask=query_mask, other=0.0).to(tl.float32)
        shared = tl.load(lse + scalar, mask=scalar_mask, other=0.0)
        top = shared
        for j in tl.static_range(J):
            k = tl.load(own_k + j * stride + key, mask=key_mask, other=0.0).to(tl.float32)
            top = tl.maximum(top, tl.sum(queries * k[None, :], 1) * scale)
        total = tl.exp(shared - top)
        mixed = tl.load(out + query, mask=query_mask, other=0.0).to(tl.float32) * total[:, None]
        for j in tl.static_range(J):
            k = tl.load(own_k + j * stride + key, mask=key_mask, other=0.0).to(tl.float32)
            v = tl.load(own_v + j * stride + key, mask=key_mask, other=0.0).to(tl.float32)
            weight = tl.exp(tl.sum(queries * k[None, :], 1) * scale - top)
            total += weight
            mixed += weight[:, None] * v[None, :]
        tl.store(out + query, (mixed / total[:, None]).to(out.dtype.element_ty), mask=query_mask)
        tl.store(lse + scalar, top + tl.log(total), mask=scalar_mask)

    @triton.jit
    def _grad_kernel(
        q, own_k, own_v, out, lse, grad, row_of_anchor, dq, dk, dv, rows, heads, groups, width, stride, grad_stride,
        scale, J: tl.constexpr, REPEAT: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        """Gradients of the own keys' part, added to dq, dk and dv, given the joint output and log-sum-exp."""
        anchor, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
        row = tl.load(row_of_anchor + anchor)
        query, query_mask, key, key_mask, scalar, scalar_mask = _tile(
            anchor, row, rows, group, heads, groups, width, REPEAT, WIDTH
        )
        queries = tl.load(q + query, mask=query_mask, other=0.0).to(tl.float32)
        upstream = tl.load(grad + query, mask=query_mask, other=0.0).to(tl.float32)
        joint = tl.load(lse + scalar, mask=scalar_mask, other=0.0)
        delta = tl.sum(upstream * tl.load(out + query, mask=query_mask, other=0.0).to(tl.float32), 1)
        d_queries = tl.load(dq + query, mask=query_mask, other=0.0).to(tl.float32)
        for j in tl.static_range(J):
            k = tl.load(own_k + j * stride + key, mask=key_mask, other=0.0).to(tl.float32)
            v = tl.load(own_v + j * stride + key, mask=key_mask, other=0.0).to(tl.float32)
            weight = tl.exp(tl.sum(queries * k[None, :], 1) * scale - joint)
            weight = tl.where(scalar_mask, weight, 0.0)
            ds = weight * (tl.sum(upstream * v[None, :], 1) - delta) * scale
            d_queries += ds[:, None] * k[None, :]
            place = j * grad_stride + key
            d_key = tl.load(dk + place, mask=key_mask, other=0.0) + tl.sum(ds[:, None] * queries, 0)
            d_value = tl.load(dv + place, mask=key_mask, other=0.0) + tl.sum(weight[:, None] * upstream, 0)
            tl.store(dk + place, d_key, mask=key_mask)
            tl.store(dv + place, d_value, mask=key_mask)
        tl.store(dq + query, d_queries.to(dq.dtype.element_ty), mask=query_mask)


def _blocks(heads: int, own_JAgD: Tensor) -> dict[str, int]:
    return {
        "J": own_JAgD.shape[0],
        "REPEAT": triton.next_power_of_2(heads // own_JAgD.shape[2]),
        "WIDTH": triton.next_power_of_2(own_JAgD.shape[3]),
    }


def join_(
    q_RhD: Tensor,
    own_k_JAgD: Tensor,
    own_v_JAgD: Tensor,
    out_RhD: Tensor,
    lse_hR: Tensor,
    row_A: Tensor,
    scale: float,
) -> None:
    """Add the own keys to the softmax over the step-1 keys: in place, `out` and the float32 `lse` cover both parts."""
    heads, width = q_RhD.shape[1:]
    anchors, groups = own_k_JAgD.shape[1:3]
    if anchors:
        _join_kernel[(anchors, groups)](
            q_RhD, own_k_JAgD, own_v_JAgD, out_RhD, lse_hR, row_A, lse_hR.stride(0), heads, groups, width,
            own_k_JAgD.stride(0), scale, **_blocks(heads, own_k_JAgD), num_warps=1,
        )  # fmt: skip


def join_backward_(
    q_RhD: Tensor,
    own_k_JAgD: Tensor,
    own_v_JAgD: Tensor,
    joint_RhD: Tensor,
    joint_hR: Tensor,
    grad_RhD: Tensor,
    row_A: Tensor,
    scale: float,
    dq_RhD: Tensor,
    dk_JAgD: Tensor,
    dv_JAgD: Tensor,
) -> None:
    """Add the own part's gradients to dq, dk and dv (the latter two float32)."""
    heads, width = q_RhD.shape[1:]
    anchors, groups = own_k_JAgD.shape[1:3]
    if anchors:
        _grad_kernel[(anchors, groups)](
            q_RhD, own_k_JAgD, own_v_JAgD, joint_RhD, joint_hR, grad_RhD, row_A, dq_RhD, dk_JAgD, dv_JAgD,
            joint_hR.stride(0), heads, groups, width, own_k_JAgD.stride(0), dk_JAgD.stride(0), scale,
            **_blocks(heads, own_k_JAgD), num_warps=1,
        )  # fmt: skip
