"""The draft vocabulary of a run: by the target's choices, of the size that a share asks for, kept when it goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headstart.console import Console
from headstart.heads.files import read_json
from headstart.heads.formats import load_head
from headstart.pipeline.data import prepare
from headstart.pipeline.run import Run
from headstart.pipeline.train import fresh_head
from headstart.recipes.load import load_recipe

ONLY_FILES = ("data.distill.prompts=[]", "train.epochs=1", "train.tau_prompts=0")
SHARE = "head.draft_vocab_size=0.8"


def votes_of(run: Run) -> list[int]:
    """The target's choice on every answer token of the training samples but the first of each."""
    votes = [0] * run.target.dims.vocab_size
    for sample in prepare(run).train:
        with torch.no_grad():
            logits_TV = run.target.model(torch.tensor([sample.token_ids.tolist()])).logits[0]
        for p in range(1, len(sample)):
            if sample.turn_ids[p] >= 0 and sample.turn_ids[p - 1] == sample.turn_ids[p]:
                votes[int(logits_TV[p - 1].argmax())] += 1
    return votes


def opened(recipe: Path, *overrides: str) -> Run:
    return Run(load_recipe(recipe, [*ONLY_FILES, *overrides]), Console(silent=True))


def chosen(recipe: Path, *overrides: str) -> list[int]:
    head = fresh_head(opened(recipe, *overrides))
    assert head.draft_ids_U is not None and head.config.draft_vocab_size == len(head.draft_ids_U)  # type: ignore
    return head.draft_ids_U.tolist()


def test_it_holds_what_the_target_chooses_however_the_features_are_made(recipe: Path, headstart: Callable) -> None:
    run = opened(recipe)
    votes, stop = votes_of(run), set(run.target.stop_token_ids)
    order = sorted(range(len(votes)), key=lambda token: (token not in stop, -votes[token], token))
    assert chosen(recipe) == sorted(order[:64]) == chosen(recipe, "data.features=memory")
    done = headstart("train", recipe, *ONLY_FILES, "data.features=stored")
    assert done.code == 0, done.err
    kept = read_json(run.dir / "data" / "draft_vocab.json")
    assert kept["ids"] == sorted(order[:64]) and kept["size"] == 64
    covered = sum(votes[token] for token in kept["ids"]) / sum(votes)
    assert f"64 of 259 tokens, {covered:.2%} of the target's choices on {sum(votes)} rows of answers" in done.err
    assert "of the target's probability; other rows do not train" in done.err


def test_a_small_vocabulary_is_told_what_it_costs(recipe: Path, headstart: Callable) -> None:
    done = headstart("train", recipe, *ONLY_FILES, "head.draft_vocab_size=3")
    assert done.code == 0, done.err
    assert "; a larger head.draft_vocab_size lets more rows train" in done.err


def test_a_share_decides_the_size_and_a_second_run_keeps_the_ids(recipe: Path, headstart: Callable) -> None:
    run = opened(recipe, SHARE)
    votes, stop = votes_of(run), set(run.target.stop_token_ids)
    order = sorted(range(len(votes)), key=lambda token: (token not in stop, -votes[token], token))
    fewest = next(n for n in range(1, 260) if sum(votes[t] for t in order[:n]) >= 0.8 * sum(votes))
    size = -(-fewest // 64) * 64
    first = headstart("train", recipe, *ONLY_FILES, SHARE)
    assert first.code == 0, first.err
    assert f"{size} of 259 tokens for a share of 0.8" in first.err
    head = load_head(run.dir / "head", run.target.dims)
    assert head.draft_vocab_size == size and head.draft_ids_U is not None
    assert head.draft_ids_U.tolist() == sorted(order[:size])
    config = json.loads((run.dir / "head" / "config.json").read_text())
    assert config["draft_vocab_size"] == size  # engines read a whole number
    shutil.rmtree(run.dir / "head")
    again = headstart("train", recipe, *ONLY_FILES, SHARE, "train.epochs=2")
    assert again.code == 0, again.err
    assert load_head(run.dir / "head", run.target.dims).draft_ids_U.tolist() == sorted(order[:size])  # type: ignore


def test_a_run_that_goes_on_keeps_its_vocabulary(recipe: Path) -> None:
    run, place = opened(recipe), Path(load_recipe(recipe).run_dir) / "data" / "draft_vocab.json"
    other, ids = chosen(recipe), list(range(64))
    assert other != ids
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps({"size": 64, "share": None, "data": run.inputs.data, "ids": ids}))
    assert chosen(recipe) == ids
    assert chosen(recipe, "head.draft_vocab_size=96") != list(range(96))  # another setting chooses anew
    assert chosen(recipe, "data.max_length=512") == other  # other data, too
    place.write_text(json.dumps({"size": 64, "share": None, "data": run.inputs.data, "ids": [5, 3]}))
    assert chosen(recipe) == other


