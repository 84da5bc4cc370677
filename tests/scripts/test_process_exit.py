"""A process that is done ends with its own exit code, whatever the threads of its libraries do."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from headstart.process_exit import ProcessExit
ending = ProcessExit()
import atexit, os, signal, sys, threading, time
import torch

numbers, begun = torch.ones(600, 600), threading.Event()
def work():
    while True:
        numbers @ numbers
        begun.set()
threading.Thread(target=work, daemon=True).start()
begun.wait()
sys.stdout.write("out")
atexit.register(lambda: sys.stdout.write(" exit functions"))
threading.Thread(target=lambda: (time.sleep(0.2), sys.stdout.write(" threads"))).start()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("ending.leave(0)", 0, "out threads exit functions"),
        ("ending.leave(3)", 3, "out threads exit functions"),
        ("ending.leave(3, at_once=True)", 3, "out"),
        ("sys.stdout.flush(); sys.stdout = None; ending.leave(3, at_once=True)", 3, "out"),  # as `>&-` makes it
        ("atexit.register(os.kill, os.getpid(), signal.SIGTERM); ending.leave(0)", 0, "out threads exit functions"),
    ],
)
def test_leave_ends_with_its_code_beside_a_busy_thread(end: str, code: int, said: str) -> None:
    ended = run(PROGRAM + end)
    assert (ended.returncode, ended.stdout) == (code, said), ended.stderr


def test_a_process_that_does_not_leave_ends_as_python_ends_it() -> None:
    assert run("import sys; from headstart.process_exit import ProcessExit; ProcessExit(); sys.exit(5)").returncode == 5
