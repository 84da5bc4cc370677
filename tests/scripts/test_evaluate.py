"""What a head would gain before there is one: synthetic acceptance with an untrained head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headstart.bench.target_checks import write_target


def test_synthetic_acceptance_before_any_training(
    headstart: Callable, tiny_target: Path, prompts: Path, tmp_path: Path
) -> None:
    asked = ("eval.synthetic_acceptance=1.0", "eval.max_new_tokens=12", "eval.tree.kind=chain", "eval.tree.depth=3")
    result = headstart("eval", "--target", tiny_target, "--data", prompts, *asked, "--out", tmp_path / "r", "--json")
    assert result.code == 0, result.err
    report = result.json
    assert report["drafter"] == "eagle3" and report["synthetic"] == [1.0] * 3 and not report["lossless"]
    # every draft is taken, four tokens a cycle, unless the answer ends among them
    first, second, third = report["per_position_acceptance"]
    assert first == 1.0 and second > 0.7 and third > 0.7 and report["tau"] > 3
    again = headstart("eval", "--target", tiny_target, "--data", prompts, *asked, "--out", tmp_path / "s", "--json")
    assert (again.json["forwards"], again.json["tokens"]) == (report["forwards"], report["tokens"])
    assert report["head"]["untrained"] and any("untrained head drafted" in note for note in report["notes"])


def test_a_recipe_s_head_stands_in_for_itself(
    headstart: Callable, recipe: Path, tiny_target: Path, prompts: Path
) -> None:
    asked = ("eval.synthetic_acceptance=[0.0]", "eval.max_new_tokens=6", "head.type=medusa", "head.depth=2")
    tree = ("eval.tree.kind=chain", "eval.tree.depth=1")
    result = headstart("eval", recipe, "--data", prompts, *asked, *tree, "--json")
    assert result.code == 0, result.err
    assert result.json["drafter"] == "medusa" and result.json["tau"] == 1 and result.json["head"]["untrained"]


def test_synthetic_acceptance_of_nothing(headstart: Callable, tiny_target: Path, prompts: Path) -> None:
    asked = ("eval.synthetic_acceptance=0.8", "eval.drafter=none")
    result = headstart("eval", "--target", tiny_target, "--data", prompts, *asked)
    assert result.code == 2 and "found 0.8, but nothing drafts (eval.drafter=none, no head)" in result.err


def test_what_a_target_with_states_cannot_do_is_refused_before_it_is_loaded(
    prompts: Path, headstart: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_target("LFM2", tmp_path / "target")
    monkeypatch.setattr("headstart.targets.load_target", lambda config: pytest.fail("loaded"))
    asked = ("eval.synthetic_acceptance=1.0", "--out", tmp_path / "out")
    cases = (("eval.tree.kind=dynamic", "eval.tree.kind=chain"), ("eval.scheduler=on", "eval.scheduler=false"))
    for setting, remedy in cases:
        result = headstart("eval", "--target", target, "--data", prompts, *asked, setting)
        assert result.code == 2 and f"set {remedy}" in result.err
