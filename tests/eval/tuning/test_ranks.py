"""Rates of paths by hand; the greedy tree against every tree of its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest

from headstart.eval.tuning import ranks as module
from headstart.eval.tuning.ranks import NEVER, UNKNOWN, HeadCounts, PathRates, best_tree, falling

Path = tuple[int, ...]
Rate = Callable[[Path], float]


def every_tree(nodes: int, levels: int, ranks: int) -> Iterator[frozenset[Path]]:
    """All sets of `nodes` paths that hold every path's parent."""
    grown = {frozenset[Path]()}
    for _ in range(nodes):
        grown = {
            tree | {(*parent, rank)}
            for tree in grown
            for parent in [(), *tree]
            if len(parent) < levels
            for rank in range(ranks)
            if (*parent, rank) not in tree
        }
    yield from grown


def recorded(cycles: int, levels: int, ranks: int, seed: int) -> np.ndarray:
    """Ranks that are right together: easy cycles have low ranks at all levels."""
    noise = np.random.default_rng(seed)
    rate = noise.choice([0.3, 0.8], size=(cycles, 1))
    rank = noise.geometric(rate, size=(cycles, levels)) - 1
    return np.where(rank < ranks, rank, NEVER)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_no_tree_of_the_size_is_better(nodes: int, seed: int) -> None:
    """For independent heads, whatever their accuracies, and for rates by path."""
    levels, ranks = 3, 3
    accuracy = np.random.default_rng(seed).dirichlet(np.ones(ranks + 1), size=levels)
    rates = PathRates(recorded(60, levels, ranks, seed), ranks)
    by_head: Rate = lambda path: float(np.prod([accuracy[level, rank] for level, rank in enumerate(path)]))  # noqa: E731
    for rate in (by_head, rates.by_head, rates.by_path):
        found = best_tree(rate, nodes, levels, ranks)
        assert len(set(found)) == nodes and all(path[:-1] in [(), *found[:n]] for n, path in enumerate(found))
        best = max(sum(map(rate, sorted(tree))) for tree in every_tree(nodes, levels, ranks))
        assert sum(map(rate, found)) == pytest.approx(best)


def test_all_trees_are_listed() -> None:
    """Of two levels with two ranks each: 2 of one node; 5 of two, the pair of siblings and a child for either."""
    assert [len(list(every_tree(nodes, 2, 2))) for nodes in (1, 2, 6)] == [2, 5, 1]


def test_it_is_the_published_construction() -> None:
    """Next sibling or first child of a chosen node, written out, for accuracies that fall with the rank."""
    accuracy = np.array([[0.5, 0.2, 0.1, 0.05], [0.4, 0.22, 0.12, 0.04], [0.35, 0.17, 0.13, 0.06]])
    rate: Rate = lambda path: float(np.prod([accuracy[level, rank] for level, rank in enumerate(path)]))  # noqa: E731
    chosen: list[Path] = [(0,)]
    while len(chosen) < 20:
        following = [(*path[:-1], path[-1] + 1) for path in chosen if path[-1] < 3]
        following += [(*path, 0) for path in chosen if len(path) < 3]
        chosen.append(max((path for path in following if path not in chosen), key=rate))
    assert best_tree(rate, 20, 3, 4) == chosen


def test_a_tree_ends_where_nothing_is_right() -> None:
    rates = PathRates(np.array([[0, NEVER], [0, NEVER]]), 4)
    assert rates.tree(rates.by_head, 9) == [(0,)]
    # equal rates: the shallower first, then the lower ranks
    assert best_tree(lambda path: 1.0, 3, 2, 2) == [(0,), (1,), (0, 0)]
    assert best_tree(lambda path: 1.0, 99, 2, 2)[-1] == (1, 1)


def test_every_head_is_counted_over_its_own_positions() -> None:
    """Head 1 has ten positions and head 2 four, as the answers end. One count for both would give another tree."""
    first = [0] * 5 + [1] * 3 + [NEVER] * 2
    second = [0, 0, UNKNOWN, UNKNOWN, UNKNOWN, 0, UNKNOWN, UNKNOWN, 0, UNKNOWN]
    rates = PathRates(np.array([first, second]).T, 2)
    heads = rates.heads
    assert heads.positions_K.tolist() == [10, 4] and heads.right_KR.tolist() == [[5, 3], [4, 0]]
    assert heads.accuracy_KR.tolist() == [[0.5, 0.3], [1.0, 0.0]]
    assert rates.tree(rates.by_head, 2) == [(0,), (0, 0)]
    assert best_tree(lambda path: float(np.prod([heads.right_KR[n, r] / 10 for n, r in enumerate(path)])), 2, 2, 2) == [
        (0,),
        (1,),
    ]
    assert heads.to_json()[0] == {
        "head": 1, "positions": 10, "right": [5, 3], "accuracy": [0.5, 0.3], "top": [0.5, pytest.approx(0.8)],
    }  # fmt: skip
    nothing = HeadCounts.of(np.array([[0, UNKNOWN]]), 2)
    assert nothing.accuracy_KR.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def by_hand(strength: float, monkeypatch: pytest.MonkeyPatch) -> PathRates:
    monkeypatch.setattr(module, "STRENGTH", strength)
    return PathRates(np.array([[0, 0], [0, 1], [1, NEVER], [NEVER, 0]]), 2)


