"""How Triton kernels start: `launch` runs one; within `compile_ahead` it only compiles it, several at a time.

Triton compiles a kernel at its first launch, a third of a second of one core each. A decoding cycle has dozens, and
choosing among the ways of a product a hundred: one after the other they took most of a short evaluation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

try:
    import triton
except ImportError:  # CPU builds of torch come without Triton
    triton = None

#: threads that compile; each spends most of its time in the compiler's own code, outside Python
THREADS = 16
#: what makes tensors without writing them
UNWRITTEN = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
#: kernels that `launch` has compiled, within `compile_ahead`
_compiled: ContextVar[list[Any] | None] = ContextVar("compiled", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel, or within `compile_ahead` compile it."""
    compiled = _compiled.get()
    if compiled is None:
        kernel[grid](*arguments, **options)
    else:
        compiled.append(kernel.warmup(*arguments, grid=grid, **options))


def compiles_ahead() -> bool:
    """Whether this Triton compiles in several threads, for a GPU (its interpreter compiles nothing)."""
    return hasattr(triton, "AsyncCompileMode") and torch.cuda.is_available() and not triton.knobs.runtime.interpret


def compile_ahead(run: Callable[[], object]) -> None:
    """Call `run` with `launch` compiling kernels instead of launching them; then all of them are compiled and loaded.

    `run` computes with zeros: tensors that kernels would have written hold zeros, so that an index made of them is a
    valid one. The caller restores the state that `run` changes. `run` is not called where kernels are not compiled
    ahead (`compiles_ahead`): there they are compiled at their first launch, as ever.

    A kernel that does not compile, or that the card cannot hold, fails when it is launched.
    """
    if not compiles_ahead():
        return
    compiled: list[Any] = []
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        token = _compiled.set(compiled)
        try:
            with triton.AsyncCompileMode(pool, ignore_errors=True), _Zeros():
                run()
        finally:
            _compiled.reset(token)
        # loading compiles the launcher's C code, which takes as long as the kernel
        list(pool.map(_load, {id(kernel): kernel for kernel in map(_result, compiled) if kernel is not None}.values()))


def _result(kernel: Any) -> Any:
    """The compiled kernel, None where that failed."""
    return kernel.result(ignore_errors=True) if hasattr(kernel, "result") else kernel


def _load(kernel: Any) -> None:
    try:
        kernel.run  # noqa: B018 - a property that loads
    except (RuntimeError, triton.runtime.errors.OutOfResources):
        pass  # the launch will say it


class _Zeros(TorchDispatchMode):
    """New tensors hold zeros instead of what memory held."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in UNWRITTEN else made
