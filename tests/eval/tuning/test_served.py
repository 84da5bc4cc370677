"""Tables for engines, from costs and choices by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import pytest

from headstart.eval.config import TreeConfig
from headstart.eval.tuning.choice import Choice, Prediction, Tuning
from headstart.eval.tuning.costs import Costs
from headstart.eval.tuning.served import rising, step_rates
from headstart.heads.formats.calibration import Calibration
from headstart.heads.formats.choices import LAST_BATCH


def costs(batch: int = 1) -> Costs:
    """Of a chain of 3: tokens 2 and 4 of a row are timed."""
    return Costs(
        batch, 64, plain_s=0.010, verify_s={"chain": {2: 0.011, 4: 0.012}, "tree": {8: 0.1}},
        draft_s={"chain": {1: 0.001, 3: 0.003}}, rest_s={"chain": {1: 0.0005, 3: 0.0007}},
    )  # fmt: skip


def test_a_step_drafts_all_whatever_it_verifies() -> None:
    assert costs().cut_s(2) == pytest.approx(0.011 + 0.003 + 0.0005)
    assert costs().cut_s(3) == pytest.approx(0.0115 + 0.003 + 0.0006)
    assert costs().cut_s(4) == pytest.approx(costs().cycle_s(TreeConfig("chain", 3)))


def test_steps_per_second_by_verified_tokens() -> None:
    two = replace(
        costs(2), verify_s={"chain": {2: 0.009, 4: 0.016}}, draft_s={"chain": {1: 0.002, 3: 0.004}},
        rest_s={"chain": {1: 0.001}},
    )  # fmt: skip
    found = step_rates([costs(), two])
    # 1 · 2, then 1 · 4 and 2 · 2, which are equally many, then 2 · 4
    seconds = [0.0145, (0.0157 + 0.014) / 2, 0.021]
    assert found is not None and found["sample_batch_tokens"] == [2, 4, 8] and found["max_batch_tokens"] == 8
    assert found["sample_steps_per_sec"] == pytest.approx([1 / s for s in seconds])


def test_more_tokens_never_take_less_time() -> None:
    quick = replace(costs(4), verify_s={"chain": {2: 0.005, 4: 0.030}})
    found = step_rates([costs(), quick])
    assert found is not None and found["sample_batch_tokens"] == [2, 4, 8, 16]
    pooled = mean([0.0145, 0.0157, 0.005 + 0.003 + 0.0005])
    assert found["sample_steps_per_sec"] == pytest.approx([1 / pooled] * 3 + [1 / 0.0337])
    assert rising([3, 1, 2, 5]) == [2, 2, 2, 5] and rising([]) == []


def test_rising_is_the_isotonic_regression() -> None:
    """Against its definition as the largest, over beginnings, of the smallest mean over endings."""
    drawn = random.Random(0)
    for size in range(1, 9):
        values = [drawn.random() for _ in range(size)]
        expected = [
            max(min(mean(values[a : b + 1]) for b in range(i, size)) for a in range(i + 1)) for i in range(size)
        ]
        assert rising(values) == pytest.approx(expected)


def test_nothing_is_made_up_where_no_chain_was_timed() -> None:
    assert step_rates([]) is None and step_rates([Costs(1, 64, 0.01, verify_s={"tree": {8: 0.1}})]) is None


def choice(batch: int, tree: TreeConfig, measured: float, chain: Prediction | None = None) -> Choice:
    return Choice(costs(batch), Prediction(tree, 2.0, 1.2), chain, {"row_speedup": measured, "tau": 2.0})


CHAIN, BUSH = TreeConfig("chain", 3), TreeConfig("dynamic", 4)


def paying(depth: int, speedup: float) -> Prediction:
    return Prediction(TreeConfig("chain", depth), 2.0, speedup)


def test_what_an_engine_is_launched_with() -> None:
    """A chain that was measured, else the best one by prediction if it pays; never one where nothing paid."""
    assert choice(1, CHAIN, 1.4, paying(5, 1.5)).launched == 3
    assert choice(1, CHAIN, 0.9, paying(5, 1.5)).launched == 0
    assert choice(1, BUSH, 1.4, paying(5, 1.1)).launched == 5
    assert choice(1, BUSH, 1.4, paying(5, 0.98)).launched == 0
    assert choice(1, BUSH, 0.98, paying(5, 1.1)).launched == 0
    assert choice(1, BUSH, 1.4).launched == 0


def test_the_head_keeps_the_tables() -> None:
    choices = [choice(1, TreeConfig("chain", 7), 2.0), choice(8, CHAIN, 1.4), choice(32, CHAIN, 0.9)]
    tuning = Tuning("drafts", {}, {"path": "x"}, "card", "bfloat16", 0.0, 64, 4, {}, {}, choices)
    entry = tuning.entry()
    assert entry["tokens_per_batch"] == [[1, 2, 7], [3, 16, 3], [17, LAST_BATCH, 0]] and "step_rates" not in entry
    # what a draft gives itself as its probability is no confidence head's word, which the other table is for
    for source, kept in (("draft_probability", False), ("confidence", True)):
        tuning.calibration = Calibration("temperature", source, temperatures=[1.0])
        assert ("step_rates" in tuning.entry()) is kept
    assert tuning.entry()["step_rates"] == step_rates([c.costs for c in choices])
    assert [c["launched"] for c in tuning.to_json()["choices"]] == [7, 3, 0]
