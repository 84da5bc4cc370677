"""The best head, validations around a kill, and disks that are full."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch
from fake_runs import Killed, KillingSource, assert_same_weights, config, losses, records, run
from train_fakes import FakeHead, FakeSource, data_of, make_documents, teacher

from headstart.heads.errors import DiskFullError, StorageError, TrainingError
from headstart.train.checkpoints.checkpoint import CheckpointStore
from headstart.train.loop import Observers, train


def test_best_validation_is_kept_and_selected(tmp_path):
    seen: dict[int, torch.Tensor] = {}
    scores = {3: 1.2, 6: 1.9, 9: 1.5, 12: 1.4}

    def validate(head, step, final):
        seen[step] = head.heads[0].weight.detach().clone()
        assert final == (step == 12)
        return {"valid/walked_tau": scores[step]}

    head, result = run(tmp_path, validate=validate, eval_every=3, select="best")
    assert result.best == {"name": "valid/walked_tau", "value": 1.9, "step": 6}
    assert torch.equal(head.heads[0].weight, seen[6])
    assert result.metrics == {"valid/walked_tau": 1.4}
    assert [r["step"] for r in records(tmp_path) if "valid/walked_tau" in r] == [3, 6, 9, 12]
    again, _ = run(tmp_path, validate=validate, eval_every=3, select="best")
    assert torch.equal(again.heads[0].weight, seen[6])


def test_best_so_far_survives_a_kill(tmp_path):
    """The best head of step 6 is written, then the run dies and repeats steps 5 and 6."""
    scores = {3: 1.2, 6: 1.9, 9: 1.5, 12: 1.4}
    chosen = dict(validate=lambda head, step, final: {"valid/walked_tau": scores[step]}, eval_every=3, select="best")
    whole, expected = run(tmp_path / "whole", **chosen)
    with pytest.raises((Killed, TrainingError)):
        run(tmp_path / "killed", KillingSource(make_documents(), after=15), **chosen)
    again, result = run(tmp_path / "killed", **chosen)
    assert result.resumed_from == 4
    assert result.best == expected.best == {"name": "valid/walked_tau", "value": 1.9, "step": 6}
    assert_same_weights(whole, again)


@pytest.mark.parametrize("again", ["fails once more", "kill -9"])
def test_a_validation_that_fails_costs_no_trained_step_and_is_made_again(tmp_path, again):
    """Steps 4 and 8 are validated and saved; the one at 8, the best, fails at first."""
    scores = {4: 1.2, 8: 1.9, 12: 1.5}
    chosen = dict(eval_every=4, select="best")

    def validate(head, step, final):
        if failing and step == 8:
            raise Killed if again == "kill -9" else TrainingError("features of sample talk-9 failed")
        return {"valid/walked_tau": scores[step]}

    failing = False
    whole, expected = run(tmp_path / "whole", validate=validate, **chosen)
    failing = True
    for _ in range(2):
        with pytest.raises((Killed, TrainingError)):
            run(tmp_path / "run", validate=validate, **chosen)
        state = json.loads((tmp_path / "run/checkpoints/step-00000008/state.json").read_text())
        assert state["unvalidated"] and state["best"]["step"] == 4
    failing = False
    head, result = run(tmp_path / "run", validate=validate, **chosen)
    assert result.resumed_from == 8 and result.best == expected.best and result.best["step"] == 8
    assert_same_weights(head, whole)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert [r["step"] for r in records(tmp_path / "run") if "valid/walked_tau" in r] == [4, 8, 12]
    state = json.loads((tmp_path / "run/checkpoints/step-00000008/state.json").read_text())
    assert not state["unvalidated"] and state["best"]["step"] == 8 and len(state["rng"]) == 1


def test_a_final_validation_that_ended_in_a_kill_is_recorded_once(tmp_path, monkeypatch):
    """Killed after its record and before the checkpoint that says so."""
    chosen = dict(validate=lambda head, step, final: {"valid/walked_tau": float(step)}, eval_every=6)
    with monkeypatch.context() as patch:
        patch.setattr(
            "headstart.train.saving.Saving.rewrite_state", lambda saving: (_ for _ in ()).throw(Killed)
        )
        with pytest.raises(Killed):
            run(tmp_path, save_every=5, **chosen)
    assert [r["step"] for r in records(tmp_path) if "valid/walked_tau" in r] == [6, 12]
    source = FakeSource(make_documents())
    _, result = run(tmp_path, source, save_every=5, **chosen)
    assert source.asked == [] and result.best["step"] == 12
    assert [r["step"] for r in records(tmp_path) if "valid/walked_tau" in r] == [6, 12]


def test_the_best_head_is_the_one_on_the_disk_also_when_the_run_takes_another_turn(tmp_path, capsys):
    """best/ of step 6, newest checkpoint of step 4: continued with another rate, no validation is as good again."""
    scores = {3: 1.2, 6: 1.9, 9: 1.5, 12: 1.4}
    chosen = dict(eval_every=3, select="best")
    seen = {}

    def validate(head, step, final):
        seen[step] = head.heads[0].weight.detach().clone()
        return {"valid/walked_tau": scores[step]}

    with pytest.raises((Killed, TrainingError)):
        run(tmp_path, KillingSource(make_documents(), after=15), validate=validate, **chosen)
    head, source = FakeHead(noise=0.1), FakeSource(make_documents())
    worse = Observers(lambda h, s, f: {"valid/walked_tau": 1.0})
    result = train(head, data_of(source), teacher(), config(lr=0.5, **chosen), tmp_path, worse)
    assert result.resumed_from == 4 and result.best == {"name": "valid/walked_tau", "value": 1.9, "step": 6}
    assert torch.equal(head.heads[0].weight, seen[6])
    said = " ".join(capsys.readouterr().err.split())
    assert "NOTE: the best head so far is that of step 6 (valid/walked_tau 1.9)" in said


def test_a_validation_made_before_a_kill_is_recorded_once(tmp_path):
    """Killed between the record and the checkpoint's new state."""
    chosen = dict(validate=lambda head, step, final: {"valid/walked_tau": float(step)}, eval_every=4)
    run(tmp_path, steps=6, **chosen)
    store = CheckpointStore(tmp_path / "checkpoints", 0)
    store._remove(store.paths()[0])
    store.rewrite_state(json.loads((store.paths()[0] / "state.json").read_text()) | {"unvalidated": True})
    run(tmp_path, **chosen)
    assert [r["step"] for r in records(tmp_path) if "valid/walked_tau" in r] == [4, 8, 12]


