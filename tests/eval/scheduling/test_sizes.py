"""What is drafted in cycles that draft less than a drafter was built for, and what timing them leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from eval_help import CONTEXTS, DRAFTING_HEADS, FAMILY_TREES, NEW_TOKENS, Trained, run, tokens_of
from torch import Tensor

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import Answer, decode, slots_needed
from headstart.eval.decoding.drafter import SizedDrafter
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.graphs import CycleGraphs, time_shapes
from headstart.eval.decoding.loop import COUNT, Loop
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.scheduler import PLAIN, CycleShape, Scheduler
from headstart.eval.drafters import Drafter, build_drafter
from headstart.eval.kernels.linear import Linear
from headstart.eval.scheduling.estimates import silent
from headstart.eval.tree import Tree, chain, static_shape
from headstart.heads.families.medusa.head import MedusaHead
from headstart.heads.targets.target import Target

Heads = Callable[[str], Trained]


class Turns(Scheduler):
    """Takes turns with some shapes. Args: timed: whether they are timed first."""

    captures = True

    def __init__(self, *given: CycleShape, timed: bool = False):
        self.given, self.timing, self.turn = list(given), timed, 0
        self.seconds: dict[CycleShape, float] = {}

    def shapes(self) -> list[CycleShape]:
        return self.given

    def next_shape(self) -> CycleShape:
        self.turn += 1
        return self.given[self.turn % len(self.given)]

    def wants_time(self, shape: CycleShape) -> bool:
        return self.timing and shape not in self.seconds

    def timed(self, shape: CycleShape, seconds: float) -> None:
        self.seconds[shape] = seconds


def drafter_of(trained: Heads, name: str, tree: TreeConfig, temperature: float = 0.0, penalty: float = 1.0) -> Drafter:
    config = EvalConfig(tree=tree, temperature=temperature, repetition_penalty=penalty)
    drafter = build_drafter(trained(name).head, config)
    assert drafter is not None
    return drafter


def begun(target: Target, drafter: Drafter, sampling: Sampling, scheduler: Scheduler) -> Loop:
    engine = Engine(target.model, 3, slots_needed(max(map(len, CONTEXTS)), NEW_TOKENS, drafter))
    loop = Loop(engine, drafter, sampling, torch.Generator().manual_seed(3), None, scheduler)
    with torch.inference_mode():
        loop.start(CONTEXTS, [NEW_TOKENS] * 3, [set()] * 3)
    return loop


def proposed(target: Target, drafter: Drafter, shape: CycleShape, sampling: Sampling) -> Tree:
    loop = begun(target, drafter, sampling, Turns(shape))
    loop.take(shape)
    return drafter.propose(torch.tensor([30, 7, 12]), torch.Generator().manual_seed(3))


def same(found: Tree, expected: Tree, tokens: bool = True) -> None:
    """Args: tokens: whether those are the same too."""
    assert found.levels == expected.levels and found.linear == expected.linear and found.nodes == expected.nodes
    for name in ("tokens_BN", "parent_BN", "depth_BN", "valid_BN"):
        assert torch.equal(getattr(found, name), getattr(expected, name)) or name == "tokens_BN" and not tokens, name
    for name in ("q_BNV", "score_BN", "confidence_BN"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


#: (temperature, repetition penalty). With a penalty drafts are drawn one after the other, also where they need not be
SAMPLINGS = [(0.0, 1.0), (0.0, 1.3), (1.0, 1.0), (1.0, 1.3)]


@pytest.mark.parametrize(("temperature", "penalty"), SAMPLINGS)
@pytest.mark.parametrize("says", [False, True])
@pytest.mark.parametrize("name", DRAFTING_HEADS)
def test_a_chain_of_fewer_levels_is_the_beginning_of_the_whole_one(
    target: Target, trained: Heads, name: str, temperature: float, penalty: float, says: bool
) -> None:
    """One drafter drafts chains of all lengths in turn, on one state: whatever an earlier one left behind."""
    sampling = Sampling(temperature=temperature, repetition_penalty=penalty)
    depth = trained(name).head.longest_chain or 5
    drafter = drafter_of(trained, name, TreeConfig("chain", depth), temperature, penalty)
    assert isinstance(drafter, SizedDrafter) and drafter.by_level
    drafter.says_confidence = says  # type: ignore[attr-defined]
    loop = begun(target, drafter, sampling, Turns(CycleShape()))
    before = loop.tensors()

    def draft(levels: int | None) -> Tree:
        loop.take(CycleShape(levels))
        loop.attach(before)
        return drafter.propose(torch.tensor([30, 7, 12]), torch.Generator().manual_seed(3))

    whole = draft(None)
    assert whole.nodes == depth > 2 and len(set(whole.tokens_BN[0].tolist())) > 1
    assert (whole.confidence_BN is not None) == says and (whole.q_BNV is not None) == (temperature > 0)
    # drafts that are all drawn at once get other random numbers, from the same distributions
    at_once = temperature > 0 and penalty == 1.0 and name in AT_ONCE
    for levels in (2, 1, depth, 3, depth + 1, 2, None):
        found = draft(levels)
        same(found, whole.first(levels or depth), tokens=not at_once)
        if found.q_BNV is not None:
            assert (found.q_BNV.gather(2, found.tokens_BN[:, :, None]) > 0).all()


#: heads that draw all drafts of a chain at once
AT_ONCE = [name for name, family in DRAFTING_HEADS.items() if family in ("medusa", "peagle", "dflash", "jetspec")]


@pytest.mark.parametrize(("family", "kind"), FAMILY_TREES)
def test_fewer_levels_take_less_time_but_in_static_trees(
    target: Target, trained: Heads, family: str, kind: str
) -> None:
    """Those are drafted as a whole, and the loop cuts them."""
    drafter = drafter_of(trained, family, TreeConfig(kind, 3, 3, 12))
    assert isinstance(drafter, SizedDrafter) and drafter.by_level == (kind != "static")
    whole, few = (proposed(target, drafter, shape, Sampling()) for shape in (CycleShape(), CycleShape(1)))
    assert whole.levels == 3 and few.levels == (3 if kind == "static" else 1)
    if kind == "static":
        same(few, whole)


@pytest.mark.parametrize("name", DRAFTING_HEADS)
def test_after_a_cycle_of_no_more_levels_fewer_rows_are_read(target: Target, trained: Heads, name: str) -> None:
    """The drafts are the same. After a cycle of more levels they would not be, so the loop does not take such a
    shape."""
    drafter = drafter_of(trained, name, TreeConfig("chain", 3))
    # all drafts are accepted, so that rows hold as many tokens as they may
    loop = begun(target, drafter, Sampling(synthetic=(1.0, 1.0, 1.0)), Turns(CycleShape()))
    for _ in range(3):
        loop.take(CycleShape(1))
        with torch.inference_mode():
            assert (loop.cycle()[:, COUNT] == 2).all()
            before = loop.tensors()
            drafts = []
            for shape in (CycleShape(2), CycleShape(2, says=False)):
                loop.attach(before)
                loop.take(shape)
                drafts.append(drafter.propose(loop.roots_B))
            loop.attach(before)
        same(drafts[1], drafts[0])


def test_a_silent_shape_follows_no_deeper_one(target: Target, trained: Heads) -> None:
    silent = [CycleShape(levels, says=False) for levels in (1, 2)]
    wanted = [silent[0], silent[1], silent[0], silent[0], PLAIN, CycleShape(), silent[1], silent[1]]
    scheduler = Turns(*wanted)
    scheduler.turn = -1
    loop = begun(target, drafter_of(trained, "eagle3", TreeConfig("chain", 3)), Sampling(), scheduler)
    taken = [loop.next_shape() for _ in wanted]
    assert taken == [silent[0], silent[1], CycleShape(1), silent[0], PLAIN, CycleShape(), CycleShape(2), silent[1]]


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("levels", [1, 2, None])
@pytest.mark.parametrize("name", [name for name in DRAFTING_HEADS if DRAFTING_HEADS[name] != "medusa"])
def test_the_fastest_kernels_are_chosen_for_the_rows_of_a_cycle(
    target: Target, trained: Heads, name: str, levels: int | None, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a cycle has no other rows. Medusa's products are not measured."""
    drafter = drafter_of(trained, name, TreeConfig("chain", 3))
    loop = begun(target, drafter, Sampling(), Turns(CycleShape(levels)))
    loop.take(CycleShape(levels, says=says))
    loop.cycle()
    seen: set[tuple[int, int]] = set()
    original = Linear._tiles

    def watched(linear: Linear, x_RK: Tensor) -> object:
        seen.add((id(linear), len(x_RK)))
        return original(linear, x_RK)

    monkeypatch.setattr(Linear, "_tiles", watched)
    loop.cycle()
    measured = {(id(linear), rows) for linears, rows in drafter.products(3) for linear in linears}
    assert seen and seen <= measured


