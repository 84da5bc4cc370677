"""RMSNorm, rotary embedding and gated activations: the project's one definition of each, in tensor operations.

On CUDA, rotary embedding and SwiGLU run as one kernel forward and one backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads.kernels.device import tl, triton, wants_kernel


def rotate_eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `cos.shape[-1]` channels of x [..., n, d] (half-split layout) by cos, sin [..., rotary]."""
    width = cos.shape[-1]
    turned, kept = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


def gated_eager(gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """act(gate) · up; None = SiLU, which makes it SwiGLU."""
    return (F.silu(gate) if act is None else act(gate)) * up


def rms_norm_eager(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last axis: float32 inside, the input's dtype outside (Llama's norm).

    The target's kernels multiply by a float32 factor (eval/kernels/norm.py): 1 + weight does not fit bfloat16.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As rotate_eager; the result is contiguous."""
    if wants_kernel(x):
        return _Rotate.apply(x, cos, sin)
    return rotate_eager(x, cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As gated_eager; only gate and up are kept for the backward pass."""
    if wants_kernel(gate):
        return _SwiGLU.apply(gate, up)
    return gated_eager(gate, up)


if triton is not None:

    @triton.jit
    def _rotate_kernel(x, cos, sin, out, count, heads, width, half, sign, BLOCK: tl.constexpr):
        """Element i of a head is rotated with its partner i ± half; channels past 2 · half are copied."""
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        channel = index % width
        row = index // (width * heads)
        turned = channel < 2 * half
        low = channel < half
        own = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
        partner = tl.where(low, index + half, index - half)
        other = tl.load(x + partner, mask=inside & turned, other=0.0).to(tl.float32)
        angle = row * (2 * half) + channel
        c = tl.load(cos + angle, mask=inside & turned, other=1.0).to(tl.float32)
        s = tl.load(sin + angle, mask=inside & turned, other=0.0).to(tl.float32) * sign
        value = own * c + tl.where(low, -other, other) * s
        tl.store(out + index, tl.where(turned, value, own).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _swiglu_kernel(gate, up, out, count, BLOCK: tl.constexpr):
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        g = tl.load(gate + index, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + index, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + index, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _swiglu_grad_kernel(gate, up, grad, d_gate, d_up, count, BLOCK: tl.constexpr):
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        g = tl.load(gate + index, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + index, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        tl.store(d_gate + index, (d * u * s * (1 + g * (1 - s))).to(d_gate.dtype.element_ty), mask=inside)
        tl.store(d_up + index, (d * g * s).to(d_up.dtype.element_ty), mask=inside)


BLOCK = 2048


def blocks(count: int) -> tuple[int]:
    """The grid of a kernel over `count` elements in blocks of BLOCK."""
    return (triton.cdiv(count, BLOCK),)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _rotate_kernel[blocks(x.numel())](
            x, cos, sin, out, x.numel(), x.shape[-2], x.shape[-1], cos.shape[-1] // 2, sign, BLOCK=BLOCK, num_warps=8
        )
    return out


class _Rotate(torch.autograd.Function):
    """The matrix is orthogonal, up to the scaling in cos and sin, so the gradient is the rotation with -sin."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor):
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0), None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        if gate.numel():
            _swiglu_kernel[blocks(gate.numel())](gate, up, out, gate.numel(), BLOCK=BLOCK, num_warps=8)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            _swiglu_grad_kernel[blocks(gate.numel())](
                gate, up, grad.contiguous(), d_gate, d_up, gate.numel(), BLOCK=BLOCK, num_warps=8
            )
        return d_gate, d_up
