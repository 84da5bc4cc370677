"""RMSNorm, rotary embedding with the store into the KV buffers, a draft's inputs: one kernel each on CUDA, eager twins
elsewhere.

Shape legend: R rows (B · M), B batch, M tokens of a forward, D hidden, h query heads, g kv heads, d head dim,
S slots of a KV buffer, W rotary channels, T positions of a rotary table, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from headstart.eval.kernels.launch import launch
from headstart.heads.kernels.elementwise import rotate_eager

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without Triton
    triton = None


#: a cache line of the GPUs that kernels prefetch on
LINE_BYTES = 128
#: heads that one program of a per-head kernel takes, a warp each: a program per head would be thousands of tiny ones
HEADS_PER_PROGRAM = 4


def wants_kernel(x: Tensor) -> bool:
    """Whether `x` goes to a Triton kernel: on a GPU, integers or a floating dtype that kernels take."""
    return triton is not None and x.is_cuda and x.dtype != torch.float64


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it drains (Hopper's programmatic dependent launch).

    Such kernels wait for their predecessor's results on the device, before they read anything but weights.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a kernel launch: `OVERLAP` for the kernel, `launch_pdl` for the launcher."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device) else {"OVERLAP": False}


@dataclass(frozen=True)
class NormWeights:
    """An RMSNorm as what it multiplies by.

    Attributes:
        factor_D: float32, the weight as applied (Gemma's 1 + weight included).
        eps: added to the mean square.
    """

    factor_D: Tensor
    eps: float


def rms_norm_eager(x_RD: Tensor, norm: NormWeights) -> Tensor:
    """x / rms(x) · factor over the last axis, in float32, rounded once to the input's dtype."""
    wide = x_RD if x_RD.dtype == torch.float64 else x_RD.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return (scaled * norm.factor_D).to(x_RD.dtype)


def rms_norm(x_RD: Tensor, norm: NormWeights) -> Tensor:
    """As rms_norm_eager."""
    if not wants_kernel(x_RD):
        return rms_norm_eager(x_RD, norm)
    return rms_norm_kernel(x_RD, norm)


def rms_norm_kernel(x_RD: Tensor, norm: NormWeights) -> Tensor:
    x_RD = x_RD.contiguous()
    width = x_RD.shape[-1]
    out_RD = torch.empty_like(x_RD)
    rows = x_RD.numel() // width
    if rows:
        block = triton.next_power_of_2(width)
        warps = min(16, max(1, block // 512))
        launch(_rms_norm_kernel, (rows,),
            x_RD, norm.factor_D, out_RD, width, norm.eps, BLOCK=block, num_warps=warps,
            **launch_options(x_RD.device),
        )  # fmt: skip
    return out_RD


@dataclass(frozen=True)
class RopeStore:
    """What happens to fused q/k/v rows before attention.

    Attributes:
        heads, kv_heads, head_dim: of the layer.
        q_norm, k_norm: RMSNorm over each head's channels before rotation, or None.
    """

    heads: int
    kv_heads: int
    head_dim: int
    q_norm: NormWeights | None = None
    k_norm: NormWeights | None = None


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
        cos_RW, sin_RW: rotary tables of the rows (half-split layout; the first W channels turn); with `position_BM`
            [T, W], of all positions, of which each row takes its own (padding, which is negative, the first).
        keys, values: [B, g, S, d], written at slots `write_BM`.
    Returns: queries [R, h, d].
    """
    if position_BM is not None:
        at_R = position_BM.clamp(min=0).flatten()
        cos_RW, sin_RW = cos_RW[at_R], sin_RW[at_R]
    h, g, d = shape.heads, shape.kv_heads, shape.head_dim
    q, k, v = (part.unflatten(-1, (-1, d)) for part in qkv_RC.split([h * d, g * d, g * d], -1))
    if shape.q_norm is not None and shape.k_norm is not None:
        q, k = rms_norm_eager(q, shape.q_norm), rms_norm_eager(k, shape.k_norm)
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
    norm = shape.q_norm is not None and shape.k_norm is not None
    q_factor = shape.q_norm.factor_D if shape.q_norm is not None else qkv_RC
    k_factor = shape.k_norm.factor_D if shape.k_norm is not None else qkv_RC
    at = write_BM if position_BM is None else position_BM
    launch(_rope_store_kernel, (rows, triton.cdiv(h + 2 * g, HEADS_PER_PROGRAM)),
        qkv_RC, cos_RW.contiguous(), sin_RW.contiguous(), q_factor, k_factor, q_Rhd, keys, values,
        write_BM.contiguous(), at.contiguous(), write_BM.shape[1], qkv_RC.stride(0), keys.stride(0), keys.stride(1),
        keys.stride(2), cos_RW.shape[-1] // 2, shape.q_norm.eps if shape.q_norm is not None else 0.0,
        shape.k_norm.eps if shape.k_norm is not None else 0.0, H=h, G=g, D=d,
        HB=HEADS_PER_PROGRAM, BLOCK=triton.next_power_of_2(d), NORM=norm, TABLE=position_BM is not None,
        num_warps=HEADS_PER_PROGRAM,
        **launch_options(qkv_RC.device),
    )  # fmt: skip
    return q_Rhd


@dataclass(frozen=True)
class DraftInput:
    """What a draft layer's rows are made of.

    Attributes:
        embed_VD: embeddings of the target's tokens.
        norms: RMSNorms of the embedding and of the feature (EAGLE-3), or None (EAGLE-1).
    """

    embed_VD: Tensor
    norms: tuple[NormWeights, NormWeights] | None


def take_rows_eager(x: Tensor, row_Bn: Tensor) -> Tensor:
    """Rows `row_Bn` (int64, from 0) of each sequence of `x` [B, N, …]: [B, n, …]."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], row_Bn]


def take_rows(x: Tensor, row_Bn: Tensor) -> Tensor:
    """As take_rows_eager."""
    return (take_rows_kernel if wants_kernel(x) else take_rows_eager)(x, row_Bn)


def take_rows_kernel(x: Tensor, row_Bn: Tensor) -> Tensor:
    x = x.contiguous()
    (batch, before, *rest), count = x.shape, row_Bn.shape[1]
    taken, width = x.new_empty((batch, count, *rest)), math.prod(rest)
    if taken.numel():
        source, out = (part.view(torch.uint8) if part.dtype == torch.bool else part for part in (x, taken))
        block = min(1024, triton.next_power_of_2(width))
        launch(_take_rows_kernel, (batch * count, triton.cdiv(width, block)),
            source, row_Bn.contiguous(), out, count, before, width, BLOCK=block, num_warps=max(1, block // 256),
            **launch_options(x.device),
        )  # fmt: skip
    return taken


def move_slots_eager(whole: Tensor, source_BJ: Tensor, target_BJ: Tensor) -> None:
    """Copy slots `source` onto `target`, all at once: they may overlap.

    Args:
        whole: [layers, 2, B, g, S, d], changed in place.
        source_BJ, target_BJ: int64, slots of each row.
    """
    rows_B1 = torch.arange(whole.shape[2], device=whole.device)[:, None]
    # the gather makes a copy first
    whole[:, :, rows_B1, :, target_BJ] = whole[:, :, rows_B1, :, source_BJ]


def move_slots(whole: Tensor, source_BJ: Tensor, target_BJ: Tensor) -> None:
    """As move_slots_eager."""
    (move_slots_kernel if wants_kernel(whole) else move_slots_eager)(whole, source_BJ, target_BJ)


def move_slots_kernel(whole: Tensor, source_BJ: Tensor, target_BJ: Tensor) -> None:
    layers, two, batch, kv_heads, slots, d = whole.shape
    count = source_BJ.shape[1]
    launch(_move_slots_kernel, (layers * two * kv_heads, batch),
        whole, source_BJ.contiguous(), target_BJ.contiguous(), batch, kv_heads, slots, count,
        D=d, BD=triton.next_power_of_2(d), BJ=triton.next_power_of_2(count), num_warps=1,
        **launch_options(whole.device),
    )  # fmt: skip


def draft_input_eager(
    tokens_BN: Tensor, g_BfD: Tensor, source: DraftInput, under_BN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What a pass of the draft starts from.

    Args:
        tokens_BN: int64, drafted or committed tokens.
        g_BfD: features, or states of the rows that are drafted on from.
        under_BN: int64, row of `g_BfD` that each token goes with; None: the one at its place (f = N).
    Returns: (cat(embedding, feature) [B · N, 2D] in the feature's dtype, each normed where `source.norms` are; the
        feature that was taken [B · N, D]).
    """
    g_RD = (g_BfD if under_BN is None else take_rows(g_BfD, under_BN)).flatten(0, 1)
    e_RD, normed_RD = source.embed_VD[tokens_BN.flatten()].to(g_RD.dtype), g_RD
    if source.norms is not None:
        e_RD, normed_RD = rms_norm_eager(e_RD, source.norms[0]), rms_norm_eager(g_RD, source.norms[1])
    return torch.cat((e_RD, normed_RD), -1), g_RD


def draft_input(
    tokens_BN: Tensor, g_BfD: Tensor, source: DraftInput, under_BN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As draft_input_eager."""
    run = draft_input_kernel if wants_kernel(g_BfD) else draft_input_eager
    return run(tokens_BN, g_BfD, source, under_BN)


def draft_input_kernel(
    tokens_BN: Tensor, g_BfD: Tensor, source: DraftInput, under_BN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    g_BfD = g_BfD.contiguous()
    (batch, count), (before, width) = tokens_BN.shape, g_BfD.shape[1:]
    rows = batch * count
    if under_BN is None and before != count:
        raise ValueError(
            f"{count} tokens and {before} features per sequence: which goes with which is for under_BN to say"
        )
    out_RC = g_BfD.new_empty((rows, 2 * width))
    taken_RD = g_BfD.flatten(0, 1) if under_BN is None else g_BfD.new_empty((rows, width))
    # factors that are not read stand for those that are not there
    of_embedding, of_feature = source.norms or (NormWeights(g_BfD, 0.0), NormWeights(g_BfD, 0.0))
    if rows:
        block = triton.next_power_of_2(width)
        launch(_draft_input_kernel, (rows, 2),
            tokens_BN.contiguous(), source.embed_VD, g_BfD, tokens_BN if under_BN is None else under_BN.contiguous(),
            of_embedding.factor_D, of_feature.factor_D, out_RC, taken_RD, count, before, width,
            source.embed_VD.stride(0), of_embedding.eps, of_feature.eps, NORM=source.norms is not None,
            UNDER=under_BN is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
            **launch_options(g_BfD.device),
        )  # fmt: skip
    return out_RC, taken_RD


@dataclass(frozen=True)
class Picked:
    """One row of every sequence: queries [B, C], residual stream [B, D], position and slot int64 [B, 1]."""

    q_BC: Tensor
    residual_BD: Tensor
    position_B1: Tensor
    write_B1: Tensor


def pick_eager(q_RC: Tensor, residual_RD: Tensor, position_BM: Tensor, write_BM: Tensor, only_B1: Tensor) -> Picked:
    batch, count = position_BM.shape
    rows = torch.arange(batch, device=only_B1.device)
    q, residual = (x.unflatten(0, (batch, count))[rows, only_B1[:, 0]] for x in (q_RC, residual_RD))
    return Picked(q, residual, position_BM.gather(1, only_B1), write_BM.gather(1, only_B1))


def pick(q_RC: Tensor, residual_RD: Tensor, position_BM: Tensor, write_BM: Tensor, only_B1: Tensor) -> Picked:
    """Row `only_B1` (int64) of each sequence of M rows."""
    run = pick_kernel if wants_kernel(q_RC) else pick_eager
    return run(q_RC, residual_RD, position_BM, write_BM, only_B1)


def pick_kernel(q_RC: Tensor, residual_RD: Tensor, position_BM: Tensor, write_BM: Tensor, only_B1: Tensor) -> Picked:
    q_RC, residual_RD = q_RC.contiguous(), residual_RD.contiguous()
    batch, count = position_BM.shape
    picked = Picked(
        q_RC.new_empty((batch, q_RC.shape[1])), residual_RD.new_empty((batch, residual_RD.shape[1])),
        torch.empty_like(only_B1), torch.empty_like(only_B1),
    )  # fmt: skip
    widest = max(q_RC.shape[1], residual_RD.shape[1])
    launch(_pick_kernel, (batch, triton.cdiv(widest, 1024)),
        q_RC, residual_RD, position_BM.contiguous(), write_BM.contiguous(), only_B1.contiguous(), picked.q_BC,
        picked.residual_BD, picked.position_B1, picked.write_B1, count, q_RC.shape[1], residual_RD.shape[1],
        BLOCK=1024, num_warps=4, **launch_options(q_RC.device),
    )  # fmt: skip
    return picked


if triton is not None:

    @triton.jit
    def prefetch(at):
        """Ask for the cache lines at the given addresses, without waiting for them."""
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def await_previous(OVERLAP: tl.constexpr):
        """Let the next kernel come up, and wait for the results of the previous one."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()

    @triton.jit
    def _rms_norm_kernel(x, factor, out, width, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        channel = tl.arange(0, BLOCK)
        inside = channel < width
        by = tl.load(factor + channel, mask=inside, other=0.0)
        await_previous(OVERLAP)
        value = tl.load(x + row * width + channel, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        tl.store(out + row * width + channel, (value * scale * by).to(out.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["count", "before"])
    def _take_rows_kernel(x, at, out, count, before, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
        await_previous(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < width
        source = (row // count) * before + tl.load(at + row)
        tl.store(out + row * width + channel, tl.load(x + source * width + channel, mask=inside), mask=inside)

    @triton.jit(do_not_specialize=["batch", "slots", "count"])
    def _move_slots_kernel(
        whole, source, target, batch, kv_heads, slots, count,
        D: tl.constexpr, BD: tl.constexpr, BJ: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One head's keys or values of one row: all slots are read before the first one is written."""
        await_previous(OVERLAP)
        row = tl.program_id(1).to(tl.int64)
        part = tl.program_id(0) // kv_heads
        first = ((part * batch + row) * kv_heads + tl.program_id(0) % kv_heads) * slots
        move = tl.arange(0, BJ)
        channel = tl.arange(0, BD)[None, :]
        there = move < count
        inside = there[:, None] & (channel < D)
        taken = tl.load(source + row * count + move, mask=there, other=0)
        put = tl.load(target + row * count + move, mask=there, other=0)
        value = tl.load(whole + (first + taken)[:, None] * D + channel, mask=inside)
        tl.debug_barrier()
        tl.store(whole + (first + put)[:, None] * D + channel, value, mask=inside)

    @triton.jit(do_not_specialize=["count", "before"])
    def _draft_input_kernel(
        tokens, embedding, g, under, e_factor, g_factor, out, taken, count, before, width, stride_e, e_eps, g_eps,
        NORM: tl.constexpr, UNDER: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One program per row and half: the embedding, then the feature."""
        row = tl.program_id(0).to(tl.int64)
        channel = tl.arange(0, BLOCK)
        inside = channel < width
        if tl.program_id(1) == 0:
            if NORM:
                by = tl.load(e_factor + channel, mask=inside, other=0.0)
            await_previous(OVERLAP)
            token = tl.load(tokens + row)
            value = tl.load(embedding + token * stride_e + channel, mask=inside, other=0.0)
            # as the eager twin: rounded before the norm
            value = value.to(out.dtype.element_ty).to(tl.float32)
            if NORM:
                value = value * tl.rsqrt(tl.sum(value * value, 0) / width + e_eps) * by
            tl.store(out + row * 2 * width + channel, value.to(out.dtype.element_ty), mask=inside)
        else:
            if NORM:
                by = tl.load(g_factor + channel, mask=inside, other=0.0)
            await_previous(OVERLAP)
            of = row
            if UNDER:
                of = row // count * before + tl.load(under + row)
            value = tl.load(g + of * width + channel, mask=inside, other=0.0)
            if UNDER:
                tl.store(taken + row * width + channel, value, mask=inside)
            value = value.to(tl.float32)
            if NORM:
                value = value * tl.rsqrt(tl.sum(value * value, 0) / width + g_eps) * by
            tl.store(out + row * 2 * width + width + channel, value.to(out.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["count"])
    def _pick_kernel(
        q, residual, position, write, only, q_out, residual_out, position_out, write_out,
        count, q_width, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        await_previous(OVERLAP)
        batch = tl.program_id(0).to(tl.int64)
        row = batch * count + tl.load(only + batch)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        own = tl.load(q + row * q_width + channel, mask=channel < q_width, other=0.0)
        tl.store(q_out + batch * q_width + channel, own, mask=channel < q_width)
        stream = tl.load(residual + row * width + channel, mask=channel < width, other=0.0)
        tl.store(residual_out + batch * width + channel, stream, mask=channel < width)
        if tl.program_id(1) == 0:
            tl.store(position_out + batch, tl.load(position + row))
            tl.store(write_out + batch, tl.load(write + row))

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
