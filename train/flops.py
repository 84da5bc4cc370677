"""Arithmetic of a training step, for the share of the device's speed that it uses (MFU)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from headstart.heads.base import Head
from headstart.heads.families.autoregressive import AutoregressiveHead
from headstart.heads.families.eagle3.head import Eagle3Head


def multiply_adds(head: Head, rows: float, counts: Sequence[float]) -> float:
    """Multiply-adds of one forward: matrices on the rows that need them, attention scores aside (they are < 3 %).

    Args:
        rows: of the pack, R. counts: positions supervised at depth 1, 2, …
    """
    own = sum(p.numel() for p in head.parameters())
    if not isinstance(head, Eagle3Head):
        teacher = getattr(head, "teacher", None)
        output = teacher.weight_VD.numel() if teacher is not None else 0
        if isinstance(head, AutoregressiveHead):  # the target's own output head on the supervised rows
            return head.depth * (own * rows + output * counts[0])
        shared = output * head.depth if getattr(head.config, "lm_head", "own") != "own" else 0
        return (own + shared) * counts[0]
    attention, mlp = head.midlayer.self_attn, head.midlayer.mlp
    packed = sum(linear.weight.numel() for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
    key_value = attention.k_proj.weight.numel() + attention.v_proj.weight.numel()
    per_row = attention.o_proj.weight.numel() + head.lm_head.weight.numel() + sum(p.numel() for p in mlp.parameters())
    # every row: fc, the embedding half of the projections, the feature half of keys and values (eagle3/ttt.py)
    shared = (head.fc.weight.numel() + packed / 2 + key_value / 2) * rows
    return shared + (packed - key_value) / 2 * counts[0] + packed / 2 * sum(counts[1:]) + per_row * sum(counts)


def step_flops(head: Head, rows: float, counts: Sequence[float], target_parameters: int = 0) -> float:
    """Floating-point operations of one pack: forward and backward of the head, and the target's forward if it is live.

    Args:
        rows, counts: see multiply_adds.
        target_parameters: that every row passes through; 0 where features come from a store.
    """
    return 6 * multiply_adds(head, rows, counts) + 2.0 * target_parameters * rows


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
