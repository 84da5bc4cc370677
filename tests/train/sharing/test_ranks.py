"""The whole loop on two CPU ranks (gloo): same curve, same weights, resume at another rank count, faults agreed on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from tiny_run import losses
from torch import nn
from train_fakes import (
    FakeHead,
    FakeSource,
    be_rank,
    forked,
    free_port,
    make_documents,
    on_two_ranks,
    pairs_of,
    quiet,
    teacher,
    window_gradient,
)

from headstart.heads.errors import DiskFullError, StorageError, TrainingError
from headstart.train.checkpoints.checkpoint import CheckpointStore
from headstart.train.checkpoints.writer import CheckpointWriter
from headstart.train.config import TrainConfig
from headstart.train.launching.setup import make_accelerator, make_parallel
from headstart.train.launching.watch import Watch
from headstart.train.loop import train
from headstart.train.sharing.distributed import require_shared
from headstart.train.sharing.gradients import FlatGradients
from headstart.train.step import LossModule
from headstart.train.tracking.track import Reporter

#: as the loop looks for the writer in earnest; most cases here wait for it
look = CheckpointWriter.free


def config(**changes) -> TrainConfig:
    values = dict(steps=6, accumulation=3, lr=0.05, warmup_steps=2, weight_decay=0.01, save_every=2, log_every=1)
    return TrainConfig(**(values | changes))


def run(run_dir: Path, source: FakeSource | None = None, validate=None, **changes):
    head = FakeHead(noise=0.1)
    source = source or FakeSource(make_documents())
    result = train(head, pairs_of(source), teacher(), config(**changes), run_dir, quiet(validate))
    return head, result


def shards_are_whole(head: FakeHead, step: int, final: bool) -> dict[str, float]:
    """A validation that uses the head as a module of its own, as τ probes do, on one rank only."""
    if torch.distributed.get_rank() == 0:
        assert head.heads[0](torch.ones(1, 8)).shape == (1, 13)
    return {"valid/walked_tau": float(step)}


class Signalled(FakeSource):
    """Sends SIGTERM to its own process when asked for one more than `after` packs."""

    after = 3

    def get(self, pack):
        if len(self.asked) == self.after:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().get(pack)


def flat_sum(rank: int) -> list[torch.Tensor]:
    head = FakeHead(seed=rank)
    flat = FlatGradients([p for p in head.parameters() if p.requires_grad])
    sum((p * (rank + 1)).sum() for p in head.parameters()).backward()
    flat.sum_over_ranks()()
    return [p.grad for p in head.parameters()]


class EagerPacks:
    """Stands in for captured steps, which need a GPU: adds this rank's own gradient, and nothing wraps the head."""

    captures, seconds = 0, 0.0

    def __init__(self, module: LossModule, terms: int):
        self.module = module

    def backward(self, batch, scale_T):
        sums = self.module(batch, scale_T)
        (sums[0] * scale_T).sum().backward()
        return sums

    def drop(self) -> None:
        pass


def unwrapped(out: Path) -> tuple[FakeHead, list[str]]:
    """A run whose gradients the loop sums itself, and what happened in which order."""
    events: list[str] = []
    begin_sum = FlatGradients.sum_over_ranks

    class Noting(FakeSource):
        def get(self, pack):
            events.append("fetch")
            return super().get(pack)

    def noting(flat):
        events.append("sum begins")
        finish = begin_sum(flat)

        def end() -> None:
            finish()
            events.append("sum ends")

        return end

    with mock.patch.multiple("headstart.train.loop", captures=lambda *_: True, CapturedPacks=EagerPacks):
        with mock.patch.object(FlatGradients, "sum_over_ranks", noting):
            head, _ = run(out, Noting(make_documents()))
    return head, events


def pausing(rank: int, out: Path, room_after: int, **changes) -> dict:
    """A run whose rank 0 finds the disk full from the second checkpoint on, for `room_after` attempts."""
    attempts, said = [], []
    real = CheckpointStore.save

    def save(store, saved):
        attempts.append(saved.state["step"])
        if 2 <= len(attempts) <= 1 + room_after:
            raise DiskFullError(f"{store.directory}: the disk is full")
        return real(store, saved)

    with (
        mock.patch.object(CheckpointStore, "save", save),
        mock.patch("headstart.train.checkpoints.writer.PAUSE_S", 0.02),
    ):
        with mock.patch.object(Reporter, "say", lambda _, message: said.append(message)):
            try:
                head, _ = run(out, **changes)
            except DiskFullError as error:
                return {"error": str(error), "attempts": attempts, "said": said}
    return {"weights": head.state_dict(), "attempts": attempts, "said": said}


