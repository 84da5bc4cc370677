"""A block head that has learnt eight conversations by heart drafts them: nearly every draft of the engine is accepted.

A wrong shift, position, mask or layout between training and decoding would leave it at one token per forward.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_golden import tiny_target

from headstart.data.memory import MemoryFeatures
from headstart.data.packing import make_packs
from headstart.data.samples import Sample
from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import build_drafter
from headstart.eval.measuring.metrics import acceptance
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.targets.target import Target
from headstart.train.config import TrainConfig
from headstart.train.loop import Observers, train
from headstart.train.stream import TrainData
from headstart.train.validate import Validator

DRAFTS, TOKENS = 7, 41
#: a block of eight: its first slot drafts or does not
HEADS = {
    "dspark": {"depth": 8, "markov_rank": 16, "layers": 1, "ce_weight": 1.0},
    "dflash": {"depth": 7, "layers": 1},
}


def conversations(target: Target) -> list[Sample]:
    """Eight prompts with the target's own greedy answers."""
    generator = np.random.default_rng(5)
    prompts = [generator.integers(2, 97, 6 + n).tolist() for n in range(8)]
    decoded = Decoder(target, EvalConfig(engine="transformers")).run(prompts, None, TOKENS, seed=0)
    samples = []
    for number, (prompt, answer) in enumerate(zip(prompts, decoded.answers, strict=True)):
        turns = np.array([-1] * len(prompt) + [0] * len(answer.tokens), dtype=np.int32)
        samples.append(Sample(f"c{number}", np.array([*prompt, *answer.tokens], dtype=np.int32), turns))
    return samples


@pytest.mark.parametrize("family", HEADS)
def test_eight_conversations_are_drafted_from_memory(family: str, tmp_path: Path) -> None:
    target = tiny_target()
    samples = conversations(target)
    used = {int(token) for sample in samples for token in sample.token_ids}
    mask = next(token for token in range(2, 97) if token not in used)
    torch.manual_seed(1)
    config = FAMILIES[family].config(**HEADS[family], anchor_share=0.5, mask_token_id=mask)
    head = build_head(config, target.dims)
    head.initialise(target.ends)
    source = MemoryFeatures(target, samples, head.spec, head.depth)
    validator = Validator(source, make_packs(source.lengths, 1024, 0, 0), target.teacher, chain=DRAFTS)
    settings = TrainConfig(steps=220, lr=6e-3, warmup_steps=10, clip_norm=1.0, save_every=0, log_every=50)
    result = train(
        head, TrainData(source, pack_tokens=1024), target.teacher, settings, tmp_path,
        Observers(validator, progress=False), provenance={},
    )  # fmt: skip
    walked = result.metrics["valid/walked_tau"]

    evaluation = EvalConfig(tree=TreeConfig(depth=DRAFTS), max_new_tokens=TOKENS)
    decoder = Decoder(target, evaluation)
    prompts = [sample.token_ids[sample.turn_ids < 0].tolist() for sample in samples]
    decoded = decoder.run(prompts, build_drafter(head.eval(), evaluation), TOKENS, seed=0)
    tau = acceptance([cycle for answer in decoded.answers for cycle in answer.cycles]).tau
    for sample, answer in zip(samples, decoded.answers, strict=True):
        assert answer.tokens == sample.token_ids[sample.turn_ids >= 0].tolist()
    assert tau >= 7.0
    assert walked == pytest.approx(tau, abs=0.05)
