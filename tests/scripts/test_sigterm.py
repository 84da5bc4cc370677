"""SIGTERM before there is anything to save, while others count on a process, and after it has said how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from headstart.sigterm import StartupStop
from headstart.process_exit import ProcessExit

early, ending = StartupStop(), ProcessExit()
def term():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)
def saved(*_):
    print("saved")
    sys.exit(0)
"""


def test_a_signal_does_not_wait_for_ever_for_ranks_that_may_be_gone() -> None:
    more = "import headstart.sigterm; headstart.sigterm.HELD_S = 0.5; early.hold(); term(); time.sleep(20); sys.exit(9)"
    ended = subprocess.run([sys.executable, "-c", PROGRAM + more], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0 and "nothing is lost" in ended.stderr  # 9 after 20 s without the limit


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ("term(); sys.exit(9)", 0, ""),
        ("early.hold(); term(); print(early.received); ending.leave(2, early.over)", 2, "True"),
        ("early.hold(); term(); signal.signal(signal.SIGTERM, saved); early.over(); sys.exit(9)", 0, "saved"),
        ("early.hold(); signal.signal(signal.SIGTERM, saved); early.over(); term(); sys.exit(9)", 0, "saved"),
        ("import atexit; atexit.register(term); ending.leave(2, early.over)", 2, ""),
        ("early.over(); term()", -signal.SIGTERM, ""),
    ],
    ids=["before", "held, then a wrong recipe", "held", "handled", "after the end", "no handler"],
)
def test_sigterm_means_what_the_process_is_at(more: str, code: int, said: str) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM + more], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout.strip()) == (code, said), ended.stderr
    assert ("stopped by SIGTERM before the work began" in ended.stderr) == more.startswith("term")
