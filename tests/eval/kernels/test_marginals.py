"""Trees over marginals: against the paper's heap, node by node, and kernels against their eager twins."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from eval_help import DEVICE, needs_kernels
from reference.ddtree import Node, all_paths, ddtree
from torch import Tensor

from headstart.eval.kernels import marginals
from headstart.eval.kernels.candidates import MAX_K, Stored, top_log_p
from headstart.eval.kernels.marginals import MarginalTree, level_eager, level_kernel
from headstart.eval.tree import Tree
from headstart.heads.kernels.device import eager_twins

#: (depths, nodes, vocabulary): chains, stars, trees that hold everything, vocabularies below and above the nodes
SIZES = [(1, 1, 5), (1, 9, 5), (4, 3, 7), (3, 14, 2), (3, 60, 2), (5, 20, 11), (7, 59, 61), (3, 59, 200), (9, 127, 17)]


def logits_of(batch: int, depth: int, vocab: int, ties: str, seed: int) -> Tensor:
    """Of one kind: no ties; few values, so that paths, siblings and tokens tie; or every log p exactly 0, -1 or -2."""
    noise = torch.Generator().manual_seed(seed)
    if ties == "none":
        return 3 * torch.randn((batch, depth, vocab), generator=noise)
    return -torch.randint(0, 3, (batch, depth, vocab), generator=noise).float()


def paths_of(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """The tokens of every node's path."""
    paths: list[tuple[int, ...]] = []
    for n in range(tree.nodes):
        parent = int(tree.parent_BN[row, n])
        assert parent < n
        paths.append((*(paths[parent] if parent >= 0 else ()), int(tree.tokens_BN[row, n])))
        assert len(paths[n]) == tree.depth_BN[row, n]
    return paths


def check(tree: Tree, row: int, expected: list[Node]) -> None:
    """The same nodes with the same scores; those of a level stand in the order that the heap found them in."""
    paths = paths_of(tree, row)
    assert len(set(paths)) == len(paths) and sorted(paths) == sorted(node.tokens for node in expected)
    scores = dict(zip(paths, tree.score_BN[row].tolist(), strict=True))  # type: ignore[index]
    assert scores == {node.tokens: float(node.score) for node in expected}
    assert tree.valid_BN[row].all()
    for depth in range(1, tree.levels + 1):
        level = [node.tokens for node in expected if len(node.tokens) == depth]
        assert [path for path in paths if len(path) == depth] == level


@pytest.mark.parametrize("ties", ["none", "some", "exact"])
@pytest.mark.parametrize(("depth", "nodes", "vocab"), SIZES)
def test_the_tree_is_the_heaps(depth: int, nodes: int, vocab: int, ties: str) -> None:
    shape = MarginalTree.of(depth, nodes, vocab)
    log_p_BKU = logits_of(3, depth, vocab, ties, seed=nodes)
    if ties != "exact":
        log_p_BKU = log_p_BKU.log_softmax(-1)
    ranked = log_p_BKU.sort(dim=-1, descending=True, stable=True)
    with eager_twins():
        tree = shape.tree((ranked.values[..., : shape.ranks], ranked.indices[..., : shape.ranks]), None)
    whole = sum(vocab**d for d in range(1, depth + 1))
    assert tree.nodes == shape.nodes == min(nodes, whole)
    assert tree.levels == min(depth, nodes) and tree.linear == (nodes == 1) and tree.q_BNV is None
    for row in range(3):
        check(tree, row, ddtree(log_p_BKU[row].numpy(), nodes))
    assert ties == "none" or nodes < 9 or any(len(set(scores)) < len(scores) for scores in tree.score_BN.tolist())


@pytest.mark.parametrize(("depth", "nodes", "vocab"), [(4, 20, 3), (6, 31, 40), (3, 50, 3), (5, 3, 9), (2, 30, 2)])
def test_the_first_levels_alone_are_a_tree_of_so_many_levels(depth: int, nodes: int, vocab: int) -> None:
    whole = MarginalTree.of(depth, nodes, vocab)
    for count in range(1, depth + 2):
        part, expected = whole.first(count), MarginalTree.of(min(count, depth), nodes, vocab)
        assert (part.nodes, part.ranks, part.stored) == (expected.nodes, expected.ranks, expected.stored)
        for one, other in zip(part.levels, expected.levels, strict=True):
            assert (one.kept, one.before, one.filled) == (other.kept, other.before, other.filled)
            assert torch.equal(one.place_P, other.place_P) and torch.equal(one.rank_P, other.rank_P)


@pytest.mark.parametrize(("depth", "nodes", "vocab"), [(4, 20, 3), (3, 12, 6)])
def test_the_heap_finds_the_likeliest_paths(depth: int, nodes: int, vocab: int) -> None:
    log_p_KU = logits_of(1, depth, vocab, "none", seed=5)[0].log_softmax(-1).numpy()
    best = sorted(all_paths(log_p_KU), reverse=True)[:nodes]
    assert [node.tokens for node in ddtree(log_p_KU, nodes)] == [tokens for _, tokens in best]


