"""Triton, where it is installed, and the question which tensors go to its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without Triton
    triton = tl = None

__all__ = ["tl", "triton", "wants_kernel"]


def wants_kernel(x: Tensor) -> bool:
    """Whether `x` goes to a Triton kernel: any tensor on a GPU but float64."""
    return triton is not None and x.is_cuda and x.dtype != torch.float64
