"""Packs: every document exactly once, within the budget, the same for everyone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.data.packing import fill, make_packs
from headstart.heads.errors import ConfigError


@given(
    lengths=st.lists(st.integers(1, 40), max_size=120),
    budget=st.integers(1, 60),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    pool=st.integers(1, 50),
)
def test_every_document_once_within_budget(lengths, budget, seed, epoch, pool):
    packs = make_packs(lengths, budget, seed, epoch, pool)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    for pack in packs:
        assert sum(lengths[i] for i in pack) <= budget or len(pack) == 1
    assert packs == make_packs(lengths, budget, seed, epoch, pool)


def test_best_fit_decreasing_fills_exactly():
    packs = make_packs([6, 5, 4, 3, 2], 10)
    assert sorted(sorted(p) for p in packs) == [[0, 2], [1, 3, 4]]
    assert fill(packs, [6, 5, 4, 3, 2], 10) == 1.0


def test_epochs_and_seeds_differ():
    lengths = [7 + i % 13 for i in range(200)]
    plans = [make_packs(lengths, 64, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert plans[0] != plans[1] != plans[2] != plans[0]
    assert all(fill(plan, lengths, 64) > 0.9 for plan in plans)


def test_a_long_document_has_a_pack_of_its_own():
    assert [0] in make_packs([50, 5, 5], 20)
    with pytest.raises(ConfigError, match="document 1: found length 0"):
        make_packs([3, 0], 20)
    assert make_packs([], 20) == []


def imbalance(counts: np.ndarray, ranks: int) -> np.ndarray:
    """Per window of one pack a rank: by how much the fullest rank exceeds the mean."""
    windows = counts[: len(counts) // ranks * ranks].reshape(-1, ranks)
    return windows.max(1) / windows.mean(1) - 1


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("budget", [4096, 16384])
def test_ranks_of_a_window_have_alike_work(budget: int, ranks: int):
    """Chat-like lengths (median 200, some ten times that), answers from a tenth to nine tenths of them."""
    noise = np.random.default_rng(3)
    lengths = np.clip(np.exp(noise.normal(5.3, 0.9, 6000)), 8, 2048).astype(int)
    supervised = np.maximum((lengths * noise.uniform(0.1, 0.9, 6000)).astype(int), 2)
    packs = make_packs(lengths.tolist(), budget, 0, 0, supervised=supervised.tolist())
    assert sorted(i for pack in packs for i in pack) == list(range(6000))
    assert fill(packs, lengths, budget) > 0.95
    for counts in (lengths, supervised):
        excess = imbalance(np.array([counts[pack].sum() for pack in packs]), ranks)
        assert excess.mean() < 0.03 and excess.max() < 0.08
    # what the supervised counts are for: without them the fullest rank has far more to train on
    blind = make_packs(lengths.tolist(), budget, 0, 0)
    assert imbalance(np.array([supervised[pack].sum() for pack in blind]), ranks).mean() > 0.04


def test_an_even_spread_costs_few_packs_and_only_where_it_fits():
    # 10 documents of 4 and 2 of 5 in packs of 10: two each is all that fits
    assert len(make_packs([4] * 10 + [5] * 2, 10)) == 6
    # 8 + 2, 7 + 3, 6 + 4: full to the last token, which spreading would not find in its own order
    assert fill(make_packs([8, 7, 6, 4, 3, 2], 10, supervised=[1, 7, 1, 4, 1, 2]), [8, 7, 6, 4, 3, 2], 10) == 1.0


def test_supervised_counts_of_other_documents_are_refused():
    with pytest.raises(ConfigError, match="supervised: found counts of 2 documents, expected 3"):
        make_packs([3, 4, 5], 20, supervised=[1, 2])
