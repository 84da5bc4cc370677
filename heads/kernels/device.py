"""Triton, where it is installed, and the question which tensors go to its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without Triton
    triton = tl = None

__all__ = ["eager_twins", "tl", "triton", "wants_kernel"]

_eager: ContextVar[bool] = ContextVar("eager", default=False)


def wants_kernel(x: Tensor) -> bool:
    """Whether `x` goes to a Triton kernel: any tensor on a GPU but float64, unless `eager_twins` is open."""
    return triton is not None and x.is_cuda and x.dtype != torch.float64 and not _eager.get()


@contextmanager
def eager_twins() -> Iterator[None]:
    """While open, tensor operations run in place of the Triton kernels, so that nothing has to be compiled."""
    token = _eager.set(True)
    try:
        yield
    finally:
        _eager.reset(token)
