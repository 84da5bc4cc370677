"""Trees: ancestor masks, shapes, and the selection of EAGLE-2."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.eval.config import TreeConfig
from headstart.eval.tree import (
    Tree,
    ancestor_mask,
    chain,
    empty,
    expand,
    published_paths,
    select,
    static_paths,
    static_shape,
    with_root,
)
from headstart.heads.errors import ConfigError


@st.composite
def parents(draw: st.DrawFn) -> list[int]:
    """Any topologically ordered parent list."""
    nodes = draw(st.integers(1, 12))
    return [draw(st.integers(-1, n - 1)) for n in range(nodes)]


def depths_of(parent: list[int]) -> list[int]:
    depths: list[int] = []
    for p in parent:
        depths.append(1 if p < 0 else depths[p] + 1)
    return depths


def tree_of(parent: list[int], tokens: list[int] | None = None) -> Tree:
    depth = depths_of(parent)
    tokens = tokens if tokens is not None else list(range(len(parent)))
    row = lambda x: torch.tensor([x])  # noqa: E731
    valid = torch.ones((1, len(parent)), dtype=torch.bool)
    return Tree(row(tokens), row(parent), row(depth), valid, max(depth))


def ancestors(parent: list[int], node: int) -> set[int]:
    found = set()
    while node >= 0:
        found.add(node)
        node = parent[node]
    return found


@given(parents())
def test_mask_is_the_ancestor_closure(parent: list[int]) -> None:
    mask = ancestor_mask(torch.tensor([parent]), max(depths_of(parent)))[0]
    for n in range(len(parent)):
        assert set(torch.nonzero(mask[n])[:, 0].tolist()) == ancestors(parent, n)


def test_mask_with_root_on_a_small_tree() -> None:
    # root → 0, 1; 0 → 2
    mask = with_root(tree_of([-1, -1, 0]).mask_BNN)[0].int().tolist()
    assert mask == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]


def test_chain_and_empty() -> None:
    tree = chain(torch.tensor([[7, 8, 9]]))
    assert tree.parent_BN.tolist() == [[-1, 0, 1]]
    assert tree.depth_BN.tolist() == [[1, 2, 3]]
    assert empty(2).nodes == 0
    assert with_root(empty(2).mask_BNN).tolist() == [[[True]], [[True]]]


def test_limit_silences_rows() -> None:
    tree = chain(torch.tensor([[7, 8], [7, 8]])).keep(torch.tensor([[True], [False]]))
    assert tree.valid_BN.tolist() == [[True, True], [False, False]]


# Static trees


def test_default_tree_is_the_published_one() -> None:
    paths = published_paths()
    assert len(paths) == len(set(paths)) == 63
    assert [sum(len(path) == depth for path in paths) for depth in (1, 2, 3, 4)] == [10, 28, 23, 2]
    # of the paths in FasterDecoding/Medusa, medusa/model/medusa_choices.py, mc_sim_7b_63, sorted
    listed = json.dumps(sorted(map(list, paths))).encode()
    assert hashlib.sha256(listed).hexdigest() == "da6baaf9f76901e4cb819e2a6b03a94c84738ad83c3976999d303538c032739c"
    # one node of every kind that a tree made by Zipf's law alone would lack, and two that it would hold
    assert {(0, 0, 9), (0, 7, 0), (1, 6)} <= set(paths) and not {(1, 1, 0), (4, 1)} & set(paths)
    shape = static_shape(paths)
    assert shape.levels == 4 and shape.ranks == 10
    assert {(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)} <= set(paths)
    # a better-ranked sibling is always there as well
    for path in paths:
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths


@pytest.mark.parametrize("nodes", [1, 2, 5, 15, 31, 59, 62, 63])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 9])
def test_every_cut_of_the_default_tree_is_a_tree(nodes: int, depth: int) -> None:
    paths = static_paths(TreeConfig("static", depth, total_tokens=nodes + 1), depth)
    assert len(paths) == min(nodes, (0, 10, 38, 61, 63)[min(depth, 4)])
    assert static_shape(paths).levels <= depth
    # the best are kept: the first levels do not crowd the deep ones out
    assert nodes < 5 or depth < 3 or (0, 0, 0) in paths


def test_fill_takes_the_rank_at_the_depth() -> None:
    shape = static_shape([(0,), (1,), (0, 1), (1, 0)])
    tree = shape.fill(torch.tensor([[[10, 11], [20, 21]]]))
    assert tree.tokens_BN.tolist() == [[10, 11, 21, 20]]
    assert tree.parent_BN.tolist() == [[-1, -1, 0, 1]]
    assert tree.depth_BN.tolist() == [[1, 1, 2, 2]]
    assert not tree.linear
    assert static_shape([(0,), (0, 0)]).fill(torch.tensor([[[1], [2]]])).linear


def test_static_shape_needs_parents() -> None:
    with pytest.raises(ConfigError, match=r"\[1, 0\] lacks its parent \[1\]"):
        static_shape([(0,), (1, 0)])


# Dynamic trees


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.integers(0, 10_000))
def test_selected_nodes_are_closed_and_ordered_even_with_ties(k: int, levels: int, nodes: int, seed: int) -> None:
    """Log-probabilities of 0 and -1 only: most scores tie exactly, parent with child included."""
    noise = torch.Generator().manual_seed(seed)
    score, parent, depth = [], [], []
    frontier: list[int | None] = [None]
    for level in range(1, levels + 1):
        first = len(score)
        for node in frontier:
            for _ in range(k):
                step = -float(torch.randint(0, 2, (1,), generator=noise))
                score.append(step + (score[node] if node is not None else 0.0))
                parent.append(-1 if node is None else node)
                depth.append(level)
        order = sorted(range(first, len(score)), key=lambda n: -score[n])
        frontier = list(order[:k])
    table = [torch.tensor([x]) for x in (score, parent, depth, list(range(len(score))))]
    tree = select(*table, nodes=nodes, levels=levels)
    kept = tree.tokens_BN[0].tolist()
    assert len(kept) == min(nodes, len(score))
    for n, candidate in enumerate(kept):
        up = tree.parent_BN[0, n].item()
        assert up < n
        assert (kept[up] if up >= 0 else -1) == parent[candidate]
        assert tree.depth_BN[0, n].item() == depth[candidate]
    # nothing left out is better, and nothing left out that ties is shallower
    rank = lambda n: (-score[n], depth[n])  # noqa: E731
    assert max(map(rank, kept)) <= min((rank(n) for n in range(len(score)) if n not in kept), default=(9e9, 0))


def test_tie_prefers_the_shallower_node() -> None:
    # node 1 at depth 1 and node 2 (child of 0) at depth 2 have the same score
    score, parent, depth, tokens = [0.0, -1.0, -1.0, -3.0], [-1, -1, 0, 0], [1, 1, 2, 2], [4, 5, 6, 7]
    tree = select(*(torch.tensor([x]) for x in (score, parent, depth, tokens)), nodes=2, levels=2)
    assert tree.tokens_BN.tolist() == [[4, 5]]


def test_expand_accumulates_log_probabilities() -> None:
    logp = torch.tensor([[[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]]]).log()
    level = expand(logp, torch.tensor([[0.6, 0.4]]).log(), k=2)
    assert level.tokens_BM.tolist() == [[1, 2, 0, 1]]
    assert level.parent_BM.tolist() == [[0, 0, 1, 1]]
    torch.testing.assert_close(level.score_BM.exp(), torch.tensor([[0.42, 0.12, 0.20, 0.12]]))
    # 0.12 ties with 0.12: the first stays
    assert level.frontier_Bk.tolist() == [[0, 2]]


def test_a_tree_of_one_node_is_a_chain() -> None:
    score, parent = torch.tensor([[-0.5, -0.1, -0.7]]), torch.tensor([[-1, -1, 0]])
    depth, tokens = torch.tensor([[1, 1, 2]]), torch.tensor([[4, 5, 6]])
    one, two = (select(score, parent, depth, tokens, nodes, 2) for nodes in (1, 2))
    assert one.linear and one.levels == 1 and one.tokens_BN.tolist() == [[5]] and one.parent_BN.tolist() == [[-1]]
    assert not two.linear and two.levels == 2
