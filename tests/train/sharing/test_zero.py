"""ZeRO stages 2 and 3 on two CPU ranks (gloo): the curve and weights of one process, resumed across kinds and ranks."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny_run import losses
from train_fakes import FakeHead, FakeSource, make_documents, on_two_ranks, pairs_of, quiet, teacher

from headstart.train.config import TrainConfig
from headstart.train.launching.setup import make_accelerator
from headstart.train.loop import train

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")]
KINDS = ("zero2", "zero3")
STOP_AFTER = 9  # packs: in the fourth step


class Stopping(FakeSource):
    def get(self, pack):
        if len(self.asked) == STOP_AFTER:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().get(pack)


def run(run_dir: Path, source: FakeSource | None = None, **changes):
    """Windows of three packs: two ranks share them as two and one, and the last of an epoch leaves one without."""
    values = dict(steps=8, accumulation=3, lr=0.05, warmup_steps=2, weight_decay=0.01, save_every=0, log_every=1)
    head, source = FakeHead(noise=0.1), source or FakeSource(make_documents())
    result = train(
        head, pairs_of(source), teacher(), TrainConfig(**(values | changes)), run_dir, quiet(), provenance={}
    )
    return head, result


def work(out: Path) -> dict:
    os.environ |= {"DS_ACCELERATOR": "cpu"}
    make_accelerator("cpu")
    found: dict = {}
    for kind in KINDS:
        head, _ = run(out / kind, parallel=kind)
        found[kind] = head.state_dict()
        head, result = run(out / f"{kind} resumed", parallel=kind)  # its first four steps were made by one process
        assert result.resumed_from == 4
        found[f"{kind} resumed"] = head.state_dict()
    run(out / "changed", parallel="zero2", steps=3)
    head, result = run(out / "changed", parallel="zero3")
    assert result.resumed_from == 3
    found["changed"] = head.state_dict()
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    head, _ = run(out)
    return losses(out), head.state_dict()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("zero")
    for kind in KINDS:
        assert run(out / f"{kind} resumed", Stopping(make_documents()))[1].step == 4
    return out, on_two_ranks(lambda rank: work(out), out)


@pytest.mark.parametrize("case", [*KINDS, *(f"{kind} resumed" for kind in KINDS), "changed"])
def test_zero_trains_what_one_process_trains(ranks, alone, case):
    out, found = ranks
    curve, weights = alone
    assert losses(out / case) == pytest.approx(curve, rel=1e-5)
    for rank in range(2):
        for name, value in weights.items():
            torch.testing.assert_close(found[rank][case][name], value, rtol=1e-4, atol=2e-5, msg=f"{name}, {case}")
