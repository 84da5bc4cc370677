"""A rank that is gone is noticed by the others, who say which and why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from train_fakes import forked, free_port

from headstart.heads.errors import DataError
from headstart.train.launching import watch
from headstart.train.launching.watch import Watch, process_alive


def rank_of(case: str, rank: int, port: int, ready: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    watch.GRACE_S = 0.5  # of this process: its main thread sleeps as if in a collective
    place = f"machine {rank}" if case in ("stopped", "server") else None
    launcher = 1 if case == "orphaned" and rank == 1 else None  # it was, and somebody else is
    if launcher is not None:
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
    # short where silence is what is to be noticed, else long enough for a busy machine
    limit_s = 1.5 if case == "stopped" else 10
    with Watch(limit_s=limit_s, interval_s=0.2, place=place, launcher=launcher):
        ready.touch()
        if case == "clean":
            time.sleep(0.5 if rank else 0.1)
        elif case == "fails" and rank == 1:
            raise DataError("line 7 is not JSON")
        elif case == "interrupted" and rank == 1:
            raise KeyboardInterrupt
        else:
            time.sleep(120)


def start(case: str, place: Path) -> list:
    port = free_port()
    ready = [place / f"ready{r}" for r in range(2)]
    ranks = [forked(lambda r=r: rank_of(case, r, port, ready[r]), place / f"err{r}") for r in range(2)]
    while not all(path.exists() for path in ready):
        time.sleep(0.01)
    return ranks


@pytest.mark.parametrize(
    ("case", "victim", "number", "message"),
    [
        ("killed", 1, signal.SIGKILL, "rank 0: error: rank 1 died (process "),
        ("stopped", 1, signal.SIGSTOP, "rank 0: error: rank 1 has been silent for "),
        ("server", 0, signal.SIGKILL, "rank 1: error: rank 0 is gone"),
        ("stopped", 0, signal.SIGSTOP, "rank 1: error: rank 0 has been silent for "),
        ("fails", 1, None, "rank 0: error: rank 1 failed: DataError: line 7 is not JSON; this job ends here."),
        ("interrupted", 1, None, "rank 0: rank 1 was stopped by a signal"),
    ],
)
def test_the_other_rank_ends_and_names_the_one_that_is_gone(tmp_path, case, victim, number, message):
    ranks = start(case, tmp_path)
    try:
        if number is not None:
            os.kill(ranks[victim].pid, number)
        ranks[1 - victim].join(timeout=100)
        assert ranks[1 - victim].exitcode == int(case != "interrupted")
        assert message in (tmp_path / f"err{1 - victim}").read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def test_ranks_that_end_at_different_times_do_not_miss_each_other(tmp_path):
    ranks = start("clean", tmp_path)
    for number, rank in enumerate(ranks):
        rank.join(timeout=100)
        assert rank.exitcode == 0, (tmp_path / f"err{number}").read_text()
        assert "error" not in (tmp_path / f"err{number}").read_text()


def test_a_rank_whose_launcher_is_gone_is_told_to_save_and_end(tmp_path):
    ranks = start("orphaned", tmp_path)
    try:
        ranks[1].join(timeout=100)
        assert ranks[1].exitcode == -signal.SIGTERM  # it has no handler here
        assert "rank 1: the launcher is gone: saving and ending" in (tmp_path / "err1").read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_rank_alone_ends_without_torchrun_and_not_without_a_shell(tmp_path, by_torchrun):
    def work() -> None:
        if by_torchrun:
            os.environ["TORCHELASTIC_RUN_ID"] = "none"
        with Watch(interval_s=0.1, launcher=1):
            time.sleep(0.6)

    process = forked(work, tmp_path / "err")
    process.join(timeout=60)
    assert process.exitcode == (-signal.SIGTERM if by_torchrun else 0)
    assert ("the launcher is gone: saving and ending" in (tmp_path / "err").read_text()) == by_torchrun


def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    while process_alive(child.pid):
        time.sleep(0.01)
    assert process_alive(os.getpid())
    child.wait()
    assert not process_alive(child.pid)
