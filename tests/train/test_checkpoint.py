import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from headstart.heads.errors import StorageError
from headstart.train.checkpoint import (
    Checkpoint,
    CheckpointStore,
    damage,
    pack_rng,
    rng_state,
    set_rng_state,
)
from headstart.train.config import TrainConfig
from headstart.train.parallel import Replicated


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
        torch.manual_seed(seed)
        head = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        alone = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
        return head, Replicated(head, head, TrainConfig(steps=1, lr=0.1, weight_decay=0.1), alone, captured=False)

    head, parallel = fresh(0)
    optimizer = parallel.optimizer
    head(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    store = CheckpointStore(tmp_path, 1)
    path = store.save(Checkpoint(dict(parallel.head_tensors()), dict(parallel.optimizer_tensors()), {}, {"step": 1}))
    again, other = fresh(1)
    loaded = store.load(path)
    other.load_head(loaded.head)
    other.load_optimizer(loaded.optimizer)
    for module, opt in ((head, optimizer), (again, other.optimizer)):
        opt.zero_grad()
        module(torch.full((1, 3), 2.0)).square().sum().backward()
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
