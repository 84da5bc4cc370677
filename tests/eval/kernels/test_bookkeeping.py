"""Kernels that decide between a cycle's products, against their eager twins: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from eval_help import CONTEXTS, DEVICE, KERNELS_RUN, Trained, needs_kernels, run

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding import verify
from headstart.eval.decoding.engine import attention_windows
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.drafters import build_drafter
from headstart.eval.kernels import argmax, bookkeeping, candidates, draft_input, line_up, norm, rope_store, rows
from headstart.eval.tree import Tree, chain, empty, select
from headstart.heads.targets.target import Target

pytest.importorskip("triton")
pytestmark = needs_kernels
BATCH, VOCAB = 3, 7


def integers(high: int, *shape: int, seed: int = 0, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def grown(nodes: int, seed: int) -> Tree:
    """A random tree; few tokens, so that siblings agree and choices are often found; one row drafts less."""
    noise = torch.Generator().manual_seed(seed)
    parent = torch.tensor(
        [[-1, *(int(torch.randint(-1, n, (1,), generator=noise)) for n in range(1, nodes))] for _ in range(BATCH)]
    )
    depth = torch.ones_like(parent)
    for n in range(nodes):
        above = parent[:, n]
        depth[:, n] = torch.where(above >= 0, depth.gather(1, above.clamp(min=0)[:, None])[:, 0] + 1, 1)
    valid = torch.ones_like(parent, dtype=torch.bool)
    valid[1, nodes // 2 :] = False
    parts = (integers(VOCAB, BATCH, nodes, seed=seed), parent, depth, valid)
    return Tree(*(part.to(DEVICE) for part in parts), levels=int(depth.max()))


def trees() -> Iterator[tuple[str, Tree]]:
    yield "plain", empty(BATCH, DEVICE)
    for depth in (1, 3, 8):
        valid = torch.ones((BATCH, depth), dtype=torch.bool, device=DEVICE)
        valid[2, depth // 2 :] = False
        yield f"chain{depth}", chain(integers(VOCAB, BATCH, depth, seed=depth), valid)
    for nodes, seed in ((1, 1), (7, 2), (24, 3), (59, 4), (63, 5)):
        yield f"tree{nodes}", grown(nodes, seed)
    scores = -torch.rand((BATCH, 40), generator=torch.Generator().manual_seed(0)).cumsum(1).to(DEVICE)
    parent, depth = [n // 3 - 1 for n in range(40)], [1, 1, 1]
    for above in parent[3:]:
        depth.append(depth[above] + 1)
    parents, depths = (torch.tensor(part, device=DEVICE).expand(BATCH, 40) for part in (parent, depth))
    yield "selected", select(scores, parents, depths, integers(VOCAB, BATCH, 40), 20, max(depth))


TREES = dict(trees()) if KERNELS_RUN else {}
LENGTH, ROOTS = torch.tensor([5, 900, 17], device=DEVICE), torch.tensor([3, 0, 6], device=DEVICE)


def same(found: Any, expected: Any) -> None:
    for field in fields(expected):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        assert (a is None) == (b is None), field.name
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), field.name


@pytest.mark.parametrize("name", TREES)
def test_lay_out(name: str) -> None:
    expected = bookkeeping.lay_out_eager(TREES[name], ROOTS, LENGTH)
    same(bookkeeping.lay_out_kernel(TREES[name], ROOTS, LENGTH), expected)
    same(bookkeeping.lay_out_kernel(TREES[name], apart(ROOTS), apart(LENGTH)), expected)


def apart(values_B: torch.Tensor) -> torch.Tensor:
    """The values as one column of a wider table."""
    return torch.stack([values_B, torch.zeros_like(values_B)], 1)[:, 0]


@pytest.mark.parametrize("name", TREES)
def test_walk_take_and_advance(name: str) -> None:
    """A cycle's decisions in a row, with idle rows, stop tokens and limits that end some."""
    tree, levels = TREES[name], 0
    active = torch.tensor([True, True, False], device=DEVICE)
    stops = torch.tensor([[2, -1], [-1, -1], [5, 1]], device=DEVICE)
    for seed in range(8):
        choice = integers(VOCAB, BATCH, tree.nodes + 1, seed=seed)
        verified = verify.walk_choices_eager(tree, choice)
        same(verify.Verified(*bookkeeping.walk_kernel(tree, choice)), verified)
        levels += int(verified.accepted_B.sum())
        arguments = (tree, ROOTS, verified.path_BK, active, LENGTH, 1000)
        columns = (tree, apart(ROOTS), verified.path_BK, apart(active), apart(LENGTH), 1000)
        same(bookkeeping.take_path_kernel(*columns), bookkeeping.take_path_eager(*arguments))
        taken = bookkeeping.take_path_eager(*arguments)
        same(bookkeeping.take_path_kernel(*arguments), taken)
        left = torch.tensor([seed, 2, 9], device=DEVICE)
        arguments = (tree, taken, verified.next_B, ROOTS, left, active, stops)
        same(bookkeeping.advance_kernel(*arguments), bookkeeping.advance_eager(*arguments))
        active = active.roll(1)
    assert levels or name in ("plain", "chain1", "tree1")


