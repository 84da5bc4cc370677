"""Muon for the inner matrices, AdamW for the rest: the update itself, who trains what, and resuming."""

from __future__ import annotations

import math

import pytest
import torch
from test_golden import curve, make_head, make_samples, run_random, tiny_target
from torch import Tensor, nn
from train_fakes import FakeHead

from headstart.heads.errors import ConfigError
from headstart.heads.families import FAMILIES, build_head
from headstart.train.checkpoints.checkpoint import CheckpointStore
from headstart.train.config import TrainConfig
from headstart.train.optim import build_optimizer, muon_matrices, set_rate, token_matrices


def orthogonal(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz steps of Muon's authors, in float64."""
    x = matrix.double()
    x = x / x.norm()
    tall = x.shape[0] > x.shape[1]
    x = x.t() if tall else x
    for _ in range(5):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.t() if tall else x


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tall, self.wide, self.norm = nn.Linear(6, 20, bias=False), nn.Linear(20, 6), nn.LayerNorm(20)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.norm(self.tall(x)).relu())


def stepped(config: TrainConfig, steps: int) -> tuple[TwoParts, list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """(the module, weights before each step and at last, gradients of each step)."""
    module = TwoParts()
    optimizer = build_optimizer(module, config, by_muon={"tall.weight", "wide.weight"})
    torch.manual_seed(1)
    weights, gradients = [], []
    for step in range(steps):
        set_rate(optimizer, config.lr * (1 + step))
        weights.append({name: p.detach().clone() for name, p in module.named_parameters()})
        optimizer.zero_grad()
        (module(torch.randn(8, 6)) * torch.randn(8, 6)).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
        optimizer.step()
    weights.append({name: p.detach().clone() for name, p in module.named_parameters()})
    return module, weights, gradients


def test_two_steps_against_a_naive_newton_schulz():
    config = TrainConfig(steps=2, optimizer="muon", lr=0.01, weight_decay=0.1, muon_momentum=0.9, muon_rate=2.0)
    _, weights, gradients = stepped(config, 2)
    for name in ("tall.weight", "wide.weight"):
        momentum = torch.zeros_like(weights[0][name])
        for step in range(2):
            rate = 2.0 * config.lr * (1 + step)  # muon_rate times the run's
            momentum = 0.9 * momentum + 0.1 * gradients[step][name]
            ahead = 0.1 * gradients[step][name] + 0.9 * momentum  # Nesterov's
            update = 0.2 * math.sqrt(20) * orthogonal(ahead)  # as large as AdamW's
            before = weights[step][name].double()
            expected = before - rate * 0.1 * before - rate * update
            error = (weights[step + 1][name] - expected).norm() / (rate * update).norm()
            assert error < 0.03, (name, step)  # the library iterates in bfloat16


def test_the_rest_is_trained_by_adamw_alone():
    """Beside Muon's matrices, one step moves norms and biases as AdamW without Muon does."""
    shared = dict(steps=1, lr=0.01, weight_decay=0.1)
    _, muon, _ = stepped(TrainConfig(optimizer="muon", **shared), 1)
    _, adamw, _ = stepped(TrainConfig(**shared), 1)
    for name in ("wide.bias", "norm.weight", "norm.bias"):
        assert torch.equal(muon[1][name], adamw[1][name])
        assert not torch.equal(muon[1][name], muon[0][name])
    assert not torch.allclose(muon[1]["tall.weight"], adamw[1]["tall.weight"])


def test_outputs_and_embeddings_stay_with_adamw():
    head = make_head("peagle", tiny_target(), make_samples())
    found = muon_matrices(head)
    assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "layers.1.self_attn.o_proj.weight"} <= found
    assert "lm_head.weight" in token_matrices(head) and not found & token_matrices(head)
    assert all(p.ndim == 2 for name, p in head.named_parameters() if name in found)


def test_layers_as_wide_as_the_draft_vocabulary_stay_with_muon():
    dims = tiny_target().dims
    config = FAMILIES["eagle3"].config(draft_vocab_size=dims.intermediate_size)
    head = build_head(config, dims)
    assert head.draft_vocab_size == head.midlayer.mlp.up_proj.out_features
    assert "lm_head.weight" in token_matrices(head)
    assert {f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")} <= muon_matrices(head)


def test_the_decay_of_token_matrices_may_differ():
    head = make_head("eagle3", tiny_target(), make_samples())
    optimizer = build_optimizer(
        head, TrainConfig(steps=1, weight_decay=0.5, token_weight_decay=0.1), tokens=token_matrices(head)
    )
    names = {p: name for name, p in head.named_parameters()}
    decays = {names[p]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays["fc.weight"] == 0.5 and decays["lm_head.weight"] == 0.1 and decays["norm.weight"] == 0.0
    assert set(decays) == {name for name, p in head.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_token_matrices_have_a_rate_of_their_own(optimizer):
    head = make_head("eagle3", tiny_target(), make_samples())
    config = TrainConfig(steps=1, optimizer=optimizer, lr=0.5, token_rate=0.25, muon_rate=3.0)
    built = build_optimizer(head, config, tokens=token_matrices(head), by_muon=muon_matrices(head))
    set_rate(built, config.lr)
    names = {p: name for name, p in head.named_parameters()}
    rates = {names[p]: group["lr"] for group in built.param_groups for p in group["params"]}
    assert rates["lm_head.weight"] == 0.125 and rates["norm.weight"] == 0.5
    assert rates["fc.weight"] == (1.5 if optimizer == "muon" else 0.5)


def test_a_rate_of_zero_keeps_the_output(tmp_path):
    heads = [run_random("eagle3", tmp_path / str(n), steps=n, token_rate=0.0, weight_decay=0.5)[0] for n in (1, 4)]
    (first, last) = ({name: p.detach().clone() for name, p in head.named_parameters()} for head in heads)
    assert torch.equal(first["lm_head.weight"], last["lm_head.weight"])
    assert heads[1].lm_head.weight.grad is None and not heads[1].lm_head.weight.requires_grad
    assert not torch.equal(first["fc.weight"], last["fc.weight"])


def test_a_head_without_inner_matrices_is_refused():
    with pytest.raises(ConfigError, match="train.optimizer: found muon, but this head has no matrix for it"):
        build_optimizer(FakeHead(), TrainConfig(steps=1, optimizer="muon"), by_muon=muon_matrices(FakeHead()))


@pytest.mark.parametrize("family", ["eagle3", "medusa", "dspark"])
def test_a_resumed_run_has_the_same_next_loss(family, tmp_path):
    settings = dict(optimizer="muon", average_decay=0.9, steps=8, save_every=4, accumulation=2)
    whole, _ = run_random(family, tmp_path, **settings)
    losses = curve(tmp_path)
    CheckpointStore._remove(tmp_path / "checkpoints/step-00000008")
    again, result = run_random(family, tmp_path, **settings)
    assert result.resumed_from == 4 and curve(tmp_path) == losses
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_a_run_does_not_go_on_with_the_other_optimiser(tmp_path):
    run_random("medusa", tmp_path, steps=2)
    with pytest.raises(ConfigError, match="train.optimizer was adamw, is muon; the moments of one"):
        run_random("medusa", tmp_path, steps=4, optimizer="muon")