def test_rates_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads: .5 .25 and .5 .25. Of the three cycles that head 1 knew, head 2's ranks were right once each."""
    rates = by_hand(2.0, monkeypatch)
    assert rates.by_head((0, 0)) == pytest.approx(0.25) and rates.by_head((1, 1)) == pytest.approx(0.0625)
    assert rates.followed.positions_K.tolist() == [4, 3] and rates.followed.right_KR.tolist() == [[2, 1], [1, 1]]
    # level 1: (2 + 2 · .5) / 6 and (1 + 2 · .25) / 6
    assert rates.by_path((0,)) == pytest.approx(0.5) and rates.by_path((1,)) == pytest.approx(0.25)
    # prior of level 2: (1 + 2 · .5) / 5 = .4 and (1 + 2 · .25) / 5 = .3; after (0): (1 + .8) / 4 and (1 + .6) / 4
    assert rates.by_path((0, 0)) == pytest.approx(0.5 * 0.45) and rates.by_path((0, 1)) == pytest.approx(0.5 * 0.4)
    # after (1), which was followed once: .8 / 3
    assert rates.by_path((1, 0)) == pytest.approx(0.25 * 0.8 / 3)
    assert [rates.observed(path) for path in ((0,), (0, 0), (0, 1), (1, 0))] == [0.5, 0.25, 0.25, 0.0]


def test_strength_leads_from_paths_to_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the counts already fall with the rank."""
    for path in ((0,), (1,), (0, 0), (0, 1), (1, 0)):
        weak, strong = by_hand(1e-9, monkeypatch).by_path(path), by_hand(1e9, monkeypatch)
        assert weak == pytest.approx(strong.observed(path), abs=1e-6)
        assert strong.by_path(path) == pytest.approx(strong.by_head(path))


def test_what_is_unknown_is_estimated() -> None:
    """Ranks after (1) were never recorded: the share of level 2 in general stands in."""
    rates = PathRates(np.array([[0, 0], [0, 0], [1, UNKNOWN], [0, NEVER]]), 2)
    general = rates.followed.right_KR[1, 0] / 3
    assert rates.observed((0, 0)) == pytest.approx(0.75 * 2 / 3)
    assert rates.observed((1, 0)) == pytest.approx(0.25 * general)
    assert 0 < rates.by_path((1, 0)) < rates.by_path((1,))


def test_shares_fall_with_the_rank() -> None:
    assert falling(np.array([0.5, 0.3, 0.1])).tolist() == [0.5, 0.3, 0.1]
    assert falling(np.array([0.1, 0.2, 0.6, 0.1])).tolist() == pytest.approx([0.3, 0.3, 0.3, 0.1])
    noise = np.random.default_rng(0)
    for _ in range(20):
        share = noise.random(5)
        made = falling(share)
        assert np.all(np.diff(made) <= 1e-12) and made.sum() == pytest.approx(share.sum())
        # no other falling values are nearer
        for other in product(np.linspace(0, 1, 6), repeat=5):
            if all(a >= b for a, b in zip(other, other[1:], strict=False)):
                assert ((made - share) ** 2).sum() <= ((np.array(other) - share) ** 2).sum() + 1e-12


def test_rates_by_path_fall_with_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """After (0), rank 1 was right three times and rank 0 once. That is chance: both get the mean, and the sum stays."""
    monkeypatch.setattr(module, "STRENGTH", 1e-9)
    rates = PathRates(np.array([[0, 0], [0, 1], [0, 1], [0, 1]]), 2)
    assert rates.observed((0, 0)) == 0.25 and rates.observed((0, 1)) == 0.75
    assert rates.by_path((0, 0)) == rates.by_path((0, 1)) == pytest.approx(0.5)
    assert rates.tree(rates.by_path, 2) == [(0,), (0, 0)]


def test_trees_by_path_do_better_on_cycles_that_were_not_recorded() -> None:
    """Heads that are right together: their product undervalues deep paths, and counts of paths alone follow chance."""
    levels, ranks, nodes = 4, 10, 31
    ways: dict[str, list[float]] = {"path": [], "head": [], "observed": []}
    for seed in range(6):
        rates = PathRates(recorded(150, levels, ranks, seed), ranks)
        others = PathRates(recorded(20_000, levels, ranks, 100 + seed), ranks)
        for name, rate in (("path", rates.by_path), ("head", rates.by_head), ("observed", rates.observed)):
            ways[name].append(sum(map(others.observed, rates.tree(rate, nodes))))
    assert np.mean(ways["path"]) > np.mean(ways["head"]) and np.mean(ways["path"]) > np.mean(ways["observed"])
