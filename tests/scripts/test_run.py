"""`headstart run` from conversations to an exported head on a tiny random target."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file
from train_fakes import forked

from headstart.cli import main
from headstart.data.choosing.split import Split
from headstart.data.memory import MemoryFeatures
from headstart.data.prepare import PreparedData, TokenizeReport
from headstart.data.samples import Sample
from headstart.directory_lock import locked
from headstart.eval.measuring.verdict import lines_of
from headstart.heads.errors import ConfigError, TrainingError
from headstart.heads.provenance import git_revision
from headstart.pipeline.data import held_out_prompts
from headstart.pipeline.markers import Begin
from headstart.pipeline.run import Run


def test_features_in_memory_are_gone_when_training_is_over(
    headstart: Callable, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation needs their memory."""
    made: list[weakref.ref] = []
    alive: list[int] = []

    def kept(*args: Any, **more: Any) -> MemoryFeatures:
        features = MemoryFeatures(*args, **more)
        made.append(weakref.ref(features._hidden_RD))
        return features

    def measure(run: Run, data: str, begin: Begin) -> None:
        gc.collect()
        alive.append(sum(features() is not None for features in made))
        raise ConfigError("measuring is not what is tested")

    monkeypatch.setattr("headstart.pipeline.features.MemoryFeatures", kept)
    monkeypatch.setattr("headstart.pipeline.evaluate._measure", measure)
    result = headstart("run", recipe, "data.features=memory")
    assert "measuring is not what is tested" in result.err and made and alive == [0]