def behind_a_slow_disk(rank: int, out: Path) -> list[int]:
    """Steps of which a run saved a checkpoint while the first one's files took until step 8 to be written.

    Until then the loop looks for the writer as in earnest. From then on each look lets a write end first: how fast
    files are written must not decide which steps are saved.
    """
    released, saved = threading.Event(), []
    real = CheckpointStore.save

    class Slow(FakeSource):
        def get(self, pack):
            if len(self.asked) == (2 if rank == 0 else 1) * 7:  # packs per window of this rank
                released.set()
            return super().get(pack)

    def save(store, checkpoint):
        assert released.wait(60)
        saved.append(checkpoint.state["step"])
        return real(store, checkpoint)

    def free(writer):
        return writer.idle(60.0) if released.is_set() else look(writer)

    with mock.patch.object(CheckpointStore, "save", save), mock.patch.object(CheckpointWriter, "free", free):
        run(out, Slow(make_documents()), steps=12, prefetch=0, keep=0)
    return saved


def unshared(rank: int, out: Path) -> list[str]:
    """What ranks say whose disks are their own: without the run directory, and with another checkpoint in it."""
    said = []
    (out / f"disk{rank}").mkdir()
    try:
        require_shared(out / f"disk{rank}" / "run", 0.3)
    except StorageError as error:
        said.append(str(error))
    require_shared(out / "shared", 5.0)
    run(out / "of rank 0", steps=2)
    mine = out / "of rank 0"
    if rank == 1:
        mine = shutil.copytree(mine, out / "of rank 1")
        with open(mine / "checkpoints" / "step-00000002" / "manifest.json", "a") as manifest:
            manifest.write("\n")
    try:
        run(mine, steps=4)
    except StorageError as error:
        said.append(str(error))
    return said


def diverging_while_saving(out: Path) -> str:
    """What a rank says whose loss is not finite while rank 0 still writes the only checkpoint."""
    real = CheckpointStore.save
    slow = mock.patch.object(CheckpointStore, "save", lambda store, saved: time.sleep(1.5) or real(store, saved))
    with slow, mock.patch.object(CheckpointWriter, "free", look):
        try:
            run(out, FakeSource(make_documents(), poison=7), save_every=1)
        except TrainingError as error:
            return str(error)
    return ""


def losing_a_rank_while_saving(rank: int, port: int, out: Path) -> None:
    """Rank 1 dies while rank 0 writes the first checkpoint for longer than a rank may take to end."""
    be_rank(rank, port)
    real, saving = CheckpointStore.save, out / "saving"

    def save(store, saved):
        saving.touch()
        time.sleep(2.0)
        return real(store, saved)

    class Dying(FakeSource):
        def get(self, pack):
            while rank == 1 and len(self.asked) >= 3:
                if saving.exists():
                    os._exit(9)
                time.sleep(0.01)
            return super().get(pack)

    slow = mock.patch.object(CheckpointStore, "save", save)
    with (
        slow,
        mock.patch.object(CheckpointWriter, "free", look),
        mock.patch("headstart.train.launching.watch.GRACE_S", 0.2),
    ):
        accelerator, source = make_accelerator("cpu"), Dying(make_documents())
        with Watch(interval_s=0.1) as watch:
            settings = config(save_every=1, prefetch=0)
            train(
                FakeHead(), pairs_of(source), teacher(), settings, out / "run", quiet(watch=watch),
                accelerator=accelerator,
            )  # fmt: skip


def shard_rows() -> list[int]:
    """Rows of each parameter that this rank holds under fsdp2; its weights are rank 0's."""
    head = FakeHead(seed=torch.distributed.get_rank())
    accelerator = make_accelerator("cpu")
    parallel = make_parallel("fsdp2", head, LossModule(head, teacher(), None), config(), accelerator, False)
    held = [p.to_local().shape[0] for p in head.parameters()]
    whole = dict(parallel.head_tensors())
    assert all(torch.equal(whole[name], p) for name, p in FakeHead(seed=0).named_parameters())
    return held


ALL = list(range(12))
#: windows of two ranks: one pack each; two packs and one; one pack and none
WINDOWS = [[ALL[:5], ALL[5:]], [ALL[:5], ALL[5:6], ALL[6:]], [ALL]]


