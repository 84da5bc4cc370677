"""Makes `train_fakes` importable under --import-mode=importlib; one thread, for bit-equality."""

import sys
from pathlib import Path

import pytest
import torch

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def patient_writer(monkeypatch):
    """Which checkpoints exist must not depend on the speed of the disk."""
    monkeypatch.setattr("headstart.train.checkpoints.writer.CheckpointWriter.free", lambda writer: writer.idle(60.0))
