"""Norm and rotary embedding of queries and keys, and the store into the KV buffers: one kernel on CUDA, with its eager
twin.

Shape legend: R rows (B · M, or flat rows), B batch, M tokens of a forward, h query heads, g kv heads, d head dim, S
slots of a KV buffer, W rotary channels, T positions of a rotary table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.kernels.flat import FlatRows
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
        norms: RMSNorms of q and of k; None where the layer has none. Each is over a head's channels, or over those of
            all heads (OLMo-2), as its factor is long.
        norm_last: the norms come after rotation (HunYuan).
        rotation: which channels rotate together: "halves": c and c + W/2; "pairs": 2c and 2c + 1 (Cohere, GLM); "none":
            the layer has no rotary embedding.
        by_angle: angle n of a head is entry n of a table (gpt-oss, GLM). False: entry c belongs to channel c.
        rotary: W, the channels of a head that rotate, from the first on; None: as many as a table has entries.
        grouped: a row holds, per kv head, its queries, key and value (GPT-NeoX). False: all q, then all k, then all v.
    """

    heads: int
    kv_heads: int
    head_dim: int
    norms: tuple[NormWeights, NormWeights] | None = None
    norm_last: bool = False
    rotation: str = "halves"
    by_angle: bool = False
    rotary: int | None = None
    grouped: bool = False

    @property
    def norms_all_heads(self) -> bool:
        """Whether a norm is over the channels of all heads together."""
        return self.norms is not None and self.norms[0].factor_D.numel() != self.head_dim

    def rotary_width(self, table_width: int) -> int:
        """W of tables of so many entries."""
        if self.rotation == "none":
            return 0
        return table_width if self.rotary is None else self.rotary


def split_heads(qkv_RC: Tensor, shape: RopeStore) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [R, h, d], keys and values [R, g, d] of the rows."""
    h, g, d = shape.heads, shape.kv_heads, shape.head_dim
    if not shape.grouped:
        q, k, v = (part.unflatten(-1, (-1, d)) for part in qkv_RC.split([h * d, g * d, g * d], -1))
        return q, k, v
    groups_RgAd = qkv_RC.unflatten(-1, (g, h // g + 2, d))
    return groups_RgAd[:, :, :-2].flatten(1, 2), groups_RgAd[:, :, -2], groups_RgAd[:, :, -1]


def rotate_channels_eager(x_Rnd: Tensor, cos_RT: Tensor, sin_RT: Tensor, shape: RopeStore) -> Tensor:
    """Rotate the first channels of every head by the rows' table entries."""
    width = shape.rotary_width(cos_RT.shape[-1])
    if not width:
        return x_Rnd
    if shape.by_angle:
        channel = torch.arange(width, device=x_Rnd.device)
        entry = channel // 2 if shape.rotation == "pairs" else channel % (width // 2)
        cos_RT, sin_RT = cos_RT[:, entry], sin_RT[:, entry]
    if shape.rotation == "halves":
        return rotate_eager(x_Rnd, cos_RT, sin_RT)
    cos, sin = (table[:, None].to(x_Rnd.dtype) for table in (cos_RT, sin_RT))
    turned, kept = x_Rnd[..., :width], x_Rnd[..., width:]
    partner = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    return torch.cat((turned * cos + partner * sin, kept), -1)


def _normed(q: Tensor, k: Tensor, shape: RopeStore) -> tuple[Tensor, Tensor]:
    """Queries and keys [R, n, d] after their norms."""
    if shape.norms is None:
        return q, k
    if shape.norms_all_heads:
        q_RC, k_RC = norm_eager(q.flatten(1), shape.norms[0]), norm_eager(k.flatten(1), shape.norms[1])
        return q_RC.view(q.shape), k_RC.view(k.shape)
    return norm_eager(q, shape.norms[0]), norm_eager(k, shape.norms[1])


