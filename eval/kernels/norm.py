"""RMSNorm as one kernel on CUDA, with its eager twin.

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
    """The weights of an RMSNorm.

    Attributes:
        factor_D: float32, what the normalised values are multiplied by (Gemma's 1 + weight).
        eps: added to the mean square.
    """

    factor_D: Tensor
    eps: float


def norm_eager(x_RD: Tensor, norm: NormWeights) -> Tensor:
    """x / rms(x) · factor over the last axis, in float32, rounded once to the input's dtype.

    A head's own norms round their weight to the input's dtype first, as in training (heads/kernels/elementwise.py).
    """
    x = wide(x_RD)
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
    return (scaled * norm.factor_D).to(x_RD.dtype)


def rms_norm(x_RD: Tensor, norm: NormWeights) -> Tensor:
    """As norm_eager."""
    if not wants_kernel(x_RD):
        return norm_eager(x_RD, norm)
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


if triton is not None:

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
