import errno
import io
import json
import math
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from train_fakes import FakeClock

from headstart.heads.errors import ConfigError, DiskFullError
from headstart.heads.files import set_aside
from headstart.train.checkpoints.resume import TRAINED
from headstart.train.config import TrainConfig
from headstart.train.tracking import track
from headstart.train.tracking.screen import Screen
from headstart.train.tracking.track import MetricLog, Reporter, RunTracker, TensorBoardTracker, open_tracker


def test_metric_log_drops_what_lies_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path)
    for step in (1, 2, 3):
        log.log(step, {"loss": float(step), "bad": math.nan})
    log.close()
    path.write_text(path.read_text() + '{"step": 2, "cut')
    MetricLog(path, resume_step=2).close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 1.0, "bad": None},
        {"step": 2, "loss": 2.0, "bad": None},
    ]
    MetricLog(path).close()
    assert path.read_text() == ""


def test_records_that_a_full_disk_refuses_are_written_later(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl")
    real, room = log._file, [10]

    class Full:
        """A file with room for so many bytes."""

        def write(self, data: bytes) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            count = min(room[0], len(data))
            room[0] -= count
            return real.write(data[:count])

        def close(self):
            real.close()

    log._file = Full()
    log.log(1, {"loss": 0.5})
    log.log(2, {"loss": 0.25})
    assert len(log.path.read_bytes()) == 10
    room[0] = 100
    log.log(3, {"loss": 0.125})
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert lines == [{"step": step, "loss": 2.0**-step} for step in (1, 2, 3)]
    room[0] = 0
    log.log(4, {"loss": 0.0625})
    with pytest.raises(DiskFullError, match=r"metrics\.jsonl: the disk is full"):
        log.close()
    assert real.closed


@pytest.mark.parametrize(("tracker", "package"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_missing_tracker_package_says_what_to_install(tmp_path, monkeypatch, tracker, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"train.tracker: {tracker} is not installed; `pip install {tracker}`"):
        open_tracker(TrainConfig(steps=1, tracker=tracker), tmp_path)


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    """As tensorboard's writer does on a full disk: told once, nothing of metrics.jsonl is lost."""
    asked = []

    class Full(TensorBoardTracker):
        def log(self, step, values):
            asked.append(step)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(track, "TensorBoardTracker", Full)
    tracker = open_tracker(TrainConfig(tracker="tensorboard"), tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"lr": 0.5})
    tracker.close()
    said = capsys.readouterr().err
    assert asked == [1] and said.count("WARNING") == 1
    assert "train.tracker: tensorboard failed (OSError: [Errno 28] No space left on device)" in said
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_damaged_and_missing_metrics_are_told_and_kept(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}', "garbage", '{"step": 3}', '{"ste']
    path.write_text("\n".join(lines))
    open_tracker(TrainConfig(), tmp_path, 3).close()
    assert path.read_text().splitlines() == [lines[0], lines[2]]
    assert (tmp_path / "damaged-metrics.jsonl").read_text().splitlines() == lines
    assert "has lines that are no records" in capsys.readouterr().err
    path.write_text(lines[0] + "\n" + lines[3])  # cut by a kill
    open_tracker(TrainConfig(), tmp_path, 3).close()
    assert "WARNING" not in capsys.readouterr().err and not (tmp_path / "damaged-metrics.jsonl-2").exists()
    path.unlink()
    open_tracker(TrainConfig(), tmp_path, 3).close()
    assert "metrics.jsonl is gone: the records until step 3 are missing" in capsys.readouterr().err


def test_tensorboard_receives_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = open_tracker(TrainConfig(steps=1, tracker="tensorboard"), tmp_path)
    tracker.log(3, {"train/loss": 1.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 1.5)]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "train/loss": 1.5}


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = open_tracker(TrainConfig(steps=1, tracker="wandb"), tmp_path)
    tracker.log(3, {"train/loss": 1.5})
    tracker.close()
    assert list((tmp_path / "wandb").rglob("*.wandb"))


def test_a_wandb_run_keeps_its_id_until_it_is_started_anew(tmp_path, monkeypatch):
    """With the id of a run that was moved to previous/, the records of two trainings would be one curve."""
    asked = []

    def init(**options):
        asked.append(options)
        return SimpleNamespace(log=lambda values, step: None, finish=lambda: None)

    fake = SimpleNamespace(init=init, errors=SimpleNamespace(Error=RuntimeError))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    place = tmp_path / "my run: 1"
    for anew in (False, False, True):
        if anew:
            set_aside(place, "train", [place / name for name in TRAINED])
        # no setting of training is a path today; published() must see those that will be
        open_tracker(TrainConfig(lr=0.1, project="mine", schedule="/home/me/x", tracker="wandb"), place).close()
    ids = [options["id"] for options in asked]
    assert ids[0] == ids[1] != ids[2] and all(i.startswith("my-run--1-") for i in ids)
    assert all(options["resume"] == "allow" and options["name"] == "my run: 1" for options in asked)
    # settings leave this machine as reports do
    assert all(options["project"] == "mine" and "project" not in options["config"] for options in asked)
    assert all((o["config"]["lr"], o["config"]["schedule"]) == (0.1, "LOCAL_PATH") for o in asked)


def test_wandb_without_an_account_says_what_to_do(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**options):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    expected = r"train.tracker: wandb does not start \(No API key configured.\).*WANDB_MODE=offline"
    with pytest.raises(ConfigError, match=expected):
        open_tracker(TrainConfig(steps=1, tracker="wandb"), tmp_path)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_numbers_on_rank_0_only(terminal):
    for show in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=80, highlight=False)
        reporter = Reporter(Screen(show, console), 10, "steps")
        reporter.start()
        for step in (5, 6, 10):
            reporter.advance(step)
            reporter.record(step, {"train/loss": 1.25, "lr": 0.001}, step)
        reporter.say("[a] note")
        reporter.close()
        assert ("loss 1.25" in out.getvalue()) is show
        assert ("10 of 10 steps" in out.getvalue()) is show
        assert ("note" in out.getvalue()) is show


VALUES = {"train/loss": 1.25, "train/acc_1": 0.4, "train/walked_tau": 1.5, "lr": 0.001, "tokens_per_s": 123.4}


def test_a_log_has_a_line_every_few_seconds_and_the_time_left_where_it_is_known():
    """Also where a record is wider than the 80 columns of a log file. Steps take 2 s."""
    out, clock = io.StringIO(), FakeClock()
    reporter = Reporter(Screen(True, Console(file=out, width=80), clock), 10, "steps")
    for step in range(1, 11):
        clock.now += 2.0
        reporter.advance(step)
        reporter.record(step, {**VALUES, "train/coverage": 0.5}, step)
    explained, *lines = out.getvalue().splitlines()
    assert "accepted length (τ) is" in explained and "weighted sum of the head's loss terms" in explained
    numbers = "loss 1.25  accepted length 1.50  123 tokens/s  coverage 50%  lr 0.001"
    assert lines == [
        f"train: 1 of 10 steps  {numbers}",
        f"train: 4 of 10 steps, 12 s left  {numbers}",
        f"train: 7 of 10 steps, 6 s left  {numbers}",
        f"train: 10 of 10 steps  {numbers}",
    ]


def test_a_limit_of_time_counts_seconds_and_names_the_step():
    out, clock = io.StringIO(), FakeClock()
    reporter = Reporter(Screen(True, Console(file=out, width=80), clock), 3600.0, "s")
    reporter.advance(75.0)
    reporter.record(12, VALUES, 75.0)
    last = out.getvalue().splitlines()[-1]
    assert last.startswith("train: 0:01:15 of 1:00:00, 0:58:45 left  step 12  loss 1.25  accepted length 1.50")


def test_a_validation_shows_the_loss_by_term_and_how_the_accepted_length_was_measured():
    out = io.StringIO()
    reporter = Reporter(Screen(True, Console(file=out, width=80)), 10, "steps")
    values = {"loss": 7.694, "loss_1": 4.131, "loss_2": 4.454, "acc_1": 0.09, "walked_tau": 1.1, "tau": 1.0}
    reporter.record(4, {f"valid/{name}": value for name, value in values.items()}, 4)
    line = out.getvalue().splitlines()[-1]
    shown = "loss 7.694 (1: 4.13, 2: 4.45)  accepted length 1.10 walked, 1.00 decoded"
    assert line == f"train: held out at step 4:  {shown}"


def test_a_log_that_cannot_be_closed_leaves_no_tracker_open(tmp_path, monkeypatch):
    closed = []

    class Beside:
        def log(self, step, values): ...

        def close(self):
            closed.append(True)

    log = MetricLog(tmp_path / "metrics.jsonl")

    def full():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log, "close", full)
    with pytest.raises(OSError, match="No space left"):
        RunTracker(log, "beside", Beside()).close()
    assert closed == [True]
