"""SIGTERM ends `headstart compare` and its processes soon, whatever the signal meets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.comparing import team, work
from headstart.console import Console
from headstart.heads.errors import TargetError
from headstart.heads.targets.target import Target
from headstart.train.loop import TrainingLoop

#: it ends at the second SIGTERM, as a process does that is inside a library when the first comes
DEAF = """
import signal, sys, time
came = []
def note(*_):
    came.append(1)
    if len(came) == 2:
        sys.exit(3)
signal.signal(signal.SIGTERM, note)
"""


def test_an_error_that_a_library_makes_of_the_signal_fails_no_cell(
    headstart: Callable, comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loads = work.loaded_target, []

    def loaded(*arguments: Any) -> Target:
        loads.append(arguments)
        if len(loads) == 2:  # to measure; as pybind11 does where its library is being imported
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            except KeyboardInterrupt as stop:
                raise TargetError("initialization failed") from stop
        return load(*arguments)

    monkeypatch.setattr(work, "loaded_target", loaded)
    words = ("compare", comparison, "seeds=[0]", "measure.speed.enabled=false")
    stopped = headstart(*words)
    assert stopped.code == 0 and "stopped; what was finished is kept" in stopped.err and len(loads) == 2
    values = json.loads((tmp_path / "sides/compare.json").read_text())
    assert values["failed"] == [] and values["unfinished"] == ["plain-s0", "rate-lr=0.01-s0"]


def test_a_signal_after_the_last_step_keeps_the_cell_and_begins_no_other(
    headstart: Callable, comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = TrainingLoop._finish

    def finishing(self: TrainingLoop, reason: str) -> Path | None:
        os.kill(os.getpid(), signal.SIGTERM)
        return finish(self, reason)

    monkeypatch.setattr(TrainingLoop, "_finish", finishing)
    words = ("compare", comparison, "seeds=[0]", "measure.speed.enabled=false")
    stopped = headstart(*words)
    assert stopped.code == 0 and "stopped; what was finished is kept" in stopped.err, stopped.err
    cells = tmp_path / "sides/cells"
    assert json.loads((cells / "plain-s0/cost.json").read_text())["peak_memory_bytes"] > 0
    assert not (cells / "rate-lr=0.01-s0").exists()

    monkeypatch.setattr(TrainingLoop, "_finish", finish)
    again = headstart(*words)
    assert again.code == 0 and again.err.count("train: starts") == 1


def test_a_process_that_loses_the_first_signal_gets_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "AGAIN_S", 0.3)
    monkeypatch.setattr(team, "STOP_S", 20.0)
    shared = SimpleNamespace(folder=tmp_path, cells=[], measure={})
    made = team.Team(shared, Console(silent=True), [None], 3)  # type: ignore[arg-type]
    for place in made.places[:2]:
        place.process = subprocess.Popen(
            [sys.executable, "-c", f"{DEAF}print(flush=True)\ntime.sleep(60)"], stdout=subprocess.PIPE, text=True
        )
        assert place.process.stdout is not None and place.process.stdout.readline() == "\n"
    made._stop()
    assert [place.process.returncode for place in made.places[:2] if place.process is not None] == [3, 3]


def test_a_process_whose_command_is_gone_is_told_until_it_ends() -> None:
    more = """
import queue, threading
from headstart.comparing import worker
worker.AGAIN_S = 0.2
threading.Thread(target=worker._listen, args=(queue.Queue(),), daemon=True).start()
time.sleep(60)
"""
    ended = subprocess.run([sys.executable, "-c", DEAF + more], stdin=subprocess.DEVNULL, timeout=50)
    assert ended.returncode == 3
