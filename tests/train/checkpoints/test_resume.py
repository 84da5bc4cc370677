"""A run continues as if nothing had happened, or says why it does not."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from fake_runs import Killed, KillingSource, assert_same_weights, config, losses, records, run
from train_fakes import FakeHead, FakeSource, data_of, make_documents, quiet, teacher

from headstart.heads.errors import ConfigError, StorageError, TrainingError
from headstart.train.checkpoints.checkpoint import CheckpointStore
from headstart.train.loop import train


@pytest.mark.parametrize("after", [3, 8, 9, 13, 20])  # packs asked for before the kill: steps 1, 4, 4, 6, 10
@pytest.mark.parametrize("prefetch", [0, 1])
def test_killed_run_continues_as_if_nothing_happened(tmp_path, after, prefetch):
    whole, _ = run(tmp_path / "whole")
    killing = KillingSource(make_documents(), after=after)
    with pytest.raises((Killed, TrainingError)):
        run(tmp_path / "killed", killing, prefetch=prefetch)
    torch.manual_seed(after)  # another process would not share the generators
    again, result = run(tmp_path / "killed", prefetch=prefetch)
    assert result.resumed_from == after // 2 // 4 * 4
    assert_same_weights(whole, again)
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")


def test_finished_run_does_nothing_and_a_larger_budget_continues(tmp_path):
    head, first = run(tmp_path)
    source = FakeSource(make_documents())
    again, second = run(tmp_path, source)
    assert source.asked == [] and second.step == 12 and second.checkpoint == first.checkpoint
    assert_same_weights(head, again)
    _, third = run(tmp_path, steps=14)
    assert (third.resumed_from, third.step) == (12, 14)


def test_damaged_checkpoint_falls_back_loudly(tmp_path, capsys):
    whole, _ = run(tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000012"
    data = bytearray((newest / "head.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "head.safetensors").write_bytes(data)
    source = FakeSource(make_documents())
    head = FakeHead(noise=0.1)
    result = train(head, data_of(source), teacher(), config(), tmp_path)
    assert result.resumed_from == 8
    message = " ".join(capsys.readouterr().err.split())
    assert "WARNING" in message and "step-00000012 is damaged: head.safetensors" in message and "sha256" in message
    assert_same_weights(whole, head)
    assert (tmp_path / "checkpoints" / "damaged-step-00000012").is_dir()


def test_only_damaged_checkpoints_is_an_error_until_resume_is_off(tmp_path):
    run(tmp_path)
    for path in (tmp_path / "checkpoints").glob("step-*"):
        (path / "optimizer.safetensors").unlink()
    with pytest.raises(StorageError, match="every checkpoint is damaged"):
        run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(StorageError, match=r"every checkpoint is damaged .*optimizer.safetensors is missing"):
        run(tmp_path)  # the same command again must not start over
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2
    _, result = run(tmp_path, resume=False)
    assert result.resumed_from == 0
    assert (tmp_path / "previous/1-train/metrics.jsonl").read_text() == before
    assert len(list((tmp_path / "previous/1-train/checkpoints").glob("step-*"))) == 2


def test_every_start_anew_keeps_what_the_one_before_had_made(tmp_path):
    for steps in (2, 3, 4):
        run(tmp_path, resume=False, steps=steps)
    kept = [(tmp_path / f"previous/{n}-train/checkpoints/latest").read_text() for n in (1, 2)]
    assert kept == ["step-00000002\n", "step-00000003\n"]


@pytest.mark.parametrize("left", ["latest", "best"])
def test_checkpoints_that_are_gone_are_not_a_fresh_start(tmp_path, left, capsys):
    """Deleted but for `latest`: an error, as if they were damaged. Without any trace but the metrics: all is kept."""
    chosen = dict(validate=lambda head, step, final: {"valid/walked_tau": float(step)}, eval_every=3)
    run(tmp_path, steps=7, **chosen)
    before = (tmp_path / "metrics.jsonl").read_text()
    for path in (tmp_path / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    if left == "latest":
        with pytest.raises(
            StorageError, match="no checkpoint can be used: the one that latest names is gone.*train.resume=false"
        ):
            run(tmp_path, **chosen)
        assert (tmp_path / "metrics.jsonl").read_text() == before
        return
    (tmp_path / "checkpoints/latest").unlink()
    head, source = FakeHead(noise=0.1), FakeSource(make_documents())
    train(head, data_of(source), teacher(), config(), tmp_path)
    said = " ".join(capsys.readouterr().err.split())
    assert "WARNING: there is no checkpoint, though metrics.jsonl goes to step 7: training starts at step 0" in said
    assert (tmp_path / "previous/1-train/metrics.jsonl").read_text() == before
    assert (tmp_path / "previous/1-train/checkpoints/best/head.safetensors").is_file()


def test_a_run_that_ended_before_its_first_checkpoint_simply_starts_again(tmp_path):
    with pytest.raises((Killed, TrainingError)):
        run(tmp_path, KillingSource(make_documents(), after=5))
    assert run(tmp_path)[1].resumed_from == 0 and not (tmp_path / "previous").exists()


def test_only_checkpoints_that_were_set_aside_are_not_a_fresh_start(tmp_path):
    run(tmp_path)
    for path in (tmp_path / "checkpoints").glob("step-*"):
        path.rename(path.with_name(f"damaged-{path.name}"))
    with pytest.raises(StorageError, match="every checkpoint is damaged"):
        run(tmp_path)


def test_other_data_or_seed_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(ConfigError, match="other data"):
        run(tmp_path, FakeSource(make_documents(11)))
    with pytest.raises(ConfigError, match="train.seed was 0, is 1"):
        run(tmp_path, seed=1)


def test_a_head_of_other_sizes_is_refused(tmp_path):
    run(tmp_path)

    class Wider(FakeHead):
        def __init__(self, **more):
            super().__init__(**more)
            self.heads[1] = torch.nn.Linear(8, 14)

    source = FakeSource(make_documents())
    with pytest.raises(
        ConfigError, match=r"holds another head \(tensors that differ: heads.1.bias \[13\], heads.1.bias"
    ):
        train(Wider(), data_of(source), teacher(), config(), tmp_path, quiet())


def test_resuming_gives_the_generators_and_the_clock_back(tmp_path):
    seen = {}

    class Drawing(FakeSource):
        """Draws beside the packs, which seed themselves."""

        def get(self, pack):
            seen[len(self.asked)] = random.random()
            return super().get(pack)

    random.seed(5)
    run(tmp_path, Drawing(make_documents()), steps=6, save_every=4, max_seconds=1000.0)
    whole, seen = seen, {}
    path = tmp_path / "checkpoints/step-00000004"
    CheckpointStore._remove(tmp_path / "checkpoints/step-00000006")
    store = CheckpointStore(tmp_path / "checkpoints", 0)
    state = json.loads((path / "state.json").read_text())
    assert 0 < state["elapsed"] < 100
    store.rewrite_state(state | {"elapsed": 500.0})
    random.seed(77)
    _, result = run(tmp_path, Drawing(make_documents()), steps=6, save_every=4, max_seconds=1000.0)
    assert seen == {i: whole[8 + i] for i in range(4)}
    assert 500.0 < result.seconds < 600.0
    assert records(tmp_path)[-1]["seconds"] > 500.0