def test_a_damaged_best_head_is_told_at_once_and_the_next_validation_counts(tmp_path, capsys):
    scores = {3: 1.9, 6: 1.2, 9: 1.5, 12: 1.4}
    chosen = dict(validate=lambda head, step, final: {"valid/walked_tau": scores[step]}, eval_every=3, select="best")
    run(tmp_path, steps=7, **chosen | {"validate": lambda *_: {"valid/walked_tau": 1.9}})
    (tmp_path / "checkpoints/best/head.safetensors").write_bytes(b"half")
    head, source = FakeHead(noise=0.1), FakeSource(make_documents())
    settings = config(**{k: v for k, v in chosen.items() if k != "validate"})
    result = train(head, data_of(source), teacher(), settings, tmp_path, Observers(chosen["validate"]))
    said = " ".join(capsys.readouterr().err.split())
    assert "WARNING: the best head (step 3, valid/walked_tau 1.9) is damaged: head.safetensors has 4 bytes" in said
    assert result.best == {"name": "valid/walked_tau", "value": 1.5, "step": 9}


def test_a_best_head_damaged_at_the_end_leaves_the_last_weights_and_a_warning(tmp_path, capsys):
    def validate(head, step, final):
        if final:
            (tmp_path / "run/checkpoints/best/head.safetensors").write_bytes(b"half")
        return {"valid/walked_tau": -float(step)}

    last, _ = run(tmp_path / "last")
    head, source = FakeHead(noise=0.1), FakeSource(make_documents())
    settings = config(eval_every=3, select="best")
    result = train(head, data_of(source), teacher(), settings, tmp_path / "run", Observers(validate))
    assert result.step == 12 and "cannot be used: head.safetensors has 4 bytes" in " ".join(
        capsys.readouterr().err.split()
    )
    assert_same_weights(head, last)


@pytest.mark.parametrize(
    ("place", "named"), [("checkpoints", "checkpoints"), ("metrics.jsonl", "metrics.jsonl"), ("latest", "latest")]
)
def test_a_file_in_the_place_of_a_directory_and_the_other_way_round_is_told(tmp_path, place, named):
    if place == "checkpoints":
        (tmp_path / place).write_text("a file")
    elif place == "latest":
        run(tmp_path, steps=4)
        (tmp_path / "checkpoints/latest").unlink()
        (tmp_path / "checkpoints/latest").mkdir()
    else:
        (tmp_path / place).mkdir()
    with pytest.raises(StorageError, match=rf"{named}: a file stands where a directory is expected, or the other way"):
        run(tmp_path)