@pytest.mark.parametrize("kind", ["chain", "ddtree", "static"])
def test_medusa_runs_the_heads_of_the_levels_alone(
    target: Target, trained: Heads, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, ran = drafter_of(trained, "medusa", TreeConfig(kind, 3, 3, 12)), []
    original = MedusaHead.logits

    def watched(head: MedusaHead, inputs: list[Tensor]) -> Tensor:
        ran.append(len(inputs))
        return original(head, inputs)

    monkeypatch.setattr(MedusaHead, "logits", watched)
    for levels in (1, 2, None):
        proposed(target, drafter, CycleShape(levels), Sampling())
    every = drafter.head.depth  # type: ignore[attr-defined]
    assert ran == ([every] * 3 if kind == "static" else [1, 2, every])


TREES = [
    ("eagle3", "dynamic"), ("eagle", "dynamic"), ("hydra", "dynamic"), ("medusa", "ddtree"), ("peagle", "ddtree"),
    ("dflash", "ddtree"), ("jetspec, anchor first, draft vocabulary", "ddtree"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), TREES)
@pytest.mark.parametrize(("levels", "nodes"), [(1, 2), (2, 5), (2, 11), (3, 7), (4, 11)])
def test_a_smaller_tree_is_that_of_a_drafter_built_for_it(
    target: Target, trained: Heads, name: str, kind: str, levels: int, nodes: int
) -> None:
    large = drafter_of(trained, name, TreeConfig(kind, 4, 3, 12))
    small = drafter_of(trained, name, TreeConfig(kind, levels, 3, nodes + 1))
    expected = proposed(target, small, CycleShape(), Sampling())
    same(proposed(target, large, CycleShape(levels, nodes), Sampling()), expected)
    assert expected.nodes == (nodes if kind == "ddtree" else min(nodes, 3 + 9 * (levels - 1)))


@pytest.mark.parametrize(("family", "tree", "shape", "smaller"), [
    ("eagle3", TreeConfig("chain", 5), CycleShape(2), TreeConfig("chain", 2)),
    ("eagle3", TreeConfig("dynamic", 4, 3, 12), CycleShape(2, 6), TreeConfig("dynamic", 2, 3, 7)),
    ("medusa", TreeConfig("ddtree", 3, total_tokens=12), CycleShape(3, 5), TreeConfig("ddtree", 3, total_tokens=6)),
    ("medusa", TreeConfig("ddtree", 3, total_tokens=12), CycleShape(2, 5), TreeConfig("ddtree", 2, total_tokens=6)),
    ("hydra", TreeConfig("chain", 3), CycleShape(2), TreeConfig("chain", 2)),
    ("hydra", TreeConfig("dynamic", 3, 3, 12), CycleShape(2, 6), TreeConfig("dynamic", 2, 3, 7)),
    ("dspark", TreeConfig("chain", 4), CycleShape(2), TreeConfig("chain", 2)),
    ("dflash", TreeConfig("ddtree", 4, total_tokens=12), CycleShape(2, 6), TreeConfig("ddtree", 2, total_tokens=7)),
    ("peagle", TreeConfig("chain", 4), CycleShape(2), TreeConfig("chain", 2)),
    ("peagle", TreeConfig("ddtree", 4, total_tokens=12), CycleShape(1, 3), TreeConfig("ddtree", 1, total_tokens=4)),
])  # fmt: skip
def test_cycles_that_draft_less_are_those_of_a_smaller_drafter(
    target: Target, plain: list[Answer], trained: Heads, family: str, tree: TreeConfig, shape: CycleShape,
    smaller: TreeConfig,
) -> None:  # fmt: skip
    """All cycles of an answer: what a cycle leaves to the next one is right too."""
    expected = run(target, drafter_of(trained, family, smaller))
    for asked in dict.fromkeys((shape, silent(shape))):
        answers = run(target, drafter_of(trained, family, tree), scheduler=Turns(asked))
        assert tokens_of(answers) == tokens_of(expected) == tokens_of(plain)
        assert [answer.cycles for answer in answers] == [answer.cycles for answer in expected]
    assert max(cycle.accepted for answer in answers for cycle in answer.cycles) > 0


SHAPES = {
    "chain": [PLAIN, CycleShape(1), CycleShape(3, rows=5), CycleShape(3)],
    "dynamic": [PLAIN, CycleShape(2, 5), CycleShape(3, 8, 12), CycleShape(3, 11)],
    "static": [PLAIN, CycleShape(3, rows=9), CycleShape(3)],
    "ddtree": [PLAIN, CycleShape(2, 6), CycleShape(3, 6, 9), CycleShape(3, 11)],
}
WAYS = [("eagle3", "chain"), ("eagle3", "dynamic"), ("medusa", "static"), ("medusa", "ddtree"), ("dspark", "chain"),
        ("hydra", "static"), ("peagle", "chain"), ("dflash", "ddtree")]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("family", "kind"), WAYS)
