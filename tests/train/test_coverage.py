"""Rows outside the draft vocabulary carry no loss: how many train is told, and a run in which none does is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_fakes import DIMS, FakeHead, FakeSource, make_documents, pairs_of, quiet, teacher

from headstart.heads.base import Loss
from headstart.heads.batch import FeatureBatch
from headstart.heads.ends import Teacher
from headstart.heads.errors import TrainingError
from headstart.train import coverage, health
from headstart.train.checkpoints.checkpoint import CheckpointStore
from headstart.train.config import TrainConfig
from headstart.train.coverage import measure_coverage
from headstart.train.loop import TrainResult, train
from headstart.train.validate import Validator


class PartHead(FakeHead):
    """Rows carry a loss only where the token two ahead is in `inside`, as with a draft vocabulary."""

    draft_vocab_size = 4

    def __init__(self, inside: set[int]):
        super().__init__(depth=2)
        self.inside = torch.tensor([token in inside for token in range(DIMS.vocab_size)])

    def on(self, batch: FeatureBatch) -> list[torch.Tensor]:
        rows = [batch.anchors.row_A[:count] for count in batch.anchors.count_K]
        return [self.inside[batch.tokens_R[row + 1 + d]].float() for d, row in enumerate(rows, start=1)]

    def loss_counts(self, batch: FeatureBatch) -> torch.Tensor:
        return torch.stack([on.sum() for on in self.on(batch)])

    def loss(self, batch, teacher, scale_T=None) -> Loss:
        found = super().loss(batch, teacher, scale_T)
        counts = self.loss_counts(batch)
        covered = torch.cat((found.numerator_M[:-1], counts[:1]))
        return replace(found, sum_T=found.sum_T * (counts > 0), count_T=counts, numerator_M=covered)


def run(run_dir: Path, head: FakeHead, documents=None, **settings) -> tuple[TrainResult, list[dict]]:
    source = FakeSource(documents or make_documents(), depth=2)
    config = TrainConfig(**{"steps": 6, "accumulation": 2, "log_every": 3, "mixed_precision": "no", **settings})
    validate = Validator(source, [[0, 1, 2]], teacher())
    result = train(head, pairs_of(source), teacher(), config, run_dir, quiet(validate))
    return result, [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_share_of_rows_that_train_is_told(tmp_path: Path):
    inside = {0, 1, 2, 3}
    documents = make_documents()
    labels = [
        [int(tokens[t + 2]) for t in range(len(tokens) - 2) if turn[t + 1] >= 0] for tokens, turn in documents
    ]  # fmt: skip
    shares = [sum(x in inside for x in rows) / len(rows) for rows in (sum(labels, []), sum(labels[:3], []))]
    assert 0.1 < shares[0] < 0.6
    result, records = run(tmp_path, PartHead(inside), log_every=6)
    (trained,) = (record for record in records if "train/coverage" in record)  # 12 packs: each of the 6 twice
    assert trained["train/coverage"] == pytest.approx(shares[0])
    assert result.metrics["valid/coverage"] == pytest.approx(shares[1])


@pytest.mark.parametrize("settings", [{"steps": 6}, {"steps": 1}], ids=["an epoch", "less than an epoch"])
def test_a_run_in_which_no_row_trains_is_refused(tmp_path: Path, settings: dict):
    with pytest.raises(TrainingError, match=r"none of \d+ supervised rows trains.*head.draft_vocab_size \(found 4"):
        run(tmp_path, PartHead(set()), **settings)
    assert "loss" not in (tmp_path / "metrics.jsonl").read_text()
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_a_long_epoch_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(health, "UNTRAINED_ROWS", 20)
    with pytest.raises(TrainingError, match="supervised rows trains"):
        run(tmp_path, PartHead(set()), documents=make_documents(100), steps=50)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_coverage_is_measured_before_training():
    documents = make_documents()
    source, inside = FakeSource(documents, depth=2), {0, 1, 2, 3}
    labels = [int(tokens[t + 2]) for tokens, turn in documents for t in range(len(tokens) - 2) if turn[t + 1] >= 0]
    assert measure_coverage(PartHead(inside), source, seed=0)[:2] == (sum(x in inside for x in labels), len(labels))
    with pytest.raises(TrainingError, match=f"none of {len(labels)} supervised rows trains"):
        measure_coverage(PartHead(set()), source, seed=0)


def test_the_probability_that_the_vocabulary_keeps_is_that_of_a_softmax(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coverage, "MASS_ROWS", 3)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(8, 6, generator=generator), torch.randn(20, 6, generator=generator)
    ids = torch.tensor([0, 3, 4, 11, 19])
    expected = (hidden.double() @ weight.double().T).softmax(-1)[:, ids].sum()
    assert coverage.kept_mass(hidden, Teacher(weight), ids) == pytest.approx(float(expected), rel=1e-5)
    softer = (torch.tanh(hidden.double() @ weight.double().T / 2) * 2).softmax(-1)[:, ids].sum()
    assert coverage.kept_mass(hidden, Teacher(weight, softcap=2.0), ids) == pytest.approx(float(softer), rel=1e-5)
    assert coverage.kept_mass(hidden, Teacher(weight), torch.arange(20)) == pytest.approx(8.0, rel=1e-5)


def test_a_part_of_much_data_is_enough(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coverage, "SAMPLE_TOKENS", 40)
    source = FakeSource(make_documents(100), depth=2)
    inside, rows = measure_coverage(PartHead({0, 1, 2, 3}), source, seed=0)[:2]
    assert 0 < inside < rows < 60 and len(source.asked) < 10
    # too few rows to say that none of the others trains
    assert measure_coverage(PartHead(set()), source, seed=0)[:2] == (0, rows)
    monkeypatch.setattr(coverage, "ENOUGH_ROWS", rows)
    with pytest.raises(TrainingError):
        measure_coverage(PartHead(set()), source, seed=0)


def test_steps_without_a_row_that_trains_do_not_pull_the_loss_down(tmp_path: Path):
    """Packs 0 and 1 make the first step, 2 and 3 the second: only the first has answers inside."""

    def documents(token: int) -> list:
        return [(torch.full((8,), token), torch.tensor([-1, -1, 0, 0, 0, 0, 0, 0]))] * 4

    _, (mixed, *_) = run(tmp_path / "mixed", PartHead({3}), documents(3) + documents(9), steps=2, log_every=2, lr=1e-9)
    _, (alone, *_) = run(tmp_path / "alone", PartHead({3}), documents(3), steps=1, log_every=1, lr=1e-9)
    assert mixed["train/loss"] == pytest.approx(alone["train/loss"], rel=1e-4) and alone["train/loss"] > 0.1
    assert mixed["train/coverage"] == pytest.approx(0.5)


def test_best_starts_anew_where_an_older_version_chose_by_another_number(tmp_path: Path):
    result, _ = run(tmp_path, FakeHead(depth=2), eval_every=2, save_every=2, steps=4)
    assert result.best["name"] == "valid/walked_tau"
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    store.save_best(store.load_best(), {"name": "valid/sim_tau", "value": 99.0, "step": 2})
    result, _ = run(tmp_path, FakeHead(depth=2), eval_every=2, save_every=2, steps=8)
    assert result.best["name"] == "valid/walked_tau" and result.best["value"] < 4
