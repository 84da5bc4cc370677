"""Attention that takes the positions of its queries from the length of the cache.

Llama 4 scales queries by position in layers without rope, and gets the positions as `length of the cache + index`. That
is not so in trees, nor in batches of contexts of different lengths. Such modules are observed: those that ask the cache
for its length. They run row by row, and the cache answers with a tensor that makes the positions come out right.
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
from headstart.eval.decoding.generic.intercept import cut, replaced_forwards


class ByRow:
    """Runs some modules row by row. Args: slots: of the cache that the modules ask."""

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
                outputs.append(forward(*cut(args, part), **cut(kwargs, part)))
        finally:
            self.slots.row = self.slots.past_M = None
        return _joined(outputs)


def _row(row: int, batch: int, value: Tensor) -> Tensor:
    return value[row : row + 1] if value.ndim > 1 and value.shape[0] == batch else value


def _joined(outputs: list[Any]) -> Any:
    """The outputs of all rows as those of one batch."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs)
    if isinstance(first, tuple | list):
        return type(first)(_joined(list(entries)) for entries in zip(*outputs, strict=True))
    return first
