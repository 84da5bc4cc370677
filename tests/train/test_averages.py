"""Averaged weights: the closed form, what is validated and kept, resuming."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from fake_runs import assert_same_weights, losses, run
from safetensors.torch import load_file
from torch import nn
from train_fakes import FakeHead

from headstart.train.averages import Averages, rate_of
from headstart.train.checkpoints import writer
from headstart.train.checkpoints.checkpoint import CheckpointStore
from headstart.train.checkpoints.writer import HostCopies


def test_averages_are_the_weighted_sum_of_all_weights():
    parameter = nn.Parameter(torch.zeros(3))
    averages = Averages(0.6, lambda: {"p": parameter})
    history = [torch.randn(3, generator=torch.Generator().manual_seed(n)) for n in range(30)]
    for step, value in enumerate(history, start=1):
        with torch.no_grad():
            parameter.copy_(value)
        averages.update(step)
    rates = [0.0] + [min(0.6, n / (n + 10)) for n in range(2, 31)]
    assert rates[9] == 0.5 and rates[-1] == 0.6
    shares = []
    for n, rate in enumerate(rates):
        share = 1 - rate
        for later in rates[n + 1 :]:
            share *= later
        shares.append(share)
    assert sum(shares) == pytest.approx(1)
    expected = sum(share * value for share, value in zip(shares, history, strict=True))
    found = dict(averages.tensors())["p"]
    assert torch.allclose(found, expected, atol=1e-6)
    place = parameter.data_ptr()
    with averages.swapped():
        assert torch.equal(parameter.detach(), found) and parameter.data_ptr() == place
    assert torch.equal(parameter.detach(), history[-1])
    assert rate_of(0.6, 1) == 1 / 11


def weights(head: FakeHead) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in head.state_dict().items()}


@pytest.mark.parametrize("select", ["last", "best"])
def test_validation_the_best_head_and_the_end_have_the_averages(tmp_path, select):
    """The last step is the best one, so that both selections end with the same weights."""
    seen = {}

    def validate(head, step, final):
        seen[step] = weights(head)
        return {"valid/walked_tau": float(step)}

    head, _ = run(tmp_path, validate=validate, eval_every=3, average_decay=0.8, select=select)
    plain, _ = run(tmp_path / "plain")
    path = tmp_path / "checkpoints/step-00000012"
    last, saved = load_file(path / "head.safetensors"), load_file(path / "optimizer.safetensors")
    for name, value in head.state_dict().items():
        assert torch.equal(value, seen[12][name]) and torch.equal(value, saved[f"average/{name}"])
        assert torch.equal(last[name], plain.state_dict()[name])  # training itself went its usual way
        assert not torch.equal(last[name], value)
    best = load_file(tmp_path / "checkpoints/best/head.safetensors")
    assert all(torch.equal(best[name], value) for name, value in seen[12].items())


class LateCopies(HostCopies):
    """Copies as on a GPU: they are made later, of what the tensors hold then; `protect` waits for them."""

    late: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def take(self, group, tensors):
        pairs = {name: (torch.empty_like(tensor), tensor.detach()) for name, tensor in tensors}
        self.late.extend(pairs.values())
        return {name: copy for name, (copy, _) in pairs.items()}

    def protect(self):
        for copy, tensor in self.late:
            copy.copy_(tensor)
        self.late.clear()

    wait = protect

    def ready(self):
        return not self.late


def test_a_checkpoint_holds_the_weights_though_a_validation_follows(tmp_path, monkeypatch):
    """The averages take the place of weights that are still being copied only when the copies are complete."""
    weights_at, averages_at, update = {}, {}, Averages.update

    def noting(self, step):
        update(self, step)
        weights_at[step] = {name: p.detach().clone() for name, p in self._trained().items()}
        averages_at[step] = {name: value.clone() for name, value in self.tensors()}

    monkeypatch.setattr(Averages, "update", noting)
    monkeypatch.setattr(writer, "HostCopies", LateCopies)

    def validate(head, step, final):
        return {"valid/walked_tau": -float(step)}

    run(tmp_path, validate=validate, eval_every=4, average_decay=0.8, keep=0)
    for step in (4, 8, 12):
        place = tmp_path / f"checkpoints/step-{step:08}"
        head, optimizer = load_file(place / "head.safetensors"), load_file(place / "optimizer.safetensors")
        for name, value in weights_at[step].items():
            assert torch.equal(head[name], value) and torch.equal(optimizer[f"average/{name}"], averages_at[step][name])
    best = load_file(tmp_path / "checkpoints/best/head.safetensors")  # of the first validation
    assert all(torch.equal(best[name], value) for name, value in averages_at[4].items())


def test_a_resumed_run_goes_on_with_its_averages(tmp_path):
    whole, _ = run(tmp_path, average_decay=0.8)
    curve = losses(tmp_path)
    CheckpointStore._remove(tmp_path / "checkpoints/step-00000012")
    again, result = run(tmp_path, average_decay=0.8)
    assert result.resumed_from == 8 and losses(tmp_path) == curve
    assert_same_weights(whole, again)
    finished, _ = run(tmp_path, average_decay=0.8)  # nothing is left to do
    assert_same_weights(whole, finished)


def test_averages_begin_with_the_weights_where_a_checkpoint_has_none(tmp_path):
    run(tmp_path, steps=8)
    begun, _ = run(tmp_path, steps=9, average_decay=0.8)
    last = load_file(tmp_path / "checkpoints/step-00000009/head.safetensors")
    assert all(torch.equal(value, last[name]) for name, value in begun.state_dict().items())
