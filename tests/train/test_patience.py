"""Stopping by the accepted length on held-out text, and choosing the head by it."""

from __future__ import annotations

import pytest
import torch
from fake_runs import run
from safetensors.torch import load_file

from headstart.heads.errors import ConfigError
from headstart.train.patience import Patience

LENGTHS = [1.5, 2.0, 1.9, 2.1, 2.05, 2.1, 2.0, 2.3, 2.2, 2.1]


def measuring(lengths, seen=None):
    """Validations every step that find these walked lengths, and a decoded one that grows without end."""

    def validate(head, step, final):
        if seen is not None:
            seen[step] = {name: value.clone() for name, value in head.state_dict().items()}
        return {"valid/walked_tau": lengths[min(step, len(lengths)) - 1], "valid/tau": float(step)}

    return validate


def test_a_run_stops_after_so_many_validations_without_a_longer_length(tmp_path):
    _, result = run(tmp_path, validate=measuring(LENGTHS), eval_every=1, patience=3)
    assert (result.stopped, result.step) == ("patience", 7)  # longest at step 4; 5, 6 and 7 were not longer
    again = run(tmp_path, validate=measuring(LENGTHS), eval_every=1, patience=3)[1]
    assert (again.stopped, again.step) == ("patience", 7)
    _, more = run(tmp_path, validate=measuring(LENGTHS), eval_every=1, patience=4)
    assert (more.resumed_from, more.stopped, more.step) == (7, "steps", 12)
    assert run(tmp_path / "never", validate=measuring(LENGTHS), eval_every=1)[1].step == 12


def test_a_resumed_run_counts_on(tmp_path):
    """A checkpoint of step 6 holds two validations without a longer length."""
    run(tmp_path, validate=measuring(LENGTHS), eval_every=1, steps=6)
    _, result = run(tmp_path, validate=measuring(LENGTHS), eval_every=1, patience=3)
    assert (result.resumed_from, result.stopped, result.step) == (6, "patience", 7)


@pytest.mark.parametrize(("choose_by", "best"), [("walked_tau", 8), ("tau", 12)])
def test_the_walked_length_may_decide_the_head(tmp_path, choose_by, best):
    seen: dict = {}
    validate = measuring(LENGTHS, seen)
    head, result = run(tmp_path, validate=validate, eval_every=1, choose_by=choose_by, select="best")
    assert result.best["step"] == best and result.best["name"] == f"valid/{choose_by}"
    kept = load_file(tmp_path / "checkpoints/best/head.safetensors")
    for name, value in head.state_dict().items():
        assert torch.equal(value, seen[best][name]) and torch.equal(value, kept[name])


def test_a_length_that_falls_while_the_loss_falls_is_told_once():
    said: list[str] = []
    patience, known = Patience(0, said.append), {}
    for step, (length, loss) in enumerate([(2.0, 3.0), (2.5, 2.0), (2.4, 2.5), (2.3, 1.5), (2.2, 1.0)], start=1):
        patience.note_loss(loss + 0.1)
        patience.note_loss(loss - 0.1)
        known = patience.note(known, step, {"valid/walked_tau": length})
    assert len(said) == 1
    assert "fell from 2.500 (step 2) to 2.300, while the training loss still fell (2 to 1.5)" in said[0]
    assert known == {"length": 2.5, "loss": pytest.approx(2.0), "step": 2, "worse": 3, "said": True, "last": 5}
    assert patience.note(known, 6, {"valid/loss": 1.0}) == known  # no length was measured
    assert patience.note({**known, "last": 6}, 6, {"valid/walked_tau": 1.0})["worse"] == 3  # the same step once more
    assert "found no longer accepted length along held-out text than 2.500 of step 2" in patience.ending(known)
    assert not patience.spent(known) and Patience(3, said.append).spent(known)


def test_patience_without_validations_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="train.eval_every: found 0 with train.patience=2"):
        run(tmp_path, validate=measuring(LENGTHS), patience=2)
    with pytest.raises(ConfigError, match="train.patience: found 2, but no text is held out"):
        run(tmp_path, patience=2, eval_every=1)
