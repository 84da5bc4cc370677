"""SIGTERM as an orderly end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from headstart.heads.errors import Terminated


@contextmanager
def terminable(after: signal.Handlers | None = None) -> Iterator[None]:
    """Inside, SIGTERM raises Terminated. (The training loop sets its own handler, which finishes the step first.)

    Python sets handlers in the main thread only; elsewhere this does nothing.

    Args:
        after: the handler of SIGTERM afterwards; None: the one before.
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
