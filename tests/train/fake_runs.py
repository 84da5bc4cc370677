"""Runs of the training loop that are small enough to repeat and to kill."""

from __future__ import annotations

import json

import torch
from train_fakes import FakeHead, FakeSource, data_of, make_documents, quiet, teacher

from headstart.train.config import TrainConfig
from headstart.train.loop import TrainResult, train


class Killed(Exception):
    """Stands for kill -9: nothing in the loop handles it."""


class KillingSource(FakeSource):
    """Dies when asked for its n-th pack."""

    def __init__(self, *args, after: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.after = after

    def get(self, pack):
        if len(self.asked) == self.after:
            raise Killed from None
        return super().get(pack)


def config(**changes) -> TrainConfig:
    values = dict(steps=12, accumulation=2, lr=0.05, warmup_steps=2, weight_decay=0.01, save_every=4, log_every=1)
    return TrainConfig(**(values | changes))


def run(run_dir, source=None, noise: float = 0.1, validate=None, **changes) -> tuple[FakeHead, TrainResult]:
    head = FakeHead(noise=noise)
    source = source or FakeSource(make_documents())
    result = train(
        head, data_of(source), teacher(), config(**changes), run_dir, quiet(validate), provenance={"recipe": "x"}
    )
    return head, result


def records(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir) -> list[tuple[int, float]]:
    return [(r["step"], r["train/loss"]) for r in records(run_dir) if "train/loss" in r]


def assert_same_weights(a: FakeHead, b: FakeHead) -> None:
    for name, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[name]), name
