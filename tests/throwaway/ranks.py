"""Two ranks train each family as one does (in the house of edits.py: in tests/train)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference.families import REFERENCES
from test_golden import curve, make_samples, tiny_target
from train_fakes import on_two_ranks

from headstart.data.features import OnlineFeatures
from headstart.heads.base import Head
from headstart.heads.families import build_head
from headstart.train.config import TrainConfig
from headstart.train.loop import Observers, train
from headstart.train.stream import TrainData

FAMILIES = ("miniblock", "minimodel")


def run(family: str, run_dir: Path) -> Head:
    """Six steps of three packs: one rank has two of them, the other one."""
    target, samples = tiny_target(), make_samples()
    torch.manual_seed(1)
    head = build_head(REFERENCES[family].random, target.dims)
    head.initialise(target.ends)
    data = TrainData(OnlineFeatures(target, samples, head.spec, head.depth), pack_tokens=96)
    config = TrainConfig(steps=6, accumulation=3, lr=3e-3, log_every=1)
    train(head, data, target.teacher, config, run_dir, Observers(progress=False), provenance={})
    return head


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("ranks")
    return out, on_two_ranks(lambda rank: {family: run(family, out / family).state_dict() for family in FAMILIES}, out)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_end_where_one_does(
    two: tuple[Path, list[dict[str, Any]]], tmp_path: Path, family: str
) -> None:
    alone = run(family, tmp_path).state_dict()
    out, ranks = two
    states = [rank[family] for rank in ranks]
    for name, value in alone.items():
        torch.testing.assert_close(states[0][name], value, rtol=1e-4, atol=2e-5, msg=name)
        assert torch.equal(states[0][name], states[1][name]), name
    assert curve(out / family) == pytest.approx(curve(tmp_path), rel=1e-5)
