"""What joint training costs by the plan: numbers kept, parameters, arithmetic, against what autograd does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from joint_fakes import batch_of, config_of, joint_head, tiny_target
from torch.utils.flop_counter import FlopCounterMode

from headstart.data.features import parameters_per_row
from headstart.heads.families import MedusaConfig, build_head
from headstart.train.joint.cost import layer_numbers, plain_parameters, target_numbers
from headstart.train.joint.head import JointHead

PATTERN = ("..AAAAAAAA", ".AAAAAAA.BBBBB", "...AAAAAAAAAAAAA")


def kept_by_autograd(head: JointHead) -> int:
    """Numbers of all tensors that one pass of the target keeps, its weights and whatever is tiny left out."""
    held: dict[int, int] = {}
    fixed = {p.untyped_storage().data_ptr() for p in head._target[0].model.parameters()}

    def note(x: torch.Tensor) -> torch.Tensor:
        place = x.untyped_storage().data_ptr()
        if place not in fixed:
            held[place] = x.untyped_storage().nbytes() // (1 if x.dtype == torch.bool else 4)
        return x

    batch = batch_of(PATTERN)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        head.live(batch)
    return sum(held.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_keeps_what_the_plan_says(dropout):
    """In float32 a norm's input is no copy, and a mask of one byte is a quarter of a number instead of a half."""
    sizes = dict(hidden_size=64, intermediate_size=160)
    rows, found = sum(map(len, PATTERN)), []
    for layers in (2, 6):
        target = tiny_target(num_hidden_layers=layers, **sizes)
        head = joint_head(config_of(dropout=dropout), target=target)
        head.enter_stage(1)
        head.train()
        found.append(kept_by_autograd(head) / rows)
    per_layer = (found[1] - found[0]) / 4
    planned = layer_numbers(target, head.joint)
    assert 0.7 * per_layer < planned < 1.5 * per_layer


def test_recomputing_keeps_the_layers_inputs_and_one_layer():
    target, joint = tiny_target(num_hidden_layers=8), config_of(loss="kl")
    kept, again = (target_numbers(target, joint, 100, recompute) for recompute in (False, True))
    layer, width = layer_numbers(target, joint), target.dims.hidden_size
    assert kept - again == pytest.approx(100 * (7 * layer - 8 * width))
    assert target_numbers(target, replace(joint, dropout=0.1), 100, False) > kept


def test_parameters_are_the_targets_own_whether_or_not_it_has_an_adapter():
    target = tiny_target()
    before = parameters_per_row(target)
    assert plain_parameters(target) == before
    joint_head(config_of(), target=target)
    assert plain_parameters(target) == before < parameters_per_row(target)


@pytest.mark.parametrize(("loss", "stage"), [("kl", 0), ("kl", 1), ("ce", 1)])
def test_multiply_adds_are_those_of_a_step(loss, stage):
    """Counted over forward and backward pass: 2 per multiply-add forward, 4 backward where weights have gradients."""
    target = tiny_target(hidden_size=64, intermediate_size=160, vocab_size=512)
    head = joint_head(config_of(loss=loss, rank=8), MedusaConfig(depth=2, lm_head="own", loss="ce"), target)
    head.enter_stage(stage)
    batch = batch_of(PATTERN)
    scale_T = head.term_weights() / head.loss_counts(batch).clamp(min=1)
    with FlopCounterMode(display=False) as counter:
        (head.loss(batch, target.teacher, scale_T).sum_T * scale_T).sum().backward()
    planned = 6 * head.multiply_adds(len(batch.tokens_R), batch.anchors.count_K)
    assert 0.75 * counter.get_total_flops() < planned < 1.3 * counter.get_total_flops()


def test_a_planned_head_leaves_the_target_as_it_is():
    target = tiny_target()
    names = set(target.model.state_dict())
    inner = build_head(MedusaConfig(depth=2), target.dims)
    inner.initialise(target.ends)
    planned = JointHead(inner, target, config_of(heads_only=0.25), planned=True)
    assert set(target.model.state_dict()) == names
    real = joint_head(config_of(heads_only=0.25), MedusaConfig(depth=2))
    assert planned.trained_parameters() == real.trained_parameters()
    assert [n for n, _ in planned.named_parameters()] == [n for n, _ in real.named_parameters()]
    both = []
    for stage in (0, 1):
        real.enter_stage(stage)
        both.append(real.multiply_adds(100, [80, 70]))
    assert planned.multiply_adds(100, [80, 70]) == pytest.approx(0.25 * both[0] + 0.75 * both[1])
    assert planned.kept_numbers(100, 80, False) > 3 * inner.kept_numbers(100, 80, False)
    # autocast copies the adapter as it copies the head
    adapter = sum(p.numel() for p in real.adapter.parameters())
    assert planned.copied_numbers() == real.copied_numbers() == inner.copied_numbers() + adapter
