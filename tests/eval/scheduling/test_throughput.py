"""The scheduler in the decode loop: answers stay the target's, whatever it chooses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from eval_help import CONTEXTS, Trained, run, tokens_of

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Answer, decode, slots_needed
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.graphs import CycleGraphs
from headstart.eval.decoding.loop import Loop
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.scheduler import PLAIN, CycleShape
from headstart.eval.drafters import Drafter, build_drafter
from headstart.eval.scheduling.throughput import ThroughputScheduler, scheduler_for
from headstart.heads.targets.target import Target

WAYS = [
    ("eagle3", TreeConfig("chain", 5)), ("eagle3", TreeConfig("dynamic", 3, 3, 12)), ("dspark", TreeConfig("chain", 4)),
    ("medusa", TreeConfig("chain", 3)), ("medusa", TreeConfig("ddtree", 3, total_tokens=10)),
    ("hydra", TreeConfig("chain", 3)), ("hydra", TreeConfig("dynamic", 3, 3, 12)), ("peagle", TreeConfig("chain", 4)),
    ("peagle", TreeConfig("ddtree", 4, total_tokens=12)), ("dflash", TreeConfig("ddtree", 4, total_tokens=12)),
]  # fmt: skip


def drafter_of(trained: Trained, tree: TreeConfig) -> Drafter:
    drafter = build_drafter(trained.head, EvalConfig(tree=tree))
    assert drafter is not None
    return drafter


@pytest.mark.parametrize(("family", "tree"), WAYS)
def test_every_shape_is_lossless(
    target: Target, plain: list[Answer], trained: Callable[[str], Trained], family: str, tree: TreeConfig
) -> None:
    drafter = drafter_of(trained(family), tree)
    scheduler = EveryShape(drafter, tree)
    for _ in range(2):
        answers = run(target, drafter, CONTEXTS * 2, scheduler=scheduler)
        assert tokens_of(answers) == tokens_of(plain) * 2
    assert set(scheduler.ran) == set(scheduler.shapes()[1:])


@pytest.mark.parametrize(("family", "tree"), WAYS)
def test_answers_are_the_targets(
    target: Target, plain: list[Answer], trained: Callable[[str], Trained], family: str, tree: TreeConfig
) -> None:
    drafter = drafter_of(trained(family), tree)
    scheduler = scheduler_for(drafter, tree)
    accepted = 0
    for _ in range(3):
        answers = run(target, drafter, scheduler=scheduler)
        assert tokens_of(answers) == tokens_of(plain)
        accepted += sum(cycle.accepted for answer in answers for cycle in answer.cycles)
    book = scheduler.book
    assert set(book.times.profiled) == set(scheduler.shapes()) >= {PLAIN, *book.shapes}
    assert accepted > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("family", "tree"), WAYS)
def test_captured_shapes(
    target: Target, plain: list[Answer], trained: Callable[[str], Trained], family: str, tree: TreeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Every shape is captured once on one state, and the answers stay the target's, whichever of them runs."""
    monkeypatch.setattr(Loop, "choose_ways", lambda loop: None)
    there = Target.from_model(copy.deepcopy(target.model).to("cuda"))
    head = copy.deepcopy(trained(family).head).to("cuda")
    head.bind(there.ends)
    drafter = build_drafter(head, EvalConfig(tree=tree))
    assert drafter is not None
    fused = FusedModel(there.model, attention_windows(there.model.config))
    contexts = CONTEXTS * 4
    engine = Engine(there.model, 6, slots_needed(12, 30, drafter), fused=fused)
    graphs, generator = CycleGraphs(), torch.Generator("cuda")
    scheduler = EveryShape(drafter, tree)
    for _ in range(3):
        decoded = decode(
            engine, contexts, drafter, Sampling(), 30, set(), generator, graphs=graphs, scheduler=scheduler
        )
        assert tokens_of(decoded.answers) == tokens_of(plain) * 4 and decoded.rule == "greedy"
    assert len(graphs.captured) == 1
    assert set(scheduler.ran) == {shape for shape in scheduler.shapes() if shape != PLAIN}
    assert set(scheduler.book.times.profiled) == set(scheduler.shapes())


class EveryShape(ThroughputScheduler):
    """Takes turns with all shapes that draft."""

    def __init__(self, drafter: Drafter, tree: TreeConfig):
        chosen = scheduler_for(drafter, tree)
        super().__init__(drafter, chosen.levels, chosen.linear)
        self.ran: list[CycleShape] = []

    def next_shape(self) -> CycleShape:
        shapes = self.shapes()[1:]
        super().next_shape()
        self.ran.append(shapes[len(self.ran) % len(shapes)])
        return self.ran[-1]
