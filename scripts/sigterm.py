"""Signals end a process in order: SIGTERM while it starts (StartupStop) and while a command works (terminable), Ctrl-C
while a command works (interruptible).

A handler's exception may never reach the command. Python drops it inside a callback of the garbage collector, and a
library in C++ that is being imported turns it into an ImportError. Training that is at its end only notes the signal.
So `terminable` remembers that the command shall end, and `stop_if_asked` ends it before its next step.

Starting takes seconds to minutes, because torch is imported and the ranks meet. This module imports nothing that takes
time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from headstart.heads.errors import Terminated

#: most seconds that a signal waits for `over`; launchers kill after 30
HELD_S = 15.0
#: seconds until a signal is sent again whose exception Python dropped
DROPPED_S = 0.2


class StartupStop:
    """Takes SIGTERM from the first line of a process on.

    Until `hold`, the signal ends the process with exit code 0: no work has begun, so nothing is lost. From `hold` to
    `over` the other ranks count on this one, so the signal waits for `over`. It waits HELD_S at most, because the ranks
    that this one waits for may be gone. A thread takes the signal: Python runs no handler while a library blocks the
    main thread, as the meeting of the ranks does.
    """

    def __init__(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # threads started from here on inherit it
        self._lock, self._held = threading.Lock(), False
        self._over, self._received = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._wait, name="startup-stop", daemon=True)
        self._thread.start()

    def _end(self) -> None:
        print("stopped by SIGTERM before the work began; nothing is lost", file=sys.stderr, flush=True)
        os._exit(0)

    def _wait(self) -> None:
        began = 0.0
        while not self._over.is_set():
            if self.received and time.monotonic() - began > HELD_S:
                self._end()
            if signal.sigtimedwait({signal.SIGTERM}, 0.05) is None:
                continue
            with self._lock:
                if not self._held:
                    self._end()
                if not self.received:
                    began = time.monotonic()
                self._received.set()

    def hold(self) -> None:
        """From here on SIGTERM waits for `over`."""
        with self._lock:
            self._held = True

    @property
    def received(self) -> bool:
        """Whether SIGTERM came since `hold`."""
        return self._received.is_set()

    def over(self) -> None:
        """From here on the process's own handler gets the signal; one that waits is sent on to it."""
        self.hold()
        self._over.set()
        self._thread.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if self.received:
            self._received.clear()
            os.kill(os.getpid(), signal.SIGTERM)


class _Command:
    """The command inside `terminable`.

    Attributes: end: what it shall end with, None while no signal came. working: whether it is still inside.
    """

    def __init__(self) -> None:
        self.end: type[KeyboardInterrupt] | None = None
        self.working = True
        self._lock = threading.Lock()

    def over(self) -> None:
        with self._lock:
            self.working = False

    def again(self) -> None:
        """In a thread: send the signal again."""
        time.sleep(DROPPED_S)
        with self._lock:
            if self.working:
                os.kill(os.getpid(), signal.SIGTERM)


_command: _Command | None = None


def stop_soon(number: int) -> None:
    """Have the command end before its next step, as the signal `number` (SIGTERM, SIGINT) asks. Outside of `terminable`
    nothing happens.
    """
    if _command is not None:
        _command.end = KeyboardInterrupt if number == signal.SIGINT else Terminated


def stop_if_asked(error: Exception | None = None) -> None:
    """Raise Terminated or KeyboardInterrupt if a signal has asked the command to end. Args: error: the cause."""
    if _command is not None and _command.end is not None:
        raise _command.end from error


@contextmanager
def terminable(after: signal.Handlers | None = None) -> Iterator[None]:
    """Inside, SIGTERM raises Terminated. (The training loop sets its own handler, which finishes the step first.)

    The signal comes again where Python drops that exception. An error after the signal becomes Terminated: a library
    made it of that exception, or work was broken off. Python sets handlers in the main thread only; in another thread
    this does nothing.

    Args:
        after: the handler of SIGTERM afterwards; None restores the one before.
    """
    global _command
    command, outer, hook = _Command(), _command, sys.unraisablehook

    def end(number: int, _frame: FrameType | None) -> None:
        stop_soon(number)
        raise Terminated

    def dropped(told: sys.UnraisableHookArgs) -> None:
        if not isinstance(told.exc_value, Terminated):
            hook(told)
            return
        with suppress(RuntimeError):  # no thread starts any more: the process is ending
            start_new_thread(command.again, ())  # not a Thread: its start may be what the signal interrupted

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:
        yield
        return
    _command, sys.unraisablehook = command, dropped
    try:
        yield
    except Exception as error:
        stop_if_asked(error)
        raise
    finally:
        command.over()
        _command, sys.unraisablehook = outer, hook
        signal.signal(signal.SIGTERM, before if after is None else after)


@contextmanager
def interruptible(tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, Ctrl-C says at once what it does, and raises KeyboardInterrupt as it does otherwise.

    Python sets handlers in the main thread only; in another thread this does nothing. Where Ctrl-C is ignored or
    handled otherwise, it stays so.

    Args: tell: says a message; it may be called while anything is interrupted.
    """
    told = False

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal told
        if not told:
            told = True
            tell("stopping: what is finished is kept; Ctrl-C again to stop now")
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
