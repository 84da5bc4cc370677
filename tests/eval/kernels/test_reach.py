"""The reach of drafted nodes against a loop over their paths, its kernel against the eager twin."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from eval_help import DEVICE, needs_kernels
from torch import Tensor

from headstart.eval.kernels.capture import capture
from headstart.eval.kernels.reach import LARGEST_LOGIT, MOST_NODES, Reach, reach, reach_eager, reach_kernel
from headstart.eval.tree import Tree, chain, empty, static_shape

RUNS = [reach_eager, pytest.param(reach_kernel, marks=needs_kernels)]
Run = Callable[[Tree, Tensor, Tensor], Reach]


def grown(batch: int, nodes: int, seed: int, shape: str) -> Tree:
    """Random chains or trees on the kernels' device. Some nodes are missing with all below them; sequence 1 is idle."""
    noise = torch.Generator().manual_seed(seed)
    tokens = torch.zeros((batch, nodes), dtype=torch.int64)
    if shape == "chain":
        valid = torch.arange(nodes) < torch.randint(0, nodes + 1, (batch, 1), generator=noise)
        tree = chain(tokens, valid)
    else:
        parent = torch.stack([torch.randint(-1, n, (batch,), generator=noise) for n in range(nodes)], 1)
        depth, valid = torch.ones_like(parent), torch.rand((batch, nodes), generator=noise) < 0.9
        for n in range(nodes):
            for b in range(batch):
                if (above := int(parent[b, n])) >= 0:
                    depth[b, n] = depth[b, above] + 1
                    valid[b, n] &= valid[b, above]
        tree = Tree(tokens, parent, depth, valid, levels=int(depth.max()))
    valid[1:2] = False
    return placed(tree)


def placed(tree: Tree) -> Tree:
    """The tree on the kernels' device; parents and depths of chains keep their strides of 0."""
    names = ("tokens_BN", "parent_BN", "depth_BN", "valid_BN")
    return replace(tree, **{name: there(getattr(tree, name)) for name in names})


def there(x: Tensor) -> Tensor:
    return x.to(DEVICE)


def scored(tree: Tree, seed: int) -> Tree:
    """With cumulative log-probabilities; those of nodes that are missing are -inf, as of candidates never found."""
    step = -torch.rand(tree.tokens_BN.shape, generator=torch.Generator().manual_seed(seed)) * 3
    score = step.clone()
    parent = tree.parent_BN.tolist()
    for b, line in enumerate(parent):
        for n, above in enumerate(line):
            if above >= 0:
                score[b, n] = step[b, n] + score[b, above]
    return replace(tree, score_BN=torch.where(tree.valid_BN, there(score), -torch.inf))


def confident(tree: Tree, seed: int, size: float = 3.0) -> Tree:
    noise = torch.Generator().manual_seed(seed)
    return replace(tree, confidence_BN=there(torch.randn(tree.tokens_BN.shape, generator=noise) * size))


def by_a_loop(tree: Tree, scale: list[float], bias: list[float]) -> tuple[list[list[float]], list[list[float]]]:
    """(logits, logarithms of the reach) in float64."""
    batch, nodes = tree.tokens_BN.shape
    logits = [[0.0] * nodes for _ in range(batch)]
    reached = [[-math.inf] * nodes for _ in range(batch)]
    parent, depth, valid = tree.parent_BN.tolist(), tree.depth_BN.tolist(), tree.valid_BN.tolist()
    for b in range(batch):
        for n in range(nodes):
            if not valid[b][n]:
                continue
            above = parent[b][n]
            if tree.confidence_BN is not None:
                logits[b][n] = float(tree.confidence_BN[b, n])
            elif tree.score_BN is not None:
                q = math.exp(float(tree.score_BN[b, n]) - (float(tree.score_BN[b, above]) if above >= 0 else 0.0))
                q = min(max(q, 1e-6), 1 - 1e-6)
                logits[b][n] = math.log(q / (1 - q))
            k = depth[b][n] - 1
            p = 1 / (1 + math.exp(-(scale[k] * logits[b][n] + bias[k])))
            reached[b][n] = math.log(p) + (reached[b][above] if above >= 0 else 0.0)
    return logits, reached


def calibration(levels: int, seed: int) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return there(torch.rand(levels, generator=noise) + 0.5), there(torch.randn(levels, generator=noise))


def never_above_the_parent(tree: Tree, log_reach_BN: Tensor) -> None:
    above = torch.where(tree.parent_BN >= 0, log_reach_BN.gather(1, tree.parent_BN.clamp(min=0)), 0.0)
    assert not log_reach_BN.isnan().any() and (log_reach_BN <= above)[tree.valid_BN].all()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("source", ["confidence", "score", "both", "none"])
