import json
import os
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from train_fakes import FakeHead

from headstart.heads.errors import StorageError
from headstart.train.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointStore,
    damage,
    pack_rng,
    rng_state,
    set_rng_state,
)
from headstart.train.config import TrainConfig
from headstart.train.sharing.parallel import Replicated


def make(step: int, value: float = 0.0) -> Checkpoint:
    return Checkpoint({"w": torch.full((2,), value)}, {"exp_avg/w": torch.zeros(2)}, {}, {"step": step, "rng": []})


def test_latest_and_retention(tmp_path):
    store = CheckpointStore(tmp_path / "c", keep=2)
    for step in (5, 10, 15):
        store.save(make(step, step))
    assert [p.name for p in store.paths()] == ["step-00000015", "step-00000010"]
    found = store.find(print)
    assert store.load(found).head["w"].tolist() == [15, 15]
    assert sorted(p.name for p in found.iterdir()) == [
        "head.safetensors", "manifest.json", "optimizer.safetensors", "rng.safetensors", "state.json",
    ]  # fmt: skip
    assert not list((tmp_path / "c").glob(".*"))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda p: (p / "head.safetensors").unlink(), "head.safetensors is missing"),
        (lambda p: (p / "state.json").write_text("{"), "state.json has 1 bytes"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").write_text('{"version": 9, "files": {}}'), "version 9, this program reads 1"),
        (lambda p: (p / "manifest.json").write_text('{"version": 1, "files": {}}'), "does not list head.safetensors"),
        (lambda p: (p / "manifest.json").write_text('{"version": 1, "files": []}'), "found files as a list"),
    ],
)
def test_damage_is_named_and_the_one_before_is_used(tmp_path, harm, message):
    store = CheckpointStore(tmp_path, keep=0)
    store.save(make(1))
    harm(store.save(make(2)))
    assert message in damage(tmp_path / "step-00000002")
    said = []
    assert store.find(said.append).name == "step-00000001"
    assert len(said) == 1 and message in said[0]
    assert (tmp_path / "latest").read_text() == "step-00000001\n"
    store.save(make(2))
    assert store.find(said.append).name == "step-00000002" and len(said) == 1


def test_names_that_are_not_a_step_are_left_alone(tmp_path):
    """A copy that somebody made sorts after every step; retention and resume must not see it."""
    store = CheckpointStore(tmp_path, keep=1)
    shutil.copytree(store.save(make(1)), tmp_path / "step-old")
    for name in ("step-00000001.bak", "step-123", "step-"):
        shutil.copytree(tmp_path / "step-old", tmp_path / name)
    store.save(make(99_999_999))
    store.save(make(100_000_000))  # nine digits sort before eight as text
    assert [p.name for p in store.paths()] == ["step-100000000"]
    assert store.find(print).name == "step-100000000"
    found = {p.name for p in tmp_path.glob("step-*")}
    assert found == {"step-old", "step-00000001.bak", "step-123", "step-", "step-100000000"}


def test_a_checkpoint_killed_while_it_was_replaced_gets_its_name_back(tmp_path):
    store = CheckpointStore(tmp_path, keep=0)
    store.save(make(1))
    store.save_best({"w": torch.ones(1)}, {})
    os.rename(store.save(make(2)), tmp_path / ".step-00000002.77.old")  # between the two renames of write_directory
    os.rename(tmp_path / "best", tmp_path / ".best.77.old")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000000.77.old")  # was being deleted
    assert store.find(print).name == "step-00000002"
    assert store.best_damage() is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "latest", "step-00000001", "step-00000002"]


def test_damaged_ones_keep_their_names_until_an_intact_one_is_found(tmp_path):
    store = CheckpointStore(tmp_path, keep=0)
    for step in (1, 2, 3):
        (store.save(make(step)) / "state.json").unlink()
    (tmp_path / "damaged-step-00000003").write_text("a file of that name")
    for _ in range(2):
        with pytest.raises(StorageError, match="every checkpoint is damaged .*train.resume=false"):
            store.find(print)
    store.save(make(1))
    assert store.find(print).name == "step-00000001"
    names = {p.name for p in tmp_path.glob("damaged-*")}
    assert names == {"damaged-step-00000002", "damaged-step-00000003", "damaged-step-00000003-2"}


