"""Launches Triton kernels, and compiles them in advance, several at a time (`compile_ahead`).

Triton compiles a kernel at its first launch, which takes a third of a second on one core. A decoding cycle has dozens
of kernels, and choosing how its products run compiles a hundred. One after the other they would take most of a short
evaluation.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from itertools import repeat
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.eval.kernels.capture import Uncapturable, capture, warm_up

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without Triton
    triton = tl = None

#: size of a cache line, for prefetching
LINE_BYTES = 128
#: threads that compile; each spends most of its time in the compiler's own code, outside Python
THREADS = 16
#: operations that return uninitialised memory
UNWRITTEN = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


class _Compiler:
    """Kernels that are being compiled. `kernels`: specialisation → Triton's kernel, or None once it is loaded."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.pool = pool
        self.kernels: dict[Any, Any] = {}

    def add(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        # layers launch the same kernels again and again
        key = (id(kernel), *map(_kind, arguments), *options.items())
        if key not in self.kernels:
            self.kernels[key] = kernel.warmup(*arguments, grid=grid, **options)

    def finish(self) -> None:
        waiting = [kernel for kernel in self.kernels.values() if kernel is not None]
        compiled = (kernel.result(ignore_errors=True) if hasattr(kernel, "result") else kernel for kernel in waiting)
        different = {id(kernel): kernel for kernel in compiled if kernel is not None}
        # loading compiles the launcher's C code, which takes as long as the kernel
        list(self.pool.map(_load, different.values(), repeat(torch.cuda.current_device())))
        self.kernels = dict.fromkeys(self.kernels)


_compiler: ContextVar[_Compiler | None] = ContextVar("compiler", default=None)
#: whether `launch` compiles instead of launching
_dry: ContextVar[bool] = ContextVar("dry", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel, or within `compile_ahead` compile it."""
    compiler = _compiler.get()
    if compiler is not None and _dry.get():
        compiler.add(kernel, grid, arguments, options)
    else:
        kernel[grid](*arguments, **options)


def compiles_ahead() -> bool:
    """Whether this Triton compiles in several threads, for a GPU (its interpreter compiles nothing)."""
    return hasattr(triton, "AsyncCompileMode") and torch.cuda.is_available() and not triton.knobs.runtime.interpret


def wake_compiler() -> None:
    """Let Triton set itself up in the background, which takes a second: call it before a target is loaded."""

    def wake() -> None:
        with suppress(Exception):  # e.g. there is no C compiler: the first launch reports it
            triton.runtime.driver.active.get_current_target()

    if compiles_ahead():
        threading.Thread(target=wake, daemon=True).start()


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (Hopper's programmatic dependent launch).

    Such a kernel waits on the device for the results of the one before it. Only weights may be read earlier.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a kernel launch: `OVERLAP` for the kernel, `launch_pdl` for the launcher."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device) else {"OVERLAP": False}


@contextmanager
def compiling() -> Iterator[None]:
    """While open, `compile_ahead` starts compiling and does not wait; at the end all kernels are compiled and loaded.

    A launch in between waits for its own kernel. Compiling disturbs what is timed: call `wait_compiled` first.
    """
    if not compiles_ahead() or _compiler.get() is not None:
        yield
        return
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        compiler = _Compiler(pool)
        token = _compiler.set(compiler)
        try:
            with triton.AsyncCompileMode(pool, ignore_errors=True):
                yield
            compiler.finish()
        finally:
            _compiler.reset(token)


def wait_compiled() -> None:
    """Wait for the kernels that `compile_ahead` has started to compile."""
    compiler = _compiler.get()
    if compiler is not None:
        compiler.finish()


def compile_ahead(run: Callable[[], object]) -> None:
    """Call `run` with `launch` compiling kernels instead of launching them.

    Tensors that kernels would have written hold zeros meanwhile, so that indices made of them are valid. The caller
    restores the state that `run` changes. Where this Triton cannot compile ahead (`compiles_ahead`), nothing is called,
    and a kernel is compiled at its first launch.

    Returns once all kernels are compiled; within `compiling` it returns at once. A kernel that does not compile, or
    that needs more than the card has, fails when it is launched.
    """
    if not compiles_ahead():
        return
    with compiling():
        token = _dry.set(True)
        try:
            with _Zeros():
                run()
        finally:
            _dry.reset(token)


def graph_time(run: Callable[[], object], replays: int = 5) -> float:
    """Milliseconds of one replay of `run` captured as a CUDA graph (median); uncaptured, if that cannot be."""
    warm_up(run)
    again = run
    with suppress(Uncapturable):
        again = capture(run)[0].replay
    again()
    again()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        again()
        mark.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))[replays // 2]


def host_time(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Milliseconds of `run` by the host's clock (median), after a run that is not timed."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) * 1e3


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued, so that it does not count in what is timed next."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _kind(argument: Any) -> Any:
    """What Triton specialises a kernel for: a tensor's dtype and alignment, the value of any other argument."""
    return (argument.dtype, argument.data_ptr() % 16) if isinstance(argument, torch.Tensor) else argument


def _load(kernel: Any, card: int) -> None:
    torch.cuda.set_device(card)  # a kernel is loaded for the thread's card, and a thread starts on the first one
    try:
        kernel.run  # noqa: B018 - a property that loads
    except (RuntimeError, triton.runtime.errors.OutOfResources):
        pass  # the launch reports it


class _Zeros(TorchDispatchMode):
    """New tensors hold zeros instead of what memory held."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in UNWRITTEN else made


if triton is not None:

    @triton.jit
    def prefetch(at):
        """Ask for the cache lines at the given addresses, without waiting for them."""
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def await_previous(OVERLAP: tl.constexpr):
        """Let the next kernel start, and wait for the results of the previous one."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
else:
    prefetch = await_previous = None
