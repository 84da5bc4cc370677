"""Attention that computes the positions of its queries from the length of the cache.

In layers without rope, Llama 4 scales queries by their position, which it computes as `length of the cache + index`.
That is wrong in trees, and in batches of contexts of different lengths. The modules that ask the cache for its length
run row by row instead. The length that they then get is a tensor: the position of each token minus its index.
Shape legend: B batch, M tokens of a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headstart.eval.decoding.cache import Slots
from headstart.eval.decoding.generic.intercept import map_tensors, replaced_forwards


class ByRow:
    """Runs some modules row by row. Args: slots: of the cache that the modules read."""

    def __init__(self, modules: list[nn.Module], slots: Slots):
        self.modules, self.slots = modules, slots

    def running(self, position_BM: Tensor) -> AbstractContextManager[None]:
        """The model's forward over tokens at these positions runs inside."""
        return replaced_forwards((module, partial(self._rows, position_BM)) for module in self.modules)

    def _rows(self, position_BM: Tensor, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch, count = position_BM.shape
        past_BM = position_BM - torch.arange(count, device=position_BM.device)
        outputs = []
        try:
            for row in range(batch):
                self.slots.row, self.slots.past_M = row, past_BM[row]
                part = partial(_row, row, batch)
                outputs.append(forward(*map_tensors(args, part), **map_tensors(kwargs, part)))
        finally:
            self.slots.row = self.slots.past_M = None
        return _joined(outputs)


def _row(row: int, batch: int, value: Tensor) -> Tensor:
    """One row of a tensor that has one entry per row of the batch; any other tensor as it is."""
    return value[row : row + 1] if value.ndim > 1 and value.shape[0] == batch else value


def _joined(outputs: list[Any]) -> Any:
    """The outputs of all rows as those of one batch."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs)
    if isinstance(first, tuple | list):
        return type(first)(_joined(list(entries)) for entries in zip(*outputs, strict=True))
    return first
