"""RMSNorm of every head's query and key, then its rotation (Qwen3), forward and backward: one kernel each on CUDA.

Nothing here records autograd. Several layers' keys may lie side by side in a row, each with a norm of its own.

Shape legend: n rows, L layers side by side, H heads of a layer (queries, then keys; more may follow), D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.kernels.device import tl, triton, wants_kernel
from headstart.heads.kernels.elementwise import rms_norm_eager, rotate_eager
from headstart.heads.kernels.rows import PARTIALS
from headstart.heads.numerics import wide


@dataclass(frozen=True)
class HeadNorms:
    """The norms' weights [L, 2, D], queries' before keys', and how many heads of a layer are of either kind."""

    weight_L2D: Tensor
    queries: int
    keys: int
    eps: float

    @property
    def heads(self) -> int:
        """Heads that are normed and rotated."""
        return self.queries + self.keys

    @property
    def kind_H(self) -> Tensor:
        """int64: 0 for queries, 1 for keys."""
        return (torch.arange(self.heads, device=self.weight_L2D.device) >= self.queries).long()


def norm_rotate(x_nLHD: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor) -> Tensor:
    """The first `norms.heads` heads of every layer, normed and rotated: [n, L, heads, D], contiguous.

    Args: x: rows and layers may be strided. cos, sin: float32 [n, rotary].
    """
    if wants_kernel(x_nLHD):
        return _norm_rotate_triton(x_nLHD, norms, cos, sin)
    return _eager(x_nLHD[:, :, : norms.heads], norms.weight_L2D, norms, cos, sin).contiguous()


def norm_rotate_backward(
    grad_nLHD: Tensor, x_nLHD: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor, out_nLHD: Tensor
) -> Tensor:
    """Write the gradient of the first `norms.heads` heads to those of `out`. Returns the weights', float32 [L, 2, D].

    Args: grad: of norm_rotate's result, contiguous. x: its argument. out: no memory of grad or x.
    """
    if wants_kernel(x_nLHD):
        return _norm_rotate_backward_triton(grad_nLHD, x_nLHD, norms, cos, sin, out_nLHD)
    with torch.enable_grad():
        x = wide(x_nLHD[:, :, : norms.heads].detach()).requires_grad_()
        weight = wide(norms.weight_L2D.detach()).requires_grad_()
        result = _eager(x, weight, norms, cos, sin)
        d_x, d_weight = torch.autograd.grad(result, (x, weight), wide(grad_nLHD))
    out_nLHD[:, :, : norms.heads] = d_x
    return d_weight


def _eager(x_nLHD: Tensor, weight_L2D: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor) -> Tensor:
    weight_LHD = weight_L2D[:, norms.kind_H].to(x_nLHD.dtype)
    unit = rms_norm_eager(x_nLHD, torch.ones_like(weight_LHD[0, 0]), norms.eps)
    return rotate_eager(unit * weight_LHD, cos[:, None], sin[:, None])


