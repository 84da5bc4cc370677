"""Keys and values that all layers make of the same rows: norm, rotary embedding and the store into the KV buffers, one
kernel for all layers on CUDA, with its eager twin.

Shape legend: B batch, J new rows of each sequence, R = B · J, n layers, g kv heads, d head dim, S slots of a KV buffer,
W rotary channels, T positions of a rotary table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.eval.kernels.norm import NormWeights, norm_eager
from headstart.heads.kernels.device import wants_kernel
from headstart.heads.kernels.elementwise import rotate_eager

#: heads of one program, a warp each
HEADS_PER_PROGRAM = 4


@dataclass(frozen=True)
class ContextStore:
    """What happens to the rows before they are stored.

    Attributes:
        factor_nd: float32, factors of every layer's RMSNorm of keys; eps: added to their mean squares.
        cos_TW, sin_TW: rotary tables, float32.
    """

    factor_nd: Tensor
    eps: float
    cos_TW: Tensor
    sin_TW: Tensor


def context_store_eager(
    kv_RC: Tensor, count_B: Tensor, length_B: Tensor, store: ContextStore, whole: Tensor
) -> Tensor:
    """Append the first `count_B` rows of each sequence behind the `length_B` rows that the buffers hold.

    Args:
        kv_RC: per row, of each layer the keys of all heads, then the values; C = n · 2 · g · d.
        count_B, length_B: int64.
        whole: buffers [n, 2, B, g, S, d], changed in place. The last slot takes what is not wanted.
    Returns: int64 [B], rows that the buffers hold now.
    """
    layers, _, batch, g, slots, d = whole.shape
    columns = kv_RC.shape[0] // batch
    column_J = torch.arange(columns, device=kv_RC.device)
    real_BJ = column_J < count_B[:, None]
    position_BJ = torch.where(real_BJ, length_B[:, None] + column_J, 0)
    write_BJ = torch.where(real_BJ, position_BJ, slots - 1)
    k_Rngd, v_Rngd = kv_RC.view(-1, layers, 2, g, d).unbind(2)
    k_Rngd = norm_eager(k_Rngd, NormWeights(store.factor_nd[:, None], store.eps))
    at_R = position_BJ.flatten()
    k_Rngd = rotate_eager(k_Rngd.flatten(1, 2), store.cos_TW[at_R], store.sin_TW[at_R]).view_as(k_Rngd)
    rows_B1 = torch.arange(batch, device=kv_RC.device)[:, None]
    whole[:, :, rows_B1, :, write_BJ] = torch.stack((k_Rngd, v_Rngd), 2).view(batch, columns, layers, 2, g, d)
    return length_B + count_B


def context_store(kv_RC: Tensor, count_B: Tensor, length_B: Tensor, store: ContextStore, whole: Tensor) -> Tensor:
    """As context_store_eager."""
    run = context_store_kernel if wants_kernel(kv_RC) else context_store_eager
    return run(kv_RC, count_B, length_B, store, whole)


def context_store_kernel(
    kv_RC: Tensor, count_B: Tensor, length_B: Tensor, store: ContextStore, whole: Tensor
) -> Tensor:
    layers, _, batch, g, slots, d = whole.shape
    rows, entries = kv_RC.shape[0], store.cos_TW.shape[1]
    after_B = torch.empty_like(length_B)
    launch(_context_store_kernel, (rows, triton.cdiv(layers * 2 * g, HEADS_PER_PROGRAM)),
        kv_RC.contiguous(), count_B, length_B, after_B, store.factor_nd, store.cos_TW, store.sin_TW, whole,
        rows // batch, batch, slots, entries, store.eps,
        N=layers, G=g, D=d, HB=HEADS_PER_PROGRAM, BLOCK=triton.next_power_of_2(d), num_warps=HEADS_PER_PROGRAM,
        **launch_options(kv_RC.device),
    )  # fmt: skip
    return after_B


if triton is not None:

    @triton.jit(do_not_specialize=["columns", "batches", "slots"])
    def _context_store_kernel(
        kv, count, length, after, factor, cos, sin, whole, columns, batches, slots, entries, eps,
        N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HB: tl.constexpr, BLOCK: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """HB heads of one row: of each layer G keys, then G values."""
        row = tl.program_id(0).to(tl.int64)
        head = (tl.program_id(1) * HB + tl.arange(0, HB))[:, None]
        channel = tl.arange(0, BLOCK)[None, :]
        half = entries // 2
        low = channel < half
        turned = channel < 2 * half
        partner = tl.where(low, channel + half, channel - half)
        layer = head // (2 * G)
        is_key = head % (2 * G) < G
        inside = (channel < D) & (head < N * 2 * G)
        keys = inside & is_key
        own_factor = tl.load(factor + layer * D + channel, mask=keys, other=0.0)
        other_factor = tl.load(factor + layer * D + partner, mask=keys & turned, other=0.0)
        await_previous(OVERLAP)
        batch = row // columns
        column = row % columns
        held = tl.load(length + batch)
        new = tl.load(count + batch)
        if (column == 0) & (tl.program_id(1) == 0):
            tl.store(after + batch, held + new)
        if column < new:
            position = held + column
            source = kv + (row * N * 2 * G + head) * D
            own = tl.load(source + channel, mask=inside, other=0.0)
            other = tl.load(source + partner, mask=keys & turned, other=0.0).to(tl.float32)
            c = tl.load(cos + position * entries + channel, mask=turned, other=1.0)
            s = tl.load(sin + position * entries + channel, mask=turned, other=0.0)
            value = own.to(tl.float32)
            scale = tl.rsqrt(tl.sum(value * value, 1)[:, None] / D + eps)
            # as the eager twin: the norm's result is rounded before it rotates
            value = (value * scale * own_factor).to(kv.dtype.element_ty).to(tl.float32)
            other = (other * scale * other_factor).to(kv.dtype.element_ty).to(tl.float32)
            rotated = value * c + tl.where(low, -other, other) * s
            result = tl.where(is_key, rotated, own.to(tl.float32)).to(whole.dtype.element_ty)
            part = layer * 2 + (head % (2 * G)) // G
            place = ((part * batches + batch) * G + head % G) * slots + position
            tl.store(whole + place * D + channel, result, mask=inside)
