"""Which way the ranks share the head, and what each way refuses (its maths: test_ranks.py)."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from train_fakes import FakeHead, teacher

from headstart.heads.errors import ConfigError
from headstart.heads.targets.target import TargetConfig
from headstart.train.config import TrainConfig
from headstart.train.launching.setup import check_layout, make_parallel
from headstart.train.sharing.parallel import resolve_kind
from headstart.train.sharing.zero import zero_config
from headstart.train.step import LossModule


def accelerator(kind: DistributedType = DistributedType.NO, stage: int = 2, ranks: int = 2) -> SimpleNamespace:
    plugin = SimpleNamespace(zero_stage=stage, deepspeed_config={})
    state = SimpleNamespace(deepspeed_plugin=plugin)
    return SimpleNamespace(distributed_type=kind, state=state, num_processes=ranks, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("asked", "launched", "stage", "kind"),
    [
        ("auto", DistributedType.NO, 0, "replicated"),
        ("auto", DistributedType.MULTI_GPU, 0, "replicated"),
        ("auto", DistributedType.FSDP, 0, "fsdp2"),
        ("auto", DistributedType.DEEPSPEED, 2, "zero2"),
        ("auto", DistributedType.DEEPSPEED, 3, "zero3"),
        ("fsdp2", DistributedType.MULTI_GPU, 0, "fsdp2"),
        ("replicated", DistributedType.FSDP, 0, "replicated"),
    ],
)
def test_the_launch_decides_unless_the_recipe_does(asked, launched, stage, kind):
    assert resolve_kind(TrainConfig(steps=1, parallel=asked), accelerator(launched, stage)) == kind


def test_other_stages_and_skipping_under_zero_are_refused():
    with pytest.raises(ConfigError, match="found DeepSpeed zero_stage 1, expected 2 or 3"):
        resolve_kind(TrainConfig(steps=1), accelerator(DistributedType.DEEPSPEED, 1))
    with pytest.raises(ConfigError, match="train.nonfinite: found skip with train.parallel=zero2"):
        resolve_kind(TrainConfig(steps=1, parallel="zero2", nonfinite="skip"), accelerator())
    with pytest.raises(ConfigError, match="train.parallel: found 'zero1', expected one of auto, replicated, fsdp2"):
        TrainConfig(steps=1, parallel="zero1").check()


def make(kind: str, **changes):
    head = FakeHead()
    config = TrainConfig(steps=1, **changes)
    return make_parallel(kind, head, LossModule(head, teacher(), None), config, accelerator(), False)


def test_one_rank_has_nothing_to_shard_over():
    with pytest.raises(ConfigError, match="found fsdp2 with one rank"):
        resolve_kind(TrainConfig(steps=1, parallel="fsdp2"), accelerator(ranks=1))


def test_zero_without_deepspeed_names_the_package_and_the_alternative(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match="zero2 needs deepspeed.*pip install deepspeed.*train.parallel=fsdp2"):
        make("zero2")


def test_zero_cannot_clip_by_value():
    with pytest.raises(ConfigError, match="train.clip_value: found 0.5 with train.parallel=zero3"):
        resolve_kind(TrainConfig(steps=1, parallel="zero3", clip_value=0.5), accelerator())


@pytest.mark.parametrize("kind", ["fsdp2", "zero2", "zero3"])
def test_muon_needs_whole_matrices(kind):
    with pytest.raises(ConfigError, match=f"train.optimizer: found muon with train.parallel={kind}.*=replicated"):
        resolve_kind(TrainConfig(steps=1, parallel=kind, optimizer="muon"), accelerator())
    assert resolve_kind(TrainConfig(steps=1, optimizer="muon"), accelerator()) == "replicated"


def test_zero_makes_no_averages():
    with pytest.raises(ConfigError, match="train.average_decay: found 0.9 with train.parallel=zero2"):
        resolve_kind(TrainConfig(steps=1, parallel="zero2", average_decay=0.9), accelerator())


@pytest.mark.parametrize(
    ("target", "ranks", "node", "message"),
    [
        (dict(parallel="fsdp2", shard_ranks=3), 4, 4, "target.shard_ranks: found 3, expected a divisor of the 4 ranks"),
        (dict(parallel="fsdp2", shard_ranks=-2), 4, 4, "target.shard_ranks: found -2, expected a divisor"),
        (dict(parallel="fsdp2", shard_ranks=0), 4, 4, "target.shard_ranks: found 0, expected a divisor"),
        (dict(parallel="fsdp2"), 1, 1, "target.parallel: found fsdp2 in a process that is alone"),
        (dict(parallel="device_map"), 2, 2, "target.parallel: found device_map with 2 ranks, expected one process"),
    ],
)
def test_layouts_of_a_target_that_ranks_cannot_hold_are_refused(target, ranks, node, message):
    with pytest.raises(ConfigError, match=message):
        check_layout("replicated", TrainConfig(steps=1), TargetConfig(name="t", **target), ranks, node)


def test_layouts_that_ranks_can_hold_are_not_refused():
    for target, ranks, node in (
        (dict(parallel="fsdp2", shard_ranks=2), 8, 4), (dict(parallel="fsdp2"), 8, 4), (dict(), 1, 1),
        (dict(parallel="device_map"), 1, 1),
    ):  # fmt: skip
        check_layout("replicated", TrainConfig(steps=1), TargetConfig(name="t", **target), ranks, node)


def test_zero_configuration_keeps_what_the_launch_says_and_no_auto():
    given = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}}
    settings = zero_config(TrainConfig(steps=1, clip_norm=0.5), 3, given)
    assert settings["zero_optimization"] == {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}
    assert settings["gradient_clipping"] == 0.5
    assert settings["gradient_accumulation_steps"] == settings["train_micro_batch_size_per_gpu"] == 1
    assert "fp16" not in settings and "bf16" not in settings  # float32 weights, autocast inside the loss
    assert zero_config(TrainConfig(steps=1, clip_norm=None), 2, {})["gradient_clipping"] == 0.0