@pytest.mark.usefixtures("real_figures")
def test_every_step_runs_and_a_second_run_does_nothing(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    first = headstart("run", recipe, "--json")
    assert first.code == 0, first.err
    run = tmp_path / "run"
    made = ("recipe.yaml", "data/distilled.jsonl", "data/held_out.jsonl", "data/report.json", "checkpoints",
            "head/model.safetensors", "report.json", "report.md", "report.html", "metrics.jsonl", "export")  # fmt: skip
    assert [name for name in made if not (run / name).exists()] == []
    for name in ("acceptance.png", "tasks.png"):  # drawn: neither empty nor cut
        assert (run / name).stat().st_size > 5000 and (run / name).read_bytes().endswith(b"IEND\xaeB`\x82")
    assert first.json["run_dir"] == str(run)
    assert first.json["train"]["stopped"] == "epochs"
    assert first.json["eval"]["greedy_identity"]["identical"] == first.json["eval"]["greedy_identity"]["sequences"] == 2

    assert "draft vocabulary: it holds the right token on " in first.err
    assert "; a larger head.draft_vocab_size" not in first.err  # 64 of 259 tokens, but those that the target chooses
    assert "answer tokens are the target's own greedy choice" in first.err
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {name for record in records for name in record}
    assert names >= {"train/walked_tau", "train/coverage", "valid/walked_tau", "valid/coverage", "valid/tau"}
    kept = json.loads((run / "data/report.json").read_text())["split"]
    assert kept["held_out_prompts"] < 20 and kept["copies"] == []
    assert f"WARNING: fewer than 20 different held-out prompts ({kept['held_out_prompts']})" in first.err

    answers = [json.loads(line) for line in (run / "data/distilled.jsonl").read_text().splitlines()]
    assert sorted(answer["id"] for answer in answers) == ["p0", "p1"]
    held = [json.loads(line) for line in (run / "data/held_out.jsonl").read_text().splitlines()]
    # every held-out prompt ends where the assistant begins to speak
    assert held and all(record["prompt_token_ids"][-1] not in (1, 2) for record in held)
    report = json.loads((run / "report.json").read_text())
    assert report["schema"] == 1 and report["git_revision"] == git_revision()
    assert report["recipe"]["head"]["depth"] == 2
    resolved = yaml.safe_load((run / "recipe.yaml").read_text())
    assert resolved["train"]["epochs"] == 2 and resolved["name"] == "tiny"

    sidecar = json.loads((run / "export/headstart.json").read_text())
    assert sidecar["provenance"]["serving_parity"]["passed"] and sidecar["recipe"]["head"]["depth"] == 2

    # a CPU's clock says nothing of serving: the verdict goes by τ, and launch commands keep the usual length
    verdict = report["verdict"]
    assert verdict == first.json["eval"]["verdict"] and verdict["speedup"] is verdict["tokens"] is None
    assert "only τ carries over to it" in verdict["says"][0] and report["device_type"] == "cpu"
    assert sidecar["measured"]["on_cpu"] and sidecar["measured"]["pays"] == verdict["pays"]
    assert "# measured on a CPU only" in first.err or "# no draft was accepted" in first.err
    assert (run / "report.md").read_text().split("\n\n")[1].startswith("**Verdict: ")
    assert report["cut"]["answers"] == 2

    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")}
    shown = headstart("run", recipe).out.splitlines()
    ending = lines_of(verdict)
    assert shown[-len(ending) :] == ending and max(map(len, ending)) <= 80

    second = headstart("run", recipe, "--json")
    assert second.code == 0
    for step in ("distill", "train", "eval", "export"):
        assert f"{step}: finished before" in second.err
    assert "loading target" not in second.err  # nothing to do needs no model
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")} == before
    assert second.json["eval"] == first.json["eval"]


def test_a_headline_of_cut_answers_says_what_longer_ones_give(
    headstart: Callable, recipe: Path, prompts: Path, tmp_path: Path
) -> None:
    assert headstart("train", recipe, "data.distill.prompts=[]").code == 0
    words = ("data.distill.prompts=[]", f"eval.data={prompts}", "eval.max_new_tokens=2")
    shown = headstart("eval", recipe, *words, "longer_answers=24")
    assert shown.code == 0, shown.err
    report = json.loads((tmp_path / "run/report.json").read_text())
    longer = report["longer"]
    assert report["cut"]["cut"] == 2 and longer["max_new_tokens"] == 24 and longer["answers"] == 2
    # the same as an evaluation of longer answers measures
    whole = headstart("eval", recipe, *words[:2], "eval.max_new_tokens=24", "--json").json
    assert longer["tau"] == pytest.approx(whole["tau"]) and longer["cut"] == whole["cut"]["cut"]
    said = " ".join(shown.out.split())
    assert f"2 of 2 answers cut at 2 tokens, τ {longer['tau']:.2f} with up to 24" in said
    assert "with up to 24 tokens" in said and "was not measured" not in said
    assert "longer" in report and whole["longer"] is None
    refused = headstart("eval", recipe, *words, "longer_answers=2")
    assert refused.code == 2 and "longer_answers: found 2, expected more than eval.max_new_tokens=2" in refused.err


def test_answers_of_a_limited_time_stay_when_more_time_is_given(
    headstart: Callable, recipe: Path, tmp_path: Path
) -> None:
    path, options = tmp_path / "run/data/distilled.jsonl", ("distill", recipe, "data.distill.batch_size=1")
    first = headstart(*options, "data.distill.max_seconds=1e-6")
    assert first.code == 0 and "data.distill.max_seconds=1e-06 are over: 1 of 2 answers" in first.err
    made = path.read_text()
    assert made.count("\n") == 1
    second = headstart(*options)
    assert second.code == 0 and "distill: continues with other settings" in second.err
    assert path.read_text().startswith(made) and path.read_text().count("\n") == 2


def test_training_follows_the_answers_and_not_the_time_they_took(
    headstart: Callable, recipe: Path, tmp_path: Path
) -> None:
    options = (recipe, "data.distill.batch_size=1", "train.epochs=1")
    short, plenty = "data.distill.max_seconds=1e-6", "data.distill.max_seconds=60"
    assert headstart("train", *options, short).code == 0
    assert "train: finished before" in headstart("train", *options, short).err
    assert headstart("distill", *options, plenty).code == 0
    more = headstart("train", *options, short)  # the same command, and another answer is there
    assert more.code == 0 and "train: done again" in more.err, more.err
    for limit in (plenty, "data.distill.max_seconds=null"):
        again = headstart("train", *options, limit)
        assert again.code == 0 and "train: finished before" in again.err, again.err


def test_changed_inputs_redo_what_depends_on_them_and_keep_the_old_head(
    headstart: Callable, recipe: Path, tmp_path: Path
) -> None:
    assert headstart("run", recipe).code == 0
    old = load_file(tmp_path / "run/head/model.safetensors")
    again = headstart("run", recipe, "eval.max_new_tokens=4")
    assert again.code == 0 and "train: finished before" in again.err
    assert "eval: done again, its inputs changed (eval.max_new_tokens: 8 → 4)" in again.err
    again = headstart("run", recipe, "train.lr=2e-3")
    assert again.code == 0, again.err
    assert "distill: finished before" in again.err
    assert "train: done again, its inputs changed (train.lr: 0.001 → 0.002)" in again.err
    assert "eval: done again" in again.err and "export: done again" in again.err
    kept = load_file(next((tmp_path / "run/previous").glob("*-train")) / "head/model.safetensors")
    assert all((kept[name] == old[name]).all() for name in old)
    new = load_file(tmp_path / "run/head/model.safetensors")
    assert any((new[name] != old[name]).any() for name in old)
    # a version that split otherwise held out what this one would train on
    marker = tmp_path / "run/steps/train.json"
    found = json.loads(marker.read_text())
    del found["inputs"]["data"]["split"]
    marker.write_text(json.dumps(found))
    again = headstart("train", recipe, "train.lr=2e-3")
    assert again.code == 0, again.err
    changed = 'data.split: null → "first prompt, without near copies"'
    assert f"train: done again, its inputs changed ({changed})" in again.err


def test_stored_features_train_the_same_head(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    assert headstart("train", recipe).code == 0
    stored = headstart("train", recipe, "data.features=stored", f"run_dir={tmp_path}/stored")
    assert stored.code == 0, stored.err
    assert (tmp_path / "stored/features/train/manifest.json").is_file()
    online, offline = (load_file(tmp_path / run / "head/model.safetensors") for run in ("run", "stored"))
    for name, value in online.items():
        assert (value.float() - offline[name].float()).abs().max() < 1e-4, name


def test_a_run_stopped_after_storing_features_continues_with_them(
    headstart: Callable, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("headstart.train.loop.train", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
        stopped = headstart("run", recipe, "data.features=stored")
    assert stopped.code == 130 and "the same command continues" in stopped.err
    again = headstart("run", recipe, "data.features=stored")
    assert again.code == 0, again.err
    for message in ("distill: finished before", "features: finished before", "train: continues"):
        assert message in again.err


def test_what_errors_advise_continues_the_run_and_starting_anew_keeps_it(
    headstart: Callable, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise TrainingError("non-finite loss")

    with monkeypatch.context() as patch:
        patch.setattr("headstart.train.loop.TrainingLoop._finish", stop)
        assert headstart("train", recipe).code == 1
    remedies = ("train.nonfinite=skip", "train.select=best", "train.lr=5e-4", "train.clip_norm=0.1")
    advised = (*remedies, "train.eval_every=0", "train.tau_prompts=0", "train.epochs=3")
    again = headstart("train", recipe, *advised, "--json")
    assert again.code == 0, again.err
    assert "train: continues with other settings (train.clip_norm: 0.5 → 0.1" in again.err
    assert "NOTE: train.lr was 0.001 until here, is 0.0005 from now on" in again.err
    assert again.json["resumed_from"] > 0 and not (tmp_path / "run/previous").exists()
    assert "finished before" in headstart("train", recipe, *advised).err
    head = (tmp_path / "run/head/model.safetensors").read_bytes()
    anew = headstart("train", recipe, *advised, "train.resume=false", "--json")
    assert anew.code == 0 and anew.json["resumed_from"] == 0
    kept = tmp_path / "run/previous/1-train"
    assert "done again, as asked (train.resume=false)" in anew.err and f"kept in {kept}" in anew.err.replace("\n", "")
    assert (kept / "head/model.safetensors").read_bytes() == head and (kept / "metrics.jsonl").is_file()
    assert (kept / "checkpoints/latest").is_file()
    other = headstart("train", recipe, *advised, "train.seed=7", "--json")
    assert other.code == 0 and other.json["resumed_from"] == 0 and (tmp_path / "run/previous/2-train").is_dir()


def start(place: Path, *arguments: str | Path) -> ForkProcess:
    """The command line in a process of its own that has written a checkpoint; its words go to `stderr` in `place`."""

    def work() -> None:
        code = main([str(argument) for argument in arguments])
        sys.stderr.flush()
        os._exit(code)

    process = forked(work, place / "stderr")
    deadline = time.monotonic() + 240
    while not list((place / "run/checkpoints").glob("step-*")):
        assert process.is_alive() and time.monotonic() < deadline, (place / "stderr").read_text()
        time.sleep(0.01)
    return process


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_killed_run_continues_to_the_same_head(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    settings = ("train.epochs=8", "train.save_every=5", "train.tau_prompts=0")
    process = start(tmp_path, "train", recipe, *settings)
    process.kill()
    process.join()
    assert not (tmp_path / "run/head").exists()
    resumed = headstart("train", recipe, *settings, "--json")
    assert resumed.code == 0, resumed.err
    assert "train: continues" in resumed.err and resumed.json["resumed_from"] > 0
    assert headstart("train", recipe, *settings, f"run_dir={tmp_path}/whole").code == 0
    one, other = (load_file(tmp_path / run / "head/model.safetensors") for run in ("run", "whole"))
    assert all((one[name] == other[name]).all() for name in other)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_saves_and_the_run_continues(
    headstart: Callable, recipe: Path, tmp_path: Path, number: int, code: int
) -> None:
    settings = ("train.epochs=400", "train.save_every=5", "train.tau_prompts=0")
    process = start(tmp_path, "train", recipe, *settings)
    os.kill(process.pid, number)
    process.join(timeout=120)
    assert process.exitcode == code
    err = (tmp_path / "stderr").read_text()
    assert "Traceback" not in err and "the same command continues" in err
    resumed = headstart("train", recipe, *settings, "train.max_seconds=1", "--json")
    assert resumed.code == 0, resumed.err


def test_two_commands_do_not_share_a_run_directory(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "run", "run_dir=…"):
        refused = headstart("run", recipe)
    assert refused.code == 1 and "another headstart command is working there" in refused.err


def test_held_out_prompts_with_several_answers_are_decoded_once() -> None:
    def sample(name: str, prompt: list[int], answer: int) -> Sample:
        turns = np.array([-1] * len(prompt) + [0, 0], np.int32)
        return Sample(name, np.array([*prompt, answer, 2], np.int32), turns)

    held = [sample("a", [5, 6], 7), sample("b", [5, 6], 8), sample("c", [5], 7)]
    data = PreparedData(Split([], held), TokenizeReport())
    assert [each.id for each in held_out_prompts(data)] == ["a", "c"]
