"""Watching which module of a model runs, and running some modules in another way for the length of a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def running_modules(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Inside, the list holds the modules that run, the innermost last."""
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
def replaced_forwards(ways: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Inside, a module's forward is `way(its own forward, *arguments)`. Args: ways: (module, way)."""
    replaced: list[tuple[nn.Module, Any]] = []
    try:
        for module, way in ways:
            replaced.append((module, module.__dict__.get("forward")))
            module.forward = partial(way, module.forward)
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, before in reversed(replaced):
            del module.forward
            if before is not None:
                module.forward = before


def cut(value: Any, part: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in it replaced by `part` of it."""
    if isinstance(value, dict):
        return {name: cut(entry, part) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(cut(entry, part) for entry in value)
    return part(value) if isinstance(value, Tensor) else value