def test_disk_full_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    import errno

    from headstart.train.checkpoints import checkpoint

    calls = []
    real = checkpoint.write_safetensors

    def full(path, *rest):
        calls.append(path)
        if len(calls) > 4:  # second checkpoint, second file
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *rest)

    monkeypatch.setattr(checkpoint, "write_safetensors", full)
    with pytest.raises(StorageError, match="disk is full"):
        run(tmp_path, disk_wait=0.0)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir()] == ["step-00000004"]
    monkeypatch.setattr(checkpoint, "write_safetensors", real)
    assert run(tmp_path)[1].resumed_from == 4


def test_a_full_disk_pauses_the_run_and_nothing_is_lost(tmp_path, monkeypatch):
    """Checkpoint, best head and final state all find the disk full at first; the pause is in no time or rate."""
    from headstart.train.checkpoints import checkpoint, writer

    clock = [0.0]
    refused = []
    real = checkpoint.write_directory

    def full(path, *rest, **more):
        if refused.count(path.name) < 2:
            refused.append(path.name)
            raise DiskFullError(f"{path}: the disk is full")
        real(path, *rest, **more)

    def sleep(seconds):
        clock[0] += 1000.0

    def validate(head, step, final):
        return {"valid/walked_tau": float(step)}

    undisturbed, _ = run(tmp_path / "undisturbed", validate=validate, eval_every=6)
    now = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: now() + clock[0])
    monkeypatch.setattr(writer.time, "sleep", sleep)
    monkeypatch.setattr(checkpoint, "write_directory", full)
    head, result = run(tmp_path / "run", validate=validate, eval_every=6, disk_wait=1e6)
    assert_same_weights(head, undisturbed)
    steps = sorted({*refused} - {"best"})  # one that finds the writer still busy is taken at a later step
    assert "best" in refused and len(steps) == 3 and steps[-1] == "step-00000012"
    assert clock[0] >= 2000.0 and result.seconds < 1000.0
    for name in steps[-2:]:
        assert checkpoint.damage(tmp_path / "run" / "checkpoints" / name) is None
    assert CheckpointStore(tmp_path / "run" / "checkpoints", 2).best_damage() is None
    state = json.loads((tmp_path / "run/checkpoints/step-00000012/state.json").read_text())
    assert state["finished"] == [12, "steps"]
    assert [r for r in records(tmp_path / "run") if "train/loss" in r and r["tokens_per_s"] < 10] == []


def test_a_tensor_file_that_finds_the_disk_full_pauses_the_run(tmp_path, monkeypatch):
    """safetensors words a full disk as an error of its own; see test_files.py for that it does."""
    from safetensors import SafetensorError

    from headstart.heads import files
    from headstart.train.checkpoints import writer

    refused, pauses = [], []
    real = files.save_file

    def full(tensors, path, **more):
        if len(refused) < 3:
            refused.append(path.parent.name)
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        real(tensors, path, **more)

    undisturbed, _ = run(tmp_path / "undisturbed")
    monkeypatch.setattr(writer.time, "sleep", pauses.append)
    monkeypatch.setattr(files, "save_file", full)
    head, result = run(tmp_path / "run", disk_wait=1e6)
    assert len(pauses) == 2  # the write behind the loop is refused, then one retry before each of the pauses
    assert all(name.startswith(".step-00000004.") for name in refused) and len(refused) == 3
    assert (result.step, result.stopped) == (12, "steps")
    assert_same_weights(head, undisturbed)
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
    assert CheckpointStore(tmp_path / "run" / "checkpoints", 2).find(print).name == "step-00000012"


def test_a_signal_ends_a_pause(tmp_path, monkeypatch):
    from headstart.train.checkpoints import checkpoint, writer

    def full(path, *rest, **more):
        raise DiskFullError(f"{path}: the disk is full")

    monkeypatch.setattr(checkpoint, "write_directory", full)
    monkeypatch.setattr(writer.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(DiskFullError, match="step-00000004: the disk is full"):
        run(tmp_path, disk_wait=1e6)
