"""Compiling ahead: kernels do not run, and what they would have written is zero."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.eval.kernels import launch as launch_module
from headstart.eval.kernels.launch import _Zeros, compile_ahead, launch

#: by thread: its card
CARDS = threading.local()


class Kernel:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.said.append(("launched", grid, arguments, options))

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
        self.said.append(("compiled", grid, arguments, options))
        return Compiled(self.said)


class Compiled:
    """Loaded as Triton's own: by the first look at `run`, for the card of the thread that looks."""

    def __init__(self, said: list[Any]) -> None:
        self._said = said

    @property
    def run(self) -> None:
        self._said.append(("loaded", getattr(CARDS, "card", 0)))


def test_nothing_is_called_where_nothing_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "compiles_ahead", lambda: False)
    compile_ahead(lambda: pytest.fail("called"))


def test_kernels_compile_ahead_and_launch_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[ThreadPoolExecutor] = []
    fake = SimpleNamespace(
        AsyncCompileMode=lambda pool, ignore_errors: pools.append(pool) or nullcontext(),
        runtime=SimpleNamespace(errors=SimpleNamespace(OutOfResources=MemoryError)),
    )
    monkeypatch.setattr(launch_module, "triton", fake)
    monkeypatch.setattr(launch_module, "compiles_ahead", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda card: setattr(CARDS, "card", card))
    kernel = Kernel()
    compile_ahead(lambda: launch(kernel, (3,), "x", BLOCK=4))
    assert len(pools) == 1
    assert kernel.said == [("compiled", (3,), ("x",), {"BLOCK": 4}), ("loaded", 3)]
    launch(kernel, (3,), "x", BLOCK=4)
    assert kernel.said[-1] == ("launched", (3,), ("x",), {"BLOCK": 4})
    with pytest.raises(ZeroDivisionError):
        compile_ahead(lambda: 1 / 0)
    launch(kernel, (1,))
    assert kernel.said[-1][0] == "launched"


def test_a_compiler_that_does_not_wake_is_left_to_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a C compiler: no traceback of a thread beside the message."""
    asked, shown = [], []

    def no_compiler() -> None:
        asked.append(1)
        raise RuntimeError("Failed to find C compiler")

    fake = SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=SimpleNamespace())))
    fake.runtime.driver.active.get_current_target = no_compiler
    monkeypatch.setattr(launch_module, "triton", fake)
    monkeypatch.setattr(launch_module, "compiles_ahead", lambda: True)
    monkeypatch.setattr(threading, "excepthook", shown.append)
    before = set(threading.enumerate())
    launch_module.wake_compiler()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert asked == [1] and not shown


def test_unwritten_tensors_are_zero() -> None:
    like = torch.full((64, 64), 7.0)
    with torch.inference_mode(), _Zeros():
        made = [
            torch.empty(64, 64),
            like.new_empty((64, 64)),
            torch.empty_like(like),
            torch.empty_strided((64, 64), (1, 64)),
            like.new_empty_strided((64, 64), (1, 64)),
        ]
        full = torch.full((2,), 3.0)
    assert all(not bool(tensor.any()) for tensor in made) and full.tolist() == [3.0, 3.0]
