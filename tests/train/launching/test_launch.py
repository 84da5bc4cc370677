"""`-m headstart.train` as users launch it: torchrun agrees with one process, accelerate's CPU trap is caught."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from unittest import mock

import pytest
import yaml
from tiny_run import losses, make_place
from train_fakes import forked, free_port

from headstart import train_on_ranks
from headstart.sigterm import StartupStop
from headstart.train.checkpoints.checkpoint import CheckpointStore
from headstart.train_on_ranks import main

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return make_place(tmp_path_factory.mktemp("launch"))


def launch(
    command: list[str], place: Path, name: str, *overrides: str, **more: str
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}
    arguments = ["-m", "headstart.train", str(place / "recipe.yaml"), f"run_dir={place / name}", *overrides]
    return subprocess.run(
        [*command, *arguments], cwd=place, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def busy_threads(place: Path, head: Path) -> str:
    """A PYTHONPATH: once `head` is saved, every rank has a thread inside torch, as Gloo's may be at the end."""
    program = f"""
        import os, threading, time
        def work():
            while not os.path.exists({str(head / "config.json")!r}):
                time.sleep(0.02)
            import torch
            numbers = torch.ones(700, 700)
            while True:
                numbers @ numbers  # Python taken down meanwhile would abort the process
                time.sleep(0.001)
        if "RANK" in os.environ:
            threading.Thread(target=work, daemon=True).start()
        """
    (place / "busy").mkdir(exist_ok=True)
    (place / "busy" / "sitecustomize.py").write_text(dedent(program))
    return str(place / "busy")


@pytest.mark.slow
def test_two_and_four_ranks_train_what_one_process_trains(place):
    """Two by torchrun itself; four with the environment that it gives them, without four more starts of torch."""
    assert main([str(place / "recipe.yaml"), f"run_dir={place / 'one'}"]) == 0
    for ranks, more in ((2, ["train.parallel=fsdp2", "target.parallel=fsdp2"]), (4, [])):
        if ranks == 2:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
            busy = busy_threads(place, place / "ranks-2" / "head")
            found = launch(torchrun, place, "ranks-2", *more, PYTHONPATH=busy)
            assert found.returncode == 0, found.stderr
            said = found.stderr
        else:
            said = "".join(fork_ranks(ranks, place, f"ranks-{ranks}"))
        assert said.count("train: 4 of 4 steps") == said.count("train: held out at step 4:") == 1  # rank 0's
        records = [json.loads(line) for line in (place / f"ranks-{ranks}" / "metrics.jsonl").read_text().splitlines()]
        names = {name for record in records for name in record}
        assert names >= {"train/acc_1", "train/acc_2", "train/walked_tau", "tokens_per_s", "lr", "grad_norm"}
        assert names >= {"data_wait", "host_memory_gib", "valid/loss", "valid/acc_1", "valid/walked_tau"}
        assert ("valid/tau" in names) is not bool(more)  # a sharded target decodes nothing
    assert len(losses(place / "one")) == 4
    for name in ("one", "ranks-2", "ranks-4"):
        assert losses(place / name) == pytest.approx(losses(place / "one"), rel=1e-5), name
        assert (place / name / "head" / "config.json").is_file()
        assert json.loads((place / name / "steps" / "train.json").read_text())["status"] == "done"
    before = losses(place / "one")
    assert main([str(place / "recipe.yaml"), f"run_dir={place / 'one'}"]) == 0
    assert losses(place / "one") == before  # a finished run is not trained again


def fork_ranks(ranks: int, place: Path, name: str, *overrides: str, own_process: bool = False) -> list[str]:
    """What each of `ranks` forked processes said on stderr; they end well."""
    port = free_port()

    def work(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        startup = StartupStop() if own_process else None
        assert main([str(place / "recipe.yaml"), f"run_dir={place / name}", *overrides], startup) == 0

    stderr = [place / f"{name}.{rank}.err" for rank in range(ranks)]
    processes = [forked(lambda r=r: work(r), stderr[r]) for r in range(ranks)]
    for process, path in zip(processes, stderr, strict=True):
        process.join(timeout=200)
        assert process.exitcode == 0, path.read_text()
    return [path.read_text() for path in stderr]


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_stop_between_meeting_and_watching_ends_every_rank_well(place, signalled):
    """Only one rank gets the signal, before the others could learn that it ends."""
    real = train_on_ranks.make_accelerator

    def make_accelerator(*arguments):
        accelerator = real(*arguments)
        if accelerator.process_index == signalled:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        return accelerator

    # rank 0 hosts the store, and waits for the other one that long before it ends
    grace = mock.patch("headstart.train.launching.watch.GRACE_S", 2.0)
    with grace, mock.patch.object(train_on_ranks, "make_accelerator", make_accelerator):
        said = fork_ranks(2, place, f"window-{signalled}", own_process=True)
    assert "stopped; what was finished is kept" in said[signalled] and "error" not in "".join(said)


def test_a_signal_after_the_last_word_changes_nothing(place):
    def work() -> None:
        assert main([str(place / "recipe.yaml"), f"run_dir={place / 'late'}", "train.steps=1"], StartupStop()) == 0
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)

    process = forked(work, place / "late.err")
    process.join(timeout=200)
    assert process.exitcode == 0, (place / "late.err").read_text()


