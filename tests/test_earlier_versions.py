"""Runs, heads, reports and feature stores of earlier revisions go on working.

Each folder of tests/fixtures named after a revision was made by that revision (tests/fixtures/make_fixtures.py).
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headstart.cli import main
from headstart.data.store import StoredFeatures
from headstart.eval.measuring.rendering import render_saved
from headstart.eval.measuring.report import Report
from headstart.heads.files import read_json
from headstart.heads.formats.sidecar import annotate, notes
from headstart.heads.provenance import device_name
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import Target, TargetConfig
from headstart.saved_heads import bound_head

FIXTURES = Path(__file__).parent / "fixtures"
REVISIONS = ("dc8b283",)

_spec = importlib.util.spec_from_file_location("make_fixtures", FIXTURES / "make_fixtures.py")
assert _spec is not None and _spec.loader is not None
made = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)

#: Where the files were made, losses are equal to the last bit and trained weights within 1e-6. Another torch or BLAS
#: adds float32 numbers in another order.
NEAR = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=REVISIONS)
def earlier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the revision's folder, as the working directory."""
    place = tmp_path / "earlier"
    shutil.copytree(FIXTURES / request.param, place)
    made.set_times(place / "target")
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def headstart(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Call the command line in this process; returns what it wrote to stdout and to stderr."""

    def call(*words: str) -> tuple[str, str]:
        capfd.readouterr()
        code = main(list(words))
        out, err = capfd.readouterr()
        assert code == 0, err
        return out, err

    return call


def target() -> Target:
    return load_target(TargetConfig(name="target"))


@pytest.mark.usefixtures("earlier")
def test_heads_and_exports_draft_what_they_drafted() -> None:
    expected, loaded = load_file("logits.safetensors"), target()
    assert set(expected) == set(made.RUNS)
    for name, logits in expected.items():
        torch.testing.assert_close(made.first_logits(bound_head(Path(name, "head"), loaded)), logits, **NEAR)
        exported = made.first_logits(bound_head(Path(name, "export"), loaded))
        # the export holds bfloat16, which has 8 bits: 0.4 % per weight
        assert (exported - logits).abs().max() < 0.02 * logits.abs().max(), name


@pytest.mark.usefixtures("earlier")
@pytest.mark.parametrize("name", made.RUNS)
def test_a_checkpoint_goes_on_to_the_same_losses(name: str, headstart: Callable[..., tuple[str, str]]) -> None:
    run = Path(name)

    def losses() -> dict[int, float]:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return {record["step"]: record["train/loss"] for record in records if "train/loss" in record}

    expected, tensors = losses(), load_file(run / "head/model.safetensors")
    for later in ("checkpoints/step-00000004", "checkpoints/best", "head"):
        shutil.rmtree(run / later)
    out, err = headstart("train", f"{name}/recipe.yaml", "--json")
    assert json.loads(out)["resumed_from"] == 2 and "done again, its inputs changed" not in err
    assert losses() == pytest.approx(expected, rel=1e-4) and len(expected) == 4
    for key, value in load_file(run / "head/model.safetensors").items():
        torch.testing.assert_close(value, tensors[key], **NEAR)


@pytest.mark.usefixtures("earlier")
@pytest.mark.parametrize("name", made.RUNS)
def test_a_finished_run_repeats_no_step(name: str, headstart: Callable[..., tuple[str, str]]) -> None:
    report = Path(name, "report.json").read_bytes()
    _, err = headstart("run", f"{name}/recipe.yaml")
    steps = {path.stem for path in Path(name, "steps").iterdir()}
    assert steps >= {"train", "eval", "export"}
    for step in steps - ({"features"} if f"{name}/features" not in err else set()):
        assert f"{step}: finished before" in err, err
    assert "starts" not in err and "done again" not in err and "continues" not in err
    assert Path(name, "report.json").read_bytes() == report and not Path(name, "previous").exists()


@pytest.mark.usefixtures("earlier")
def test_the_feature_store_holds_the_states_of_the_target() -> None:
    loaded = target()
    store = StoredFeatures(Path("eagle3/features/train"), 2, fingerprint=loaded.fingerprint())
    assert len(store.manifest.shards) > 1
    pack = list(range(len(store.lengths)))
    stored = store.get(pack)
    again = loaded.extract(stored, store.spec)
    assert stored.hidden_RD.shape == (sum(store.lengths), loaded.dims.hidden_size)
    for name in ("hidden_RD", "streams_RkD"):
        torch.testing.assert_close(getattr(stored, name), getattr(again, name), **NEAR)


@pytest.mark.usefixtures("earlier")
def test_reports_are_read_and_rendered_with_the_same_numbers(headstart: Callable[..., tuple[str, str]]) -> None:
    for name in (*made.RUNS, "eval"):
        saved = read_json(Path(name, "report.json"))
        assert {key: value for key, value in Report.read(Path(name)).to_json().items() if key in saved} == saved
        text = Path(name, "report.md")
        rows = [line for line in text.read_text().splitlines() if line.startswith("| all ")]
        text.unlink()
        assert render_saved(Path(name, "report.json"), print)
        page = Path(name, "report.html").read_text(encoding="utf-8")
        assert f'data-value="{saved["tau"]}"' in page and "earlier version wrote" in page
        assert len(rows) == 2 and rows == [x for x in text.read_text().splitlines() if x.startswith("| all ")]
    out, _ = headstart("report", *made.RUNS, "eval", "--json")
    taus = [report["tau"] for report in json.loads(out)["runs"].values()]
    assert taus == [read_json(Path(name, "report.json"))["tau"] for name in (*made.RUNS, "eval")]


@pytest.mark.usefixtures("earlier")
def test_a_tuned_tree_is_used(headstart: Callable[..., tuple[str, str]]) -> None:
    (entry,) = notes(Path("eagle3/head"))["tuned"].values()
    (choice,) = read_json(Path("eagle3/tune/tune.json"))["choices"]
    chosen = entry["batches"]["1"]
    assert chosen["predicted_speedup"] == choice["predicted_speedup"]
    # whether a tree pays here is a matter of noise: say that it does, on this machine
    entry["batches"]["1"] = {**chosen, "speculate": True}
    annotate(Path("eagle3/head"), {"tuned": {device_name("cpu"): entry}})
    given = ("--head", "eagle3/head", "--target", "target", "--data", "prompts.jsonl", "eval.max_new_tokens=6")
    out, err = headstart("eval", *given, "--out", "again", "--json")
    assert "tuned for this card" in err
    assert json.loads(out)["tree"]["label"] == chosen["label"]
