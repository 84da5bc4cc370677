"""A signal asks a training run to end; the run saves first."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopSignal:
    """While open, SIGTERM and a first SIGINT only set `received`. A second SIGINT interrupts at once.

    Python sets handlers in the main thread only; in another thread this does nothing.

    Args: told: called by the handler with the first signal's number. It may interrupt anything, so it must not print.
    """

    def __init__(self, told: Callable[[int], None] = lambda number: None) -> None:
        self.received: int | None = None
        self._told = told
        self._previous: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        first, self.received = self.received is None, number
        if first:
            self._told(number)

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
