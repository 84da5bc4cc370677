"""Checkpoints are written behind the loop, one at a time, and a failed write is not lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from train_fakes import FakeHead, FakeSource, make_documents, teacher

from headstart.heads.errors import StorageError
from headstart.train import checkpoint
from headstart.train import saver as saver_module
from headstart.train.checkpoint import Checkpoint, CheckpointStore
from headstart.train.config import TrainConfig
from headstart.train.gradients import FlatGradients
from headstart.train.loop import train
from headstart.train.saver import Saver


@pytest.fixture
def patient_saver():
    """Here the loop looks for the writer as it does in earnest."""


def make(step: int) -> Checkpoint:
    return Checkpoint({"w": torch.ones(2)}, {}, {}, {"step": step, "rng": []})


class Gate:
    """Holds every write of a tensor file until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open = threading.Event()
        self.waiting = threading.Event()
        real = checkpoint.write_safetensors

        def write(path, *rest):
            self.waiting.set()
            assert self.open.wait(60)
            real(path, *rest)

        monkeypatch.setattr(checkpoint, "write_safetensors", write)


def run(run_dir: Path, source: FakeSource, **changes):
    config = TrainConfig(**(dict(steps=12, accumulation=1, lr=0.01, save_every=2, keep=0, log_every=1) | changes))
    return train(
        FakeHead(), source, teacher(), source.lengths, config, run_dir, provenance={}, pack_tokens=20, progress=False
    )


def test_steps_go_on_while_a_checkpoint_is_written_and_later_ones_wait_their_turn(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    began: list[float] = []

    class Opening(FakeSource):
        def get(self, pack):
            began.append(time.perf_counter())
            if len(self.asked) == 9:  # seven steps after the checkpoint of step 2 began
                assert gate.waiting.is_set() and not list((tmp_path / "checkpoints").glob("step-*"))
                gate.open.set()
                while not list((tmp_path / "checkpoints").glob("step-*")):
                    time.sleep(0.01)
            return super().get(pack)

    result = run(tmp_path, Opening(make_documents()), prefetch=0)
    # from step 4 on a checkpoint is due at every step: none may wait for the one that is being written
    assert sorted(b - a for a, b in zip(began[3:9], began[4:10], strict=True))[3] < 0.05
    saved = sorted(int(p.name.removeprefix("step-")) for p in (tmp_path / "checkpoints").glob("step-*"))
    # 4, 6 and 8 were due while 2 was being written: one is taken as soon as that is done
    assert saved[0] == 2 and saved[1] in (10, 11) and saved[-1] == 12
    assert result.step == 12


def test_no_step_waits_for_a_write_under_way(tmp_path, monkeypatch):
    """Looking for the writer asks for no time at all, and whatever it takes is reported."""
    gate = Gate(monkeypatch)
    real, asked = saver_module.wait, []

    def noting(futures, timeout=None):
        if not gate.open.is_set():
            asked.append(timeout)
        return real(futures, timeout)

    class Opening(FakeSource):
        def get(self, pack):
            if len(self.asked) == 9:
                gate.open.set()
            return super().get(pack)

    monkeypatch.setattr(saver_module, "wait", noting)
    run(tmp_path / "quick", Opening(make_documents()), prefetch=0)
    assert len(asked) >= 5 and set(asked) == {0.0}

    look = Saver.free
    monkeypatch.setattr(Saver, "free", lambda saver: time.sleep(0.2) or look(saver))
    assert run(tmp_path / "slow", FakeSource(make_documents()), steps=3).save_blocked_ms >= 200.0


def test_what_was_saved_is_what_was_there_when_it_was_asked_for(tmp_path, monkeypatch):
    """Weights that change while the file is written do not reach it."""
    gate = Gate(monkeypatch)
    saver = Saver(CheckpointStore(tmp_path, 0), torch.device("cpu"))
    weight = torch.ones(3)
    saver.save(Checkpoint(saver.copies.take("head", [("w", weight)]), {}, {}, {"step": 1, "rng": []}))
    weight += 1
    assert not saver.idle(0.05)
    gate.open.set()
    saver.finish()
    assert saver.idle(0.0)
    assert CheckpointStore.load(tmp_path / "step-00000001").head["w"].tolist() == [1.0, 1.0, 1.0]
    saver.close()


def test_a_failed_write_is_raised_once_and_stops_the_run(tmp_path, monkeypatch):
    def full(path, *rest):
        raise StorageError(f"{path}: cannot be written")

    monkeypatch.setattr(checkpoint, "write_safetensors", full)
    saver = Saver(CheckpointStore(tmp_path / "alone", 0), torch.device("cpu"))
    saver.save(make(1))
    assert not saver.idle(5.0) and saver.failed  # its tensors are not for the next one yet
    with pytest.raises(StorageError, match="cannot be written"):
        saver.finish()
    saver.finish()
    saver.close()
    source = FakeSource(make_documents())
    with pytest.raises(StorageError, match="cannot be written"):
        run(tmp_path / "run", source, steps=500)
    assert len(source.asked) < 400  # noticed long before the end


def test_flat_gradients_are_views_that_stay():
    head = FakeHead()
    parameters = [p for p in head.parameters() if p.requires_grad]
    flat = FlatGradients(parameters)
    assert len(flat.buffers) == 1
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for p in parameters:
        assert p.grad.shape == p.shape and p.grad.data_ptr() % 16 == 0
    (sum(p.sum() for p in parameters) * 2).backward()
    assert float(flat.buffers[0].sum()) == 2 * sum(p.numel() for p in parameters)
    optimizer.zero_grad(set_to_none=False)
    assert not flat.buffers[0].any()
