"""The loop: its budgets, its records, signals and what it leaves behind."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from fake_runs import assert_same_weights, config, losses, records, run
from train_fakes import FakeHead, FakeSource, data_of, make_documents, pairs_of, quiet, teacher

from headstart.heads.errors import TrainingError
from headstart.train.loop import Observers, train
from headstart.train.tracking.screen import Screen


def test_loss_falls_and_the_result_says_what_was_done(tmp_path):
    _, result = run(tmp_path, noise=0.0, steps=30)
    curve = [loss for _, loss in losses(tmp_path)]
    assert len(curve) == 30 and curve[-1] < 0.7 * curve[0]
    assert (result.step, result.stopped, result.resumed_from) == (30, "steps", 0)
    assert result.supervised_tokens == records(tmp_path)[-1]["supervised_tokens"] > 0
    assert result.checkpoint.endswith("step-00000030")
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000030\n"
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000028", "step-00000030"]


def test_epochs_end_with_a_short_window(tmp_path):
    source = FakeSource(make_documents())
    result = train(
        FakeHead(), pairs_of(source), teacher(), config(steps=None, epochs=1.5, accumulation=4), tmp_path, quiet()
    )
    assert (result.step, result.stopped) == (3, "epochs")  # 6 packs per epoch: 9 packs in windows of 4, 4, 1
    assert source.asked == [[i, i + 1] for i in [0, 2, 4, 6, 8, 10, 0, 2, 4]]
    assert result.tokens == sum(source.lengths) + sum(source.lengths[:6])


def test_time_budget_ends_the_run(tmp_path):
    _, result = run(tmp_path, steps=None, max_seconds=0.3, log_every=5)
    assert result.stopped == "seconds" and result.step > 0 and 0.3 <= result.seconds < 5


def test_sigterm_saves_and_the_next_call_continues(tmp_path):
    whole, _ = run(tmp_path / "whole")

    class Terminating(FakeSource):
        def get(self, pack):
            if len(self.asked) == 10:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().get(pack)

    before = signal.getsignal(signal.SIGTERM)
    _, stopped = run(tmp_path / "stopped", Terminating(make_documents()))
    assert (stopped.stopped, stopped.step) == ("signal", 6)
    assert signal.getsignal(signal.SIGTERM) is before
    again, result = run(tmp_path / "stopped")
    assert (result.resumed_from, result.stopped) == (6, "steps")
    assert_same_weights(whole, again)


def test_trains_in_a_thread_where_signals_cannot_be_handled(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(run(tmp_path, steps=2)[1]))
    thread.start()
    thread.join()
    assert found[0].step == 2


def test_progress_is_rank_0s_alone():
    shown = {(rank, show): Observers(progress=show).screen_of(rank).show for rank in (0, 1) for show in (True, False)}
    assert shown == {(0, True): True, (0, False): False, (1, True): False, (1, False): False}
    screen = Screen()
    assert Observers(screen=screen).screen_of(0) is screen and not Observers(screen=screen).screen_of(1).show


class Interrupting(FakeSource):
    """Presses Ctrl-C `times` times in the seventh step, which goes on when that was answered.

    Attributes: seen: what stderr had when the step went on.
    """

    def __init__(self, times, capsys):
        super().__init__(make_documents())
        self.times, self.capsys, self.seen = times, capsys, ""

    def get(self, pack):
        if len(self.asked) == 10:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
            given_up = time.monotonic() + 60
            while "Ctrl-C again" not in self.seen and time.monotonic() < given_up:
                time.sleep(0.01)
                self.seen += self.capsys.readouterr().err
        return super().get(pack)


def test_ctrl_c_says_at_once_what_happens_and_the_step_is_finished(tmp_path, capsys):
    source = Interrupting(1, capsys)
    result = train(FakeHead(), data_of(source), teacher(), config(prefetch=0), tmp_path, Observers())
    assert (result.stopped, result.interrupted) == ("signal", True) and result.step < config().steps
    assert "stopping after this step, then saving; Ctrl-C again to stop now\n" in source.seen
    assert f"stopped by a signal at step {result.step}; the same command continues from" in capsys.readouterr().err


def test_a_second_ctrl_c_stops_now(tmp_path, capsys):
    source = Interrupting(2, capsys)
    before, began = signal.getsignal(signal.SIGINT), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train(FakeHead(), data_of(source), teacher(), config(prefetch=0), tmp_path, Observers())
    assert time.monotonic() - began < 20 and signal.getsignal(signal.SIGINT) is before
    assert len(source.asked) == 10  # the pack was not made
    err = capsys.readouterr().err
    assert err.count("Ctrl-C again to stop now") == 1 and "stopped by a signal at step" not in err


def test_trackers_receive_every_number_of_a_record(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = {"valid/loss": 1.0, "valid/walked_tau": 1.5, "valid/tau": 1.25}
    run(tmp_path, validate=lambda head, step, final: values, steps=4, tracker="tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert names == {name for record in records(tmp_path) for name in record} - {"step"}
    assert names >= {
        "train/loss", "train/acc_1", "train/acc_2", "train/acc_3", "train/walked_tau", "train/coverage", "lr",
        "grad_norm", "tokens_per_s", "data_wait", "host_memory_gib", *values,
    }  # fmt: skip
    assert "mfu" not in names  # a CPU's
    assert all(record["host_memory_gib"] > 0.01 for record in records(tmp_path) if "train/loss" in record)
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_sample_that_cannot_be_read_is_named_and_the_checkpoint_stays(tmp_path, prefetch):
    class Unreadable(FakeSource):
        sample_ids = [f"talk-{i}" for i in range(12)]

        def get(self, pack):
            if 9 in pack:
                raise OSError("Input/output error")
            return super().get(pack)

    source = Unreadable(make_documents())
    with pytest.raises(TrainingError, match=r"features of sample talk-9 \(epoch 0, pack 4\) failed: OSError"):
        settings = config(save_every=1, prefetch=prefetch)
        train(FakeHead(), pairs_of(source), teacher(), settings, tmp_path, quiet())
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000002\n"
