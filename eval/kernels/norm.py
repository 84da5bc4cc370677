"""RMSNorm and LayerNorm as one kernel on CUDA, with its eager twin.

Shape legend: R rows, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.heads.kernels.device import wants_kernel
from headstart.heads.numerics import wide


@dataclass(frozen=True)
class NormWeights:
    """The weights of a norm.

    Attributes:
        factor_D: float32, what the normalised values are multiplied by (Gemma's 1 + weight).
        eps: added to the mean square.
        bias_D: float32, added at the end, or None.
        centred: LayerNorm: the mean is taken off first. False: RMSNorm.
    """

    factor_D: Tensor
    eps: float
    bias_D: Tensor | None = None
    centred: bool = False


def norm_eager(x_RD: Tensor, norm: NormWeights) -> Tensor:
    """x / rms(x) · factor (+ bias) over the last axis, in float32, rounded once to the input's dtype.

    A head's own norms round their weight to the input's dtype first, as in training (heads/kernels/elementwise.py).
    """
    x = wide(x_RD)
    if norm.centred:
        x = x - x.mean(-1, keepdim=True)
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.factor_D
    return (scaled if norm.bias_D is None else scaled + norm.bias_D).to(x_RD.dtype)


def apply_norm(x_RD: Tensor, norm: NormWeights) -> Tensor:
    """As norm_eager."""
    if not wants_kernel(x_RD):
        return norm_eager(x_RD, norm)
    return norm_kernel(x_RD, norm)


def norm_kernel(x_RD: Tensor, norm: NormWeights) -> Tensor:
    x_RD = x_RD.contiguous()
    width = x_RD.shape[-1]
    out_RD = torch.empty_like(x_RD)
    rows = x_RD.numel() // width
    if rows:
        block = triton.next_power_of_2(width)
        warps = min(16, max(1, block // 512))
        # without a bias the kernel gets a tensor that it does not read
        launch(_norm_kernel, (rows,),
            x_RD, norm.factor_D, norm.factor_D if norm.bias_D is None else norm.bias_D, out_RD, width, norm.eps,
            BLOCK=block, CENTRED=norm.centred, BIAS=norm.bias_D is not None, num_warps=warps,
            **launch_options(x_RD.device),
        )  # fmt: skip
    return out_RD


if triton is not None:

    @triton.jit
    def normalised(value, by, bias, inside, width, eps, CENTRED: tl.constexpr, BIAS: tl.constexpr):
        """The norm of one row in float32; `value` is 0 beyond its `width`."""
        if CENTRED:
            value = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
        scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        result = value * scale * by
        if BIAS:
            result += bias
        return result

    @triton.jit
    def _norm_kernel(
        x, factor, bias, out, width, eps,
        BLOCK: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        channel = tl.arange(0, BLOCK)
        inside = channel < width
        by = tl.load(factor + channel, mask=inside, other=0.0)
        shift = 0.0
        if BIAS:
            shift = tl.load(bias + channel, mask=inside, other=0.0)
        await_previous(OVERLAP)
        value = tl.load(x + row * width + channel, mask=inside, other=0.0).to(tl.float32)
        result = normalised(value, by, shift, inside, width, eps, CENTRED, BIAS)
        tl.store(out + row * width + channel, result.to(out.dtype.element_ty), mask=inside)
else:
    normalised = None
