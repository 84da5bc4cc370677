"""Where Triton kernels run: the one question that the callers of kernels ask."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
except ImportError:  # CPU builds of torch come without Triton
    triton = None


def wants_kernel(x: Tensor) -> bool:
    """Whether `x` goes to a Triton kernel: on a GPU, integers or a floating dtype that kernels take."""
    return triton is not None and x.is_cuda and x.dtype != torch.float64
