"""The adapter's dropout where activations are recomputed: the backward pass must drop what the forward pass dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headstart.heads.targets.adapter import NAME, adapted_layers


class KeptDropout(nn.Module):
    """Dropout that can drop the same inputs again, where activations are recomputed.

    torch would restore the state of its generator for that, which a captured graph cannot do. This keeps the mask, a
    byte per input, from the forward pass until it is used again.

    Attributes: again: whether the next call repeats what the last one drew.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p, self.again = p, False
        self._mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.again and self._mask is not None:
            mask, self._mask = self._mask, None
        else:
            mask = self._mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - self.p)
        return x * mask * (1 / (1 - self.p))


def keep_dropout(model: nn.Module) -> None:
    """Let the adapter's dropout repeat what it drew (KeptDropout)."""
    for layer in adapted_layers(model).values():
        before = layer.lora_dropout[NAME]
        if isinstance(before, nn.Dropout):
            layer.lora_dropout[NAME] = KeptDropout(before.p).train(before.training)


@contextmanager
def dropping_again(layer: nn.Module, again: bool) -> Iterator[None]:
    """While open, the dropout inside a decoder layer draws, or repeats what it drew last."""
    kept = [module for module in layer.modules() if isinstance(module, KeptDropout)]
    for module in kept:
        module.again = again
    try:
        yield
    finally:
        for module in kept:
            module.again = False