def scripted(place: Path, script: str, name: str, *overrides: str, **settings: str) -> subprocess.Popen[str]:
    """A script of scripts/launch at work on CPU ranks of this machine."""
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "LAUNCHER": "torchrun",
        "PYTHON": sys.executable,
    }
    environment |= {"HEAD": "127.0.0.1", "PORT": str(port), **settings}
    arguments = [str(place / "recipe.yaml"), f"run_dir={place / name}", *overrides]
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts" / "launch" / script), *arguments],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_steps(job: subprocess.Popen[str], run_dir: Path, steps: int) -> None:
    deadline = time.monotonic() + 200
    while not (run_dir / "metrics.jsonl").exists() or len(losses(run_dir)) < steps:
        assert job.poll() is None, job.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_two_nodes_over_ssh_train_what_one_process_trains_and_sigterm_is_requeued(place, tmp_path):
    """Both nodes are this machine; the remote shell runs its command here. What was stopped goes on with two ranks.

    How many steps are made until the signal is through depends on the machine. So the first part has no end of its own,
    and no rate depends on the end.
    """
    shell = tmp_path / "ssh"
    shell.write_text('#!/usr/bin/env bash\nshift\nexec bash -c "$*"\n')
    shell.chmod(0o755)
    settings = {"HOSTS": "one two", "RANKS": "1", "SSH": str(shell), "TMPDIR": str(tmp_path)}
    long = ["train.schedule=constant", "train.warmup_steps=0", "train.save_every=0", "train.tau_prompts=0"]
    job = scripted(place, "ssh.sh", "nodes", "train.steps=1000000", *long, **settings)
    wait_for_steps(job, place / "nodes", 2)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    stopped = int((place / "nodes" / "checkpoints" / "latest").read_text().removeprefix("step-"))
    assert stopped == len(losses(place / "nodes"))
    long.append(f"train.steps={stopped + 6}")
    assert "continuing from" in "".join(fork_ranks(2, place, "nodes", *long))
    assert main([str(place / "recipe.yaml"), f"run_dir={place / 'long'}", *long]) == 0
    assert len(losses(place / "nodes")) == stopped + 6
    assert losses(place / "nodes") == pytest.approx(losses(place / "long"), rel=1e-4)


@pytest.mark.slow
def test_a_stop_while_ranks_are_starting_is_no_failure(place):
    """Sent as soon as both ranks are processes: they import for seconds and meet then."""
    job = scripted(place, "node.sh", "early", "train.steps=100000", RANKS="2")
    deadline = time.monotonic() + 100
    while len(ranks_of(job)) < 2:
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert err.count("stopped by SIGTERM before the work began") == 2 and not (place / "early").exists()


def ranks_of(job: subprocess.Popen[str]) -> list[str]:
    """Process ids of the ranks under node.sh: the launcher's children that run headstart.train."""
    found = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    return subprocess.run(
        ["pgrep", "-f", "-P", ",".join(found or ["1"]), "headstart.train"], capture_output=True, text=True
    ).stdout.split()


@pytest.mark.slow
def test_a_rank_killed_ends_the_job_within_a_minute_and_is_named(place):
    job = scripted(place, "node.sh", "killed", "train.steps=100000", "train.save_every=5", RANKS="2")
    wait_for_steps(job, place / "killed", 6)
    ranks = ranks_of(job)
    assert len(ranks) == 2
    began = time.monotonic()
    os.kill(int(ranks[1]), signal.SIGKILL)
    _, err = job.communicate(timeout=60)
    assert job.returncode != 0 and time.monotonic() - began < 60
    # process ids may wrap, and then it was rank 0, which hosts the store
    assert re.search("error: rank (1 died|0 died|0 is gone)", err), err
    assert "continues from the last checkpoint" in err
    assert CheckpointStore(place / "killed" / "checkpoints", 2).find(print) is not None


@pytest.mark.slow
def test_accelerate_on_cpus_is_refused_before_anything_is_trained(place):
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    found = launch(accelerate, place, "trap")
    assert found.returncode != 0
    assert "independent" in found.stderr and "torchrun" in found.stderr
    assert not (place / "trap").exists()


def test_wrong_override_exits_with_2_and_names_the_key(place, capsys):
    assert main([str(place / "recipe.yaml"), "train.learning_rate=1"]) == 2
    assert "train.learning_rate" in capsys.readouterr().err


def test_ranks_choose_packs_that_fit_the_smallest_of_them(place, monkeypatch):
    """Each has a pack, all have the same, and a step has the tokens that it has on one."""
    least = 700 << 20
    monkeypatch.setattr(
        "headstart.auto.local_device_bytes", lambda device: 2 * (least if os.environ["RANK"] == "1" else 64 << 30)
    )
    said = fork_ranks(2, place, "auto", "data.pack_tokens=auto")
    kept = json.loads((place / "auto/data/auto.json").read_text())
    assert kept["memory"] == least, "half of what its machine has"
    assert kept["pack_tokens"] < 16384 and kept["accumulation"] >= 2
    assert kept["pack_tokens"] * kept["accumulation"] == 16384 * kept["asked"]["accumulation"]
    assert f"auto: data.pack_tokens={kept['pack_tokens']}" in said[0] and "auto:" not in said[1]
    written = yaml.safe_load((place / "auto/recipe.yaml").read_text())
    assert written["data"]["pack_tokens"] == kept["pack_tokens"]
