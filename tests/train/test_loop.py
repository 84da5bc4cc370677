from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file
from train_fakes import FakeHead, FakeSource, data_of, in_order, make_documents, pairs_of, quiet, teacher

from headstart.heads.errors import ConfigError, DiskFullError, StorageError, TrainingError
from headstart.train.checkpoints.checkpoint import CheckpointStore
from headstart.train.config import TrainConfig
from headstart.train.loop import Observers, TrainResult, train
from headstart.train.optim import Budget
from headstart.train.standing import Standing
from headstart.train.step import SumNames
from headstart.train.stream import PackStream
from headstart.train.tracking.meters import Meters


class Killed(Exception):
    """Stands for kill -9: nothing in the loop handles it."""


class KillingSource(FakeSource):
    """Dies when asked for its n-th pack."""

    def __init__(self, *args, after: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.after = after

    def get(self, pack):
        if len(self.asked) == self.after:
            raise Killed from None
        return super().get(pack)


def config(**changes) -> TrainConfig:
    values = dict(steps=12, accumulation=2, lr=0.05, warmup_steps=2, weight_decay=0.01, save_every=4, log_every=1)
    return TrainConfig(**(values | changes))


def run(run_dir, source=None, noise: float = 0.1, validate=None, **changes) -> tuple[FakeHead, TrainResult]:
    head = FakeHead(noise=noise)
    source = source or FakeSource(make_documents())
    result = train(
        head, data_of(source), teacher(), config(**changes), run_dir, quiet(validate), provenance={"recipe": "x"}
    )
    return head, result


def records(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir) -> list[tuple[int, float]]:
    return [(r["step"], r["train/loss"]) for r in records(run_dir) if "train/loss" in r]


def assert_same_weights(a: FakeHead, b: FakeHead) -> None:
    for name, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[name]), name


def test_loss_falls_and_the_result_says_what_was_done(tmp_path):
    _, result = run(tmp_path, noise=0.0, steps=30)
    curve = [loss for _, loss in losses(tmp_path)]
    assert len(curve) == 30 and curve[-1] < 0.7 * curve[0]
    assert (result.step, result.stopped, result.resumed_from) == (30, "steps", 0)
    assert result.supervised_tokens > 0 and result.checkpoint.endswith("step-00000030")
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000030\n"
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000028", "step-00000030"]


@pytest.mark.parametrize("after", [3, 8, 9, 13, 20])  # packs asked for before the kill: steps 1, 4, 4, 6, 10
@pytest.mark.parametrize("prefetch", [0, 1])
def test_killed_run_continues_as_if_nothing_happened(tmp_path, after, prefetch):
    whole, _ = run(tmp_path / "whole")
    killing = KillingSource(make_documents(), after=after)
    with pytest.raises((Killed, TrainingError)):
        run(tmp_path / "killed", killing, prefetch=prefetch)
    torch.manual_seed(after)  # another process would not share the generators
    again, result = run(tmp_path / "killed", prefetch=prefetch)
    assert result.resumed_from == after // 2 // 4 * 4
    assert_same_weights(whole, again)
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")


def test_finished_run_does_nothing_and_a_larger_budget_continues(tmp_path):
    head, first = run(tmp_path)
    source = FakeSource(make_documents())
    again, second = run(tmp_path, source)
    assert source.asked == [] and second.step == 12 and second.checkpoint == first.checkpoint
    assert_same_weights(head, again)
    _, third = run(tmp_path, steps=14)
    assert (third.resumed_from, third.step) == (12, 14)


