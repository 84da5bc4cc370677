"""headstart tune: what it writes, what it keeps with the head, and that eval finds it there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headstart import identity
from headstart.commands.evaluate import nearest_tuned
from headstart.eval.config import TreeConfig
from headstart.eval.tuning.tune_report import overrides
from headstart.heads.errors import FormatError
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.formats import load_head, save_head
from headstart.heads.formats.calibration import read_calibration
from headstart.heads.formats.choices import LAST_BATCH
from headstart.heads.formats.sidecar import annotate, notes
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import TargetConfig

CHAIN_OF_ONE = {"kind": "chain", "depth": 1, "paths": None}


@pytest.fixture(autouse=True)
def few_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle's time is measured on short answers: what it is does not matter here."""
    monkeypatch.setattr("headstart.eval.tuning.costs.CYCLE_TOKENS", 12)


@pytest.fixture
def head(tiny_target: Path, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    target = load_target(TargetConfig(name=str(tiny_target)))
    made = build_head(FAMILIES["medusa"].config(depth=2), target.dims)
    made.initialise(target.ends)
    save_head(made, tmp_path / "head", {})
    return tmp_path / "head"


def test_tune_keeps_its_choice_and_eval_uses_it(
    headstart: Callable, tiny_target: Path, head: Path, prompts: Path, tmp_path: Path
) -> None:
    options = ("--head", head, "--target", tiny_target, "--data", prompts, "eval.max_new_tokens=8")
    small = ("tune.batch_sizes=[1]", "tune.depth=2", "tune.total_tokens=[3,4]", "tune.prompts=2", "tune.repeats=1")
    result = headstart("tune", *options, *small, "--out", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    (choice,) = result.json["choices"]
    assert choice["batch"] == 1 and choice["costs"]["plain_ms"] > 0
    assert {"chain1", "chain2"} <= set(result.json["taus"])
    assert json.loads((tmp_path / "out" / "tune.json").read_text())["choices"] == result.json["choices"]
    assert f"{choice['predicted_speedup']:.2f}×" in (tmp_path / "out" / "tune.md").read_text()

    assert result.json["verdict"]["pays"] is None and "Verdict: it cannot be told" in (
        tmp_path / "out" / "tune.md"
    ).read_text()
    low, high = choice["measured"]["tau_ci95"]
    assert 1 <= low <= choice["measured"]["tau"] <= high
    assert (tmp_path / "out" / "tune.png").read_bytes().startswith(b"\x89PNG")

    # the sidecar is sealed again, and the head is still read
    load_head(head)
    (entry,) = notes(head)["tuned"].values()
    kept = entry["batches"]["1"]
    assert kept["predicted_speedup"] == choice["predicted_speedup"] and entry["data"]["path"] == "own data"

    # the calibrated tree and the published one, whose overrides give them to eval
    for name in ("calibrated", "published"):
        words = shlex.split(choice[name]["overrides"])
        given = headstart("eval", *options, *words, "--out", tmp_path / name, "--json")
        assert given.code == 0, given.err
        assert {**given.json["tree"], "label": None} == {**choice[name]["tree"], "label": None}
        assert given.json["tree"]["label"] == choice[name]["label"] == f"static{choice[name]['nodes']}"

    # whether a tiny model gains here is a matter of noise: say that it does, with a tree of our own
    tree = {**kept["tree"], "kind": "static", "depth": 2, "total_tokens": 4, "paths": [[0], [1], [0, 0]]}
    entry["batches"]["1"] = {**kept, "speculate": True, "tree": tree, "label": "static3"}
    annotate(head, {"tuned": {entry["device"]: entry}})
    measured = headstart("eval", *options, "--out", tmp_path / "a", "--json")
    assert measured.code == 0, measured.err
    assert measured.json["tree"]["label"] == "static3" and measured.json["tree"]["paths"] == [[0], [1], [0, 0]]
    assert "tree tuned for this card and batch 1: static3" in measured.err
    for words, label in ((("eval.tree.depth=2",), "chain2"), (("eval.batch_size=3",), "chain2")):
        assert headstart("eval", *options, *words, "--out", tmp_path / "b", "--json").json["tree"]["label"] == label
    near = headstart("eval", *options, "eval.batch_size=2", "--out", tmp_path / "b", "--json")
    assert near.json["tree"]["label"] == "static3" and "card and batch 1, the nearest to 2: static3" in near.err
    # the scheduler drafts up to the tree that it was measured with, whether a fixed draft pays or not
    assert kept["scheduled"]["against_fixed"] == choice["scheduled"]["against_fixed"] > 0
    smaller = {**kept["tree"], **CHAIN_OF_ONE}
    entry["batches"]["1"]["scheduled"] = {**kept["scheduled"], "tree": smaller, "label": "chain1"}
    entry["batches"]["1"]["speculate"] = False
    annotate(head, {"tuned": {entry["device"]: entry}})
    scheduled = headstart("eval", *options, "eval.scheduler=on", "--out", tmp_path / "e", "--json")
    assert scheduled.code == 0 and scheduled.json["tree"]["label"] == "chain1, scheduled", scheduled.err
    assert "card and batch 1: chain1" in scheduled.err
    annotate(head, {"tuned": {entry["device"]: entry}})
    plain = headstart("eval", *options, "--out", tmp_path / "c", "--json")
    assert "plain decoding is faster at batch 1" in plain.err and plain.json["tree"]["label"] == "chain2"
    for odd in (
        1,
        {},
        {"batches": {"one": kept}},
        {"batches": {"0": kept}},
        {"batches": {"1": {"speculate": True}}},
        {"batches": {"1": {**kept, "tree": {"sort": "bush"}}}},
    ):
        annotate(head, {"tuned": {entry["device"]: odd}})
        ignored = headstart("eval", *options, "--out", tmp_path / "d", "--json")
        assert ignored.code == 0 and ignored.json["tree"]["label"] == "chain2"
        assert ("what was tuned cannot be read" in ignored.err) == (odd != {})


@pytest.mark.parametrize(
    ("batch", "expected"), [(1, "1"), (2, "1"), (4, None), (8, "16"), (16, "16"), (32, "64"), (33, "64"), (129, None)]
)
def test_the_nearest_tuned_batch_size(batch: int, expected: str | None) -> None:
    assert nearest_tuned(["64", "1", "16"], batch) == expected
    assert nearest_tuned([], batch) is None


def test_tune_without_a_head(headstart: Callable, tiny_target: Path, prompts: Path, tmp_path: Path) -> None:
    options = ("--target", tiny_target, "--data", prompts, "eval.max_new_tokens=6", "eval.drafter=ngram")
    small = ("tune.batch_sizes=[1]", "tune.depth=1", "tune.prompts=1", "tune.repeats=1")
    result = headstart("tune", *options, *small, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert "chain1" in result.out and "predicted" in result.out and "report:" in result.out


def test_tune_says_what_is_missing(headstart: Callable, tiny_target: Path, prompts: Path) -> None:
    result = headstart("tune", "--data", prompts)
    assert result.code == 2 and "tune: give a RECIPE, or --target T" in result.err
    result = headstart("tune", "--target", tiny_target)
    assert result.code == 2 and "eval.data is not set" in result.err
    result = headstart("tune", "--target", tiny_target, "--data", prompts, "tune.depth=0")
    assert result.code == 2 and "tune.depth: found 0" in result.err
    result = headstart("tune", "--target", tiny_target, "--data", prompts, "tune.depht=2")
    assert result.code == 2 and "did you mean 'tune.depth'?" in result.err


def test_overrides_give_the_tree_back() -> None:
    assert (
        overrides(TreeConfig("dynamic", 6, 10, 48))
        == "eval.tree.kind=dynamic eval.tree.depth=6 eval.tree.total_tokens=48"
    )
    static = TreeConfig("static", 2, total_tokens=4, paths=[[0], [1], [0, 0]])
    assert overrides(static).endswith("'eval.tree.paths=[[0],[1],[0,0]]'")


def test_a_tuned_head_is_the_same_head(head: Path) -> None:
    before = identity.of_saved_head(head)
    assert before == identity.of_file(head / "headstart.json")
    annotate(head, {"tuned": {"card": {"batches": {}}}})
    assert identity.of_saved_head(head) == before != identity.of_file(head / "headstart.json")
    annotate(head, {"recipe": {"seed": 1}})
    assert identity.of_saved_head(head) != before


def test_tune_keeps_the_calibration_with_the_head(
    headstart: Callable, tiny_target: Path, prompts: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    target = load_target(TargetConfig(name=str(tiny_target)))
    made = build_head(FAMILIES["dspark"].config(depth=2, layers=1, mask_token_id=3), target.dims)
    place = tmp_path / "sure"
    made.initialise(target.ends)
    save_head(made, place, {})
    result = headstart(
        "tune", "--head", place, "--target", tiny_target, "--data", prompts, "eval.max_new_tokens=8",
        "tune.batch_sizes=[1]", "tune.depth=2", "tune.prompts=2", "tune.repeats=1", "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    kept = read_calibration(place)
    assert kept is not None and kept.kind == "logistic" and kept.source == "confidence" and kept.positions == 2
    assert kept.dataset == "own data" and kept.num_samples > 0
    assert result.json["calibration"]["temperatures"] == kept.temperatures
    load_head(place)
    assert str(prompts) not in (tmp_path / "out" / "tune.json").read_text()
    text = (tmp_path / "out" / "tune.md").read_text()
    errors = [kept.ece_before[0], kept.ece_after[0], kept.ece_of_temperatures[0]]
    row = " | ".join([f"{kept.biases[0]:.3f}", f"{kept.temperatures[0]:.3f}", *(f"{error:.1%}" for error in errors)])
    assert "## Calibration" in text and f"{row} |" in text and "(reliability.png)" in text
    assert (tmp_path / "out" / "reliability.png").read_bytes().startswith(b"\x89PNG")

    # what engines read goes along with an export
    (entry,) = notes(place)["tuned"].values()
    (choice,) = result.json["choices"]
    assert entry["tokens_per_batch"] == [[1, LAST_BATCH, choice["launched"]]]
    assert f"| {choice['launched'] or 'plain'} |" in text
    rates = entry["step_rates"]
    assert rates["sample_batch_tokens"] == [2, 3] and rates["max_batch_tokens"] == 3
    step_ms = choice["costs"]["verify_ms"]["chain"]["3"] + choice["costs"]["draft_ms"]["chain"]["2"]
    assert 0 < rates["sample_steps_per_sec"][1] <= 1e3 / step_ms * (1 + 1e-9)
    exported = headstart(
        "export", "--head", place, "--target", tiny_target, "target.device=cpu", "--out", tmp_path / "exported",
    )  # fmt: skip
    assert exported.code == 0, exported.err
    assert json.loads((tmp_path / "exported/sglang_sps.json").read_text()) == rates
    served = json.loads((tmp_path / "exported/sglang_sts.json").read_text())
    assert (served["temperatures"], served["ece_after"]) == (kept.temperatures, kept.ece_of_temperatures)
    said = "".join(exported.err.split())
    assert "--speculative-dspark-sps-table-path" in said and '"enable_adaptive_verification":true' in said


def test_notes_need_a_sidecar(tmp_path: Path, head: Path) -> None:
    assert notes(tmp_path / "none") == {}
    with pytest.raises(FormatError, match="only directories that Headstart wrote"):
        annotate(tmp_path, {"tuned": {}})
    annotate(head, {"tuned": {"card": 1}})
    assert notes(head)["tuned"] == {"card": 1} and notes(head)["type"] == "medusa"
