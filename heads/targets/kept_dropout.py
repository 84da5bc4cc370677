"""The adapter's dropout where activations are recomputed: the backward pass must drop what the forward pass dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headstart.heads.targets.adapter import NAME, adapted_layers

#: the dropout modules of a decoder layer → what one call of the layer keeps, bool; False is dropped
Masks = dict[nn.Module, Tensor]


class KeptDropout(nn.Module):
    """Dropout that can drop the same inputs again, where activations are recomputed.

    torch would restore the state of its generator for that, which a captured graph cannot do. This keeps the mask, a
    byte per input, from the forward pass until the activations are recomputed. A pass may call a layer several times
    before it goes backward, so every call has masks of its own.

    Attributes: masks: of the call under way; None where nothing is recomputed.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.masks: Masks | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        mask = None if self.masks is None else self.masks.get(self)
        if mask is None:
            mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - self.p)
            if self.masks is not None:
                self.masks[self] = mask
        return x * mask * (1 / (1 - self.p))


def keep_dropout(model: nn.Module) -> None:
    """Let the adapter's dropout repeat what it drew (KeptDropout)."""
    for layer in adapted_layers(model).values():
        before = layer.lora_dropout[NAME]
        if isinstance(before, nn.Dropout):
            layer.lora_dropout[NAME] = KeptDropout(before.p).train(before.training)


@contextmanager
def dropping(layer: nn.Module, masks: Masks) -> Iterator[None]:
    """While open, the dropout inside a decoder layer takes its masks from `masks`. It draws missing ones and adds them.

    Args: masks: of one call of the layer: empty in its forward pass, and the same dict when it is computed again.
    """
    kept = [module for module in layer.modules() if isinstance(module, KeptDropout)]
    for module in kept:
        module.masks = masks
    try:
        yield
    finally:
        for module in kept:
            module.masks = None