# conftest's patience begins after this module's fixture has started the ranks
@mock.patch.object(CheckpointWriter, "free", lambda writer: writer.idle(60.0))
def _work(rank: int, out: Path) -> dict:
    """Every case in one process group: starting processes is what takes the time."""
    found: dict = {}
    make_accelerator("cpu")
    found["gradients"] = []
    for packs in WINDOWS:
        grads, sums = window_gradient(
            packs, rank=rank, size=2, wrap=lambda m: nn.parallel.DistributedDataParallel(m, broadcast_buffers=False)
        )
        torch.distributed.all_reduce(sums.loss)
        found["gradients"].append({**grads, "loss": sums.loss})
    found["flat"] = flat_sum(rank)
    found["shards"] = shard_rows()
    head, events = unwrapped(out / "unwrapped")
    found["unwrapped"], found["unwrapped events"] = head.state_dict(), events
    found["paused"] = pausing(rank, out / "paused", 3)
    found["slow disk"] = behind_a_slow_disk(rank, out / "slow disk")
    found["no room"] = pausing(rank, out / "no room", 1_000_000, disk_wait=0.1)
    head, result = run(out / "plain")
    found["plain"] = head.state_dict()
    found["plain_tokens"] = [result.tokens, result.supervised_tokens]
    head, _ = run(out / "resumed")  # its first four steps were made by one rank
    found["resumed"] = head.state_dict()
    head, _ = run(out / "sharded", parallel="fsdp2", validate=shards_are_whole)
    found["sharded"] = head.state_dict()
    head, _ = run(out / "resharded", parallel="fsdp2")
    found["resharded"] = head.state_dict()
    head, _ = run(out / "averaged", parallel="fsdp2", average_decay=0.8, validate=shards_are_whole)
    found["averaged"] = head.state_dict()
    try:
        run(out / "nan", FakeSource(make_documents(), poison=3))  # pack 1: rank 1's
    except TrainingError as error:
        found["nan"] = str(error)
    found["nan while saving"] = diverging_while_saving(out / "nan while saving")
    source = Signalled(make_documents()) if rank == 1 else FakeSource(make_documents())
    _, result = run(out / "signal", source)
    found["signal"] = [result.stopped, result.step]
    (out / "fault" / "checkpoints").parent.mkdir(exist_ok=True)
    if rank == 0:
        (out / "fault" / "checkpoints").write_text("a file where the directory should be")
    torch.distributed.barrier()
    found["fault"] = []
    broken = mock.patch.object(CheckpointStore, "clean", side_effect=RuntimeError("Stale file handle"))
    for cause in (nullcontext(), broken):
        with cause:
            try:
                run(out / ("fault" if cause is not broken else "broken"))
            except (TrainingError, StorageError, RuntimeError) as error:
                found["fault"].append(f"{type(error).__name__}: {error}")
    found["unshared"] = unshared(rank, out)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    for name in ("resumed", "resharded", "averaged"):
        source = Signalled(make_documents())
        source.after = 9  # in the fourth step
        assert run(out / name, source, **({"average_decay": 0.8} if name == "averaged" else {}))[1].step == 4
    return out, on_two_ranks(lambda rank: _work(rank, out), out)


def test_a_checkpoint_under_way_outlasts_a_rank_that_dies(tmp_path):
    port = free_port()
    errors = [tmp_path / f"err{rank}" for rank in range(2)]
    processes = [forked(lambda r=r: losing_a_rank_while_saving(r, port, tmp_path), errors[r]) for r in range(2)]
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [1, 9], errors[0].read_text()
    assert CheckpointStore(tmp_path / "run" / "checkpoints", 1).find(print).name == "step-00000001"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    head, result = run(out)
    return out, head, result


@pytest.mark.parametrize("case", range(len(WINDOWS)), ids=["one each", "two and one", "a rank without packs"])
def test_two_ranks_have_the_gradient_of_one(ranks, case):
    grads, sums = window_gradient([ALL])
    for rank in range(2):
        for name, value in {**grads, "loss": sums.loss}.items():
            found = ranks[1][rank]["gradients"][case][name]
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6, msg=f"{name} of rank {rank}")


@pytest.mark.parametrize("case", ["plain", "unwrapped", "resumed", "sharded", "resharded"])
def test_two_ranks_end_where_one_does(ranks, alone, case):
    out, found = ranks
    for rank in range(2):
        for name, value in alone[1].state_dict().items():
            torch.testing.assert_close(
                found[rank][case][name], value, rtol=1e-4, atol=2e-5, msg=f"{name} of rank {rank}"
            )
    for name, value in found[0][case].items():
        assert torch.equal(value, found[1][case][name]), f"ranks differ in {name}"
    if case in ("plain", "unwrapped", "sharded"):
        assert losses(out / case) == pytest.approx(losses(alone[0]), rel=1e-5)
    if case == "plain":
        assert found[0]["plain_tokens"] == found[1]["plain_tokens"] == [alone[2].tokens, alone[2].supervised_tokens]


def test_gradients_that_nothing_wraps_are_summed_over_the_ranks(ranks):
    for rank in range(2):
        assert all(bool((g == 3.0).all()) for g in ranks[1][rank]["flat"])


