"""Convolutions of a block's slots before and after a sublayer, whose taps depend on the slot.

Shape legend: M = A · B slots of A blocks, B slots of a block, D hidden, T taps, P groups of channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BlockConvolution(nn.Module):
    """y_j = Σ_tap k_tap ⊙ x_{j - tap} over the slots j of a block, 0 before the first one.

    k = base_kernel + a part that depends on the slot and is alike for the channels of a group. One product of the
    sublayer's input gives that part of both convolutions. A new one changes nothing: tap 0 is 1, all else 0.
    """

    def __init__(self, hidden_size: int, taps: int, group: int):
        super().__init__()
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group), bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def before(self, x_MD: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """(what the sublayer reads, the taps for `after`: [M, T, P]). Args: size: B."""
        delta_M2TP = self.kernel_projection(x_MD).unflatten(-1, (2, self.taps, -1))
        return self._convolve(x_MD, delta_M2TP[:, 0], self.base_kernel[0], size), delta_M2TP[:, 1]

    def after(self, y_MD: Tensor, delta_MTP: Tensor, size: int) -> Tensor:
        """What the sublayer's result adds to the residual stream."""
        return self._convolve(y_MD, delta_MTP, self.base_kernel[1], size)

    def _convolve(self, x_MD: Tensor, delta_MTP: Tensor, base_TD: Tensor, size: int) -> Tensor:
        x_ABD = x_MD.unflatten(0, (-1, size))
        total = None
        for tap in range(self.taps):
            moved_MD = F.pad(x_ABD[:, : size - tap], (0, 0, tap, 0)).flatten(0, 1)
            kernel_MD = base_TD[tap].to(x_MD.dtype) + delta_MTP[:, tap].repeat_interleave(self.group, -1)
            total = kernel_MD * moved_MD if total is None else total + kernel_MD * moved_MD
        assert total is not None
        return total
