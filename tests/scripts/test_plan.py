"""`headstart train RECIPE --plan`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def test_a_plan_counts_the_data_and_loads_nothing(
    headstart: Callable, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("headstart.heads.target.Target.load", refuse)
    shown = headstart("train", recipe, "--plan", "--gpus", "2", "--gpu-memory", "80", "--json")
    assert shown.code == 0, shown.err
    plan = shown.json
    assert plan["fits"] and plan["steps"] > 0 and plan["layout"]["ranks"] == 2
    assert plan["memory"]["target weights"] > 0 and plan["hours"] is None
    assert not (tmp_path / "run" / "head").exists()


def test_a_plan_in_words(headstart: Callable, recipe: Path) -> None:
    stated = ("--samples", "1000", "--mean-tokens", "64", "--tokens-per-s", "1000")
    shown = headstart("train", recipe, "--plan", *stated, "train.epochs=2", "train.accumulation=1")
    assert shown.code == 0, shown.err
    for words in ("target weights", "optimiser moments", "peak", "steps of", "disk:", "1000 samples of 64 tokens"):
        assert words in shown.out


def test_what_cannot_fit_is_shown_and_refused(headstart: Callable, recipe: Path) -> None:
    refused = headstart("train", recipe, "--plan", "--gpus", "1", "--gpu-memory", "0.01")
    assert refused.code == 2
    assert "optimiser moments" in refused.out
    assert "plan: the run needs" in refused.err and "lower data.pack_tokens" in refused.err
