"""Two ranks train block heads as one does: the same anchors in every pack, and divisors over both ranks' slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_golden import curve, run_random
from train_fakes import on_two_ranks

from headstart.heads.base import Head

FAMILIES = ("dflash", "dspark")


def run(family: str, run_dir: Path) -> Head:
    """Six steps of three packs: one rank has two of them, the other one."""
    return run_random(family, run_dir, steps=6, accumulation=3)[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("ranks")
    return out, on_two_ranks(lambda rank: {family: run(family, out / family).state_dict() for family in FAMILIES}, out)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_end_where_one_does(two: tuple[Path, list[dict[str, Any]]], tmp_path: Path, family: str) -> None:
    alone = run(family, tmp_path).state_dict()
    out, ranks = two
    states = [rank[family] for rank in ranks]
    for name, value in alone.items():
        torch.testing.assert_close(states[0][name], value, rtol=1e-4, atol=2e-5, msg=name)
        assert torch.equal(states[0][name], states[1][name]), name
    assert curve(out / family) == pytest.approx(curve(tmp_path), rel=1e-5)
