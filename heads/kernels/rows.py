"""Row-wise steps of a draft layer, forward and backward: one Triton kernel each on CUDA, else tensor operations.

Nothing here records autograd: training-time test calls forward and backward itself.

Shapes: n rows, H hidden, W channels of a row, I MLP width, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headstart.heads.kernels.device import tl, triton, wants_kernel
from headstart.heads.kernels.elementwise import BLOCK, blocks, gated_eager, rms_norm_eager, rotate_eager
from headstart.heads.numerics import wide

#: most programs of a kernel that sums over rows: each writes one partial sum
PARTIALS = 528


def put_rows(into_RW: Tensor, row_n: Tensor, from_nW: Tensor) -> None:
    """into[row] = from; the last axes of both are contiguous. On CUDA in units of 8 bytes where they fit."""
    into_RW, from_nW = into_RW.flatten(1), from_nW.flatten(1)
    if into_RW.is_cuda and all(
        (side * x.element_size()) % 8 == 0 for x in (into_RW, from_nW) for side in (x.shape[1], x.stride(0))
    ):
        into_RW, from_nW = into_RW.view(torch.int64), from_nW.view(torch.int64)
    into_RW.index_copy_(0, row_n, from_nW)


def add_rows(into_RW: Tensor, row_n: Tensor, from_nW: Tensor) -> None:
    """into[row] += from. A row may occur twice only where `from` is zero. The last axis of both is contiguous."""
    if wants_kernel(into_RW):
        _add_rows_triton(into_RW, row_n, from_nW)
    else:
        into_RW.index_add_(0, row_n, from_nW)


def rms_norm(x_nH: Tensor, weight_H: Tensor, eps: float, out_nH: Tensor | None = None) -> Tensor:
    """As rms_norm_eager, into `out` where it is given."""
    if out_nH is None:
        return rms_norm_eager(x_nH, weight_H, eps)
    if wants_kernel(x_nH):
        return _rms_norm_triton(x_nH, weight_H, eps, out_nH)
    return out_nH.copy_(rms_norm_eager(x_nH, weight_H, eps))


def rms_norm_backward(
    grad_nH: Tensor,
    x_nH: Tensor,
    weight_H: Tensor,
    eps: float,
    out_nH: Tensor,
    residual_nH: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Write the gradient of x, plus `residual`, to `out`; with `accumulate`, add it. Returns the weight's, float32."""
    if wants_kernel(x_nH):
        return _rms_norm_backward_triton(grad_nH, x_nH, weight_H, eps, out_nH, residual_nH, accumulate)
    x, grad, weight = wide(x_nH), wide(grad_nH), wide(weight_H)
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit = x * scale
    inner = grad * weight
    gradient = scale * (inner - unit * (inner * unit).mean(-1, keepdim=True))
    if residual_nH is not None:
        gradient = gradient + residual_nH
    out_nH.copy_(gradient + out_nH if accumulate else gradient)
    return (grad * unit).sum(0)


def gated(packed_nW: Tensor, out_nI: Tensor, act: Callable[[Tensor], Tensor] | None) -> None:
    """out = act(gate) · up with gate, up the two halves of `packed` [n, 2I]; act None = SiLU."""
    if act is None and wants_kernel(packed_nW):
        return _launch_gated(_gated_kernel, packed_nW, out_nI)
    gate, up = packed_nW.chunk(2, dim=-1)
    out_nI.copy_(gated_eager(gate, up, act))


def gated_backward(packed_nW: Tensor, grad_nI: Tensor, act: Callable[[Tensor], Tensor] | None) -> None:
    """Overwrite `packed` with its gradient, given the gradient of `gated`'s result."""
    if act is None and wants_kernel(packed_nW):
        return _launch_gated(_gated_grad_kernel, packed_nW, grad_nI)
    with torch.enable_grad():
        leaf = packed_nW.detach().clone().requires_grad_()
        gate, up = leaf.chunk(2, dim=-1)
        (gradient,) = torch.autograd.grad(gated_eager(gate, up, act), leaf, grad_nI)
    packed_nW.copy_(gradient)