def test_damaged_checkpoint_falls_back_loudly(tmp_path, capsys):
    whole, _ = run(tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000012"
    data = bytearray((newest / "head.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "head.safetensors").write_bytes(data)
    source = FakeSource(make_documents())
    head = FakeHead(noise=0.1)
    result = train(head, data_of(source), teacher(), config(), tmp_path)
    assert result.resumed_from == 8
    message = " ".join(capsys.readouterr().err.split())
    assert "WARNING" in message and "step-00000012 is damaged: head.safetensors" in message and "sha256" in message
    assert_same_weights(whole, head)
    assert (tmp_path / "checkpoints" / "damaged-step-00000012").is_dir()


def test_only_damaged_checkpoints_is_an_error_until_resume_is_off(tmp_path):
    run(tmp_path)
    for path in (tmp_path / "checkpoints").glob("step-*"):
        (path / "optimizer.safetensors").unlink()
    with pytest.raises(StorageError, match="all 2 checkpoints are damaged"):
        run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(StorageError, match=r"all 2 checkpoints are damaged .*optimizer.safetensors is missing"):
        run(tmp_path)  # the same command again must not start over
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2
    _, result = run(tmp_path, resume=False)
    assert result.resumed_from == 0
    assert (tmp_path / "previous/1-train/metrics.jsonl").read_text() == before
    assert len(list((tmp_path / "previous/1-train/checkpoints").glob("step-*"))) == 2


def test_every_start_anew_keeps_what_the_one_before_had_made(tmp_path):
    for steps in (2, 3, 4):
        run(tmp_path, resume=False, steps=steps)
    kept = [(tmp_path / f"previous/{n}-train/checkpoints/latest").read_text() for n in (1, 2)]
    assert kept == ["step-00000002\n", "step-00000003\n"]


@pytest.mark.parametrize("left", ["latest", "best"])
def test_checkpoints_that_are_gone_are_not_a_fresh_start(tmp_path, left, capsys):
    """Deleted but for `latest`: an error, as if they were damaged. Without any trace but the metrics: all is kept."""
    chosen = dict(validate=lambda head, step, final: {"valid/walked_tau": float(step)}, eval_every=3)
    run(tmp_path, steps=7, **chosen)
    before = (tmp_path / "metrics.jsonl").read_text()
    for path in (tmp_path / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    if left == "latest":
        with pytest.raises(
            StorageError, match="no checkpoint can be used, though latest names one.*train.resume=false"
        ):
            run(tmp_path, **chosen)
        assert (tmp_path / "metrics.jsonl").read_text() == before
        return
    (tmp_path / "checkpoints/latest").unlink()
    head, source = FakeHead(noise=0.1), FakeSource(make_documents())
    train(head, data_of(source), teacher(), config(), tmp_path)
    said = " ".join(capsys.readouterr().err.split())
    assert "WARNING: no checkpoint is there, though metrics.jsonl goes to step 7: training starts at step 0" in said
    assert (tmp_path / "previous/1-train/metrics.jsonl").read_text() == before
    assert (tmp_path / "previous/1-train/checkpoints/best/head.safetensors").is_file()


def test_a_run_that_ended_before_its_first_checkpoint_simply_starts_again(tmp_path):
    with pytest.raises((Killed, TrainingError)):
        run(tmp_path, KillingSource(make_documents(), after=5))
    assert run(tmp_path)[1].resumed_from == 0 and not (tmp_path / "previous").exists()


def test_only_checkpoints_that_were_set_aside_are_not_a_fresh_start(tmp_path):
    run(tmp_path)
    for path in (tmp_path / "checkpoints").glob("step-*"):
        path.rename(path.with_name(f"damaged-{path.name}"))
    with pytest.raises(StorageError, match="all 2 checkpoints are damaged"):
        run(tmp_path)


def test_other_data_or_seed_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(ConfigError, match="other data"):
        run(tmp_path, FakeSource(make_documents(11)))
    with pytest.raises(ConfigError, match="train.seed was 0, is 1"):
        run(tmp_path, seed=1)


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


@pytest.mark.parametrize("after_good", [0, 2])
def test_nan_loss_stops_with_the_sample_ids_and_keeps_the_checkpoint(tmp_path, after_good):
    source = FakeSource(make_documents(), poison=None)
    packs = in_order(source.lengths, 0, 0, 0)
    poisoned = packs[(2 * after_good + 1) % len(packs)][0]
    kept = config(steps=40, save_every=2, log_every=50)
    run_source = FakeSource(make_documents(), poison=poisoned)
    with pytest.raises(TrainingError) as caught:
        train(FakeHead(), pairs_of(run_source), teacher(), kept, tmp_path, quiet())
    message = str(caught.value)
    assert f"non-finite loss at step {after_good}" in message
    assert f"samples sample-{poisoned}, sample-{poisoned + 1}." in message
    dump = json.loads((tmp_path / f"nonfinite-step-{after_good}.json").read_text())
    assert dump["sample_ids"] == [f"sample-{poisoned}", f"sample-{poisoned + 1}"]
    bad = load_file(tmp_path / f"nonfinite-step-{after_good}.safetensors")
    rows = source.lengths[poisoned]
    assert dump["nonfinite_features"] == {"hidden_RD": rows * bad["hidden_RD"].shape[1]}
    assert torch.equal(bad["tokens_R"][:rows], source.documents[poisoned][0])
    # the NaN reaches the weights where steps are not held back for it
    assert set(dump["nonfinite_weights"]) <= {name for name, _ in FakeHead().named_parameters()}
    if after_good:
        assert "continues from" in message and "step-00000002. Look at these samples" in message
        assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000002"]


def test_nan_with_policy_skip_goes_on(tmp_path):
    source = FakeSource(make_documents(), poison=2)
    head = FakeHead()
    result = train(head, pairs_of(source), teacher(), config(steps=6, nonfinite="skip"), tmp_path, quiet())
    assert result.step == 6
    assert all(torch.isfinite(p).all() for p in head.parameters())
    found = sorted(p.name for p in tmp_path.glob("nonfinite-*.json"))
    assert found == ["nonfinite-step-0.json", "nonfinite-step-3.json"]


def test_a_gradient_that_is_not_finite_is_skipped_though_the_loss_is(tmp_path):
    from headstart.heads.base import Loss

    source = FakeSource(make_documents())
    weights = []  # of every pack, two a step

    class Head(FakeHead):
        def loss(self, batch, teacher, scale_T=None) -> Loss:
            found = super().loss(batch, teacher, scale_T)
            weights.append(self.heads[0].weight.detach().clone())
            if len(weights) == 2 * 2 + 1:
                found.sum_T.register_hook(lambda gradient: gradient * float("inf"))
            return found

    head = Head()
    train(head, pairs_of(source), teacher(), config(steps=5, nonfinite="skip"), tmp_path, quiet())
    dump = json.loads((tmp_path / "nonfinite-step-2.json").read_text())
    assert dump["what"] == "gradient" and len(dump["sample_ids"]) == 4
    assert torch.equal(weights[2 * 3], weights[2 * 2]) and not torch.equal(weights[2 * 4], weights[2 * 3])
    assert all(torch.isfinite(p).all() for p in head.parameters())
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 4, 5]  # a skipped step has no loss to record


class NonFinite(FakeSource):
    """Features that are not finite behind the first `after` packs asked for; SIGTERM with the pack of number `stop`."""

    def __init__(self, after: int, stop: int | None = None):
        super().__init__(make_documents())
        self.after, self.stop = after, stop

    def get(self, pack):
        batch = super().get(pack)
        if len(self.asked) > self.after:
            batch.hidden_RD[:] = float("nan")
        if len(self.asked) == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch


def diverging() -> NonFinite:
    """Non-finite from the sixth step on; SIGTERM in the seventh, whose look at it is the 16th pack asked for."""
    return NonFinite(after=2 * 5, stop=16)


def train_spoiled(run_dir, source: FakeSource, after: int, noise: float, **settings) -> TrainResult:
    """Train a head of which a weight becomes NaN once `after` packs were asked for."""
    head, real = FakeHead(noise=noise), source.get

    def get(pack):
        if len(source.asked) == after:
            with torch.no_grad():
                head.heads[0].weight[0, 0] = float("nan")
        return real(pack)

    source.get = get
    return train(head, data_of(source), teacher(), config(**settings), run_dir)


def test_a_run_that_only_skips_ends_and_keeps_its_good_checkpoints(tmp_path):
    source, diverging = FakeSource(make_documents()), NonFinite(after=2 * 5)
    settings = config(steps=40, save_every=1, nonfinite="skip")
    with pytest.raises(TrainingError, match=r"10 steps in a row .* continues from .*step-00000005\. .*train\.lr"):
        train(FakeHead(), pairs_of(diverging), teacher(), settings, tmp_path, quiet())
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000004", "step-00000005"]
    assert len(diverging.asked) >= 2 * 15
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4, 5]
    head = FakeHead()
    result = train(head, pairs_of(source), teacher(), settings, tmp_path, quiet())
    assert (result.resumed_from, result.step) == (5, 40)


SKIPPING = dict(steps=40, nonfinite="skip", save_every=5, keep=1, noise=0.0, prefetch=0)


def steps_in(run_dir) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir() if "step-" in p.name)


def test_a_stop_while_steps_are_skipped_loses_no_step_and_keeps_the_checkpoint_before(tmp_path):
    _, stopped = run(tmp_path, diverging(), **SKIPPING)
    assert (stopped.stopped, stopped.step) == ("signal", 7)
    assert steps_in(tmp_path) == ["step-00000005", "step-00000007"] and stopped.checkpoint.endswith("07")
    again, clean = run(tmp_path, **(SKIPPING | {"steps": 12}))
    assert clean.resumed_from == 7 and steps_in(tmp_path) == ["step-00000012"]
    assert all(torch.isfinite(p).all() for p in again.parameters())


def test_a_run_that_diverged_over_a_stop_goes_back_to_before_its_skips(tmp_path):
    run(tmp_path, diverging(), **SKIPPING)

    with pytest.raises(TrainingError, match="10 steps in a row .* continues from .*step-00000005.* lower train.lr"):
        run(tmp_path, NonFinite(after=0), **SKIPPING)
    assert steps_in(tmp_path) == ["diverged-step-00000007", "step-00000005"]
    assert run(tmp_path, **(SKIPPING | {"steps": 8}))[1].resumed_from == 5


def test_a_run_that_no_longer_skips_saves_again(tmp_path):
    run(tmp_path, diverging(), **SKIPPING)
    stopping = SKIPPING | {"nonfinite": "stop", "steps": 12}
    assert run(tmp_path, **stopping)[1].resumed_from == 7
    assert steps_in(tmp_path) == ["step-00000012"]
    assert json.loads((tmp_path / "checkpoints/step-00000012/state.json").read_text())["skipped"] == 0


def test_a_budget_that_ends_between_skipped_steps_leaves_no_weights_that_are_not_finite(tmp_path):
    with pytest.raises(TrainingError, match="ended at step 8 between skipped steps.* not finite.*step-00000005"):
        train_spoiled(tmp_path, FakeSource(make_documents()), 2 * 6, **(SKIPPING | {"steps": 8}))
    assert steps_in(tmp_path) == ["step-00000005"]


def test_a_budget_that_ends_between_skipped_steps_ends_well_with_finite_weights(tmp_path):
    head, result = run(tmp_path, NonFinite(after=2 * 7), **(SKIPPING | {"steps": 8}))
    assert result.stopped == "steps" and steps_in(tmp_path) == ["step-00000008"]
    assert all(torch.isfinite(p).all() for p in head.parameters())


def test_a_checkpoint_of_weights_that_are_not_finite_is_not_gone_back_to(tmp_path):
    """Saved after the update that broke them and before the first skip."""
    real = CheckpointStore.save

    def save(store, checkpoint):
        if checkpoint.state["step"] == 4:
            checkpoint.head["heads.0.weight"][0, 0] = float("nan")
        return real(store, checkpoint)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingError, match="continues from .*step-00000003"):
        patch.setattr(CheckpointStore, "save", save)
        train_spoiled(tmp_path, FakeSource(make_documents()), 2 * 4, **(SKIPPING | {"save_every": 1, "keep": 0}))
    assert "diverged-step-00000004" in steps_in(tmp_path) and "step-00000004" not in steps_in(tmp_path)


