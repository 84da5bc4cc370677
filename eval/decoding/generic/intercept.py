"""Tools for transformers' modules: know which of them run, and replace the forwards of some for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def running_modules(model: nn.Module) -> Iterator[list[nn.Module]]:
    """While open, the yielded list holds the modules that are running, the innermost last."""
    running: list[nn.Module] = []
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda module, _: running.append(module)))
        handles.append(module.register_forward_hook(lambda *_: (running.pop(), None)[1], always_call=True))
    try:
        # compiled layers would run without the hooks of what is in them
        with torch.compiler.set_stance("force_eager"):
            yield running
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replaced_forwards(replacements: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """While open, calling a module runs `replacement(the module's own forward, *arguments)`.

    Args: replacements: (module, replacement).
    """
    replaced: list[tuple[nn.Module, Any]] = []
    try:
        for module, replacement in replacements:
            replaced.append((module, module.__dict__.get("forward")))
            module.forward = partial(replacement, module.forward)
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, before in reversed(replaced):
            del module.forward
            if before is not None:
                module.forward = before


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` applied to every tensor in it, through dicts, tuples and lists."""
    if isinstance(value, dict):
        return {name: map_tensors(entry, function) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(entry, function) for entry in value)
    return function(value) if isinstance(value, Tensor) else value
