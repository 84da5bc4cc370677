"""The end of a process in which libraries still have threads at work."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


class ProcessExit:
    """`leave` ends this process with its own exit code; before it, nothing changes.

    Gloo's threads release a collective's tensors when they get to it, and a daemon thread may be inside an operation of
    torch. One that asks for the interpreter while that is taken down aborts the process (exit code -6, "terminate
    called without an active exception", pytorch issue 190489), although all work was done. So the process ends once
    all exit functions have run, with Python intact.

    Make it before anything is imported that registers exit functions: Python runs the first registered last, and those
    registered before this one are left out.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._last)

    def leave(self, code: int, over: Callable[[], None] = lambda: None, *, at_once: bool = False) -> NoReturn:
        """End with `code`; SIGTERM no longer changes it.

        Args:
            over: called once SIGTERM is ignored: ends what took it until now (StartupStop.over).
            at_once: without exit functions and without waiting for threads, which may be stuck.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        over()
        self._code = code
        if at_once:
            self._last()
        sys.exit(code)

    def _last(self) -> None:
        if self._code is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(
                OSError, ValueError, AttributeError
            ):  # nobody reads it, it is closed, or was so from the start
                stream.flush()
        os._exit(self._code)
