"""A mistake costs nothing: what was trained, measured and exported stays where it is, and results outlive renderers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from headstart.directory_lock import locked
from headstart.eval.prompts import load_prompts
from headstart.heads.errors import DataError

ONLY_FILES = ("data.distill.prompts=[]", "train.epochs=1")


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


#: mistake → (exit code, what is said)
MISTAKES = {
    "head.feature_layers=[1,2,3,5]": (2, "feature_layers"),
    "head.feature_layers=[1,2,99]": (2, "feature_layers"),
    "data.sources=[{path: gone.jsonl}]": (1, "gone.jsonl"),
    "data.sources=[{path: bad.jsonl}]": (1, "bad.jsonl:2"),
    "start_from=./gone": (1, "start_from ./gone"),
    "data.min_supervised=1000": (1, "min_supervised=1000"),
    "export.engines=[tgi]": (2, "TGI does not serve eagle3"),
    "export.dtype=float8": (2, "export.dtype"),
    "eval.data=gone.jsonl": (1, "gone.jsonl"),
    "eval.data=bad.jsonl": (1, "bad.jsonl:2"),
}


def test_a_mistake_after_training_touches_nothing(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "response": "b c"}\n{"prompt": \n')
    assert headstart("run", recipe, *ONLY_FILES).code == 0
    before = contents(tmp_path / "run")
    for mistake, (code, message) in MISTAKES.items():
        result = headstart("run", recipe, *ONLY_FILES, mistake)
        assert result.code == code and message in result.err, result.err
        assert contents(tmp_path / "run") == before
    assert "train: finished before" in headstart("run", recipe, *ONLY_FILES).err
    # words about other heads and data do not change what is told of the trained one; those about this step do
    other = ("head.depth=3", "data.pack_tokens=64", "data.sources=[]", "train.lr=0.5")
    assert headstart("eval", recipe, *other, "eval.max_new_tokens=4").code == 0
    exported = headstart("export", recipe, *ONLY_FILES, "head.depth=3", "train.lr=0.5", "export.dtype=float32")
    assert exported.code == 0, exported.err
    report, side = (json.loads((tmp_path / "run" / f).read_text()) for f in ("report.json", "export/headstart.json"))
    for told in (report["recipe"], side["recipe"]):
        assert told["head"]["depth"] == 2 and told["data"]["pack_tokens"] == 128 and told["train"]["lr"] == 1e-3
        assert told["data"]["sources"][0]["sha256"]
    assert report["recipe"]["eval"]["max_new_tokens"] == 4 and side["recipe"]["export"]["dtype"] == "float32"


def test_wrong_engines_and_data_are_told_before_training_and_before_the_target_is_loaded(
    headstart: Callable, recipe: Path, tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": 5}\n')
    (tmp_path / "head").mkdir()
    options = ("--target", tiny_target, "--head", tmp_path / "head")
    for words, code, message in (
        (("run", recipe, "export.engines=[tgi]"), 2, "TGI does not serve eagle3"),
        (("run", recipe, "train.tracker=wandb"), 2, "wandb is not installed"),
        (("run", recipe, "eval.data=bad.jsonl"), 1, "bad.jsonl:2"),
        (("run", recipe, "data.sources=[{path: bad.jsonl}]"), 1, "bad.jsonl:2"),
        (("run", recipe, "data.sources=[{path: bad.jsonl}]", "data.distill.prompts=[]"), 1, "bad.jsonl:2"),
        (("export", *options, "export.engines=[nonsense]"), 2, "export.engines: found ['nonsense']"),
        (("export", *options, "export.max_shard_size=9e400"), 2, "export.max_shard_size"),
        (("eval", *options, "--data", "bad.jsonl"), 1, "bad.jsonl:2"),
        (("tune", *options, "--data", "bad.jsonl"), 1, "bad.jsonl:2"),
    ):
        result = headstart(*words)
        assert result.code == code and message in result.err, result.err
        assert "loading target" not in result.err and "distill: 0" not in result.err
    assert not (tmp_path / "run/recipe.yaml").exists()


@pytest.mark.parametrize("failure", [RuntimeError("?"), MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_training_that_fails_at_once_gives_the_head_back(
    headstart: Callable, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    assert headstart("train", recipe, *ONLY_FILES).code == 0
    head, kept = contents(tmp_path / "run/head"), contents(tmp_path / "run/checkpoints")

    def broken(*_: object, **__: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr("headstart.train.loop.train", broken)
        with pytest.raises(RuntimeError) if str(failure) == "?" else nullcontext():
            result = headstart("train", recipe, *ONLY_FILES, "train.lr=0.1")
            assert result.code == 1 and "error: out of memory" in result.err and "data.pack_tokens" in result.err
    assert contents(tmp_path / "run/head") == head and contents(tmp_path / "run/checkpoints") == kept
    assert not list(tmp_path.glob("run/previous/*"))
    assert "train: finished before" in headstart("train", recipe, *ONLY_FILES).err


def test_an_export_that_fails_its_check_leaves_the_one_before(
    headstart: Callable, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert headstart("train", recipe, *ONLY_FILES).code == 0 and headstart("export", recipe, *ONLY_FILES).code == 0
    before = contents(tmp_path / "run/export")
    refused = headstart("export", recipe, *ONLY_FILES, "export.max_shard_size=200")
    assert refused.code == 1 and "export.max_shard_size" in refused.err, refused.err
    assert contents(tmp_path / "run/export") == before


def test_two_evaluations_do_not_mix_their_files(
    headstart: Callable, tiny_target: Path, prompts: Path, tmp_path: Path
) -> None:
    options = ("--target", tiny_target, "--data", prompts, "eval.drafter=ngram", "eval.max_new_tokens=2")
    with locked(tmp_path / "same", "--out"):
        for verb in ("eval", "tune"):
            second = headstart(verb, *options, "--out", tmp_path / "same")
            assert second.code == 1 and "another headstart command is working there" in second.err
            assert "--out" in second.err and "loading target" not in second.err
    assert headstart("eval", *options, "--out", tmp_path / "same").code == 0


def test_odd_names_do_not_throw_a_finished_evaluation_away(
    headstart: Callable, tiny_target: Path, tmp_path: Path
) -> None:
    """Refused when read, or written: never lost after the decoding."""
    read, data = [], tmp_path / "odd.jsonl"
    for text in ("half \udc80", "half \ud83d", "a\x00b\x1b[31m", "| `x` |\n# y", "_a $x_$ {", "x" * 1500):
        for name in ("task", "id", "category", "name", "meta", "note", "prompt"):
            line = json.dumps({"prompt": "Hello", name: {"a": text} if name == "meta" else text}) + "\n"
            data.write_text(line)
            try:
                load_prompts(str(data))
            except DataError as error:
                assert "odd.jsonl:1" in str(error)
            else:
                read.append(line)
    data.write_text("".join(read))
    options = ("--target", tiny_target, "eval.drafter=none", "eval.max_new_tokens=1", "--out", tmp_path / "r")
    result = headstart("eval", *options, "--data", data, "--json")
    assert result.code == 0 and result.json["prompts"] == len(read) > 0, result.err
    assert json.loads((tmp_path / "r/report.json").read_text())["prompts"] == len(read)
    assert (tmp_path / "r/report.md").is_file()
    assert headstart("report", tmp_path / "r").code == 0


def test_what_cannot_be_rendered_is_measured_all_the_same(
    headstart: Callable, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert headstart("train", recipe, *ONLY_FILES).code == 0

    def broken(*_: object, **__: object) -> None:
        raise ValueError("no such glyph")

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("headstart.eval.measuring.rendering.draw_plots", broken)
        first = headstart("eval", recipe, *ONLY_FILES)
    assert first.code == 0 and "no such glyph" in first.err and f"`headstart report {run}`" in first.err
    assert json.loads((run / "report.json").read_text())["tau"] >= 1 and not (run / "report.md").exists()
    measured = (run / "report.json").read_bytes()
    assert headstart("report", run).code == 0
    assert (run / "report.md").is_file() and (run / "acceptance.png").is_file()
    (run / "report.md").unlink()
    second = headstart("eval", recipe, *ONLY_FILES)  # the measurement counts as done; only the rendering is made again
    assert "eval: finished before" in second.err and (run / "report.md").is_file()
    assert (run / "report.json").read_bytes() == measured


def test_nothing_is_written_over(headstart: Callable, recipe: Path, tiny_target: Path, tmp_path: Path) -> None:
    """An earlier report is kept, a run's own is not replaced, and a model of somebody else is no place to export to."""
    assert headstart("train", recipe, *ONLY_FILES).code == 0
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    options = ("--target", tiny_target, "--data", "p.jsonl", "eval.drafter=none", "eval.max_new_tokens=1")
    refused = headstart("eval", *options, "--out", tmp_path / "run")
    assert refused.code == 2 and "found a run's directory" in refused.err and "loading target" not in refused.err
    assert headstart("eval", *options, "--out", "r").code == 0
    first = (tmp_path / "r/report.json").read_bytes()
    again = headstart("eval", *options, "--out", "r", "eval.seed=1")
    assert again.code == 0 and "is kept in r/previous/1-eval" in again.err
    assert (tmp_path / "r/previous/1-eval/report.json").read_bytes() == first
    assert (tmp_path / "r/report.json").read_bytes() != first
    before = contents(tiny_target)
    head = ("--head", tmp_path / "run/head", "--target", tiny_target)
    for place, message in ((tiny_target, "a model that Headstart did not export"), (tmp_path / "run/head", "itself")):
        refused = headstart("export", *head, "--out", place)
        assert refused.code == 2 and message in refused.err and "loading target" not in refused.err
    assert contents(tiny_target) == before
