"""Makes `reference` and the rooms' helper modules importable: with --import-mode=importlib pytest adds no directory.

Takes away what tells programs about the terminal that the tests were started in: what they print must not depend on it.
Gives torch one thread where nothing else is set, as scripts/test.sh does: on cores that others use, threads that wait
for one another make tests many times slower, and a process forked beside them can stand still.
"""

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOMS = (
    "", "data", "data/serving", "eval", "eval/decoding", "eval/measuring", "eval/measuring/page", "eval/scheduling",
    "eval/servers", "data/chat", "heads/formats", "train", "train/joint",
)  # fmt: skip
sys.path[:0] = [place for place in (str(TESTS / room) for room in ROOMS) if place not in sys.path]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
for name in "COLUMNS LINES NO_COLOR FORCE_COLOR CLICOLOR CLICOLOR_FORCE TTY_COMPATIBLE TTY_INTERACTIVE".split():
    os.environ.pop(name, None)


@pytest.fixture
def patient_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint waits for the one before it, so that the disk's speed does not decide which checkpoints exist."""
    monkeypatch.setattr("headstart.train.checkpoints.writer.CheckpointWriter.free", lambda writer: writer.idle(60.0))
