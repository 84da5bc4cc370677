"""SIGTERM before there is anything to save, while others count on a process, and after it has said how it ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from headstart.heads.errors import Terminated
from headstart.pipeline.markers import Markers
from headstart.sigterm import stop_if_asked, stop_soon, terminable

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


def test_a_signal_that_python_drops_comes_again() -> None:
    class Node:
        pass

    node = Node()
    node.itself = node  # the garbage collector frees it  # type: ignore[attr-defined]
    kept = weakref.ref(node, lambda _: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)])
    hook = sys.unraisablehook
    with pytest.raises(Terminated), terminable():
        del node
        gc.collect()
        assert kept() is None
        for _ in range(40):
            time.sleep(0.1)
    assert sys.unraisablehook is hook


def test_an_error_after_the_signal_is_its_doing() -> None:
    with pytest.raises(Terminated) as stop, terminable():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None
    assert isinstance(stop.value.__cause__, ImportError)
    with pytest.raises(ImportError), terminable():
        stop_if_asked()  # nothing of the command before
        raise ImportError
    stop_soon(signal.SIGTERM)  # outside of a command
    stop_if_asked()


def test_a_late_signal_ends_the_command_before_its_next_step(tmp_path: Path) -> None:
    for number, kind in ((signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)):
        with pytest.raises(KeyboardInterrupt) as stop, terminable():
            stop_soon(number)
            Markers(tmp_path, print).do("step", {}, [], lambda begin: begin() or {})
        assert type(stop.value) is kind and list(tmp_path.iterdir()) == []
