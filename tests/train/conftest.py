"""One thread, for bit-equality."""

import pytest
import torch


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
