"""SIGTERM as an orderly end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from headstart.heads.errors import Terminated


@contextmanager
def terminable(after: signal.Handlers | None = None) -> Iterator[None]:
    """While open, SIGTERM raises Terminated (the training loop has its own way to end: it finishes its step first).

    Handlers can be set in the main thread only; elsewhere this does nothing.

    Args:
        after: what SIGTERM does from then on; None: what it did before.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if after is None else after)
