"""RMSNorm, and rotary embedding with the store into the KV buffers: one kernel each on CUDA, eager twins elsewhere.

Shape legend: R rows (B · M), B batch, M tokens of a forward, D hidden, h query heads, g kv heads, d head dim,
S slots of a KV buffer, W rotary channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from headstart.heads.elementwise import rotate_eager

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without Triton
    triton = None


#: a cache line of the GPUs that kernels prefetch on
LINE_BYTES = 128


def wants_kernel(x: Tensor) -> bool:
    """Whether `x` goes to a Triton kernel: on a GPU, in a floating dtype that kernels take."""
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
        _rms_norm_kernel[(rows,)](
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
    qkv_RC: Tensor, cos_RW: Tensor, sin_RW: Tensor, shape: RopeStore, keys: Tensor, values: Tensor, write_BM: Tensor
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values into their buffers.

    Args:
        qkv_RC: rows of cat(q, k, v), C = (h + 2g) · d.
        cos_RW, sin_RW: rotary tables of the rows (half-split layout; the first W channels turn).
        keys, values: [B, g, S, d], written at slots `write_BM`.
    Returns: queries [R, h, d].
    """
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
    qkv_RC: Tensor, cos_RW: Tensor, sin_RW: Tensor, shape: RopeStore, keys: Tensor, values: Tensor, write_BM: Tensor
) -> Tensor:
    """As rope_store_eager."""
    run = rope_store_kernel if wants_kernel(qkv_RC) else rope_store_eager
    return run(qkv_RC, cos_RW, sin_RW, shape, keys, values, write_BM)


def rope_store_kernel(
    qkv_RC: Tensor, cos_RW: Tensor, sin_RW: Tensor, shape: RopeStore, keys: Tensor, values: Tensor, write_BM: Tensor
) -> Tensor:
    rows, h, g, d = qkv_RC.shape[0], shape.heads, shape.kv_heads, shape.head_dim
    q_Rhd = qkv_RC.new_empty((rows, h, d))
    norm = shape.q_norm is not None and shape.k_norm is not None
    q_factor = shape.q_norm.factor_D if shape.q_norm is not None else qkv_RC
    k_factor = shape.k_norm.factor_D if shape.k_norm is not None else qkv_RC
    _rope_store_kernel[(rows, h + 2 * g)](
        qkv_RC, cos_RW.contiguous(), sin_RW.contiguous(), q_factor, k_factor, q_Rhd, keys, values,
        write_BM.contiguous(), write_BM.shape[1], qkv_RC.stride(0), keys.stride(0), keys.stride(1), keys.stride(2),
        cos_RW.shape[-1] // 2, shape.q_norm.eps if shape.q_norm is not None else 0.0, H=h, G=g, D=d,
        BLOCK=triton.next_power_of_2(d), NORM=norm, num_warps=1, **launch_options(qkv_RC.device),
    )  # fmt: skip
    return q_Rhd


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
        await_previous(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        channel = tl.arange(0, BLOCK)
        inside = channel < width
        value = tl.load(x + row * width + channel, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        by = tl.load(factor + channel, mask=inside, other=0.0)
        tl.store(out + row * width + channel, (value * scale * by).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _rope_store_kernel(
        qkv, cos, sin, q_factor, k_factor, q_out, keys, values, write,
        tokens, stride_row, stride_b, stride_g, stride_s, half, eps,
        H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One program per row and head: heads 0 … H-1 are queries, then G keys, then G values."""
        await_previous(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
        batch = row // tokens
        slot = tl.load(write + row)
        channel = tl.arange(0, BLOCK)
        inside = channel < D
        source = qkv + row * stride_row + head * D
        own = tl.load(source + channel, mask=inside, other=0.0)
        if head >= H + G:
            place = values + batch * stride_b + (head - H - G) * stride_g + slot * stride_s
            tl.store(place + channel, own, mask=inside)
        else:
            turned = channel < 2 * half
            low = channel < half
            partner = tl.where(low, channel + half, channel - half)
            value = own.to(tl.float32)
            other = tl.load(source + partner, mask=turned, other=0.0).to(tl.float32)
            if NORM:
                scale = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
                factor = q_factor
                if head >= H:
                    factor = k_factor
                value = value * scale * tl.load(factor + channel, mask=inside, other=0.0)
                other = other * scale * tl.load(factor + partner, mask=turned, other=0.0)
                # as the eager twin: the norm's result is rounded before it turns
                value = value.to(qkv.dtype.element_ty).to(tl.float32)
                other = other.to(qkv.dtype.element_ty).to(tl.float32)
            c = tl.load(cos + row * 2 * half + channel, mask=turned, other=1.0).to(tl.float32)
            s = tl.load(sin + row * 2 * half + channel, mask=turned, other=0.0).to(tl.float32)
            rotated = tl.where(turned, value * c + tl.where(low, -other, other) * s, value)
            if head < H:
                tl.store(q_out + (row * H + head) * D + channel, rotated.to(q_out.dtype.element_ty), mask=inside)
            else:
                place = keys + batch * stride_b + (head - H) * stride_g + slot * stride_s
                tl.store(place + channel, rotated.to(keys.dtype.element_ty), mask=inside)
