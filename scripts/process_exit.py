"""Ends a process with its own exit code, although threads of libraries still work."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


class ProcessExit:
    """`leave` ends this process with the exit code that it is given.

    Without it, Python's own shutdown can abort a process that has done all its work. Gloo's threads release the tensors
    of a collective some time after it, and a daemon thread may be inside an operation of torch. A thread that needs the
    interpreter during the shutdown aborts the process (exit code -6, "terminate called without an active exception",
    pytorch issue 190489). So `leave` runs the exit functions and then ends the process before the shutdown.

    Make this object before anything is imported that registers exit functions: Python runs the function that was
    registered first last, and functions registered before this object do not run.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._last)

    def leave(self, code: int, over: Callable[[], None] = lambda: None, *, at_once: bool = False) -> NoReturn:
        """End with `code`. SIGTERM no longer changes the code.

        Args:
            over: called once SIGTERM is ignored; ends what has taken the signal so far (StartupStop.over).
            at_once: run no exit functions and wait for no threads, because they may be stuck.
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
            with suppress(OSError, ValueError, AttributeError):  # the reader is gone, or the stream is closed
                stream.flush()
        os._exit(self._code)