def rope_store_eager(
    qkv_RC: Tensor,
    cos_RW: Tensor,
    sin_RW: Tensor,
    shape: RopeStore,
    keys: Tensor,
    values: Tensor,
    write_BM: Tensor,
    position_BM: Tensor | None = None,
    flat: FlatRows | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values into their buffers.

    Args:
        qkv_RC: rows of q, k, v as `shape.grouped` says, C = (h + 2g) · d.
        cos_RW, sin_RW: rotary tables of the rows, read as `shape` says. With `position_BM` they are [T, W], of all
            positions: each row takes its own, padding (negative) the first.
        keys, values: [B, g, S, d], written at slots `write_BM`.
        flat: `qkv_RC` holds these rows alone, and so do tables without `position_BM`. Cut places are not written.
    Returns: queries [R, h, d], or of the flat rows.
    """
    if position_BM is not None:
        at_R = position_BM.clamp(min=0).flatten()
        at_R = at_R if flat is None else at_R[flat.place_F]
        cos_RW, sin_RW = cos_RW[at_R], sin_RW[at_R]
    q, k, v = split_heads(qkv_RC, shape)
    if not shape.norm_last:
        q, k = _normed(q, k, shape)
    q, k = rotate_channels_eager(q, cos_RW, sin_RW, shape), rotate_channels_eager(k, cos_RW, sin_RW, shape)
    if shape.norm_last:
        q, k = _normed(q, k, shape)
    if flat is not None:
        # rows that are left over write once more what place 0 wrote
        batch_F, write_F = flat.place_F // write_BM.shape[1], write_BM.flatten()[flat.place_F]
        source_F = flat.source_F()
        keys[batch_F, :, write_F], values[batch_F, :, write_F] = k[source_F], v[source_F]
        return q.contiguous()
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
    flat: FlatRows | None = None,
) -> Tensor:
    """As rope_store_eager."""
    run = rope_store_kernel if wants_kernel(qkv_RC) else rope_store_eager
    return run(qkv_RC, cos_RW, sin_RW, shape, keys, values, write_BM, position_BM, flat)


def rope_store_kernel(
    qkv_RC: Tensor,
    cos_RW: Tensor,
    sin_RW: Tensor,
    shape: RopeStore,
    keys: Tensor,
    values: Tensor,
    write_BM: Tensor,
    position_BM: Tensor | None = None,
    flat: FlatRows | None = None,
) -> Tensor:
    rows, h, g, d = qkv_RC.shape[0], shape.heads, shape.kv_heads, shape.head_dim
    all_heads = shape.norms_all_heads
    if all_heads and (shape.grouped or shape.norm_last):
        raise ValueError("a norm over all heads comes before rotation, and its rows hold all q, then all k, then all v")
    q_Rhd = qkv_RC.new_empty((rows, h, d))
    # without norms the kernel gets factors that it does not read
    q_norm, k_norm = shape.norms or (NormWeights(qkv_RC, 0.0),) * 2
    at = write_BM if position_BM is None else position_BM
    # of None Triton makes no argument
    maps = (None, None) if flat is None else (flat.place_F, flat.row_R)
    launch(_rope_store_kernel, (rows, triton.cdiv(h + 2 * g, HEADS_PER_PROGRAM)),
        qkv_RC, cos_RW.contiguous(), sin_RW.contiguous(), q_norm.factor_D, k_norm.factor_D, q_Rhd, keys, values,
        write_BM.contiguous(), at.contiguous(), *maps, write_BM.shape[1], qkv_RC.stride(0), keys.stride(0),
        keys.stride(1), keys.stride(2), shape.rotary_width(cos_RW.shape[-1]) // 2, cos_RW.shape[-1],
        q_norm.eps, k_norm.eps,
        H=h, G=g, D=d, HB=HEADS_PER_PROGRAM, BLOCK=triton.next_power_of_2(d), NORM=shape.norms is not None,
        TABLE=position_BM is not None, NORM_LAST=shape.norm_last, ALL=triton.next_power_of_2(h * d) if all_heads else 0,
        PAIRS=shape.rotation == "pairs", BY_ANGLE=shape.by_angle, GROUPED=shape.grouped, FLAT=flat is not None,
        num_warps=HEADS_PER_PROGRAM, **launch_options(qkv_RC.device),
    )  # fmt: skip
    return q_Rhd


if triton is not None:

    @triton.jit(do_not_specialize=["tokens"])
    def _rope_store_kernel(
        qkv, cos, sin, q_factor, k_factor, q_out, keys, values, write, position, place_of, row_of,
        tokens, stride_row, stride_b, stride_g, stride_s, half, entries, q_eps, k_eps,
        H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HB: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
        TABLE: tl.constexpr, NORM_LAST: tl.constexpr, ALL: tl.constexpr, PAIRS: tl.constexpr, BY_ANGLE: tl.constexpr,
        GROUPED: tl.constexpr, FLAT: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """HB heads of one row: heads 0 … H-1 are queries, then G keys, then G values.

        ALL > 0: the norms are over all heads; every program then reads the whole row. FLAT: row `row` stands for place
        `place_of[row]`, unless another row does (`row_of`): then it stores no key.
        """
        row = tl.program_id(0).to(tl.int64)
        head = (tl.program_id(1) * HB + tl.arange(0, HB))[:, None]
        channel = tl.arange(0, BLOCK)[None, :]
        if PAIRS:
            low = channel % 2 == 0
            partner = channel ^ 1
        else:
            low = channel < half
            partner = tl.where(low, channel + half, channel - half)
        inside = (channel < D) & (head < H + 2 * G)
        turned = channel < 2 * half
        if NORM:
            kept = inside & (head < H + G)
            q_first = 0
            k_first = 0
            if ALL:
                q_first = head * D
                k_first = (head - H) * D
            own_factor = tl.load(q_factor + q_first + channel, mask=kept & (head < H), other=0.0) + tl.load(
                k_factor + k_first + channel, mask=kept & (head >= H), other=0.0
            )
            if not NORM_LAST:
                other_factor = tl.load(
                    q_factor + q_first + partner, mask=kept & turned & (head < H), other=0.0
                ) + tl.load(k_factor + k_first + partner, mask=kept & turned & (head >= H), other=0.0)
        await_previous(OVERLAP)
        place = row
        if FLAT:
            place = tl.load(place_of + row)
            used = tl.load(row_of + place) == row
        batch = place // tokens
        slot = tl.load(write + place)
        place_in_row = head
        if GROUPED:
            A: tl.constexpr = H // G
            of_key = head - H
            of_value = head - H - G
            place_in_row = tl.where(
                head < H,
                head // A * (A + 2) + head % A,
                tl.where(head < H + G, of_key * (A + 2) + A, of_value * (A + 2) + A + 1),
            )
        source = qkv + row * stride_row + place_in_row * D
        own = tl.load(source + channel, mask=inside, other=0.0)
        other = tl.load(source + partner, mask=inside & turned, other=0.0).to(tl.float32)
        angle = row
        if TABLE:
            angle = tl.maximum(tl.load(position + place), 0)
        entry = channel
        if BY_ANGLE:
            if PAIRS:
                entry = channel // 2
            else:
                entry = tl.where(low, channel, channel - half)
        c = tl.load(cos + angle * entries + entry, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + angle * entries + entry, mask=turned, other=0.0).to(tl.float32)
        value = own.to(tl.float32)
        if NORM and not NORM_LAST:
            if ALL:
                all_channels = tl.arange(0, ALL)
                whole = qkv + row * stride_row + all_channels
                q_all = tl.load(whole, mask=all_channels < H * D, other=0.0).to(tl.float32)
                k_all = tl.load(whole + H * D, mask=all_channels < G * D, other=0.0).to(tl.float32)
                q_scale = tl.rsqrt(tl.sum(q_all * q_all, 0) / (H * D) + q_eps)
                k_scale = tl.rsqrt(tl.sum(k_all * k_all, 0) / (G * D) + k_eps)
                scale = tl.where(head < H, q_scale, k_scale)
            else:
                scale = tl.rsqrt(tl.sum(value * value, 1)[:, None] / D + tl.where(head < H, q_eps, k_eps))
            # as the eager twin: the norm's result is rounded before it rotates
            value = (value * scale * own_factor).to(qkv.dtype.element_ty).to(tl.float32)
            other = (other * scale * other_factor).to(qkv.dtype.element_ty).to(tl.float32)
        rotated = tl.where(turned, value * c + tl.where(low, -other, other) * s, value).to(q_out.dtype.element_ty)
        if NORM and NORM_LAST:
            value = rotated.to(tl.float32)
            scale = tl.rsqrt(tl.sum(value * value, 1)[:, None] / D + tl.where(head < H, q_eps, k_eps))
            rotated = (value * scale * own_factor).to(q_out.dtype.element_ty)
        tl.store(q_out + (row * H + head) * D + channel, rotated, mask=inside & (head < H))
        spot = batch * stride_b + slot * stride_s + channel
        is_key = inside & (head >= H) & (head < H + G)
        if FLAT:
            is_key = is_key & used
        tl.store(keys + spot + (head - H) * stride_g, rotated.to(keys.dtype.element_ty), mask=is_key)
        is_value = inside & (head >= H + G)
        if FLAT:
            is_value = is_value & used
        tl.store(values + spot + (head - H - G) * stride_g, own, mask=is_value)
