"""Flat verification: a forward over the kept nodes alone gives what the forward over all places gives there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from eval_help import (
    CONTEXTS,
    FAMILY_TREES,
    NEW_TOKENS,
    VOCAB,
    Trained,
    check_cycles,
    close,
    memory_of_nan,
    needs_kernels,
    run,
    tokens_of,
    tree_of,
)
from torch import Tensor

from headstart.eval.config import EvalConfig
from headstart.eval.decoding.decode import Answer, decode, slots_needed
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused import layers
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.graphs import CycleGraphs
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.scheduler import CycleShape, Scheduler
from headstart.eval.decoding.verify import verify
from headstart.eval.drafters import build_drafter
from headstart.eval.kernels.attention import attend_kernel
from headstart.eval.kernels.capture import capture
from headstart.eval.kernels.flat import FlatRows, flatten
from headstart.eval.kernels.rope_store import rope_store_kernel
from headstart.eval.tree import Tree, chain
from headstart.heads.batch import FeatureSpec
from headstart.heads.targets.target import Target


class Cut(Scheduler):
    """Keeps all nodes of the first `levels` levels, and verifies `rows` rows at most."""

    captures = True

    def __init__(self, rows: int | None, levels: int = 99):
        self.rows, self.levels = rows, levels

    def shapes(self) -> list[CycleShape]:
        return [CycleShape(rows=self.rows)]

    def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor:
        return tree.depth_BN <= self.levels


TREE_TENSORS = ("tokens_BN", "parent_BN", "depth_BN", "valid_BN")


def fused(target: Target) -> FusedModel:
    return FusedModel(target.model, attention_windows(target.model.config))


@pytest.mark.parametrize("rows", [3, 4, 7, 10, 15, 20])
def test_rows_by_a_loop(rows: int) -> None:
    noise = torch.Generator().manual_seed(rows)
    for _ in range(30):
        valid_BN = torch.rand((3, 4), generator=noise) < 0.6
        found = flatten(valid_BN, rows)
        places = [5 * b for b in range(3)] + [5 * b + 1 + n for b in range(3) for n in range(4) if valid_BN[b, n]]
        places = places[:rows]
        assert found.place_F.tolist() == places + [0] * (rows - len(places))
        assert found.row_R.tolist() == [places.index(place) if place in places else 0 for place in range(15)]
        assert found.kept_BM.flatten().tolist() == [place in places for place in range(15)]
        assert found.used_F().tolist() == [f < len(places) for f in range(rows)]
        x_R = torch.rand((15, 2), generator=noise)
        assert torch.equal(found.spread(found.gather(x_R))[places], x_R[places])
        assert torch.equal(found.places(found.gather(x_R)).flatten(0, 1)[places], x_R[places])
        column_BJ = torch.where(found.kept_BM, torch.arange(5), 0)[:, [0, 3, 1, 1]]
        expected_BJ2 = x_R.view(3, 5, 2)[torch.arange(3)[:, None], column_BJ]
        assert torch.equal(found.columns(found.gather(x_R), column_BJ), expected_BJ2)
    with pytest.raises(ValueError, match="found 2 for 3 sequences"):
        flatten(valid_BN, 2)


def drafts(kind: str, noise: torch.Generator) -> Tree:
    """Random chains, or trees whose parents stand before their children, some nodes missing with all below them."""
    tokens_BN = torch.randint(0, VOCAB, (3, 6), generator=noise)
    if kind == "chain":
        return chain(tokens_BN, torch.arange(6) < torch.randint(0, 7, (3, 1), generator=noise))
    parent_BN = torch.stack([torch.randint(-1, n, (3,), generator=noise) for n in range(6)], 1)
    depth_BN, valid_BN = torch.ones_like(parent_BN), torch.rand((3, 6), generator=noise) < 0.7
    for n in range(6):
        for b in range(3):
            if (parent := int(parent_BN[b, n])) >= 0:
                depth_BN[b, n] = depth_BN[b, parent] + 1
                valid_BN[b, n] &= valid_BN[b, parent]
    return Tree(tokens_BN, parent_BN, depth_BN, valid_BN, levels=6)


def check_kept_rows(
    target: Target, model: FusedModel, kind: str, rows: int, rounds: int = 4, captured: bool = False
) -> None:
    """Logits, features, keys and values; and nothing of a cut node reaches the buffers."""
    spec, noise, device = FeatureSpec((1, 3)), torch.Generator().manual_seed(rows), target.model.device
    for _ in range(rounds):
        tree, roots_B = drafts(kind, noise), torch.randint(0, VOCAB, (3,), generator=noise).to(device)
        tree = replace(tree, **{name: getattr(tree, name).to(device) for name in TREE_TENSORS})
        flat = flatten(tree.valid_BN, rows)
        tree = tree.keep(flat.kept_BM[:, 1:])
        engines = [Engine(target.model, 3, 40, fused=model) for _ in range(2)]
        for engine in engines:
            engine.prefill(CONTEXTS)
        before = engines[1].kv.whole.clone()
        whole = engines[0].verify(roots_B, tree, spec)
        if captured:
            graph, part = capture(partial(engines[1].verify, roots_B, tree, spec, flat=flat))
            graph.replay()
        else:
            part = engines[1].verify(roots_B, tree, spec, flat=flat)
        kept_BM = flat.kept_BM
        assert int(kept_BM.sum()) <= rows and len(part.logits) == len(part.hidden) == len(part.streams) == rows
        assert torch.isfinite(part.hidden).all()
        near(part.roots_BV, whole.roots_BV)
        for name in ("logits_BMV", "hidden_BMD", "streams_BMkD"):
            given, expected = getattr(part, name), getattr(whole, name)
            assert given.shape == expected.shape
            near(given[kept_BM], expected[kept_BM])
        column_BJ = torch.where(kept_BM, torch.arange(7, device=device), 0).flip(1)
        given, expected = (step.rows(column_BJ, roots_B, column_BJ) for step in (part, whole))
        near(given.hidden_BJD, expected.hidden_BJD)
        near(given.streams_BJkD, expected.streams_BJkD)
        written = torch.zeros((3, 41), dtype=torch.bool, device=device)
        for b, context in enumerate(CONTEXTS):
            written[b, len(context) + torch.arange(7, device=device)[kept_BM[b]]] = True
        kv, expected = (engine.kv.whole.permute(2, 4, 0, 1, 3, 5) for engine in engines[::-1])
        near(kv[written], expected[written])
        assert torch.equal(kv[~written], before.permute(2, 4, 0, 1, 3, 5)[~written])


def near(given: Tensor, expected: Tensor) -> None:
    if given.dtype == torch.float32:
        # products of fewer rows may run in another kernel on a GPU
        tolerance = 1e-4 if given.is_cuda else 1e-5
        torch.testing.assert_close(given, expected, atol=tolerance, rtol=tolerance)
    else:
        close(given, expected)


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("rows", [3, 8, 21])
def test_kept_rows_are_those_of_the_whole_forward(target: Target, kind: str, rows: int) -> None:
    check_kept_rows(target, fused(target), kind, rows)


@needs_kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels anyway")
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_kept_rows_of_the_attention_kernels(target: Target, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rope, store and attention in Triton's interpreter, where empty memory holds NaN."""
    model = fused(target)
    monkeypatch.setattr(layers, "rope_store", rope_store_kernel)
    monkeypatch.setattr(
        layers,
        "attend",
        lambda q, k, v, visibility, shape, ahead, flat: attend_kernel(q, k, v, visibility, shape, flat=flat),
    )
    with memory_of_nan():
        check_kept_rows(target, model, kind, 12, rounds=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("rows", [3, 8, 21])
def test_kept_rows_on_a_gpu(target: Target, kind: str, rows: int, captured: bool, dtype: torch.dtype) -> None:
    there = Target.from_model(copy.deepcopy(target.model).to("cuda", dtype))
    check_kept_rows(there, fused(there), kind, rows, captured=captured)


RULES = {
    "greedy": Sampling(),
    "greedy, with a penalty": Sampling(repetition_penalty=1.3),
    "drawn": Sampling(0.8, top_k=9),
    "drawn, with a penalty": Sampling(0.8, repetition_penalty=1.3),
    "typical": Sampling(0.8, typical=(0.3, 0.6)),
    "synthetic": Sampling(synthetic=(0.8, 0.5)),
    "synthetic, drawn": Sampling(0.8, synthetic=(0.8, 0.5)),
}


@pytest.mark.parametrize("with_q", [False, True])
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("rule", RULES)
def test_rules_read_flat_logits(rule: str, kind: str, with_q: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they read those of all places. Greedy choices alone are spread, where nothing is penalised."""
    noise, spread = torch.Generator().manual_seed(4), []
    places = FlatRows.places

    def watched(self: FlatRows, x_F: Tensor) -> Tensor:
        spread.append(x_F.dtype)
        return places(self, x_F)

    accepted = 0
    for rows in (3, 8, 12, 21):
        tree = drafts(kind, noise)
        if with_q:
            tree = replace(tree, q_BNV=torch.randn((3, 6, VOCAB), generator=noise).softmax(-1))
        flat = flatten(tree.valid_BN, rows)
        tree = tree.keep(flat.kept_BM[:, 1:])
        logits_BMV = torch.randn((3, 7, VOCAB), generator=noise)
        # what is drafted is likely
        logits_BMV[torch.arange(3)[:, None], tree.parent_BN + 1, tree.tokens_BN] += 5
        seen_BV = torch.rand((3, VOCAB), generator=noise) < 0.3
        logits_FV = flat.gather(logits_BMV.flatten(0, 1))
        verified = []
        for logits, layout in ((logits_BMV, None), (logits_FV, flat)):
            with monkeypatch.context() as patched:
                patched.setattr(FlatRows, "places", watched)
                generator = torch.Generator().manual_seed(rows)
                verified.append(verify(tree, logits, RULES[rule], generator, seen_BV, flat=layout))
        for name in ("path_BK", "accepted_B", "next_B"):
            assert torch.equal(getattr(verified[0], name), getattr(verified[1], name))
        accepted += int(verified[0].accepted_B.sum())
    assert accepted > 3
    assert set(spread) == {torch.int64 if rule in ("greedy", "synthetic") else torch.float32}


@pytest.mark.parametrize(("family", "kind"), FAMILY_TREES)
def test_every_budget_is_lossless(
    target: Target, plain: list[Answer], trained: Callable[[str], Trained], family: str, kind: str
) -> None:
    drafter, model = build_drafter(trained(family).head, EvalConfig(tree=tree_of(kind))), fused(target)
    every = run(target, drafter, fused=model)
    most = 3 * (drafter.max_nodes + 1)
    for rows in (3, 6, most):
        found = run(target, drafter, fused=model, scheduler=Cut(rows))
        assert tokens_of(found) == tokens_of(plain)
        check_cycles(found)
        if rows == 3:
            # roots alone: plain decoding
            assert all(cycle.drafted == 0 for answer in found for cycle in answer.cycles)
        if rows == most:
            assert found == every
    # the generic forward computes all nodes, and obeys the same number of rows
    assert run(target, drafter, scheduler=Cut(6)) == run(target, drafter, fused=model, scheduler=Cut(6))


def test_limits_and_refilled_places(target: Target, trained: Callable[[str], Trained]) -> None:
    """A queue of contexts on two rows, of which 5 rows of a forward hold the roots and three drafts."""
    drafter, model = build_drafter(trained("eagle3").head, EvalConfig(tree=tree_of("chain"))), fused(target)
    contexts, limits = [*CONTEXTS, *CONTEXTS[::-1]], [9, 30, 4, 17, 1, 12]
    engine = Engine(target.model, 2, slots_needed(12, 30, drafter), fused=model)
    found = decode(engine, contexts, drafter, Sampling(), limits, set(), scheduler=Cut(5)).answers
    alone = [run(target, None, [context], limit)[0] for context, limit in zip(contexts, limits, strict=True)]
    assert tokens_of(found) == tokens_of(alone)
    assert sum(cycle.accepted for answer in found for cycle in answer.cycles) > 0


def test_a_cut_level_costs_no_row(target: Target, trained: Callable[[str], Trained]) -> None:
    """Two of four levels verified: 9 rows hold all of them, and the same drafts are accepted as on all 15."""
    drafter, model = build_drafter(trained("eagle3").head, EvalConfig(tree=tree_of("chain"))), fused(target)
    found = run(target, drafter, fused=model, scheduler=Cut(9, levels=2))
    assert found == run(target, drafter, fused=model, scheduler=Cut(None, levels=2))
    assert any(cycle.accepted for answer in found for cycle in answer.cycles)
    seen: list[int] = []
    head = model.view.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0][..., 0].numel()))
    run(target, drafter, fused=model, scheduler=Cut(9, levels=2))
    handle.remove()
    # after the prefill, whose chunks give one row of logits per sequence
    assert set(seen) == {3, 9}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("family", "kind"), FAMILY_TREES)
def test_captured_cycles_on_flat_rows(
    target: Target, plain: list[Answer], trained: Callable[[str], Trained], family: str, kind: str
) -> None:
    """Captured and not, every number of rows gives the plain answers, and both the same cycles."""
    there, head = Target.from_model(copy.deepcopy(target.model).cuda()), copy.deepcopy(trained(family).head).cuda()
    head.bind(there.ends)
    drafter, model = build_drafter(head, EvalConfig(tree=tree_of(kind))), fused(there)
    generator = torch.Generator("cuda")
    engine = Engine(there.model, 3, slots_needed(12, NEW_TOKENS, drafter), prefill_chunk=4, fused=model)
    graphs = CycleGraphs()
    for rows in (3, 6, 3 * (drafter.max_nodes + 1)):
        scheduler = Cut(rows)
        found = [
            decode(
                engine, CONTEXTS, drafter, Sampling(), NEW_TOKENS, set(), generator, graphs=kept, scheduler=scheduler
            ).answers
            for kept in (None, graphs, graphs)
        ]
        assert all(tokens_of(answers) == tokens_of(plain) for answers in found)
        assert found[0] == found[1] == found[2]
    assert len(graphs.captured) == 3
