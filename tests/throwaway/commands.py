"""From a recipe of each family to an export, by the command line (in the house of edits.py: in tests/scripts)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from headstart.heads.formats import load_head
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import TargetConfig

#: what only this family logs
OWN_METRICS = {
    "miniblock": {"train/confidence_right", "valid/confidence_right", "valid/loss_tokens", "valid/loss_confidence"},
    "minimodel": {"valid/loss_1"},
}


@pytest.mark.parametrize("family", OWN_METRICS)
def test_from_plan_to_export(headstart: Callable, recipe: Path, tmp_path: Path, tiny_target: Path, family: str) -> None:
    options = (recipe, f"head.type={family}", "export.engines=[portable]", "--json")
    plan = headstart("plan", *options)
    assert plan.code == 0 and plan.json["steps"] > 0 and plan.json["memory"]["head activations"] > 0, plan.err

    made = headstart("run", *options)
    assert made.code == 0, made.err
    assert made.json["train"]["step"] > 10
    identity = made.json["eval"]["greedy_identity"]
    assert identity["identical"] == identity["sequences"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {"train/acc_1", "valid/walked_tau", "valid/tau", *OWN_METRICS[family]} <= {n for line in lines for n in line}
    if family == "miniblock":  # every term by its weight
        valid = [line for line in lines if "valid/loss_tokens" in line]
        assert [line["valid/loss"] for line in valid] == pytest.approx(
            [line["valid/loss_tokens"] + 0.5 * line["valid/loss_confidence"] for line in valid]
        )
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert sum(losses[-3:]) < sum(losses[:3])

    assert f"vLLM does not draft with {family} heads" in made.err
    check = headstart("export", "--check", tmp_path / "run/export")
    assert check.code == 1 and "Headstart compact" in check.out + check.err
    refused = headstart("export", *options, "export.engines=[vllm]")
    assert refused.code == 2 and f"vLLM does not serve {family} heads" in refused.err

    tensors = load_file(tmp_path / "run/head/model.safetensors")
    head = load_head(tmp_path / "run/head")
    head.bind(load_target(TargetConfig(name=str(tiny_target), dtype="float32")).ends)
    # neither saved nor trained: the target's own
    assert {*head.state_dict()} == {*tensors}
    assert head.trained_parameters() == sum(tensor.numel() for tensor in tensors.values())


def test_the_draft_model_holds_a_module_of_the_target(tiny_target: Path) -> None:
    from headstart.heads.families.minimodel.head import MiniModelConfig, MiniModelHead

    target = load_target(TargetConfig(name=str(tiny_target), dtype="float32"))
    head = MiniModelHead(MiniModelConfig(), target.dims)
    before = head.trained_parameters(), [*head.state_dict()]
    head.bind(target.ends)
    (held,) = head.model.get_input_embeddings().held
    assert held is target.model.get_input_embeddings()
    assert before == (head.trained_parameters(), [*head.state_dict()])
