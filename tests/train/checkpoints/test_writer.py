"""Checkpoints are written behind the loop, one at a time, and a failed write is not lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from train_fakes import FakeHead, FakeSource, data_of, make_documents, quiet, teacher

from headstart.heads.errors import DiskFullError, StorageError
from headstart.train.checkpoints import checkpoint
from headstart.train.checkpoints import writer as writer_module
from headstart.train.checkpoints.checkpoint import Checkpoint, CheckpointStore
from headstart.train.checkpoints.writer import CheckpointWriter, HostCopies
from headstart.train.config import TrainConfig
from headstart.train.loop import Validate, train
from headstart.train.sharing.gradients import FlatGradients


@pytest.fixture
def patient_writer():
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


def run(run_dir: Path, source: FakeSource, validate: Validate | None = None, **changes):
    config = TrainConfig(**(dict(steps=12, accumulation=1, lr=0.01, save_every=2, keep=0, log_every=1) | changes))
    return train(
        FakeHead(), data_of(source), teacher(), config, run_dir, quiet(validate), provenance={}
    )  # fmt: skip


def test_steps_go_on_while_a_checkpoint_is_written_and_later_ones_wait_their_turn(tmp_path, monkeypatch):
    gate, look = Gate(monkeypatch), CheckpointWriter.free

    class Opening(FakeSource):
        def get(self, pack):
            if len(self.asked) == 9:  # seven steps after the checkpoint of step 2 began, which none waited for
                assert gate.waiting.wait(60) and not list((tmp_path / "checkpoints").glob("step-*"))
                gate.open.set()
            return super().get(pack)

    def free(writer):  # once the gate is open, how fast files are written must not decide
        return writer.idle(60.0) if gate.open.is_set() else look(writer)

    monkeypatch.setattr(CheckpointWriter, "free", free)
    result = run(tmp_path, Opening(make_documents()), prefetch=0)
    saved = sorted(int(p.name.removeprefix("step-")) for p in (tmp_path / "checkpoints").glob("step-*"))
    # 4, 6 and 8 were due while 2 was being written: one is taken as soon as that is done
    assert saved == [2, 10, 12] and result.step == 12


def test_no_step_waits_for_a_write_under_way(tmp_path, monkeypatch):
    """Looking for the writer asks for no time at all, and whatever it takes is reported."""
    gate = Gate(monkeypatch)
    real, asked = writer_module.wait, []

    def noting(futures, timeout=None):
        if not gate.open.is_set():
            asked.append(timeout)
        return real(futures, timeout)

    class Opening(FakeSource):
        def get(self, pack):
            if len(self.asked) == 9:
                gate.open.set()
            return super().get(pack)

    monkeypatch.setattr(writer_module, "wait", noting)
    run(tmp_path / "quick", Opening(make_documents()), prefetch=0)
    assert len(asked) >= 5 and set(asked) == {0.0}

    look = CheckpointWriter.free
    monkeypatch.setattr(CheckpointWriter, "free", lambda writer: time.sleep(0.2) or look(writer))
    assert run(tmp_path / "slow", FakeSource(make_documents()), steps=3).save_blocked_ms >= 200.0


def test_what_was_saved_is_what_was_there_when_it_was_asked_for(tmp_path, monkeypatch):
    """Weights that change while the file is written do not reach it."""
    gate = Gate(monkeypatch)
    writer = CheckpointWriter(CheckpointStore(tmp_path, 0), torch.device("cpu"))
    weight = torch.ones(3)
    writer.save(Checkpoint(writer.copies.take("head", [("w", weight)]), {}, {}, {"step": 1, "rng": []}))
    weight += 1
    assert not writer.idle(0.05)
    gate.open.set()
    writer.finish()
    assert writer.idle(0.0)
    assert CheckpointStore.load(tmp_path / "step-00000001").head["w"].tolist() == [1.0, 1.0, 1.0]
    writer.close()


def test_a_best_head_waits_for_its_copies_and_is_written_before_a_later_checkpoint(tmp_path, monkeypatch):
    """On a GPU the copies are under way when the next step begins: until they are complete nothing is handed over."""
    store = CheckpointStore(tmp_path, 0)
    writer, order = CheckpointWriter(store, torch.device("cpu")), []
    monkeypatch.setattr(store, "save_best", lambda head, state: order.append(("best", head["w"].tolist(), state)))
    monkeypatch.setattr(store, "save", lambda checkpoint: order.append(("step", checkpoint.state["step"])))
    complete = threading.Event()
    monkeypatch.setattr(writer.best_copies[0], "ready", complete.is_set)
    monkeypatch.setattr(writer.best_copies[0], "wait", complete.set)
    weight = torch.ones(2)
    writer.save_best([("w", weight)], {"step": 3})
    weight += 1
    writer.save(make(4))
    writer.poll()
    assert not writer.free() and order == []
    writer.finish()
    assert order == [("best", [1.0, 1.0], {"step": 3}), ("step", 4)]
    assert writer.idle(0.0)
    writer.close()


def reusing(copies, group, tensors):
    """HostCopies.take as on a GPU: into the same buffers every time."""
    tensors = dict(tensors)
    taken = {
        name: copies._buffer(f"{group}/{name}", tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }
    for name, buffer in taken.items():
        buffer.copy_(tensors[name])
    return taken


def test_best_heads_that_come_faster_than_the_disk_hold_no_step_up(tmp_path, monkeypatch):
    """While one is written the next waits, a newer one takes its place, and each that is written is what it was."""
    first, found, write = threading.Event(), [], CheckpointStore.save_best
    weights = {}

    def slow(store, head, state):
        assert first.wait(60)
        found.append((state["step"], {name: tensor.clone() for name, tensor in head.items()}))
        write(store, head, state)

    def validate(head, step, final):
        weights[step] = {name: tensor.clone() for name, tensor in head.state_dict().items()}
        if step == 8:  # no step before it waited for the first one
            first.set()
        return {"valid/walked_tau": float(step)}

    monkeypatch.setattr(CheckpointStore, "save_best", slow)
    monkeypatch.setattr(HostCopies, "take", reusing)
    settings = dict(steps=9, eval_every=1, save_every=2, select="best")
    result = run(tmp_path, FakeSource(make_documents()), validate=validate, **settings)
    written = [step for step, _ in found]
    assert written[0] == 1 and written[-1] == 9 and not {3, 4, 5, 6} & set(written) and sorted(written) == written
    for step, head in found:
        assert head.keys() == weights[step].keys()
        assert all(torch.equal(tensor, weights[step][name]) for name, tensor in head.items())
    assert result.save_blocked_ms < 30_000  # the first one alone would have blocked for 60 s
    store = CheckpointStore(tmp_path / "checkpoints", 0)
    assert store.best_damage() is None and torch.equal(
        store.load_best()["heads.0.weight"], weights[9]["heads.0.weight"]
    )


def test_no_checkpoint_names_a_best_head_that_is_not_on_the_disk(tmp_path, monkeypatch):
    """Best 1, checkpoint, best 2 in place of none, its checkpoint's new state: written in that order, also after a
    full disk."""
    store = CheckpointStore(tmp_path, 0)
    writer, order, full = CheckpointWriter(store, torch.device("cpu")), [], [True]

    def save_best(head, state):
        if full[0]:
            raise DiskFullError("the disk is full")
        order.append(("best", head["w"].tolist(), state["step"]))

    monkeypatch.setattr(store, "save_best", save_best)
    monkeypatch.setattr(store, "save", lambda checkpoint: order.append(("save", checkpoint.state["step"])))
    monkeypatch.setattr(store, "rewrite_state", lambda state: order.append(("rewrite_state", state["step"])))
    monkeypatch.setattr(HostCopies, "take", reusing)
    writer.save_best([("w", torch.tensor([1.0]))], {"step": 1})
    writer.save(make(1))
    writer.save_best([("w", torch.tensor([2.0]))], {"step": 2})
    writer.rewrite_state({"step": 2})
    writer.save_best([("w", torch.tensor([3.0]))], {"step": 3})
    assert not writer.idle(5.0) and writer.failed and order == []
    assert not writer.retry() and order == []
    full[0] = False
    assert writer.retry()
    assert order == [("best", [1.0], 1), ("save", 1), ("best", [3.0], 3), ("rewrite_state", 2)]
    writer.close()


def test_a_failed_write_is_raised_once_and_stops_the_run(tmp_path, monkeypatch):
    def full(path, *rest):
        raise StorageError(f"{path}: cannot be written")

    monkeypatch.setattr(checkpoint, "write_safetensors", full)
    writer = CheckpointWriter(CheckpointStore(tmp_path / "alone", 0), torch.device("cpu"))
    writer.save(make(1))
    assert not writer.idle(5.0) and writer.failed  # its tensors are not for the next one yet
    with pytest.raises(StorageError, match="cannot be written"):
        writer.finish()
    writer.finish()
    writer.close()
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
