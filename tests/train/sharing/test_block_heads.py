"""Two ranks train heads that draw rows as one does: the same rows in every pack, and divisors over both ranks' rows.

They share the head in both ways that a CPU has: whole on each rank, and in FSDP2's shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_golden import curve, run_random
from train_fakes import on_two_ranks

from headstart.heads.base import Head

#: family and train.parallel of two ranks
CASES = [("dflash", "replicated"), ("dspark", "replicated"), ("dspark", "fsdp2"), ("peagle", "replicated")]


def run(family: str, run_dir: Path, parallel: str = "replicated") -> Head:
    """Six steps of three packs: one rank has two of them, the other one."""
    return run_random(family, run_dir, steps=6, accumulation=3, parallel=parallel)[0]


def runs(out: Path) -> dict[str, Any]:
    """The trained weights of every case."""
    return {f"{family} {kind}": run(family, out / f"{family} {kind}", kind).state_dict() for family, kind in CASES}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("ranks")
    return out, on_two_ranks(lambda rank: runs(out), out)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_two_ranks_end_where_one_does(
    two: tuple[Path, list[dict[str, Any]]], tmp_path: Path, family: str, kind: str
) -> None:
    alone = run(family, tmp_path).state_dict()
    out, ranks = two
    states = [rank[f"{family} {kind}"] for rank in ranks]
    for name, value in alone.items():
        torch.testing.assert_close(states[0][name], value, rtol=1e-4, atol=2e-5, msg=name)
        assert torch.equal(states[0][name], states[1][name]), name
    assert curve(out / f"{family} {kind}") == pytest.approx(curve(tmp_path), rel=1e-5)