def test_no_fewer_children_would_do() -> None:
    """The bound on the children is sharp: marginals that are all but equal need the last rank, and the last place."""
    nodes, depth = 8, 3
    shape = MarginalTree.of(depth, nodes, 50)
    assert shape.ranks == 8 and [len(level.place_P) for level in shape.levels] == [8, 16, 14]
    assert [level.kept for level in shape.levels] == [8, 7, 6]
    flat = np.full((depth, 50), -5.0, dtype=np.float32)
    sure = np.full((depth, 50), -9.0, dtype=np.float32)
    sure[:, 0] = 0.0
    # all siblings of the first level; the second level's last rank, its ancestor being sure
    assert max(node.ranks[-1] for node in ddtree(flat, nodes)) == 7
    mixed = np.stack([sure[0], flat[0], flat[0]])
    assert max(node.ranks[1] for node in ddtree(mixed, nodes) if len(node.ranks) == 2) == 6


def test_logits_become_log_probabilities() -> None:
    logits = logits_of(2, 3, 40, "none", seed=1)
    log_p, ids = top_log_p(logits, 7)
    expected = logits.double().log_softmax(-1).topk(7)
    assert torch.equal(ids, expected.indices) and log_p.dtype == torch.float32
    torch.testing.assert_close(log_p.double(), expected.values, rtol=1e-5, atol=1e-6)
    wide = top_log_p(logits.double(), 7)[0]
    assert wide.dtype == torch.float64 and torch.allclose(wide, expected.values)
    # one sure token: rounding never lifts it above 0
    assert (top_log_p(torch.tensor([[1000.0, -3.0, 0.1]]), 3)[0] <= 0).all()
    silent = torch.tensor([[1.0, -torch.inf, -torch.inf], [torch.nan] * 3])
    assert torch.isfinite(top_log_p(silent, 2)[0]).tolist() == [[True, False], [False, False]]


def test_what_cannot_be_drafted_is_no_node() -> None:
    """Tokens of probability 0 pad the tree; target ids are those of the draft vocabulary's."""
    logits = torch.full((1, 2, 6), -torch.inf)
    logits[0, 0, 2], logits[0, 1, 3], logits[0, 1, 4] = 0.0, 1.0, 0.5
    shape = MarginalTree.of(2, 5, 6)
    with eager_twins():
        tree = shape.tree(shape.marginals(logits), torch.arange(6) * 10)
    real = {path for path, valid in zip(paths_of(tree, 0), tree.valid_BN[0].tolist(), strict=True) if valid}
    assert real == {(20,), (20, 30), (20, 40)}


def same(found: Stored | Tree, expected: Stored | Tree) -> None:
    for field in fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other), field.name
        else:
            assert one == other, field.name


@needs_kernels
@pytest.mark.parametrize("ties", ["none", "some", "exact"])
@pytest.mark.parametrize(("depth", "nodes", "vocab"), [(1, 9, 5), (4, 3, 7), (3, 14, 2), (5, 59, 61), (3, 200, 300)])
def test_levels_with_and_without_kernels(depth: int, nodes: int, vocab: int, ties: str) -> None:
    """Level by level on the same stored nodes, with marginals in either order of their axes."""
    shape = MarginalTree.of(depth, nodes, vocab).to(torch.device(DEVICE))
    log_p = logits_of(3, depth, vocab, ties, seed=2).to(DEVICE)
    log_p[2, -1] = -torch.inf
    ranked = log_p.sort(dim=-1, descending=True, stable=True)
    log_p_BLR, token_BLR = ranked.values[..., : shape.ranks], ranked.indices[..., : shape.ranks]
    stored = []
    for run in (level_eager, level_kernel):
        score_BS = torch.full((3, shape.stored), 7.0, device=DEVICE)
        nodes_so_far = Stored(score_BS, *(torch.full_like(score_BS, -9, dtype=torch.int64) for _ in range(3)))
        for number, level in enumerate(shape.levels):
            if run is level_kernel and number % 2:
                log_p_BLR, token_BLR = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (log_p_BLR, token_BLR))
            run(nodes_so_far, level, number, log_p_BLR[:, number], token_BLR[:, number])
        stored.append(nodes_so_far)
    same(stored[1], stored[0])


@needs_kernels
@pytest.mark.parametrize("k", [5, MAX_K, MAX_K + 9])
def test_log_probabilities_with_and_without_kernels(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(2, 3, 700, "none", seed=4).to(DEVICE)
    expected = top_log_p(logits, k) if DEVICE == "cpu" else tuple(x.to(DEVICE) for x in top_log_p(logits.cpu(), k))
    monkeypatch.setattr("headstart.eval.kernels.candidates.wants_kernel", lambda x: True)
    found = top_log_p(logits, k)
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0])


@needs_kernels
def test_whole_trees_with_and_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of logits that are powers of two apart, so that both round alike."""
    noise = torch.Generator().manual_seed(3)
    logits = (-128.0 * torch.rand((2, 4, 61), generator=noise).argsort(-1)).to(DEVICE)
    shape, ids = MarginalTree.of(4, 40, 61).to(torch.device(DEVICE)), torch.arange(61, device=DEVICE) * 3
    trees = []
    for kernels in (False, True):
        monkeypatch.setattr("headstart.eval.kernels.candidates.wants_kernel", lambda x, kernels=kernels: kernels)
        monkeypatch.setattr(marginals, "wants_kernel", lambda x, kernels=kernels: kernels)
        trees.append(shape.tree(shape.marginals(logits), ids))
    same(trees[1], replace(trees[0]))