def test_a_run_of_an_earlier_version_keeps_the_vocabulary_of_its_data(recipe: Path) -> None:
    """Such a run has checkpoints and no file of its vocabulary, which was chosen from the data's tokens."""
    run = opened(recipe)
    counts = [0] * 259
    for sample in prepare(run).train:
        for token, turn in zip(sample.token_ids.tolist(), sample.turn_ids.tolist(), strict=True):
            counts[token] += turn >= 0
    stop = set(run.target.stop_token_ids)
    order = sorted(range(259), key=lambda token: (token not in stop, -counts[token], token))
    (run.dir / "checkpoints" / "step-00000002").mkdir(parents=True)
    assert chosen(recipe) == sorted(order[:64])
    assert chosen(recipe, "train.resume=false") != sorted(order[:64])


def test_special_tokens_that_answers_hold_are_forced_in(
    recipe: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """<|im_start|> is an added token: answers that hold it keep it, however rare; <|endoftext|> occurs nowhere."""
    from headstart.pipeline.draft_vocab import forced_tokens

    target = opened(recipe).target
    count_V = torch.zeros(259, dtype=torch.int64)
    assert forced_tokens(target, count_V) == tuple(target.stop_token_ids)
    count_V[1] = 1
    assert set(forced_tokens(target, count_V)) == {*target.stop_token_ids, 1}


def test_a_plan_says_that_the_data_decides(recipe: Path, headstart: Callable) -> None:
    planned = headstart("plan", recipe, *ONLY_FILES, SHARE, "--json", "--gpus", "1")
    assert planned.code == 0, planned.err
    (note,) = (note for note in planned.json["notes"] if "draft_vocab_size" in note)
    assert "0.8 is a share" in note and "256 tokens" in note
    most = headstart("plan", recipe, *ONLY_FILES, "head.draft_vocab_size=256", "--json", "--gpus", "1").json
    assert planned.json["memory"]["head weights"] == most["memory"]["head weights"]
    assert not [note for note in most["notes"] if "draft_vocab_size" in note]


@pytest.mark.parametrize("size", ["1.0", "1.5", "-3", "true", ".nan"])
def test_other_values_are_refused(recipe: Path, headstart: Callable, size: str) -> None:
    wrong = headstart("train", recipe, *ONLY_FILES, f"head.draft_vocab_size={size}")
    assert wrong.code == 2 and "head.draft_vocab_size: found" in wrong.err and "expected" in wrong.err


def test_a_head_that_training_goes_on_from_has_its_size(recipe: Path, headstart: Callable, tmp_path: Path) -> None:
    assert headstart("train", recipe, *ONLY_FILES).code == 0
    more = (f"start_from={tmp_path}/run/head", f"run_dir={tmp_path}/on", *ONLY_FILES)
    wrong = headstart("train", recipe, *more, SHARE)
    assert wrong.code == 2 and "head.draft_vocab_size=64" in wrong.err
