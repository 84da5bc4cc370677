"""SIGTERM while a process still starts: importing torch and meeting the other ranks take seconds to minutes."""

from __future__ import annotations

import os
import signal
import sys
import threading


class EarlyStop:
    """Until `over`, SIGTERM ends the process with exit code 0: nothing has been begun that could be lost.

    A thread waits for the signal, because a Python handler does not run while a library blocks the main thread (a
    rendezvous does). Imports nothing that takes time.
    """

    def __init__(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # threads started from here on inherit it
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="early-stop", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        while not self._over.is_set():
            if signal.sigtimedwait({signal.SIGTERM}, 0.05) is not None:
                print("stopped by SIGTERM before the work began; nothing is lost", file=sys.stderr, flush=True)
                os._exit(0)

    def over(self) -> None:
        """From here on the handler that is installed gets the signal, one that arrives meanwhile included."""
        self._over.set()
        self._thread.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
