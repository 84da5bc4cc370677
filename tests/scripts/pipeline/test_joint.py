"""Joint training as a step of a run: what is saved, what it is for, what it depends on, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.console import Console
from headstart.heads.files import read_json
from headstart.heads.formats.loading import load_head
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import TargetConfig
from headstart.pipeline.run import Run
from headstart.pipeline.train import train
from headstart.recipes.load import load_recipe

Call = Callable[..., Any]
JOINT = "joint: {enabled: true, rank: 4, alpha: 8, loss: ce, weight: 0.5, schedule: linear}"


@pytest.fixture
def recipe(tmp_path: Path, tiny_target: Path, conversations: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(f"""
run_dir: {tmp_path}/run
target: {{name: {tiny_target}}}
head: {{type: medusa, depth: 2, lm_head: own, loss: ce}}
data: {{sources: [{{path: {conversations}}}], held_out_fraction: 0.2, pack_tokens: 128}}
train: {{steps: 8, lr: 5e-3, warmup_steps: 1, log_every: 1, tau_prompts: 2, tau_tokens: 8}}
eval: {{limit: 2, max_new_tokens: 8, warmup_tokens: 0, tree: {{depth: 2}}}}
{JOINT}
""")
    return path


def test_head_and_adapter_are_saved_and_belong_together(recipe, headstart: Call, tmp_path, tiny_target):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert headstart("train", recipe).code == 0
    head_dir = tmp_path / "run" / "head"
    plain = load_target(TargetConfig(str(tiny_target), device="cpu"))
    tuned = load_target(TargetConfig(str(tiny_target), adapter=str(head_dir / "adapter"), device="cpu"))
    tokens = torch.arange(40)[None] % 200
    with torch.no_grad():
        before, after = (target.model(tokens).logits for target in (plain, tuned))
        base = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
        through_peft = PeftModel.from_pretrained(base, str(head_dir / "adapter")).eval()(tokens).logits
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(through_peft, after, rtol=0, atol=1e-4)

    side = read_json(head_dir / "headstart.json")
    said, found = side["target"], tuned.fingerprint()
    assert said["base_weight_hash"] == plain.weight_hash() and said["adapter_digest"] == found["adapter_digest"]
    assert side["recipe"]["joint"]["enabled"] is True
    # the adapter that was trained last: the checkpoint's
    from safetensors.torch import load_file

    checkpoint = load_file(tmp_path / "run" / "checkpoints" / "step-00000008" / "head.safetensors")
    saved = load_file(head_dir / "adapter" / "adapter_model.safetensors")
    trained = {n.removeprefix("adapter."): x for n, x in checkpoint.items() if n.startswith("adapter.")}
    assert {n.removeprefix("base_model.model.") for n in saved} == trained.keys()
    assert all(torch.equal(saved[f"base_model.model.{name}"], x) for name, x in trained.items())
    own = load_head(head_dir, tuned.dims).state_dict()
    assert all(torch.equal(checkpoint[f"inner.{name}"], x) for name, x in own.items())
    valid = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"valid/loss_target", "valid/target_acc", "valid/loss_1", "valid/tau"} <= valid[-1].keys()


def test_the_decoded_tau_of_training_is_that_of_the_tuned_target(recipe, headstart: Call, tmp_path, tiny_target):
    from headstart.eval.measuring.benchmark import tau_probe
    from headstart.pipeline.data import first_prompt, held_out_prompts, prepare

    assert headstart("train", recipe).code == 0
    run = Run(load_recipe(recipe), Console())
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    prompts = [first_prompt(sample) for sample in held_out_prompts(prepare(run))[:2]]
    tuned = run.drafted_target
    assert tuned.merged_adapter is not None
    head = load_head(run.head_dir, tuned.dims)
    head.bind(tuned.ends)
    head.eval()
    assert records[-1]["valid/tau"] == pytest.approx(tau_probe(tuned, head, prompts, 8, 2))


def test_the_target_in_memory_is_the_original_again(recipe):
    run = Run(load_recipe(recipe), Console())
    before = {name: weight.clone() for name, weight in run.target.model.state_dict().items()}
    train(run)
    after = run.target.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(x, after[name]) for name, x in before.items())


def test_without_joint_training_no_adapter_lies_beside_the_head(recipe, headstart: Call, tmp_path):
    assert headstart("train", recipe).code == 0
    adapter = tmp_path / "run" / "head" / "adapter"
    assert adapter.is_dir()
    assert headstart("train", recipe, "joint.enabled=false").code == 0
    assert not adapter.exists()
    assert "adapter_digest" not in read_json(adapter.parent / "headstart.json")["target"]


def test_an_adapter_that_a_killed_run_left_is_taken_away(recipe, headstart: Call, tmp_path):
    """Beside a head of the original target it would make every later step tune that target."""
    assert headstart("train", recipe).code == 0
    left = tmp_path / "other" / "head" / "adapter"
    shutil.copytree(tmp_path / "run" / "head" / "adapter", left)
    assert headstart("train", recipe, "joint.enabled=false", f"run_dir={tmp_path}/other").code == 0
    assert (left.parent / "config.json").is_file() and not left.exists()


def test_a_trained_run_is_trained_again_where_joint_changes_and_not_where_the_guard_does(recipe, headstart: Call):
    first = headstart("train", recipe)
    assert first.code == 0
    assert "skipped" in headstart("train", recipe, "joint.max_perplexity_rise=0.5", "joint.guard_prompts=3").err
    again = headstart("train", recipe, "joint.rank=2")
    assert again.code == 0 and "joint.rank: 4 → 2" in again.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["data.features=memory"], "data.features: found memory with joint.enabled=true"),
        (["data.features=stored"], "data.features: found stored"),
        (["target.parallel=device_map"], "target.parallel: found device_map"),
        (["target.compile=true"], "target.compile: found true"),
        (["train.parallel=fsdp2"], "train.parallel: found fsdp2"),
        (["target.adapter=somewhere"], "target.adapter: found 'somewhere'"),
        (["joint.modules=[query]"], "joint.modules: found 'query'"),
        (["joint.loss=mse"], "joint.loss: found 'mse'"),
        (["joint.heads_only=1.0"], "joint.heads_only: found 1.0"),
        (["head.type=eagle3", "head.draft_vocab_size=40"], "joint.enabled: found true with a draft vocabulary"),
        (["train.steps=1"], "train.steps: found a run of 1 step"),
    ],
)
def test_what_cannot_work_is_refused_before_work(recipe, headstart: Call, tmp_path, changes, said):
    if "head.type=eagle3" in changes:
        text = recipe.read_text().replace("{type: medusa, depth: 2, lm_head: own, loss: ce}", "{type: eagle3}")
        recipe.write_text(text)
        changes = ["head.draft_vocab_size=40"]
    result = headstart("train", recipe, *changes)
    assert result.code == 2 and said in result.err, result.err
    assert not (tmp_path / "run" / "data").exists()


def test_settings_without_effect_are_not_checked_while_joint_training_is_off(recipe, headstart: Call):
    result = headstart("train", recipe, "joint.enabled=false", "data.features=memory")
    assert result.code == 0


def test_the_plan_counts_the_target(recipe, headstart: Call):
    joint = headstart("plan", recipe, "--gpu-memory", "80", "--json").json
    alone = headstart("plan", recipe, "joint.enabled=false", "--gpu-memory", "80", "--json").json
    assert joint["memory"]["head activations"] > 2 * alone["memory"]["head activations"]
    assert joint["memory"]["optimiser moments"] > alone["memory"]["optimiser moments"]
    assert joint["memory"]["target weights"] == alone["memory"]["target weights"]
    kept = headstart("plan", recipe, "train.activation_checkpointing=true", "--gpu-memory", "80", "--json").json
    assert kept["memory"]["head activations"] < joint["memory"]["head activations"]


def test_the_plan_refuses_a_stage_without_a_step(recipe, headstart: Call):
    """How many steps epochs take is known once the data is."""
    epochs = ("train.steps=null", "train.epochs=1", "train.accumulation=64", "--gpu-memory", "80")
    result = headstart("plan", recipe, *epochs)
    assert result.code == 2 and "train.epochs: found a run of 1 step, in which the stage" in result.err
    assert headstart("plan", recipe, "joint.enabled=false", *epochs).code == 0


def test_the_plan_advises_no_sharding_that_joint_training_refuses(recipe, headstart: Call):
    ranks = ("--gpus", "2", "--gpu-memory", "80", "--json")
    advice = "to plan for FSDP2, add train.parallel=fsdp2"
    assert advice not in str(headstart("plan", recipe, *ranks).json["notes"])
    assert advice in str(headstart("plan", recipe, "joint.enabled=false", *ranks).json["notes"])