def rotate_heads(
    x_nW: Tensor, cos: Tensor, sin: Tensor, turned: int, width: int, out_nW: Tensor | None = None
) -> Tensor:
    """Rope on the first `turned` heads of packed projections [n, heads · d]. Rows of input and output may be strided.

    cos, sin: float32 [n, rotary]. With -sin it computes the gradient, as that is the rotation back.
    """
    if wants_kernel(x_nW):
        return _rotate_heads_triton(x_nW, cos, sin, turned, width, out_nW)
    x = x_nW.unflatten(-1, (-1, width))
    rotated = torch.cat((rotate_eager(x[:, :turned], cos, sin), x[:, turned:]), dim=1).flatten(1)
    return rotated if out_nW is None else out_nW.copy_(rotated)


def collect_steps(grad_MW: Tensor, row_A: Tensor, counts: tuple[int, ...], rows: int, first: int = 0) -> Tensor:
    """Sum, for every row, the gradients of the anchors that read it: anchor a reads row_A[a] + first + s at step s.

    Args:
        grad_MW: the steps' gradients laid end to end, for the first `counts[s]` anchors each.
    Returns: [rows, W].
    """
    if wants_kernel(grad_MW):
        return _collect_triton(grad_MW, row_A, counts, rows, first)
    out = grad_MW.new_zeros(rows, grad_MW.shape[1])
    for step, grad in enumerate(grad_MW.split(counts)):
        out.index_add_(0, (row_A[: len(grad)] + first + step).clamp(max=rows - 1), grad)
    return out