def test_timing_leaves_everything_as_it_was(
    target: Target, trained: Heads, family: str, kind: str, temperature: float
) -> None:
    drafter = drafter_of(trained, family, TreeConfig(kind, 3, 3, 12), temperature)
    sampling = Sampling(temperature=temperature, repetition_penalty=1.2)
    scheduler = Turns(*SHAPES[kind], timed=True)
    loop = begun(target, drafter, sampling, scheduler)
    assert loop.generator is not None
    names, before = [name for _, name in loop.state], [tensor.clone() for tensor in loop.tensors()]
    noise, longest = loop.generator.get_state(), loop.longest
    with torch.inference_mode():
        time_shapes(loop)
    assert set(scheduler.seconds) == set(scheduler.shapes()) and min(scheduler.seconds.values()) > 0
    for name, tensor, expected in zip(names, loop.tensors(), before, strict=True):
        assert torch.equal(tensor, expected), name
    assert torch.equal(loop.generator.get_state(), noise) and loop.longest == longest


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("family", "kind"), WAYS)
def test_answers_do_not_depend_on_timing(
    target: Target, trained: Heads, family: str, kind: str, temperature: float
) -> None:
    """Keys and values too: the cycles after it are those that would have been."""
    found = []
    for timed in (False, True):
        drafter = drafter_of(trained, family, TreeConfig(kind, 3, 3, 12), temperature)
        scheduler = Turns(*SHAPES[kind][1:], timed=timed)
        engine = Engine(target.model, 3, slots_needed(max(map(len, CONTEXTS)), NEW_TOKENS, drafter))
        generator = torch.Generator().manual_seed(5)
        # three contexts are admitted later
        decoded = decode(
            engine, CONTEXTS * 2, drafter, Sampling(temperature=temperature), NEW_TOKENS, set(), generator,
            scheduler=scheduler,
        )  # fmt: skip
        assert len(scheduler.seconds) == (len(scheduler.shapes()) if timed else 0)
        found.append([(answer.tokens, answer.cycles) for answer in decoded.answers])
    assert found[0] == found[1]


