"""Runs code in a terminal of 80 columns, and says what stood on its screen."""

from __future__ import annotations

import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import Callable, Sequence
from fcntl import ioctl


def in_terminal(
    work: Callable[[], object], columns: int = 80, stop_after: Sequence[str] = (),
    answers: Sequence[tuple[str, str]] = (),
) -> tuple[str, int]:  # fmt: skip
    """What a forked process that does `work` writes to a terminal of so many columns, and its exit code.

    Args:
        stop_after: Ctrl-C is pressed once for each of these texts, when it was written, in this order.
        answers: (what the process asks, what is typed then), in this order.
    """
    waiting, presses = list(answers), list(stop_after)
    process, terminal = pty.fork()
    if process == 0:
        code = 99
        try:
            for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
                os.environ.pop(name, None)
            os.environ["TERM"] = "xterm-256color"
            signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
            ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115  until the end
            code = int(work() or 0)  # type: ignore[call-overload]
        except KeyboardInterrupt:
            code = 130
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    written = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the process has ended
            break
        if not piece:
            break
        written += piece
        if waiting and waiting[0][0].encode() in written:
            os.write(terminal, waiting.pop(0)[1].encode() + b"\r")
        if presses and presses[0].encode() in written:
            presses.pop(0)
            os.write(terminal, b"\x03")
    os.close(terminal)
    return written.decode(), os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def lines_of(written: str) -> list[str]:
    """What stood in any line of the terminal at any time, without colours."""
    return [line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)) if line.strip()]