@pytest.mark.parametrize("save_every", [5, 0])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, capsys, save_every):
    result = train_spoiled(tmp_path, diverging(), 2 * 6, **(SKIPPING | {"save_every": save_every}))
    said = " ".join(capsys.readouterr().err.split())
    assert "the head's weights are not finite and were not saved" in said
    if save_every:
        assert steps_in(tmp_path) == ["step-00000005"] and result.checkpoint.endswith("05")
    else:
        assert steps_in(tmp_path) == [] and result.checkpoint == "" and "the same command starts at step 0" in said
    assert run(tmp_path, **(SKIPPING | {"steps": 8}))[1].resumed_from == save_every


def test_skipped_steps_in_a_row_count_across_a_stop(tmp_path):
    class Poisoned(FakeSource):
        stops = True

        def get(self, pack):
            if self.stops and len(self.asked) == 12:
                os.kill(os.getpid(), signal.SIGTERM)
            batch = super().get(pack)
            batch.hidden_RD[:] = float("nan")
            return batch

    _, first = run(tmp_path, Poisoned(make_documents()), steps=40, nonfinite="skip")
    assert first.stopped == "signal" and 1 < first.step < 9
    Poisoned.stops = False
    with pytest.raises(TrainingError, match="at step 9, .* 10 steps in a row"):
        run(tmp_path, Poisoned(make_documents()), steps=40, nonfinite="skip")


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
            "headstart.train.checkpoints.saving.Saving.rewrite_state", lambda saving: (_ for _ in ()).throw(Killed)
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


