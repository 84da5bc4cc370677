"""A block head from a recipe to a decoded answer: trained, evaluated, exported, trained further."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM


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


def recipe_for(recipe: Path, family: str, target: Path) -> Path:
    """The recipe with a small block head, on the conversations alone, with checkpoints at every second step."""
    text = recipe.read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("head:", "target:", "  distill:"))]
    head = f"head: {{type: {family}, depth: 3, layers: 1, intermediate_size: 32, anchor_share: 0.2}}"
    recipe.write_text("\n".join([*lines, head, f"target: {{name: {target}}}", ""]))
    return recipe


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_train_evaluate_export(family: str, headstart: Callable, recipe: Path, roomy: Path, tmp_path: Path) -> None:
    place, common = recipe_for(recipe, family, roomy), ("train.epochs=null", "train.schedule=constant")
    trained = headstart("train", place, *common, "train.steps=4", "--json")
    assert trained.code == 0, trained.err
    assert "head.mask_token_id: 259 (no token of the tokenizer)" in trained.err
    kept = json.loads((tmp_path / "run/data/placeholder.json").read_text())
    assert kept["token"] == 259
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    names = {name for record in records for name in record}
    # drawn anchors are not walked: training shows each draft's accuracy, validation walks all anchors
    assert names >= {"train/acc_1", "train/acc_3", "valid/acc_1", "valid/walked_tau", "valid/tau", "valid/coverage"}
    assert "train/walked_tau" not in names
    assert " walked" in trained.err
    config = json.loads((tmp_path / "run/head/config.json").read_text())
    assert "259" in json.dumps(config)

    answer = headstart("eval", place, *common, "train.steps=4", "eval.tree.depth=3", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["greedy_identity"]["identical"] == answer.json["greedy_identity"]["sequences"] > 0
    assert answer.json["tree"]["label"] == "chain3"
    exported = headstart("export", place, *common, "train.steps=4", "export.engines=[vllm]", "--json")
    assert exported.code == 0, exported.err
    # going on from this head takes its token
    more = headstart(
        "train", place, *common, "train.steps=1", f"start_from={tmp_path}/run/head", f"run_dir={tmp_path}/more"
    )
    assert more.code == 0, more.err
    other_token = ("head.mask_token_id=260", f"start_from={tmp_path}/run/head", f"run_dir={tmp_path}/more")
    refused = headstart("train", place, *common, "train.steps=1", *other_token)
    assert refused.code != 0 and "head.mask_token_id=259" in refused.err
    layout = ("head.sample_from_anchor=" + ("true" if family == "dflash" else "false"), *other_token[1:])
    refused = headstart("train", place, *common, "train.steps=1", *layout)
    assert refused.code != 0 and "head.sample_from_anchor=" in refused.err


def test_a_plan_says_how_many_rows_a_step_trains(headstart: Callable, recipe: Path, roomy: Path) -> None:
    place = recipe_for(recipe, "dflash", roomy)
    stated = ("--samples", "1000", "--mean-tokens", "64", "data.pack_tokens=1000")
    assert "trains the head at 200 of a pack's 1000 supervised rows" in headstart("plan", place, *stated).out
    assert "trains the head at" not in headstart("plan", place, *stated, "head.anchor_share=1").out


@pytest.mark.parametrize(
    "family, field", [("dflash", "kl_weight"), ("dspark", "ce_weight"), ("dspark", "confidence_weight")]
)
@pytest.mark.parametrize("weight", ["-0.1", ".nan", ".inf"])
def test_weights_of_losses_are_numbers_above_or_at_zero(
    headstart: Callable, recipe: Path, tiny_target: Path, family: str, field: str, weight: str
) -> None:
    refused = headstart("plan", recipe_for(recipe, family, tiny_target), "--samples", "10", f"head.{field}={weight}")
    assert refused.code == 2
    assert f"head.{field}: found {float(weight.lstrip('.'))}, expected a finite number, 0 or more" in refused.err