@pytest.mark.parametrize(("shape", "nodes"), [("chain", 1), ("chain", 7), ("tree", 5), ("tree", 23)])
def test_reach_by_a_loop(run: Run, source: str, shape: str, nodes: int) -> None:
    for seed in range(4):
        tree = grown(3, nodes, seed, shape)
        tree = scored(tree, seed) if source in ("score", "both") else tree
        tree = confident(tree, seed) if source in ("confidence", "both") else tree
        scale, bias = calibration(tree.levels, seed)
        found = run(tree, scale, bias)
        assert found.both_2BN.shape == (2, 3, nodes) and found.both_2BN.dtype == torch.float32
        logits, reached = by_a_loop(tree, scale.tolist(), bias.tolist())
        torch.testing.assert_close(found.logit_BN.cpu(), torch.tensor(logits), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.log_reach_BN.cpu(), torch.tensor(reached), atol=1e-5, rtol=1e-5)
        assert (found.log_reach_BN.isfinite() == tree.valid_BN).all()
        never_above_the_parent(tree, found.log_reach_BN)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_rounding_puts_no_node_above_its_parent(run: Run, shape: str) -> None:
    """Terms of any size, many of them next to 0: sums differ in their last bit alone."""
    for seed in range(3):
        tree = confident(grown(4, 60, seed, shape), seed, size=8.0)
        never_above_the_parent(tree, run(tree, *calibration(tree.levels, seed)).log_reach_BN)


@pytest.mark.parametrize("run", RUNS)
def test_numbers_that_are_none(run: Run) -> None:
    """NaN and infinite confidences become finite logits; a NaN of the calibration makes the reach 0, not NaN."""
    tree = placed(chain(torch.zeros((2, 4), dtype=torch.int64)))
    said = [[math.nan, math.inf, -math.inf, 0.5], [1.0, math.inf, 0.5, math.nan]]
    tree = replace(tree, confidence_BN=there(torch.tensor(said)))
    ones, zeros = there(torch.ones(4)), there(torch.zeros(4))
    found = run(tree, ones, zeros)
    high = LARGEST_LOGIT
    assert found.logit_BN.tolist() == [[-high, high, -high, 0.5], [1.0, high, 0.5, -high]]
    expected = torch.tensor([-high, 0.0, -high, math.log(1 / (1 + math.exp(-0.5)))]).cumsum(0)
    torch.testing.assert_close(found.log_reach_BN[0].cpu(), expected)
    bias = there(torch.tensor([0.0, 0.0, math.nan, 0.0]))
    found = run(tree, ones, bias)
    assert found.log_reach_BN.isfinite().tolist() == [[True, True, False, False]] * 2
    never_above_the_parent(tree, found.log_reach_BN)


@pytest.mark.parametrize("run", RUNS)
def test_levels_beyond_the_calibration_take_its_last(run: Run) -> None:
    tree = confident(grown(3, 6, 0, "chain"), 0)
    scale, bias = calibration(2, 0)
    longer = [torch.cat([part, part[-1:].expand(4)]) for part in (scale, bias)]
    assert torch.equal(run(tree, scale, bias).both_2BN, run(tree, *longer).both_2BN)


@pytest.mark.parametrize("run", [*RUNS, reach])
def test_plain_decoding_has_no_nodes(run: Run) -> None:
    assert run(empty(3, DEVICE), *calibration(1, 0)).both_2BN.shape == (2, 3, 0)


@needs_kernels
@pytest.mark.parametrize(("nodes", "shape"), [(63, "tree"), (100, "tree"), (16, "chain"), (MOST_NODES, "tree")])
def test_the_kernel_on_sizes_that_are_used(nodes: int, shape: str) -> None:
    tree = grown(2 if nodes > 128 else 5, nodes, nodes, shape)
    for said in (confident(tree, 1), scored(tree, 1), tree):
        scale, bias = calibration(tree.levels, 2)
        found, expected = reach_kernel(said, scale, bias), reach_eager(said, scale, bias)
        torch.testing.assert_close(found.both_2BN, expected.both_2BN, atol=1e-4, rtol=1e-5)
        never_above_the_parent(said, found.log_reach_BN)


@needs_kernels
def test_the_kernel_reads_inputs_of_any_strides() -> None:
    """A static tree's parents and depths are one row for all sequences; the drafter's slices are not contiguous."""
    shape = static_shape([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]).to(torch.device(DEVICE))
    tree = shape.tree(torch.zeros((3, 6), dtype=torch.int64, device=DEVICE))
    assert tree.parent_BN.stride(0) == 0
    wide = there(torch.randn((6, 3), generator=torch.Generator().manual_seed(0)))
    valid = torch.ones((6, 3), dtype=torch.bool, device=DEVICE)
    valid[2:, 1] = False
    tree = replace(tree, confidence_BN=wide.T, valid_BN=valid.T)
    scale, bias = calibration(3, 1)
    found, expected = reach_kernel(tree, scale, bias), reach_eager(tree, scale, bias)
    torch.testing.assert_close(found.both_2BN, expected.both_2BN, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("nodes", "shape"), [(7, "chain"), (63, "tree"), (MOST_NODES + 8, "tree")])
def test_captured_reach(nodes: int, shape: str) -> None:
    """Replays follow new drafts and new calibrations, also where the eager twin is captured."""
    trees = [confident(grown(8, nodes, 3, shape), seed) for seed in range(5)]
    scale, bias = calibration(trees[0].levels, 0)
    said = trees[0].confidence_BN
    assert said is not None
    graph, made = capture(lambda: reach(trees[0], scale, bias))
    for seed, tree in enumerate(trees[1:]):
        for held, new in zip((said, scale, bias), (tree.confidence_BN, *calibration(tree.levels, seed)), strict=True):
            held.copy_(new)
        graph.replay()
        expected = reach_eager(tree, scale, bias)
        torch.testing.assert_close(made.both_2BN, expected.both_2BN, atol=1e-4, rtol=1e-5)
        never_above_the_parent(tree, made.log_reach_BN)
