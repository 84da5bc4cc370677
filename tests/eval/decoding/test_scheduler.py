# ruff: noqa: F811 - fixtures of another file are imported
"""Schedulers: what is left out of verification changes how far a cycle comes, and nothing of what is said."""

from __future__ import annotations

import copy

import pytest
import torch
from eval_help import CONTEXTS, Trained, run, tokens_of
from test_distribution import CONTEXT, ROWS, TOKENS, deviation, enumerated, heads, small  # noqa: F401
from torch import Tensor

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Answer, decode, slots_needed
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.graphs import CycleGraphs, graph_key
from headstart.eval.decoding.loop import Loop
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.scheduler import Scheduler
from headstart.eval.drafters import Drafter, build_drafter
from headstart.eval.tree import Tree
from headstart.heads.base import Head
from headstart.heads.targets.target import Target


class Stateless(Scheduler):
    captures = True

    def start(self, context: Rows) -> None:
        pass


class Everything(Stateless):
    """Says of every node that it is kept, as the default does without saying it."""

    def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor:
        return torch.ones_like(tree.valid_BN)


class Shallow(Stateless):
    """Leaves out the deepest level."""

    def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor:
        return tree.depth_BN < tree.levels


class AllButTheFirst(Stateless):
    """Leaves out all drafts of row 0."""

    def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor:
        return (torch.arange(len(roots_B), device=roots_B.device) > 0)[:, None].expand_as(tree.valid_BN)


class EveryOther(Scheduler):
    """Leaves out all drafts of every other cycle; which one it is stands in a tensor."""

    captures = True

    @property
    def state(self) -> list[tuple[object, str]]:
        return [(self, "turn_1")]

    @property
    def row_state(self) -> list[tuple[object, str]]:
        return []  # all rows share the turn

    def start(self, context: Rows) -> None:
        self.turn_1 = torch.zeros(1, dtype=torch.int64, device=context.count_B.device)

    def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor:
        self.turn_1 = 1 - self.turn_1
        return (self.turn_1 == 0)[:, None].expand_as(tree.valid_BN)


class LooksAtTheDraws(Stateless):
    """Leaves out what the draft thought unlikely when it drew it: not allowed where trees carry q."""

    def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor:
        assert tree.q_BNV is not None
        likely_BN = tree.q_BNV.gather(2, tree.tokens_BN[:, :, None])[..., 0] > 0.15
        return likely_BN.long().cumprod(1).bool()


WAYS = [("eagle3", TreeConfig("chain", 4)), ("eagle3", TreeConfig("dynamic", 3, 3, 12)),
        ("medusa", TreeConfig("static", 3, 3, 20))]  # fmt: skip


def drafter_of(head: Head, tree: TreeConfig, temperature: float = 0.0) -> Drafter:
    drafter = build_drafter(head, EvalConfig(tree=tree, temperature=temperature))
    assert drafter is not None
    return drafter


def drafted(answers: list[Answer], row: int) -> list[int]:
    return [cycle.drafted for cycle in answers[row].cycles]


@pytest.mark.parametrize(("family", "tree"), WAYS)
@pytest.mark.parametrize(
    "scheduler", [Everything(), Shallow(), AllButTheFirst(), EveryOther()], ids=lambda s: type(s).__name__
)
def test_answers_are_the_targets(
    target: Target, plain: list[Answer], scheduler: Scheduler, family: str, tree: TreeConfig,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    trained: Trained = request.getfixturevalue(family)
    whole = run(target, drafter_of(trained.head, tree))
    answers = run(target, drafter_of(trained.head, tree), scheduler=scheduler)
    assert tokens_of(answers) == tokens_of(plain)
    if isinstance(scheduler, Everything):
        assert [answer.cycles for answer in answers] == [answer.cycles for answer in whole]
    if isinstance(scheduler, Shallow):
        levels, left = (max(n for row in range(3) for n in drafted(found, row)) for found in (whole, answers))
        assert left == levels - 1
    if isinstance(scheduler, AllButTheFirst):
        assert set(drafted(answers, 0)) == {0} and min(drafted(answers, 1)) > 0
    if isinstance(scheduler, EveryOther):
        assert set(drafted(answers, 0)[::2]) == {0} and min(drafted(answers, 0)[1::2]) > 0


@pytest.mark.parametrize(("scheduler", "exact"), [(Shallow(), True), (EveryOther(), True), (LooksAtTheDraws(), False)])
def test_sampling_keeps_the_targets_distribution(
    small: Target,
    heads: dict[str, Head],
    scheduler: Scheduler,
    exact: bool,
) -> None:
    """Drawn chains: what may be left out, and what may not."""
    drafter = drafter_of(heads["eagle"], TreeConfig("chain", 3), temperature=1.0)
    sampling = Sampling(temperature=1.0)
    answers = run(
        small, drafter, [CONTEXT] * ROWS, TOKENS, sampling=sampling, seed=17, bucket=16, prefill_chunk=16,
        scheduler=scheduler,
    )  # fmt: skip
    assert (deviation(answers, enumerated(small, sampling)) < 5) == exact
    assert max(cycle.accepted for answer in answers for cycle in answer.cycles) > 0


def test_a_scheduler_is_part_of_what_a_cycle_runs_on(target: Target, eagle3: Trained) -> None:
    """Loops without one share their captured cycle; another scheduler asks for another one, its state included."""
    drafter, sampling = drafter_of(eagle3.head, TreeConfig("chain", 3)), Sampling()
    engine = Engine(target.model, 3, slots_needed(12, 30, drafter))
    keys = []
    other = EveryOther()
    for scheduler in ([], [], [other], [other], [EveryOther()]):
        loop = Loop(engine, drafter, sampling, None, None, *scheduler)
        loop.start(CONTEXTS, [30] * 3, [set()] * 3)
        assert all(((it, "turn_1") in loop.state) for it in scheduler)
        keys.append(graph_key(loop))
    assert keys[0] == keys[1] != keys[2] == keys[3] != keys[4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scheduler", [Shallow(), EveryOther()], ids=lambda s: type(s).__name__)
def test_captured_cycles_ask_the_scheduler(
    target: Target, plain: list[Answer], eagle3: Trained, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "choose_ways", lambda loop: None)
    there = Target.from_model(copy.deepcopy(target.model).to("cuda"))
    head = copy.deepcopy(eagle3.head).to("cuda")
    head.bind(there.ends)
    tree = TreeConfig("chain", 4)
    drafter = drafter_of(head, tree)
    fused = FusedModel(there.model, attention_windows(there.model.config))
    engine = Engine(there.model, 3, slots_needed(12, 30, drafter), fused=fused)
    graphs, generator = CycleGraphs(), torch.Generator("cuda")
    for _ in range(2):
        decoded = decode(
            engine, CONTEXTS, drafter, Sampling(), 30, set(), generator, graphs=graphs, scheduler=scheduler
        )
        assert tokens_of(decoded.answers) == tokens_of(plain) and decoded.rule == "greedy"
        found = drafted(decoded.answers, 0)
        if isinstance(scheduler, Shallow):
            assert set(found) == {tree.depth - 1}
        else:
            assert set(found[::2]) == {0} and set(found[1::2]) == {tree.depth}
    assert len(graphs.captured) == 1
