"""What every head family promises about training: killed and resumed, a run ends with the bits of one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_golden import curve, run_random

from headstart.data.features import OnlineFeatures
from headstart.heads.base import Head
from headstart.heads.families import FAMILIES
from headstart.train.loop import TrainResult


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
    return run_random(family, run_dir, source_of, steps=8, accumulation=2, warmup_steps=2, save_every=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_killed_and_resumed_is_bit_equal(family: str, tmp_path: Path) -> None:
    whole, _ = run(family, tmp_path / "whole")
    with pytest.raises(SystemExit):
        run(family, tmp_path / "killed", Killing)
    again, result = run(family, tmp_path / "killed")
    assert result.resumed_from == 3
    assert curve(tmp_path / "whole") == curve(tmp_path / "killed") and len(curve(tmp_path / "whole")) == 8
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
