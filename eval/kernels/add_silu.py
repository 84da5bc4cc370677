"""x + SiLU(y), the end of a residual block, as one kernel on CUDA, with its eager twin.

Shape legend: R rows, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.heads.kernels.device import wants_kernel


def add_silu_eager(x_RD: Tensor, y_RD: Tensor) -> Tensor:
    """x + SiLU(y) [R, D]; SiLU is rounded to the dtype before it is added, as in training."""
    return x_RD + F.silu(y_RD)


def add_silu(x_RD: Tensor, y_RD: Tensor) -> Tensor:
    """As add_silu_eager. Both may be columns of wider tensors."""
    return (add_silu_kernel if wants_kernel(x_RD) else add_silu_eager)(x_RD, y_RD)


def add_silu_kernel(x_RD: Tensor, y_RD: Tensor) -> Tensor:
    x_RD, y_RD = (each if each.stride(1) == 1 else each.contiguous() for each in (x_RD, y_RD))
    rows, width = x_RD.shape
    out_RD = torch.empty((rows, width), dtype=x_RD.dtype, device=x_RD.device)
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        launch(_add_silu_kernel, (rows, triton.cdiv(width, block)),
            x_RD, y_RD, out_RD, width, x_RD.stride(0), y_RD.stride(0), BLOCK=block, num_warps=max(1, block // 256),
            **launch_options(x_RD.device),
        )  # fmt: skip
    return out_RD


if triton is not None:

    @triton.jit
    def _add_silu_kernel(x, y, out, width, stride_x, stride_y, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
        """A part of one row."""
        await_previous(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < width
        left = tl.load(x + row * stride_x + channel, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(y + row * stride_y + channel, mask=inside, other=0.0).to(tl.float32)
        right = (right * tl.sigmoid(right)).to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + row * width + channel, (left + right).to(out.dtype.element_ty), mask=inside)