def test_a_file_in_the_place_of_the_best_head_is_replaced(tmp_path):
    store = CheckpointStore(tmp_path, keep=0)
    (tmp_path / "best").write_text("a file")
    store.save_best({"w": torch.ones(1)}, {})
    assert store.best_damage() is None and [p.name for p in tmp_path.iterdir()] == ["best"]


def test_what_a_rename_makes_visible_is_on_the_disk_before(tmp_path, monkeypatch):
    """Every file, the directory, then the name: a power loss leaves the old checkpoint or the new one."""
    events: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def path_of(descriptor: int) -> str:
        return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).replace(str(os.getpid()), "PID")

    monkeypatch.setattr(os, "fsync", lambda d: (events.append(f"sync {path_of(d)}"), fsync(d))[1])
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(f"rename {b.name}"), rename(a, b))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(f"replace {b.name}"), replace(a, b))[1])
    CheckpointStore(tmp_path / "c", keep=0).save(make(1))
    files = ["head.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "manifest.json"]
    each = [event for name in files for event in (f"sync .{name}.PID.tmp", f"replace {name}")]
    assert events == [
        *each, "sync .step-00000001.PID.tmp", "rename step-00000001", "sync c",
        "sync .latest.PID.tmp", "replace latest",
    ]  # fmt: skip


def test_leftovers_of_a_killed_writer_are_ignored_and_removed(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(make(1))
    (tmp_path / ".step-00000002.77.tmp").mkdir()
    (tmp_path / ".step-00000002.77.tmp" / "head.safetensors").write_bytes(b"half")
    assert store.find(print).name == "step-00000001"
    assert not list(tmp_path.glob(".*"))
    assert CheckpointStore(tmp_path / "none", 1).find(print) is None


def test_optimizer_state_goes_by_name(tmp_path):
    def fresh(seed):
        head = FakeHead(depth=1, seed=seed)
        head.heads.append(nn.LayerNorm(13))
        alone = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
        return head, Replicated(head, head, TrainConfig(steps=1, lr=0.1, weight_decay=0.1), alone, captured=False)

    head, parallel = fresh(0)
    optimizer = parallel.optimizer
    nn.Sequential(*head.heads)(torch.ones(1, 8)).square().sum().backward()
    optimizer.step()
    store = CheckpointStore(tmp_path, 1)
    path = store.save(Checkpoint(dict(parallel.head_tensors()), dict(parallel.optimizer_tensors()), {}, {"step": 1}))
    again, other = fresh(1)
    loaded = store.load(path)
    other.load_head(loaded.head)
    other.load_optimizer(loaded.optimizer)
    for module, opt in ((head, optimizer), (again, other.optimizer)):
        opt.zero_grad()
        nn.Sequential(*module.heads)(torch.full((1, 8), 2.0)).square().sum().backward()
        opt.step()
    for a, b in zip(head.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.1
    with pytest.raises(StorageError, match="head changed"):
        other.load_optimizer({"exp_avg/else": torch.zeros(1)})
    with pytest.raises(StorageError, match="another head"):
        other.load_head({"else": torch.zeros(1)})


def test_generators_survive_json_and_safetensors(tmp_path):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    random.gauss(0, 1)
    tensors, values = pack_rng([rng_state()])
    expected = (random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(1).item())
    path = CheckpointStore(tmp_path, 1).save(Checkpoint({}, {}, tensors, {"step": 0, "rng": values}))
    state = json.loads((path / "state.json").read_text())["rng"][0]
    set_rng_state({**state, "cpu": CheckpointStore.load(path).rng["rank0/cpu"]})
    assert (random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(1).item()) == expected
