"""Copies to a device that do not make the host wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device | str, non_blocking: bool = False) -> Tensor:
    """`x` on `device`. With `non_blocking`, host memory is pinned first, as a copy from pageable memory would wait."""
    if non_blocking and x.device.type == "cpu" and torch.device(device).type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=non_blocking)
