"""Levers of training in captured steps on a GPU (`pytest -m gpu`): emphasis of rounds, Muon, averaged weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.data.features import OnlineFeatures
from headstart.data.samples import Sample
from headstart.heads.batch import FeatureBatch
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.targets.target import Target
from headstart.train.captured import CapturedPacks
from headstart.train.config import TrainConfig
from headstart.train.loop import Observers, train
from headstart.train.rounds import emphasise
from headstart.train.step import LossModule
from headstart.train.stream import TrainData

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def small_target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    return Target.from_model(LlamaForCausalLM(config).cuda().bfloat16())


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_emphasis_counts_in_a_captured_step():
    """Failed drafts of train.rounds: a graph of packs with emphasis gives the eager gradient."""
    target = small_target()
    head = build_head(FAMILIES["eagle3"].config(draft_vocab_size=0), target.dims).cuda()
    head.initialise(target.ends)
    module = LossModule(head, target.teacher, torch.bfloat16)
    captured = CapturedPacks(module, len(head.terms))
    for lengths in ([64, 64], [90, 40]):
        pairs = [(torch.randint(0, 512, (n,)), torch.tensor([-1] * 4 + [0] * (n - 4))) for n in lengths]
        batch = target.extract(FeatureBatch.pack(pairs, head.depth), head.spec)
        failed_R = torch.randint(0, 4, (len(batch.tokens_R),), device="cuda", dtype=torch.uint8)
        scale_T = head.term_weights().cuda() / head.loss_counts(batch)
        found = []
        for each in (batch, emphasise(batch, failed_R, 5.0)):
            total = (module(each)[0] * scale_T).sum()
            found.append(torch.autograd.grad(total, [head.fc.weight])[0])
            del total
        for parameter in head.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        captured.backward(emphasise(batch, failed_R, 5.0), scale_T)
        assert relative(head.fc.weight.grad, found[1]) < 2e-2 and relative(found[0], found[1]) > 0.1


def test_muon_trains_a_captured_run(tmp_path):
    """Graphs read the weights where they are: losses fall, and the head that is left is the average."""
    target = small_target()
    head = build_head(FAMILIES["eagle3"].config(draft_vocab_size=0, depth=3), target.dims).cuda()
    head.initialise(target.ends)
    tokens, turns = np.arange(60, dtype=np.int32) * 7 % 512, np.array([-1] * 9 + [0] * 51, dtype=np.int32)
    samples = [Sample(id=f"s{i}", token_ids=tokens, turn_ids=turns, finish_reason="stop", meta={}) for i in range(8)]
    source = OnlineFeatures(target, samples, head.spec, head.depth)
    settings = TrainConfig(
        steps=24, lr=3e-3, optimizer="muon", average_decay=0.5, rounds=2, capture="on", mixed_precision="bf16",
        log_every=1, save_every=0,
    )  # fmt: skip
    train(head, TrainData(source, 128), target.teacher, settings, tmp_path, Observers(progress=False), provenance={})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    # most of it is the entropy of a random target; failed drafts count more from step 12 on
    assert losses[11] < losses[0] - 0.05 and losses[23] < losses[12]
    saved = load_file(tmp_path / "checkpoints/step-00000024/optimizer.safetensors")
    assert torch.equal(head.fc.weight.cpu(), saved["average/fc.weight"]) and "momentum_buffer/fc.weight" in saved
