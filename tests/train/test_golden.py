"""Twenty steps of every real head on a tiny random target against recorded losses.

    HEADSTART_WRITE_GOLDEN=1 pytest tests/train/test_golden.py     records the curves anew (say why in the commit)

Tolerance: 1e-3 relative. Another BLAS or torch release reorders float32 sums (about 1e-6 per step, amplified over
twenty AdamW steps); a wrong shift, mask, weight or rate moves the curve by far more.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.families import REFERENCES
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.data.features import OnlineFeatures
from headstart.data.samples import Sample, token_counts
from headstart.eval.measuring.benchmark import tau_probe
from headstart.heads.base import Head
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.targets.target import Target
from headstart.heads.vocab import choose_draft_vocab
from headstart.train.config import TrainConfig
from headstart.train.loop import Observers, TrainResult, train
from headstart.train.stream import TrainData
from headstart.train.validate import Validator

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
SETTINGS = {
    "medusa": {"depth": 3},
    "hydra": {"depth": 3, "prefix_layer": True, "num_layers": 2, "lm_head": "lowrank", "rank": 8},
    "eagle": {"feature_noise": 0.01},
    "eagle3": {"depth": 3, "draft_vocab_size": 48},
    "peagle": {"depth": 4, "layers": 2, "draft_vocab_size": 48, "mask_token_id": 96},
}


def tiny_target(dtype: torch.dtype = torch.float32) -> Target:
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, max_position_embeddings=256, initializer_range=0.2, eos_token_id=1,
    )  # fmt: skip
    return Target.from_model(LlamaForCausalLM(shape).to(dtype))


def make_samples(count: int = 16) -> list[Sample]:
    """Lengths 12 … 35, two turns each, tokens from a narrow distribution so that twenty steps learn something."""
    generator = np.random.default_rng(0)
    samples = []
    for i in range(count):
        length = int(generator.integers(12, 36))
        tokens = np.minimum(generator.geometric(0.1, length), 96).astype(np.int32)
        turns = np.full(length, -1, dtype=np.int32)
        turns[3 : length // 2] = 0
        turns[length // 2 + 2 :] = 1
        samples.append(Sample(id=f"s{i}", token_ids=tokens, turn_ids=turns, finish_reason="stop", meta={}))
    return samples


def make_head(family: str, target: Target, samples: list[Sample]) -> Head:
    torch.manual_seed(1)
    head = build_head(FAMILIES[family].config(**SETTINGS[family]), target.dims)
    size = SETTINGS[family].get("draft_vocab_size")
    ids = choose_draft_vocab(token_counts(samples, target.dims.vocab_size), size, (1,)) if size else None
    head.initialise(target.ends, ids)
    return head


def run(family: str, run_dir: Path) -> None:
    target, samples = tiny_target(), make_samples()
    head = make_head(family, target, samples)
    config = TrainConfig(steps=20, accumulation=2, lr=3e-3, warmup_steps=2, save_every=7, log_every=1)
    data = TrainData(OnlineFeatures(target, samples, head.spec, head.depth), pack_tokens=96)
    train(head, data, target.teacher, config, run_dir, Observers(progress=False), provenance={})


def run_random(
    family: str, run_dir: Path, source_of: type[OnlineFeatures] = OnlineFeatures, **settings: Any
) -> tuple[Head, TrainResult]:
    """A run with all the randomness that the family's training has."""
    target, samples = tiny_target(), make_samples()
    torch.manual_seed(1)
    head = build_head(REFERENCES[family].random, target.dims)
    size, vocab = head.draft_vocab_size, target.dims.vocab_size
    ids = None if size is None else choose_draft_vocab(token_counts(samples, vocab), size, (1,))
    head.initialise(target.ends, ids)
    data = TrainData(source_of(target, samples, head.spec, head.depth), pack_tokens=96)
    config = TrainConfig(lr=3e-3, log_every=1, **settings)
    return head, train(head, data, target.teacher, config, run_dir, Observers(progress=False), provenance={})


def curve(run_dir: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", sorted(SETTINGS))
def test_twenty_steps_follow_the_recorded_curve(family, tmp_path):
    run(family, tmp_path)
    found, path = curve(tmp_path), GOLDEN / f"{family}.json"
    if os.environ.get("HEADSTART_WRITE_GOLDEN"):
        path.write_text(json.dumps({"train/loss": [round(x, 7) for x in found]}, indent=1) + "\n")
    expected = json.loads(path.read_text())["train/loss"]
    assert found == pytest.approx(expected, rel=1e-3)
    assert found[-1] < found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_validation_measures_real_tau_on_float32_master_weights(dtype):
    """The target may run in bfloat16 while the head under training is float32."""
    target, samples = tiny_target(dtype), make_samples(4)
    head = make_head("eagle3", target, samples)
    source = OnlineFeatures(target, samples, head.spec, head.depth)
    prompts = [s.token_ids[:6].tolist() for s in samples[:2]]
    autocast = None if dtype == torch.float32 else dtype
    validator = Validator(
        source, [[0, 1], [2, 3]], target.teacher, lambda h: tau_probe(target, h, prompts, 8, 2), autocast=autocast
    )
    values = validator(head, 1)
    assert 1.0 <= values["valid/tau"] <= 3.0
    assert all(0 <= values[f"valid/acc_{d}"] <= 1 for d in (1, 2, 3))
    assert {p.dtype for p in head.parameters()} == {torch.float32}
