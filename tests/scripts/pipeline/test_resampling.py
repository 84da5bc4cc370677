"""`data.resampled_copies` in a run: what trains, what keeps to the originals, resuming, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from headstart.console import Console
from headstart.data.ranks import Ranks
from headstart.pipeline.data import counted_samples, prepare, trained_samples
from headstart.pipeline.features import data_tokens
from headstart.pipeline.resampling import make_copies, samples_with_copies
from headstart.pipeline.run import Run
from headstart.plan import Launch, data_of
from headstart.recipes.load import load_recipe

BARE = ["data.distill.prompts=[]", "train.tau_prompts=0"]
COPIES = [*BARE, "data.resampled_copies=2", "data.resampled_share=0.3"]


def run_of(recipe: Path, *overrides: str) -> Run:
    return Run(load_recipe(recipe, [*COPIES, *overrides]), Console(silent=True))


@pytest.mark.parametrize("features", ["online", "memory", "stored"])
def test_a_run_trains_on_the_copies_and_says_so(headstart: Callable, recipe: Path, tmp_path: Path, features: str):
    plain = headstart("train", recipe, *BARE, f"run_dir={tmp_path}/plain", "--json").json
    result = headstart("train", recipe, *COPIES, f"data.features={features}", "--json")
    trained = result.json
    assert trained["step"] > 2 * plain["step"], "two epochs of three times as many samples"
    said = [line for line in result.err.splitlines() if "resampled copies, 2 of each training sample" in line]
    assert len(said) == 1
    report = json.loads((tmp_path / "run/data/report.json").read_text())["statistics"]
    bare = json.loads((tmp_path / "plain/data/report.json").read_text())["statistics"]
    assert report["samples"] == bare["samples"] and report["own_choice"]["tokens"] == bare["own_choice"]["tokens"]
    assert (tmp_path / "run/data/held_out.jsonl").read_text() == (tmp_path / "plain/data/held_out.jsonl").read_text()
    if features == "memory":
        again = headstart("train", recipe, *COPIES, f"data.features={features}", "--json")
        assert again.code == 0 and "resampled" not in again.err, "a head that is done is kept"


def test_a_resumed_run_ends_with_the_same_head(headstart: Callable, recipe: Path, tmp_path: Path, one_thread: None):
    whole = headstart("train", recipe, *COPIES, "train.epochs=null", "train.steps=6", f"run_dir={tmp_path}/whole")
    part = headstart("train", recipe, *COPIES, "train.epochs=null", "train.steps=6", "train.keep=9")
    assert whole.code == part.code == 0
    for step in (tmp_path / "run/checkpoints").glob("step-*"):  # as if it had been stopped after four steps
        if int(step.name.removeprefix("step-")) > 4:
            for file in sorted(step.rglob("*"), reverse=True):
                file.unlink() if file.is_file() else file.rmdir()
            step.rmdir()
    (tmp_path / "run/steps/train.json").unlink()
    (tmp_path / "run/head/model.safetensors").unlink()
    resumed = headstart("train", recipe, *COPIES, "train.epochs=null", "train.steps=6", "train.keep=9")
    assert resumed.code == 0 and "step 4" in resumed.err
    expected, found = (load_file(tmp_path / name / "head/model.safetensors") for name in ("whole", "run"))
    assert expected.keys() == found.keys() and all(found[name].equal(expected[name]) for name in expected)


def test_lengths_are_known_without_the_target(recipe: Path):
    run = run_of(recipe)
    originals, counted, held_out = trained_samples(run), counted_samples(run), prepare(run).held_out
    shape = data_of(run, Launch())
    samples = samples_with_copies(run)
    assert samples is samples_with_copies(run) and samples[: len(originals)] == originals
    assert [(len(s), s.supervised) for s in samples] == [(len(s), s.supervised) for s in counted]
    assert any(s.token_ids.tolist() != c.token_ids.tolist() for s, c in zip(samples, counted, strict=True))
    assert prepare(run).held_out == held_out and trained_samples(run) == originals
    tokens = 3 * sum(map(len, originals))
    assert data_tokens(run) == tokens + sum(map(len, held_out))
    assert (shape.tokens, shape.samples) == (tokens, len(originals))
    stated, bare = (data_of(each, Launch(samples=50)) for each in (run, run_of(recipe, "data.resampled_copies=0")))
    assert (stated.tokens, stated.samples) == (3 * bare.tokens, 50)


def test_the_share_of_no_copies_changes_no_input(recipe: Path):
    def data(copies: int, share: float) -> object:
        return run_of(recipe, f"data.resampled_copies={copies}", f"data.resampled_share={share}").inputs.data

    assert data(0, 0.3) == data(0, 0.15) and "resampled_share" not in json.dumps(data(0, 0.3))
    assert data(2, 0.3) != data(2, 0.15) != data(0, 0.15)


def test_features_of_another_share_are_stored_anew(headstart: Callable, recipe: Path):
    stored = [*COPIES, "data.features=stored"]
    assert headstart("train", recipe, *stored).code == 0
    again = headstart("train", recipe, *stored, "data.resampled_share=0.6")
    assert again.code == 0 and "resampled_share: 0.3 → 0.6" in again.err, again.err
    assert "features: done again" in again.err


def test_the_draft_vocabulary_keeps_to_the_originals(headstart: Callable, recipe: Path, tmp_path: Path):
    chosen = []
    for name, settings in (("plain", BARE), ("copies", COPIES)):
        more = ["data.features=memory", f"run_dir={tmp_path}/{name}", "train.epochs=null", "train.steps=4"]
        assert headstart("train", recipe, *settings, *more).code == 0
        chosen.append(json.loads((tmp_path / name / "data/draft_vocab.json").read_text())["ids"])
    assert chosen[0] == chosen[1]


def test_ranks_that_drew_other_tokens_take_those_of_the_first(recipe: Path):
    runs = [run_of(recipe) for _ in range(2)]
    for run in runs:
        make_copies(run)
    first = [sample.token_ids.tolist() for sample in samples_with_copies(runs[0])]
    other = samples_with_copies(runs[1])
    text = other[-1].token_ids.copy()
    text[-3] += 1
    runs[1].resampled = [*other[:-1], replace(other[-1], token_ids=text)]
    barrier, given = threading.Barrier(2), [None, None]

    def work(rank: int) -> None:
        def gather(value: object) -> list:
            given[rank] = value
            barrier.wait(20)
            found = list(given)
            barrier.wait(20)
            return found

        make_copies(runs[rank], Ranks(rank, 2, gather))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [[sample.token_ids.tolist() for sample in samples_with_copies(run)] for run in runs] == [first, first]


@pytest.mark.parametrize(
    "settings, found",
    [
        (["target.parallel=fsdp2"], "target.parallel=fsdp2"),
        (["head={type: medusa, depth: 2}", "joint.enabled=true"], "joint.enabled=true"),
        (["head={type: medusa, depth: 2, loss: ce}"], "head.loss=ce"),
        (["head={type: hydra, depth: 2, loss: ce}"], "head.loss=ce"),
        (["head={type: dflash, depth: 2, mask_token_id: 258, ce_weight: 0.5}"], "head.ce_weight=0.5"),
        (
            ["head={type: dflash2, depth: 2, mask_token_id: 258, ce_weight: 0, kl_weight: 1, conv_group: 8}"],
            "head.select_weight=1",
        ),
    ],
)
def test_what_cannot_have_copies_is_refused_first(headstart: Callable, recipe: Path, settings: list[str], found: str):
    result = headstart("plan", recipe, *COPIES, *settings, "--gpus", "2" if "fsdp2" in found else "1")
    assert result.code == 2 and f"data.resampled_copies: found 2 with {found}, expected 0" in result.err


@pytest.mark.parametrize(
    "head",
    ["{type: medusa, depth: 2}", "{type: dflash, depth: 2, mask_token_id: 258, ce_weight: 0, kl_weight: 1}"],
    ids=["medusa", "dflash"],
)
def test_a_loss_that_learns_the_distribution_has_copies(headstart: Callable, recipe: Path, head: str):
    result = headstart("plan", recipe, *COPIES, f"head={head}", "--gpus", "1")
    assert result.code == 0, result.err