CAPTURED = [*((name, "chain") for name in DRAFTING_HEADS), *TREES]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "kind"), CAPTURED)
def test_captured_cycles_of_all_levels_draft_what_others_do(
    target: Target, plain: list[Answer], trained: Heads, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several graphs of one drafter on one state, in turn, against the same cycles operation by operation."""
    monkeypatch.setattr(Loop, "choose_ways", lambda loop: None)
    there = Target.from_model(copy.deepcopy(target.model).to("cuda"))
    head = copy.deepcopy(trained(name).head).to("cuda")
    head.bind(there.ends)
    fused = FusedModel(there.model, attention_windows(there.model.config))
    found = []
    for graphs in (CycleGraphs(), None):
        drafter = build_drafter(head, EvalConfig(tree=TreeConfig(kind, 4, 3, 12)))
        assert drafter is not None
        scheduler = Turns(
            CycleShape(1), CycleShape(3), CycleShape(), CycleShape(2), CycleShape(3, rows=8),
            *([CycleShape(1), CycleShape(1, says=False), CycleShape(2, says=False)] if kind == "chain" else []),
        )  # fmt: skip
        engine = Engine(there.model, 3, slots_needed(max(map(len, CONTEXTS)), NEW_TOKENS, drafter), fused=fused)
        decoded = decode(
            engine, CONTEXTS, drafter, Sampling(), NEW_TOKENS, set(), torch.Generator("cuda"), graphs=graphs,
            scheduler=scheduler,
        )  # fmt: skip
        assert graphs is None or len(graphs.captured) == 1
        assert tokens_of(decoded.answers) == tokens_of(plain)
        found.append([answer.cycles for answer in decoded.answers])
    assert found[0] == found[1] and max(cycle.accepted for cycles in found[0] for cycle in cycles) > 0


def test_first_levels() -> None:
    tokens = torch.arange(10).view(2, 5)
    q_BNV, number_BN = torch.rand(2, 5, 7), torch.rand(2, 5)
    valid = torch.tensor([[True] * 5, [True, True, False, False, False]])
    line = replace(chain(tokens, valid, q_BNV), score_BN=number_BN, confidence_BN=-number_BN)
    assert line.first(5) is line and line.first(9) is line
    cut = line.first(3)
    same(cut, replace(chain(tokens[:, :3], valid[:, :3], q_BNV[:, :3]), score_BN=number_BN[:, :3],
                      confidence_BN=-number_BN[:, :3]))  # fmt: skip
    assert cut.nodes == 3 and cut.first(0).nodes == 0
    tree = static_shape([(0,), (1,), (0, 0), (0, 0, 0), (1, 0)]).tree(tokens)
    assert tree.first(3) is tree
    # nodes stay in their places, so that what a captured cycle knows of the shape stays right
    assert tree.first(2).valid_BN.tolist() == [[True, True, True, True, False]] * 2
    assert tree.first(1).valid_BN.tolist() == [[True, True, False, False, False]] * 2
    assert torch.equal(tree.first(1).tokens_BN, tokens) and tree.first(1).levels == 3
