"""Arithmetic of a training step, for the share of the device's speed that it uses (MFU)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from headstart.heads.base import Head


def step_flops(head: Head, rows: float, counts: Sequence[float], target_parameters: int = 0) -> float:
    """Floating-point operations of one pack: forward and backward of the head, and the target's forward if it is live.

    Args:
        rows, counts: see Head.multiply_adds.
        target_parameters: that every row passes through; 0 where features come from a store.
    """
    return 6 * head.multiply_adds(rows, counts) + 2.0 * target_parameters * rows


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that MFU is a share of. None on a CPU: other programs use it as well, now and later, so that a share of
    what is measured now would say nothing."""
    return matmul_flops(device, dtype) if device.type == "cuda" else None


def matmul_flops(device: torch.device, dtype: torch.dtype, size: int = 8192, runs: int = 20) -> float:
    """FLOP/s that a large matrix product reaches on this GPU: what MFU is measured against."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for number in range(runs + 2):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        a @ b
        torch.cuda.synchronize(device)
        if number >= 2:
            seconds.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(seconds)
