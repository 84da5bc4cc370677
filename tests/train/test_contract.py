"""What every head family promises about training: killed and resumed, a run ends with the bits of one that was not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from reference.families import REFERENCES
from test_golden import make_samples, tiny_target

from headstart.data.features import OnlineFeatures
from headstart.data.samples import token_counts
from headstart.heads.base import Head
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.vocab import choose_draft_vocab
from headstart.train.config import TrainConfig
from headstart.train.loop import Observers, TrainResult, train
from headstart.train.stream import TrainData


class Killing(OnlineFeatures):
    """The process ends in the middle of the fifth step."""

    asked = 0

    def get(self, pack):
        self.asked += 1
        if self.asked > 9:
            raise SystemExit  # not an Exception: nothing wraps it
        return super().get(pack)


def run(family: str, run_dir: Path, source_of: type[OnlineFeatures] = OnlineFeatures) -> tuple[Head, TrainResult]:
    """Eight steps of two packs, a checkpoint at every third."""
    target, samples = tiny_target(), make_samples()
    torch.manual_seed(1)
    head = build_head(REFERENCES[family].random, target.dims)
    size, vocab = head.draft_vocab_size, target.dims.vocab_size
    ids = None if size is None else choose_draft_vocab(token_counts(samples, vocab), size, (1,))
    head.initialise(target.ends, ids)
    config = TrainConfig(steps=8, accumulation=2, lr=3e-3, warmup_steps=2, save_every=3, log_every=1)
    source = source_of(target, samples, head.spec, head.depth)
    data = TrainData(source, pack_tokens=96)
    result = train(head, data, target.teacher, config, run_dir, Observers(progress=False), provenance={})
    return head, result


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", FAMILIES)
def test_killed_and_resumed_is_bit_equal(family: str, tmp_path: Path) -> None:
    whole, _ = run(family, tmp_path / "whole")
    with pytest.raises(SystemExit):
        run(family, tmp_path / "killed", Killing)
    again, result = run(family, tmp_path / "killed")
    assert result.resumed_from == 3
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed") and len(losses(tmp_path / "whole")) == 8
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
