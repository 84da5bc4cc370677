"""kill -9 at random moments: the run that continues ends with the same bits."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
import torch
from fake_runs import losses
from train_fakes import FakeHead, FakeSource, data_of, forked, make_documents, quiet, teacher

from headstart.train.config import TrainConfig
from headstart.train.loop import train

KILLS = 20


class Doomed(FakeSource):
    """The kernel kills the process, as kill -9 does, some processor seconds after it is first asked for a pack."""

    after: float

    def get(self, pack):
        if not self.asked:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, self.after)
        return super().get(pack)


def run(run_dir: Path, source_class: type[FakeSource] = FakeSource) -> FakeHead:
    head, source = FakeHead(noise=0.1), source_class(make_documents())
    config = TrainConfig(
        steps=160, accumulation=2, lr=0.01, warmup_steps=2, weight_decay=0.01, save_every=4, log_every=1, keep=2
    )
    train(head, data_of(source), teacher(), config, run_dir, quiet(), provenance={})
    torch.save(head.state_dict(), run_dir / "end.pt")
    return head


@pytest.mark.slow
def test_twenty_random_kills_leave_no_trace(tmp_path):
    began = time.process_time()
    whole = run(tmp_path / "whole")  # before anything is forked: what it imports is shared
    longest = (time.process_time() - began) / 14  # twenty kills, half of this apart on average, come before the end
    place, generator = tmp_path / "killed", random.Random(0)
    killed_at, kills = set(), 0
    while kills < KILLS and not (place / "end.pt").exists():
        Doomed.after = generator.uniform(0.001, longest)
        child = forked(lambda: run(place, Doomed), tmp_path / "stderr")
        child.join()
        kills += child.exitcode == -signal.SIGPROF
        latest = place / "checkpoints" / "latest"
        killed_at.add(latest.read_text() if latest.exists() else "")
    assert kills == KILLS, "the run ended before it was killed often enough"
    assert len(killed_at) > 3  # it came further between kills
    child = forked(lambda: run(place), tmp_path / "stderr")
    child.join(timeout=200)
    assert child.exitcode == 0, (tmp_path / "stderr").read_text()
    found = torch.load(place / "end.pt", weights_only=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, found[name]), name
    assert losses(place) == losses(tmp_path / "whole")
