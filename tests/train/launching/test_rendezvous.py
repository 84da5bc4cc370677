import os
import time

import pytest
import torch
import typer
from train_fakes import forked, free_port

from headstart.cli import main
from headstart.commands import run, train
from headstart.heads.errors import ConfigError, Terminated
from headstart.train.launching.rendezvous import check_launch, check_variables, meet, refuse_ranks


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_more_ranks_promised_than_there_are(name):
    with pytest.raises(ConfigError, match=f"launch: {name} promises 2 ranks and the process group has 1.*torchrun"):
        check_launch(1, {name: "2"})
    check_launch(1, {name: "1"})
    check_launch(16, {name: "2", "WORLD_SIZE": "16"})  # srun starts one launcher per node


@pytest.mark.parametrize("verb", ["train", "run"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_verb_started_as_ranks_names_the_command_that_is_meant(verb, rank, tmp_path, monkeypatch, capsys):
    """`torchrun --nproc_per_node 2 -m headstart train RECIPE`: the environment that it gives each process."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    command = {"train": train.command, "run": run.command}[verb]
    with pytest.raises(typer.Exit) as caught:
        command("smollm2-eagle3", [f"run_dir={tmp_path}/run"])
    assert caught.value.exit_code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"`headstart {verb}` is one process" in said and "WORLD_SIZE promises 2 ranks" in said
    assert "torchrun --nproc_per_node N -m headstart.train RECIPE" in said
    assert "accelerate launch --multi_gpu --num_processes N -m headstart.train RECIPE" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [["distill", "quickstart"], ["eval", "quickstart"], ["tune", "quickstart"], ["export", "quickstart"],
     ["eval", "--target", "T", "--data", "p.jsonl"]],
)  # fmt: skip
def test_verbs_that_do_not_train_are_one_process_too(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"`headstart {words[0]}` is one process, found a launch of several (WORLD_SIZE=2)" in said
    assert "start it without a launcher" in said and not any(tmp_path.iterdir())


def test_what_only_reads_may_run_anywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["export", "--check", str(tmp_path)]) == 1
    assert "launch:" not in capsys.readouterr().err


RANKS = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: found 'two', expected a whole number"),
        ({"RANK": "-1"}, "RANK: found '-1', expected a whole number"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK: found 'x'"),
        ({"LOCAL_WORLD_SIZE": "abc"}, "LOCAL_WORLD_SIZE: found 'abc'"),
        ({"LOCAL_RANK": ""}, "WORLD_SIZE promises 2 ranks and the process group has 1"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT: found 'http'"),
        ({"MASTER_ADDR": ""}, "found WORLD_SIZE=2 without MASTER_ADDR, which every rank needs"),
        ({"RANK": "", "MASTER_PORT": ""}, "found WORLD_SIZE=2 without RANK, MASTER_PORT"),
        ({"RANK": "2"}, "found RANK=2, expected less than WORLD_SIZE=2"),
        ({"MASTER_PORT": "70000"}, "found MASTER_PORT=70000, expected 1 to 65535"),
    ],
)
def test_a_launchers_variable_that_cannot_be_is_named(changes, message):
    with pytest.raises(ConfigError, match=f"launch: {message}.*torchrun"):
        check_variables(RANKS | changes)
    if "WORLD_SIZE" in changes:
        with pytest.raises(ConfigError, match="WORLD_SIZE: found 'two'"):
            check_launch(1, RANKS | changes)


def test_variables_of_a_launch_and_of_none():
    assert check_variables(RANKS) == 2
    assert check_variables({}) == check_variables({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}) == 1


def test_an_address_where_nobody_is_is_told_in_time(monkeypatch):
    for name, value in (RANKS | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"rank 1 of 2 did not meet the others at MASTER_ADDR=127.0.0.1 MASTER_PORT="):
        meet(1.0)
    assert time.monotonic() - began < 30


def test_ranks_that_did_not_come_are_named(tmp_path):
    """Two of three ranks: both end, and rank 1 knows who is missing."""
    port = str(free_port())

    def rank(number):
        os.environ.update(RANKS | {"WORLD_SIZE": "3", "RANK": str(number), "LOCAL_RANK": "0", "MASTER_PORT": port})
        meet(2.0)

    processes = [forked(lambda n=n: rank(n), tmp_path / str(n)) for n in (0, 1)]
    for number, process in enumerate(processes):
        process.join(60)
        assert process.exitcode == 1
        assert "of 3 ranks these did not come: 2. Give every machine" in (tmp_path / str(number)).read_text()


class Stopped:
    """SIGTERM once this rank has come."""

    def __init__(self):
        self.received = False

    def hold(self):
        self.received = True

    def over(self):
        raise AssertionError("there was nothing to go on with")


@pytest.mark.parametrize("agent", [True, False], ids=["torchrun's store", "rank 0's store"])
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stop_while_ranks_meet_ends_all_that_came(tmp_path, stopped, agent):
    port = str(free_port())

    def rank(number):
        os.environ.update(RANKS | {"WORLD_SIZE": "3", "RANK": str(number), "LOCAL_RANK": "0", "MASTER_PORT": port})
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(agent)
        with pytest.raises(Terminated):
            meet(60.0, startup=Stopped() if number == stopped else None)

    store = (
        torch.distributed.TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False) if agent else None
    )
    processes = [forked(lambda n=n: rank(n), tmp_path / str(n)) for n in (0, 1)]
    for number, process in enumerate(processes):
        process.join(30)
        assert process.exitcode == 0, (tmp_path / str(number)).read_text()
    del store


def test_one_rank_alone():
    check_launch(2, {"WORLD_SIZE": "2"})
    check_launch(1, {})
    refuse_ranks("train", {"WORLD_SIZE": "1"})


def test_accelerate_launch_cpu_trap():
    """What `accelerate launch --cpu --num_processes 2` of accelerate 1.15 sets; one process gets no MASTER_*."""
    by_accelerate = {"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no"}
    with pytest.raises(ConfigError, match="independent"):
        check_launch(1, by_accelerate | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    check_launch(1, by_accelerate)
    check_launch(2, by_accelerate | {"MASTER_ADDR": "h", "MASTER_PORT": "1", "WORLD_SIZE": "2"})