@pytest.mark.parametrize("name", TREES)
def test_synthetic(name: str) -> None:
    tree, accepted = TREES[name], 0
    for seed, rates in enumerate(([0.7], [0.9] * 12, [0.5, 0.0], [1.0] * 3)):
        uniform = torch.rand((BATCH, tree.levels), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        choice, rate = integers(VOCAB, BATCH, tree.nodes + 1, seed=seed), torch.tensor(rates, device=DEVICE)
        verified = verify.synthetic_eager(tree, choice, uniform, rate)
        same(verify.Verified(*bookkeeping.synthetic_kernel(tree, choice, uniform, rate)), verified)
        accepted += int(verified.accepted_B.sum())
    assert accepted or name == "plain"


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_synthetic_with_rates_of_nodes(name: str, strided: bool) -> None:
    """Rates may lie in rows of a wider tensor."""
    tree, counts = TREES[name], set()
    choice, unused = integers(VOCAB, BATCH, tree.nodes + 1), torch.zeros(2, device=DEVICE)
    for seed in range(6):
        noise = torch.Generator().manual_seed(seed)
        uniform = torch.rand((BATCH, tree.levels), generator=noise).to(DEVICE)
        wide = torch.rand((BATCH, tree.nodes + 3), generator=noise).to(DEVICE) ** 0.3
        rated = replace(tree, rate_BN=wide[:, : tree.nodes] if strided else wide[:, : tree.nodes].contiguous())
        verified = verify.synthetic_eager(rated, choice, uniform, unused)
        same(verify.Verified(*bookkeeping.synthetic_kernel(rated, choice, uniform, unused)), verified)
        counts |= set(verified.accepted_B.tolist())
    assert counts == {0} if name == "plain" else len(counts) > 1


WAYS = [
    ("plain", TreeConfig("chain", 3)),
    ("eagle3", TreeConfig("chain", 3)),
    ("eagle3", TreeConfig("dynamic", 3, 2, 6)),
    ("eagle", TreeConfig("chain", 2)),
    ("medusa", TreeConfig("static", 2, 3, 6)),
]


@pytest.mark.skipif(DEVICE == "cuda", reason="captured cycles are tested in decoding/test_cycles.py")
@pytest.mark.parametrize(("kind", "tree"), WAYS)
def test_the_whole_loop_on_kernels(
    target: Target, kind: str, tree: TreeConfig, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cycle has the tokens and counts of the loop on eager twins, through stops and limits of single rows."""

    def answers(**options: Any) -> list[Any]:
        drafter = None
        if kind != "plain":
            trained: Trained = request.getfixturevalue(kind)
            drafter = build_drafter(trained.head, EvalConfig(tree=tree))
        return run(target, drafter, CONTEXTS, max_new_tokens=[9, 3, 8], stops=stops, **options)

    stops: list[set[int]] = [set(), set(), set()]
    stops[2] = {answers()[2].tokens[4]}
    expected = answers()
    model = FusedModel(target.model, attention_windows(target.model.config))
    for module in (bookkeeping, line_up, verify, norm, rope_store, rows, draft_input, argmax, candidates):
        monkeypatch.setattr(module, "wants_kernel", lambda _: True)
    assert answers(fused=model) == expected
    assert any(cycle.accepted for answer in expected for cycle in answer.cycles) or kind == "plain"
