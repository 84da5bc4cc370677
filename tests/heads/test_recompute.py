"""Activation checkpointing: activations made again in the backward pass change neither loss nor gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.errors import ConfigError
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.targets.target import Target
from headstart.train.launching.setup import recompute_activations


def built(family: str) -> tuple[Head, Target]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    target = Target.from_model(LlamaForCausalLM(config).double())
    settings = FAMILIES[family].config()
    if family == "eagle3":
        settings.draft_vocab_size = 30
    if family == "eagle":
        settings.feature_noise = 0.0
    head = build_head(settings, target.dims).double()
    head.initialise(target.ends, torch.arange(30) * 2)
    return head.train(), target


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_same_loss_and_gradients(family: str, tmp_path: Path) -> None:
    head, target = built(family)
    turns = torch.tensor([-1, -1, 0, 0, 0, 0, 0, 0, -1, 1, 1, 1, 1])
    documents = [(torch.randint(0, 60, (n,)), turns[:n]) for n in (13, 9, 13)]
    batch = target.extract(FeatureBatch.pack(documents, head.depth), head.spec)
    scale_T = head.term_weights().double()
    found = []
    for recompute in (False, True):
        if recompute:
            recompute_activations(head)
        loss = (head.loss(batch, target.teacher, scale_T).sum_T * scale_T).sum()
        gradients = torch.autograd.grad(loss, list(head.parameters()), allow_unused=True)
        found.append([loss, *(g for g in gradients if g is not None)])
    assert len(found[0]) > 8
    for kept, again in zip(*found, strict=True):
        torch.testing.assert_close(again, kept)


def test_a_head_without_a_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="activation_checkpointing: found true, medusa heads have no layer whose"):
        recompute_activations(built("medusa")[0])
