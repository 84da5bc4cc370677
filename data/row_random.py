"""Random numbers of a row: they depend on its seed and position only, not on the batch that it is decoded in.

The generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, §7) on seed and position. It is made of integer
operations on the device, so that a captured CUDA graph draws new numbers at every replay.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """A 64-bit constant as the int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA, _FIRST, _SECOND = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's output for state `x`, int64 (bits of the unsigned result)."""
    x = x + _GAMMA
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def uniforms(seed_B: Tensor, position_B: Tensor) -> Tensor:
    """float64 [B] in [0, 1): one number per (seed, position), int64 both."""
    return _shifted(mix(seed_B ^ mix(position_B)), 11).double() * 2.0**-53


def draw_at(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The token at which the cumulative distribution [B, V] passes `uniform_B`: int64 [B].

    Tokens of probability 0 are never drawn.
    """
    total_BV = p_BV.double().cumsum(-1)
    index_B = (total_BV <= (uniform_B * total_BV[:, -1])[:, None]).sum(-1)
    # rounding may take the uniform number up to the whole: the token with which the sum becomes whole has mass
    last_B = (total_BV < total_BV[:, -1:]).sum(-1)
    return torch.minimum(index_B, last_B)


def draws_at(p_BV: Tensor, uniform_BC: Tensor) -> Tensor:
    """`draw_at` of several numbers a row, [B, C], float64: int64 [B, C]."""
    total_BV = p_BV.double().cumsum(-1)
    whole_B1 = total_BV[:, -1:].contiguous()
    index_BC = torch.searchsorted(total_BV, (uniform_BC * whole_B1).contiguous(), right=True)
    return torch.minimum(index_BC, torch.searchsorted(total_BV, whole_B1)).clamp(max=p_BV.shape[-1] - 1)
