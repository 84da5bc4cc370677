"""A run chooses the token that no text holds once, says so, and keeps it when it goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.console import Console
from headstart.heads.errors import ConfigError
from headstart.heads.targets.load import weightless_target
from headstart.heads.targets.target import TargetConfig
from headstart.pipeline.placeholder import keep_placeholder, settled_config
from headstart.pipeline.run import Run
from headstart.recipes.load import load_recipe
from headstart.refusals import planned_head

HEAD = ["data.distill.prompts=[]", "head={type: dflash, layers: 1, depth: 3}"]


@pytest.fixture
def roomy(tmp_path: Path, tiny_target: Path) -> Path:
    """The tiny target with five ids more than its tokenizer has tokens (259)."""
    place = tmp_path / "roomy"
    shutil.copytree(tiny_target, place, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(tiny_target)
    config.vocab_size = 264
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return place


class Said(Console):
    """A terminal that remembers."""

    def __init__(self) -> None:
        super().__init__(silent=True)
        self.lines: list[str] = []

    def say(self, text: str, style: str | None = None) -> None:
        self.lines.append(text)


def run_of(recipe: Path, *overrides: str) -> Run:
    return Run(load_recipe(recipe, [*HEAD, *overrides]), Said())


def settled(run: Run) -> int | None:
    return settled_config(run, run.recipe.head).placeholder_token


def test_it_is_chosen_once(recipe: Path, roomy: Path) -> None:
    run = run_of(recipe, f"target.name={roomy}")
    config = settled_config(run, run.recipe.head)
    assert config.placeholder_token == 259
    said = "head.mask_token_id: 259 (no token of the tokenizer), the first id that the tokenizer has no token for"
    assert said in run.console.lines
    keep_placeholder(run, config.with_placeholder(261))  # an earlier choice, which training has begun with
    assert settled(run_of(recipe, f"target.name={roomy}")) == 261
    # given by the recipe, and other data: the earlier choice says nothing
    assert settled(run_of(recipe, f"target.name={roomy}", "head.mask_token_id=260")) == 260
    assert settled(run_of(recipe, f"target.name={roomy}", "data.max_length=1024")) == 259


def test_the_plan_has_it_too(recipe: Path, roomy: Path) -> None:
    settings = load_recipe(recipe, [*HEAD, f"target.name={roomy}"])
    assert planned_head(settings, weightless_target(settings.target)).config.placeholder_token == 259


def test_a_token_of_the_data_is_refused(recipe: Path, tiny_target: Path, conversations: Path) -> None:
    tokenizer = weightless_target(TargetConfig(name=str(tiny_target))).tokenizer
    letter = tokenizer.encode("S", add_special_tokens=False)[0]
    with pytest.raises(ConfigError, match=rf"head.mask_token_id: found {letter} \('S'\), which occurs in the training"):
        settled(run_of(recipe, f"head.mask_token_id={letter}"))
    with pytest.raises(ConfigError, match=r"found null, and no token of the target .*set head.mask_token_id"):
        settled(run_of(recipe))  # each of its 259 ids is a byte's, or used by its chats


def test_a_command_refuses_an_end_token_before_work(recipe: Path, headstart) -> None:
    answer = headstart("plan", recipe, "--json", "--gpus", "1", *HEAD, "head.mask_token_id=2")
    assert answer.code != 0 and "which is the tokenizer's eos token" in answer.err + answer.out
    answer = headstart("inspect", recipe, "--json", *HEAD)
    assert answer.code != 0 and "set head.mask_token_id" in json.dumps(answer.out) + answer.err
