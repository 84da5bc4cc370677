"""Precision rules shared by heads and losses."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """At least float32: float64 stays (reference tests), everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()
