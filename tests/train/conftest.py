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
def checkpoints_when_due(patient_writer):
    """Tests of this room count on every checkpoint that `train.save_every` asks for."""
