"""Mistakes in measuring, tuning and exporting a saved head cost no load of the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headstart.heads.families import build_head
from headstart.heads.formats import save_head
from headstart.heads.targets.load import weightless_target
from headstart.heads.targets.target import TargetConfig
from headstart.recipes.load import load_recipe


@pytest.fixture
def head(recipe: Path, tiny_target: Path, tmp_path: Path) -> Path:
    """A directory with an EAGLE-3 head for the tiny target."""
    target = weightless_target(TargetConfig(name=str(tiny_target)))
    made = build_head(load_recipe(recipe).head, target.dims)
    made.draft_ids_U.copy_(torch.arange(64))
    save_head(made, tmp_path / "some-head", {"target": {"name": "tiny"}})
    return tmp_path / "some-head"


@pytest.fixture(autouse=True)
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.targets.load_target", lambda config: pytest.fail("the target was loaded"))


#: words of a command → what it says. HEAD, TARGET, DATA and RECIPE stand for what there is
CASES = {
    "eval, target": ("eval --head HEAD --target TARGETx --data DATA", "TARGETx"),
    "tune, target": ("tune --head HEAD --target TARGETx --data DATA", "TARGETx"),
    "export, target": ("export --head HEAD --target TARGETx", "TARGETx"),
    "check, target": ("export --check HEAD --target TARGETx", "TARGETx"),
    "run, target": ("run RECIPE target.name=TARGETx", "TARGETx"),
    "train, target": ("train RECIPE target.name=TARGETx", "TARGETx"),
    "eval, head": ("eval --head HEADx --target TARGET --data DATA", "HEADx: no such directory"),
    "eval, tree": (
        "eval --head HEAD --target TARGET --data DATA eval.tree.kind=ddtree",
        "eval.tree.kind: eagle3 drafts a chain or a dynamic tree",
    ),
    "eval, lookup": (
        "eval --target TARGET --data DATA eval.drafter=ngram eval.scheduler=on",
        "eval.scheduler: found true, but the host drafts",
    ),
    "eval, lookup of a recipe": (
        "eval RECIPE --data DATA eval.drafter=ngram eval.scheduler=on eval.synthetic_acceptance=0.5",
        "eval.scheduler: found true, but the host drafts",
    ),
    "eval, contexts": (
        "eval --head HEAD --target TARGET --data DATA eval.context_lengths=[4096]",
        "eval.context_lengths: found 4096",
    ),
    "eval, dtype": (
        "eval --head HEAD --target TARGET --data DATA eval.dtype=float16 target.dtype=float32",
        "eval.dtype: found 'float16', the target is loaded in float32",
    ),
    "tune, nothing": ("tune --target TARGET --data DATA eval.drafter=none", "tune: give a head, or eval.drafter=ngram"),
    "tune, context": ("tune --head HEAD --target TARGET --data DATA tune.context=9999", "tune.context: found 9999"),
    "tune, acceptance": (
        "tune --head HEAD --target TARGET --data DATA eval.synthetic_acceptance=0.5", "eval.synthetic_acceptance: tune"
    ),
    "export, engines": ("export --head HEAD --target TARGET export.engines=[vlm]", "export.engines: found ['vlm']"),
    "run, engines": ("run RECIPE export.engines=[vlm]", "export.engines: found ['vlm']"),
    "train, engines": ("train RECIPE export.engines=[vlm]", "export.engines: found ['vlm']"),
    "export, shards": (
        "export --head HEAD --target TARGET export.engines=[llama_cpp] export.max_shard_size=1KB", "max_shard_size"
    ),
    "run, head": ("run RECIPE head.dept=2", "head.dept"),
    "train, head": ("train RECIPE head.loss=soft", "head.loss"),
    "run, layers": ("run RECIPE head.feature_layers=[1,2,99]", "3 distinct ascending ids in 1 … 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_costs_no_load(
    name: str, headstart: Callable, head: Path, tiny_target: Path, prompts: Path, recipe: Path
) -> None:
    command, said = CASES[name]
    places = {"HEAD": head, "TARGET": tiny_target, "DATA": prompts, "RECIPE": recipe}
    for word, place in places.items():
        command, said = command.replace(word, str(place)), said.replace(word, str(place))
    result = headstart(*command.split())
    assert result.code in (1, 2), result.out
    assert said in " ".join(result.err.split()).replace("\n", " "), result.err


def test_a_head_of_another_target_costs_no_load(
    headstart: Callable, head: Path, tiny_target: Path, prompts: Path, tmp_path: Path
) -> None:
    from headstart.bench.target_checks import write_target

    other = write_target("Llama", tmp_path / "other")
    for verb in ("eval", "tune"):
        result = headstart(verb, "--head", head, "--target", other, "--data", prompts)
        assert result.code == 1 and "dims." in result.err, result.err
    result = headstart("export", "--head", head, "--target", other)
    assert result.code == 1 and "dims." in result.err, result.err
