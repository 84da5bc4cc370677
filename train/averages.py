"""Averages of the weights over the steps (an exponential moving average, `train.average_decay`).

    average_1 = weights_1,    average_n = d_n · average_{n-1} + (1 - d_n) · weights_n,    d_n = min(decay, n / (n + 10))

Training goes on from the weights. What is validated, kept as the best head and handed on at the end are the averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

#: how many steps the first averages span at most, as a part of the steps so far: n / (n + WARMUP)
WARMUP = 10
#: what averages are called in a checkpoint, beside the optimiser's state
KEY = "average"


def rate_of(decay: float, step: int) -> float:
    """d_n, with n = `step`, counted from 1."""
    return min(decay, step / (step + WARMUP))


class Averages:
    """The averages of the parameters that `trained` names; nothing where `decay` is None.

    Args:
        decay: `train.average_decay`.
        trained: gives the trained parameters by name. Sharding replaces them, so they are asked for anew.
    """

    def __init__(self, decay: float | None, trained: Callable[[], dict[str, nn.Parameter]]):
        self.decay, self._trained = decay, trained
        self._average: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after `step` (from 1) into the averages. The host does not wait."""
        if self.decay is None:
            return
        trained = self._trained()
        if not self._average:
            self._average = {name: p.detach().clone() for name, p in trained.items()}
            return
        rate, averages = rate_of(self.decay, step), [self._average[name] for name in trained]
        torch._foreach_mul_(averages, rate)
        torch._foreach_add_(averages, [p.detach() for p in trained.values()], alpha=1.0 - rate)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """While open, the parameters hold the averages. Their memory stays where it is: CUDA graphs read it."""
        kept = {name: p.detach().clone() for name, p in self._trained().items()} if self._average else {}
        self.keep()
        try:
            yield
        finally:
            self._write(kept)

    def keep(self) -> None:
        """Give the parameters the averages for good."""
        self._write(self._average)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        trained = self._trained()
        for name, value in values.items():
            trained[name].copy_(value)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, average), shards where the parameters are in shards."""
        yield from self._average.items()

    def load(self, averages: dict[str, Tensor]) -> None:
        """Go on from saved averages, placed as the parameters are. None are kept where none are made."""
        self._average = dict(averages) if self.decay is not None else {}