def test_a_head_of_other_sizes_is_refused(tmp_path):
    run(tmp_path)

    class Wider(FakeHead):
        def __init__(self, **more):
            super().__init__(**more)
            self.heads[1] = torch.nn.Linear(8, 14)

    source = FakeSource(make_documents())
    with pytest.raises(
        ConfigError, match=r"holds another head \(tensors that differ: heads.1.bias \[13\], heads.1.bias"
    ):
        train(Wider(), data_of(source), teacher(), config(), tmp_path, quiet())


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


def test_resuming_gives_the_generators_and_the_clock_back(tmp_path):
    seen = {}

    class Drawing(FakeSource):
        """Draws beside the packs, which seed themselves."""

        def get(self, pack):
            seen[len(self.asked)] = random.random()
            return super().get(pack)

    random.seed(5)
    run(tmp_path, Drawing(make_documents()), steps=6, save_every=4, max_seconds=1000.0)
    whole, seen = seen, {}
    path = tmp_path / "checkpoints/step-00000004"
    CheckpointStore._remove(tmp_path / "checkpoints/step-00000006")
    store = CheckpointStore(tmp_path / "checkpoints", 0)
    state = json.loads((path / "state.json").read_text())
    assert 0 < state["elapsed"] < 100
    store.rewrite_state(state | {"elapsed": 500.0})
    random.seed(77)
    _, result = run(tmp_path, Drawing(make_documents()), steps=6, save_every=4, max_seconds=1000.0)
    assert seen == {i: whole[8 + i] for i in range(4)}
    assert 500.0 < result.seconds < 600.0
    assert records(tmp_path)[-1]["seconds"] > 500.0


def test_progress_is_rank_0s_alone(tmp_path):
    settings, stream = config(), PackStream([5, 6], 20, 0)
    meters, budget = Meters(SumNames((), ()), torch.device("cpu")), Budget.of(settings, None)
    shown = {
        (rank, show): Standing(settings, tmp_path, stream, budget, meters, rank, 2, show).reporter._show
        for rank in (0, 1) for show in (True, False)
    }  # fmt: skip
    assert shown == {(0, True): True, (0, False): False, (1, True): False, (1, False): False}


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


def test_no_supervised_position_is_an_error(tmp_path):
    documents = [(tokens, torch.full_like(turn, -1)) for tokens, turn in make_documents()]
    with pytest.raises(TrainingError, match="no position is supervised"):
        run(tmp_path, FakeSource(documents))


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