if triton is not None:

    @triton.jit
    def _add_rows_kernel(into, row_of, source, width, into_stride, source_stride, BLOCK: tl.constexpr):
        index = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        place = into + tl.load(row_of + index) * into_stride + column
        value = tl.load(source + index * source_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(place, mask=inside, other=0.0).to(tl.float32) + value
        tl.store(place, total.to(into.dtype.element_ty), mask=inside)

    @triton.jit
    def _rms_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
        column = tl.arange(0, BLOCK)
        inside = column < width
        place = tl.program_id(0).to(tl.int64) * width + column
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        tl.store(out + place, (value * scale * w).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _rms_grad_kernel(
        grad, x, weight, residual, out, partial, rows, turns, width, eps, HAS_RESIDUAL: tl.constexpr,
        ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        program, programs = tl.program_id(0), tl.num_programs(0)
        column = tl.arange(0, BLOCK)
        inside = column < width
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for turn in range(turns):
            row = program + turn * programs
            here = inside & (row < rows)
            place = row.to(tl.int64) * width + column
            value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
            upstream = tl.load(grad + place, mask=here, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
            unit = value * scale
            inner = upstream * w
            found = scale * (inner - unit * (tl.sum(inner * unit, 0) / width))
            if HAS_RESIDUAL:
                found += tl.load(residual + place, mask=here, other=0.0).to(tl.float32)
            if ACCUMULATE:
                found += tl.load(out + place, mask=here, other=0.0).to(tl.float32)
            tl.store(out + place, found.to(out.dtype.element_ty), mask=here)
            total += upstream * unit
        tl.store(partial + program * width + column, total, mask=inside)

    @triton.jit
    def _gated_kernel(packed, out, count, width, BLOCK: tl.constexpr):
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        place = index // width * (2 * width) + index % width
        g = tl.load(packed + place, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(packed + place + width, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + index, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _gated_grad_kernel(packed, grad, count, width, BLOCK: tl.constexpr):
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        place = index // width * (2 * width) + index % width
        g = tl.load(packed + place, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(packed + place + width, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        tl.store(packed + place, (d * u * s * (1 + g * (1 - s))).to(packed.dtype.element_ty), mask=inside)
        tl.store(packed + place + width, (d * g * s).to(packed.dtype.element_ty), mask=inside)

    @triton.jit
    def _rotate_heads_kernel(
        x, cos, sin, out, count, heads, turned, width, half, stride, out_stride, BLOCK: tl.constexpr
    ):
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        channel = index % width
        row = index // (width * heads)
        place = row * stride + index % (width * heads)
        rotated = ((index // width) % heads < turned) & (channel < 2 * half)
        low = channel < half
        own = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(x + tl.where(low, place + half, place - half), mask=inside & rotated, other=0.0).to(tl.float32)
        angle = row * (2 * half) + channel
        c = tl.load(cos + angle, mask=inside & rotated, other=1.0)
        s = tl.load(sin + angle, mask=inside & rotated, other=0.0)
        value = own * c + tl.where(low, -other, other) * s
        place = row * out_stride + index % (width * heads)
        tl.store(out + place, tl.where(rotated, value, own).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _collect_kernel(
        grad, anchor_of_row, starts, out, first, width, STEPS: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for step in tl.static_range(STEPS):
            source = row - first - step
            anchor = tl.load(anchor_of_row + source, mask=source >= 0, other=-1).to(tl.int64)
            start = tl.load(starts + step)
            there = (anchor >= 0) & (anchor < tl.load(starts + step + 1) - start)
            total += tl.load(grad + (start + anchor) * width + column, mask=inside & there, other=0.0).to(tl.float32)
        tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


def _add_rows_triton(into_RW: Tensor, row_n: Tensor, from_nW: Tensor) -> None:
    count, width = from_nW.shape
    block = min(2048, triton.next_power_of_2(width))
    if count:
        _add_rows_kernel[(count, triton.cdiv(width, block))](
            into_RW, row_n, from_nW, width, into_RW.stride(0), from_nW.stride(0), BLOCK=block, num_warps=4
        )


def _rms_norm_triton(x_nH: Tensor, weight_H: Tensor, eps: float, out_nH: Tensor) -> Tensor:
    rows, width = x_nH.shape
    if rows:
        _rms_kernel[(rows,)](x_nH, weight_H, out_nH, width, eps, BLOCK=triton.next_power_of_2(width), num_warps=4)
    return out_nH


def _rms_norm_backward_triton(grad_nH, x_nH, weight_H, eps, out_nH, residual_nH, accumulate) -> Tensor:
    rows, width = x_nH.shape
    programs = max(1, min(PARTIALS, rows))
    partial = torch.empty(programs, width, dtype=torch.float32, device=x_nH.device)
    _rms_grad_kernel[(programs,)](
        grad_nH, x_nH, weight_H, out_nH if residual_nH is None else residual_nH, out_nH, partial, rows,
        triton.cdiv(rows, programs), width, eps,
        HAS_RESIDUAL=residual_nH is not None, ACCUMULATE=accumulate, BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return partial.sum(0)


def _launch_gated(kernel: Any, packed_nW: Tensor, x_nI: Tensor) -> None:
    if x_nI.numel():
        kernel[blocks(x_nI.numel())](packed_nW, x_nI, x_nI.numel(), x_nI.shape[1], BLOCK=BLOCK, num_warps=8)


def _rotate_heads_triton(x_nW, cos, sin, turned: int, width: int, out_nW: Tensor | None) -> Tensor:
    out_nW = torch.empty(x_nW.shape, dtype=x_nW.dtype, device=x_nW.device) if out_nW is None else out_nW
    if out_nW.numel():
        _rotate_heads_kernel[blocks(out_nW.numel())](
            x_nW, cos.contiguous(), sin.contiguous(), out_nW, out_nW.numel(), x_nW.shape[1] // width, turned, width,
            cos.shape[-1] // 2, x_nW.stride(0), out_nW.stride(0), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return out_nW


def _collect_triton(grad_MW: Tensor, row_A: Tensor, counts: tuple[int, ...], rows: int, first: int) -> Tensor:
    width, device = grad_MW.shape[1], grad_MW.device
    out = torch.empty(rows, width, dtype=grad_MW.dtype, device=device)
    most = max(counts, default=0)
    anchor_of_row = torch.full((rows,), -1, dtype=torch.int32, device=device)
    anchor_of_row.index_copy_(0, row_A[:most], torch.arange(most, dtype=torch.int32, device=device))
    # filled one by one: a copy from the host cannot be captured in a graph
    starts = torch.empty(len(counts) + 1, dtype=torch.int64, device=device)
    for step, start in enumerate(accumulate(counts, initial=0)):
        starts[step].fill_(start)
    block = min(2048, triton.next_power_of_2(width))
    if out.numel():
        _collect_kernel[(rows, triton.cdiv(width, block))](
            grad_MW, anchor_of_row, starts, out, first, width, STEPS=len(counts), BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out