def test_features_of_the_next_window_are_made_while_gradients_travel(ranks):
    # windows of three packs: two of rank 0, one of rank 1; the last window has no next one
    for rank, count in ((0, 2), (1, 1)):
        fetches = ["fetch"] * count
        between = ["sum begins", *fetches, "sum ends"] * 5
        assert ranks[1][rank]["unwrapped events"] == [*fetches, *between, "sum begins", "sum ends"]


def test_a_full_disk_pauses_every_rank_until_there_is_room(ranks):
    out, found = ranks
    for rank in range(2):
        for name, value in found[rank]["plain"].items():
            assert torch.equal(value, found[rank]["paused"]["weights"][name])
    assert found[0]["paused"]["attempts"] == [2, 4, 4, 4, 4, 6] and found[1]["paused"]["attempts"] == []
    idle, paused, again = found[0]["paused"]["said"]
    assert idle.startswith("NOTE: train.accumulation=3 over 2 ranks leaves ranks idle 25% of the time") and "4," in idle
    assert "the disk is full" in paused and "paused" in paused and "train.disk_wait" in paused
    assert "there is room again" in again
    assert losses(out / "paused") == losses(out / "plain")


def test_no_rank_waits_for_a_checkpoint_that_is_being_written(ranks):
    """Steps 3 to 7 are made meanwhile. In step 8 rank 0 tells that its writer is free; what was due is saved at 9."""
    out, found = ranks
    assert found[0]["slow disk"] == [2, 9, 10, 12] and found[1]["slow disk"] == []
    assert len(losses(out / "slow disk")) == 12


def test_a_disk_that_stays_full_ends_every_rank_and_keeps_the_last_checkpoint(ranks):
    out, found = ranks
    assert found[0]["no room"]["error"] == found[1]["no room"]["error"]
    assert "the disk is full" in found[0]["no room"]["error"]
    assert [p.name for p in (out / "no room" / "checkpoints").glob("step-*")] == ["step-00000002"]


def test_fsdp2_holds_half_of_every_parameter_of_rank_0(ranks):
    for rank in range(2):  # 13 rows: seven and six
        assert ranks[1][rank]["shards"] == [(7, 6)[rank]] * 6


def test_averages_are_those_of_one_process_in_shards_too(ranks, tmp_path):
    expected, _ = run(tmp_path, average_decay=0.8)
    for rank in range(2):
        for name, value in expected.state_dict().items():
            assert torch.allclose(ranks[1][rank]["averaged"][name], value, atol=2e-5), name
    plain, _ = run(tmp_path / "plain")
    assert not torch.allclose(plain.heads[0].weight, expected.heads[0].weight, atol=1e-3)


def test_non_finite_loss_of_one_rank_is_named_on_all(ranks):
    out, found = ranks
    assert found[0]["nan"] == found[1]["nan"]
    assert "non-finite loss at step 0, samples sample-2, sample-3." in found[0]["nan"]
    assert json.loads((out / "nan" / "nonfinite-step-0.json").read_text())["sample_ids"] == ["sample-2", "sample-3"]


def test_ranks_that_diverge_wait_for_the_checkpoint_under_way_and_name_it(ranks):
    out, found = ranks
    assert found[0]["nan while saving"] == found[1]["nan while saving"]
    place = out / "nan while saving" / "checkpoints" / "step-00000001"
    assert (
        f"non-finite loss at step 1, samples sample-6, sample-7. The same command continues from {place}"
        in (found[1]["nan while saving"])
    )
    assert place.is_dir()


def test_a_signal_to_one_rank_stops_both_with_a_checkpoint(ranks):
    out, found = ranks
    assert found[0]["signal"] == found[1]["signal"]
    stopped, step = found[0]["signal"]
    # rank 1 has one pack per window: its fourth is of step 3; the exchange of step 3 carries the request
    assert (stopped, step) == ("signal", 4)
    assert (out / "signal" / "checkpoints" / "latest").read_text() == "step-00000004\n"


def test_a_fault_of_rank_0_reaches_every_rank(ranks):
    _, found = ranks
    known, broken = found[0]["fault"]
    assert known.startswith("StorageError: ") and "a file stands where a directory is expected" in known
    assert broken == "RuntimeError: Stale file handle"
    assert found[1]["fault"] == [known, f"TrainingError: rank 0 failed: {broken}"]


def test_a_run_directory_that_is_not_shared_is_refused_on_every_rank(ranks):
    out, found = ranks
    missing, _ = found[0]["unshared"]
    for rank in range(2):
        other = found[rank]["unshared"][1]
        assert "ranks 1 read another checkpoint there than rank 0" in other
        assert "run_dir must lie on storage that all machines share" in other
    assert all("that ranks 1 (" in found[rank]["unshared"][0] for rank in range(2)) and "disk0" in missing
    assert not [path for place in ("shared", "disk0/run") for path in (out / place).iterdir()]
