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


def matmul_flops(device: torch.device, dtype: torch.dtype, size: int | None = None, runs: int = 20) -> float:
    """FLOP/s that a large matrix product reaches on this device: what MFU is measured against.

    On a CPU others run in between, for longer than a product takes: the fastest run is what the device reaches.
    """
    cuda = device.type == "cuda"
    size = size or (8192 if cuda else 512)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for number in range(runs + 2):
        if cuda:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        a @ b
        if cuda:
            torch.cuda.synchronize(device)
        if number >= 2:
            seconds.append(time.perf_counter() - started)
    return 2 * size**3 / (statistics.median(seconds) if cuda else min(seconds))
