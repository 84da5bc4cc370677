"""Gradients that a forward pass adds to `.grad` itself, so that none waits in memory for the backward pass.

A loss that forms a matrix's gradient in its forward pass keeps it for the backward pass, which adds it to `.grad`: with
K output matrices, K more gradients of full size. A step that is known to differentiate the loss exactly once, with
factor 1, needs none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class AddsGradients:
    """Mixin of a module that can add gradients of its parameters to `.grad` in its forward pass.

    Attributes:
        adds_gradients: whether it may. `adding_gradients` sets it.
    """

    adds_gradients = False


@contextmanager
def adding_gradients(module: nn.Module) -> Iterator[None]:
    """While open, forward passes of `module` and its parts may add gradients to `.grad`.

    The caller promises that every parameter has a gradient, and that after each forward pass made here it runs
    `(sum_T * scale_T).sum().backward()` exactly once, with the `scale_T` that it gave to the head's loss. Nothing else
    may wait for these gradients (DDP, FSDP2).
    """
    parts = [part for part in module.modules() if isinstance(part, AddsGradients)]
    for part in parts:
        part.adds_gradients = True
    try:
        yield
    finally:
        for part in parts:
            part.adds_gradients = False
