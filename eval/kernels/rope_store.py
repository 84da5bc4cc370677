"""Norm and rotary embedding of queries and keys, and the store into the KV buffers: one kernel on CUDA, with its eager
twin.

Shape legend: R rows (B · M), B batch, M tokens of a forward, h query heads, g kv heads, d head dim, S slots of a KV
buffer, W rotary channels, T positions of a rotary table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.eval.kernels.norm import NormWeights, norm_eager
from headstart.heads.kernels.device import wants_kernel
from headstart.heads.kernels.elementwise import rotate_eager

#: heads of one program, a warp each; a program per head would mean thousands of tiny programs
HEADS_PER_PROGRAM = 4


@dataclass(frozen=True)
class RopeStore:
    """What happens to fused q/k/v rows before attention.

    Attributes:
        heads, kv_heads, head_dim: of the layer.
        norms: RMSNorms of q and of k over each head's channels, before rotation; None where the layer has none.
    """

    heads: int
    kv_heads: int
    head_dim: int
    norms: tuple[NormWeights, NormWeights] | None = None


def rope_store_eager(
    qkv_RC: Tensor,
    cos_RW: Tensor,
    sin_RW: Tensor,
    shape: RopeStore,
    keys: Tensor,
    values: Tensor,
    write_BM: Tensor,
    position_BM: Tensor | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values into their buffers.

    Args:
        qkv_RC: rows of cat(q, k, v), C = (h + 2g) · d.
        cos_RW, sin_RW: rotary tables of the rows (half-split layout; the first W channels turn). With `position_BM`
            they are [T, W], of all positions: each row takes its own, padding (negative) the first.
        keys, values: [B, g, S, d], written at slots `write_BM`.
    Returns: queries [R, h, d].
    """
    if position_BM is not None:
        at_R = position_BM.clamp(min=0).flatten()
        cos_RW, sin_RW = cos_RW[at_R], sin_RW[at_R]
    h, g, d = shape.heads, shape.kv_heads, shape.head_dim
    q, k, v = (part.unflatten(-1, (-1, d)) for part in qkv_RC.split([h * d, g * d, g * d], -1))
    if shape.norms is not None:
        q, k = norm_eager(q, shape.norms[0]), norm_eager(k, shape.norms[1])
    q, k = rotate_eager(q, cos_RW, sin_RW), rotate_eager(k, cos_RW, sin_RW)
    batch = torch.arange(write_BM.shape[0], device=write_BM.device)[:, None]
    keys[batch, :, write_BM] = k.unflatten(0, write_BM.shape)
    values[batch, :, write_BM] = v.unflatten(0, write_BM.shape)
    return q.contiguous()


def rope_store(
    qkv_RC: Tensor,
    cos_RW: Tensor,
    sin_RW: Tensor,
    shape: RopeStore,
    keys: Tensor,
    values: Tensor,
    write_BM: Tensor,
    position_BM: Tensor | None = None,
) -> Tensor:
    """As rope_store_eager."""
    run = rope_store_kernel if wants_kernel(qkv_RC) else rope_store_eager
    return run(qkv_RC, cos_RW, sin_RW, shape, keys, values, write_BM, position_BM)


def rope_store_kernel(
    qkv_RC: Tensor,
    cos_RW: Tensor,
    sin_RW: Tensor,
    shape: RopeStore,
    keys: Tensor,
    values: Tensor,
    write_BM: Tensor,
    position_BM: Tensor | None = None,
) -> Tensor:
    rows, h, g, d = qkv_RC.shape[0], shape.heads, shape.kv_heads, shape.head_dim
    q_Rhd = qkv_RC.new_empty((rows, h, d))
    # without norms the kernel gets factors that it does not read
    q_norm, k_norm = shape.norms or (NormWeights(qkv_RC, 0.0),) * 2
    at = write_BM if position_BM is None else position_BM
    launch(_rope_store_kernel, (rows, triton.cdiv(h + 2 * g, HEADS_PER_PROGRAM)),
        qkv_RC, cos_RW.contiguous(), sin_RW.contiguous(), q_norm.factor_D, k_norm.factor_D, q_Rhd, keys, values,
        write_BM.contiguous(), at.contiguous(), write_BM.shape[1], qkv_RC.stride(0), keys.stride(0), keys.stride(1),
        keys.stride(2), cos_RW.shape[-1] // 2, q_norm.eps, k_norm.eps, H=h, G=g, D=d, HB=HEADS_PER_PROGRAM,
        BLOCK=triton.next_power_of_2(d), NORM=shape.norms is not None, TABLE=position_BM is not None,
        num_warps=HEADS_PER_PROGRAM, **launch_options(qkv_RC.device),
    )  # fmt: skip
    return q_Rhd


if triton is not None:

    @triton.jit(do_not_specialize=["tokens"])
    def _rope_store_kernel(
        qkv, cos, sin, q_factor, k_factor, q_out, keys, values, write, position,
        tokens, stride_row, stride_b, stride_g, stride_s, half, q_eps, k_eps,
        H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HB: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
        TABLE: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """HB heads of one row: heads 0 … H-1 are queries, then G keys, then G values."""
        row = tl.program_id(0).to(tl.int64)
        head = (tl.program_id(1) * HB + tl.arange(0, HB))[:, None]
        channel = tl.arange(0, BLOCK)[None, :]
        low = channel < half
        partner = tl.where(low, channel + half, channel - half)
        inside = (channel < D) & (head < H + 2 * G)
        turned = channel < 2 * half
        if NORM:
            kept = inside & (head < H + G)
            own_factor = tl.load(q_factor + channel, mask=kept & (head < H), other=0.0) + tl.load(
                k_factor + channel, mask=kept & (head >= H), other=0.0
            )
            other_factor = tl.load(q_factor + partner, mask=kept & turned & (head < H), other=0.0) + tl.load(
                k_factor + partner, mask=kept & turned & (head >= H), other=0.0
            )
        await_previous(OVERLAP)
        batch = row // tokens
        slot = tl.load(write + row)
        source = qkv + row * stride_row + head * D
        own = tl.load(source + channel, mask=inside, other=0.0)
        other = tl.load(source + partner, mask=inside & turned, other=0.0).to(tl.float32)
        angle = row
        if TABLE:
            angle = tl.maximum(tl.load(position + row), 0)
        c = tl.load(cos + angle * 2 * half + channel, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + angle * 2 * half + channel, mask=turned, other=0.0).to(tl.float32)
        value = own.to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(value * value, 1)[:, None] / D + tl.where(head < H, q_eps, k_eps))
            # as the eager twin: the norm's result is rounded before it turns
            value = (value * scale * own_factor).to(qkv.dtype.element_ty).to(tl.float32)
            other = (other * scale * other_factor).to(qkv.dtype.element_ty).to(tl.float32)
        rotated = tl.where(turned, value * c + tl.where(low, -other, other) * s, value).to(q_out.dtype.element_ty)
        tl.store(q_out + (row * H + head) * D + channel, rotated, mask=inside & (head < H))
        place = batch * stride_b + slot * stride_s + channel
        is_key = inside & (head >= H) & (head < H + G)
        tl.store(keys + place + (head - H) * stride_g, rotated.to(keys.dtype.element_ty), mask=is_key)
        is_value = inside & (head >= H + G)
        tl.store(values + place + (head - H - G) * stride_g, own, mask=is_value)
