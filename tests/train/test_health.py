"""Losses and gradients that are not finite, skipped steps, rows that do not train."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from fake_runs import config, losses, run
from safetensors.torch import load_file
from train_fakes import FakeHead, FakeSource, data_of, in_order, make_documents, pairs_of, quiet, teacher

from headstart.heads.errors import TrainingError
from headstart.train.checkpoints.checkpoint import CheckpointStore
from headstart.train.loop import TrainResult, train


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


def test_no_supervised_position_is_an_error(tmp_path):
    documents = [(tokens, torch.full_like(turn, -1)) for tokens, turn in make_documents()]
    with pytest.raises(TrainingError, match="no position is supervised"):
        run(tmp_path, FakeSource(documents))
