"""FLOPs of a training step, for MFU: the share of the device's speed that training uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from headstart.heads.base import Head


def step_flops(head: Head, rows: float, counts: Sequence[float], target_parameters: int = 0) -> float:
    """Floating-point operations of one pack: forward and backward of the head, and the target's forward if it is live.

    Args:
        rows, counts: see Head.multiply_adds.
        target_parameters: parameters of the target that every row passes through; 0 if features come from a store.
    """
    return 6 * head.multiply_adds(rows, counts) + 2.0 * target_parameters * rows


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The FLOP/s that MFU is a share of. None on a CPU: other programs share it, so its measured speed means little."""
    return matmul_flops(device, dtype) if device.type == "cuda" else None


def matmul_flops(device: torch.device, dtype: torch.dtype, size: int = 8192, runs: int = 20) -> float:
    """FLOP/s that a large matrix product reaches on this device: what MFU is measured against."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    wait: Callable[[], object] = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    seconds = []
    for number in range(runs + 2):
        wait()
        started = time.perf_counter()
        a @ b
        wait()
        if number >= 2:
            seconds.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(seconds)
