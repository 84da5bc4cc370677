"""Packs: every document exactly once, within the budget, the same for everyone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.data.packing import fill, plan_packs
from headstart.heads.errors import ConfigError


@given(
    lengths=st.lists(st.integers(1, 40), max_size=120),
    budget=st.integers(1, 60),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    window=st.integers(1, 50),
)
def test_every_document_once_within_budget(lengths, budget, seed, epoch, window):
    packs = plan_packs(lengths, budget, seed, epoch, window)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    for pack in packs:
        assert sum(lengths[i] for i in pack) <= budget or len(pack) == 1
    assert packs == plan_packs(lengths, budget, seed, epoch, window)


def test_best_fit_decreasing_fills_exactly():
    packs = plan_packs([6, 5, 4, 3, 2], 10)
    assert sorted(sorted(p) for p in packs) == [[0, 2], [1, 3, 4]]
    assert fill(packs, [6, 5, 4, 3, 2], 10) == 1.0


def test_epochs_and_seeds_differ():
    lengths = [7 + i % 13 for i in range(200)]
    plans = [plan_packs(lengths, 64, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert plans[0] != plans[1] != plans[2] != plans[0]
    assert all(fill(plan, lengths, 64) > 0.9 for plan in plans)


def test_long_document_own_pack_or_refused():
    assert [0] in plan_packs([50, 5, 5], 20)
    with pytest.raises(ConfigError, match="document 0: found 50 tokens, expected at most data.pack_tokens=20"):
        plan_packs([50, 5, 5], 20, too_long="refuse")
    with pytest.raises(ConfigError, match="document 1: found length 0"):
        plan_packs([3, 0], 20)
    assert plan_packs([], 20) == []