if triton is not None:

    @triton.jit
    def _lines(line, layers, row_stride, layer_stride, head, WIDTH: tl.constexpr):
        """Offset of each head of a layer of a row."""
        return (line // layers).to(tl.int64) * row_stride + (line % layers) * layer_stride + head * WIDTH

    @triton.jit
    def _norm_rotate_kernel(
        x, weight, cos, sin, out, layers, queries, heads, half, row_stride, layer_stride, eps, WIDTH: tl.constexpr,
        D: tl.constexpr, HEADS: tl.constexpr,
    ):  # fmt: skip
        line = tl.program_id(0)
        head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
        inside = (head < heads)[:, None] & (column < WIDTH)[None, :]
        low, turned = column < half, column < 2 * half
        partner = tl.where(low, column + half, column - half)
        source = x + _lines(line, layers, row_stride, layer_stride, head, WIDTH)[:, None]
        norm = weight + ((line % layers) * 2 + (head >= queries).to(tl.int32))[:, None] * WIDTH
        own = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
        other = tl.load(source + partner[None, :], mask=inside & turned[None, :], other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(own * own, 1) / WIDTH + eps)[:, None]
        own *= scale * tl.load(norm + column[None, :], mask=inside, other=0.0).to(tl.float32)
        other *= scale * tl.load(norm + partner[None, :], mask=inside & turned[None, :], other=0.0).to(tl.float32)
        angle = (line // layers).to(tl.int64) * (2 * half) + column
        c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)[None, :]
        s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)[None, :]
        value = own * c + tl.where(low[None, :], -other, other) * s
        place = out + (line.to(tl.int64) * heads + head)[:, None] * WIDTH + column[None, :]
        tl.store(place, value.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _norm_rotate_grad_kernel(
        grad, x, weight, cos, sin, out, partial, lines, turns, layers, queries, heads, half, row_stride, layer_stride,
        out_row_stride, out_layer_stride, eps, WIDTH: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    ):  # fmt: skip
        """The number of programs is a multiple of the layers: all lines of a program are of one layer."""
        program, programs = tl.program_id(0), tl.num_programs(0)
        head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
        low, turned = column < half, column < 2 * half
        partner = tl.where(low, column + half, column - half)
        of_query = (head < queries)[:, None]
        there = (head < heads)[:, None] & (column < WIDTH)[None, :]
        norm = weight + ((program % layers) * 2 + (head >= queries).to(tl.int32))[:, None] * WIDTH
        w = tl.load(norm + column[None, :], mask=there, other=0.0).to(tl.float32)
        total_q, total_k = tl.zeros((D,), dtype=tl.float32), tl.zeros((D,), dtype=tl.float32)
        for turn in range(turns):
            line = program + turn * programs
            inside = there & (line < lines)
            source = x + _lines(line, layers, row_stride, layer_stride, head, WIDTH)[:, None]
            upstream = grad + (line.to(tl.int64) * heads + head)[:, None] * WIDTH
            own = tl.load(upstream + column[None, :], mask=inside, other=0.0).to(tl.float32)
            other = tl.load(upstream + partner[None, :], mask=inside & turned[None, :], other=0.0).to(tl.float32)
            angle = (line // layers).to(tl.int64) * (2 * half) + column
            here = turned & (line < lines)
            c = tl.load(cos + angle, mask=here, other=1.0).to(tl.float32)[None, :]
            s = tl.load(sin + angle, mask=here, other=0.0).to(tl.float32)[None, :]
            back = own * c + tl.where(low[None, :], other, -other) * s
            value = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
            unit, inner = value * scale, back * w
            found = scale * (inner - unit * (tl.sum(inner * unit, 1) / WIDTH)[:, None])
            place = out + _lines(line, layers, out_row_stride, out_layer_stride, head, WIDTH)[:, None]
            tl.store(place + column[None, :], found.to(out.dtype.element_ty), mask=inside)
            share = back * unit
            total_q += tl.sum(tl.where(of_query, share, 0.0), 0)
            total_k += tl.sum(tl.where(of_query, 0.0, share), 0)
        place = partial + ((program * tl.num_programs(1) + tl.program_id(1)) * 2) * WIDTH + column
        tl.store(place, total_q, mask=column < WIDTH)
        tl.store(place + WIDTH, total_k, mask=column < WIDTH)


def _sizes(width: int, heads: int) -> dict[str, int]:
    """Each program takes a few heads of a row: 2,048 numbers at most."""
    padded = triton.next_power_of_2(width)
    return {"WIDTH": width, "D": padded, "HEADS": min(triton.next_power_of_2(heads), max(1, 2048 // padded))}


def _norm_rotate_triton(x_nLHD: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor) -> Tensor:
    rows, layers, _, width = x_nLHD.shape
    out = torch.empty(rows, layers, norms.heads, width, dtype=x_nLHD.dtype, device=x_nLHD.device)
    sizes = _sizes(width, norms.heads)
    if out.numel():
        _norm_rotate_kernel[(rows * layers, triton.cdiv(norms.heads, sizes["HEADS"]))](
            x_nLHD, norms.weight_L2D, cos.contiguous(), sin.contiguous(), out, layers, norms.queries, norms.heads,
            cos.shape[-1] // 2, x_nLHD.stride(0), x_nLHD.stride(1), norms.eps, **sizes, num_warps=4,
        )  # fmt: skip
    return out


def _norm_rotate_backward_triton(grad_nLHD, x_nLHD, norms: HeadNorms, cos, sin, out_nLHD) -> Tensor:
    rows, layers, _, width = x_nLHD.shape
    sizes = _sizes(width, norms.heads)
    chunks, programs = triton.cdiv(norms.heads, sizes["HEADS"]), layers * max(1, min(PARTIALS // layers, rows))
    partial = torch.empty(programs // layers, layers, chunks, 2, width, dtype=torch.float32, device=x_nLHD.device)
    _norm_rotate_grad_kernel[(programs, chunks)](
        grad_nLHD, x_nLHD, norms.weight_L2D, cos.contiguous(), sin.contiguous(), out_nLHD, partial, rows * layers,
        triton.cdiv(rows * layers, programs), layers, norms.queries, norms.heads, cos.shape[-1] // 2, x_nLHD.stride(0),
        x_nLHD.stride(1), out_nLHD.stride(0), out_nLHD.stride(1), norms.eps, **sizes, num_warps=4,
    )  # fmt: skip
    return partial.sum((0, 2))
