"""A head with an adapter of its target beside it: measured, refused or exported, and used with the tuned target."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.tuned_runs import save_random_adapter, tune_by_hand

from headstart.console import Console
from headstart.heads.files import read_json, write_json
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import TargetConfig
from headstart.pipeline.data import prepare
from headstart.pipeline.quality import answer_texts, prompt_texts
from headstart.pipeline.run import Run
from headstart.quality_guard import FEWEST_TOKENS
from headstart.recipes.load import load_recipe

Call = Callable[..., Any]
HARMLESS, DAMAGING = 1e-4, 0.5


@pytest.fixture
def recipe(tmp_path: Path, tiny_target: Path, conversations: Path) -> Path:
    """A run of seconds: a Medusa head with output matrices of its own."""
    path = tmp_path / "tiny.yaml"
    path.write_text(f"""
run_dir: {tmp_path}/run
target: {{name: {tiny_target}}}
head: {{type: medusa, depth: 2, lm_head: own}}
data: {{sources: [{{path: {conversations}}}], held_out_fraction: 0.2, pack_tokens: 128}}
train: {{epochs: 1, lr: 1e-3, tau_prompts: 2, tau_tokens: 8}}
joint: {{guard_prompts: 3, guard_tokens: 8}}
eval: {{limit: 2, max_new_tokens: 8, warmup_tokens: 0, tree: {{depth: 2}}}}
""")
    return path


@pytest.fixture
def trained(recipe: Path, headstart: Call, tmp_path: Path) -> Path:
    assert headstart("train", recipe).code == 0
    return tmp_path / "run"


def tokens_of(adapter: Path | None, target: Path) -> Any:
    return load_target(TargetConfig(str(target), adapter=None if adapter is None else str(adapter), device="cpu"))


@torch.no_grad()
def naive_perplexity(model: Any, recipe: Path) -> tuple[float, int]:
    """Of the held-out tokens that are supervised, one document after the other."""
    nats: list[float] = []
    for sample in prepare(Run(load_recipe(recipe), Console())).held_out:
        logits_TV = model(input_ids=torch.tensor(sample.token_ids.tolist())[None]).logits[0].double()
        for place in range(1, len(sample)):
            if sample.turn_ids[place] >= 0:
                label = int(sample.token_ids[place])
                nats.append(float(torch.logsumexp(logits_TV[place - 1], 0) - logits_TV[place - 1, label]))
    return math.exp(sum(nats) / len(nats)), len(nats)


def test_a_harmless_adapter_is_exported_merged(trained: Path, recipe: Path, tiny_target: Path, headstart: Call) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tune_by_hand(trained / "head", tiny_target, HARMLESS)
    result = headstart("export", recipe, "export.dtype=float32")
    assert result.code == 0, result.err
    export, quality = trained / "export", read_json(trained / "quality.json")
    base, tuned = tokens_of(None, tiny_target), tokens_of(trained / "head" / "adapter", tiny_target)
    before, count = naive_perplexity(base.model, recipe)
    after, _ = naive_perplexity(tuned.model, recipe)
    assert quality["tokens"] == count and quality["passed"] and quality["max_perplexity_rise"] == 0.01
    assert quality["perplexity_original"] == pytest.approx(before, rel=1e-5)
    assert quality["perplexity_tuned"] == pytest.approx(after, rel=1e-5)
    assert quality["rise"] == pytest.approx(after / before - 1, abs=2e-5)
    assert quality["answers"]["prompts"] == 3 and quality["answers"]["length_original"] > 0
    # the questions are too short to judge
    assert 0 < quality["on_prompts"]["tokens"] < FEWEST_TOKENS and not quality["on_prompts"]["judged"]
    assert "too few to judge" in result.err
    # what engines load is the tuned target
    served, tokens = AutoModelForCausalLM.from_pretrained(export / "target"), torch.arange(5, 60)[None]
    with torch.no_grad():
        assert torch.equal(served(tokens).logits, tuned.model(tokens).logits)
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_target), export / "adapter")
        assert torch.allclose(plain(tokens).logits, served(tokens).logits, atol=1e-4)
    assert AutoTokenizer.from_pretrained(export / "target").chat_template == base.tokenizer.chat_template
    assert {path.name for path in (export / "target").iterdir()} >= {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    # nothing names a place on this machine
    assert str(tiny_target.parent) not in (export / "adapter" / "adapter_config.json").read_text()
    assert str(tiny_target.parent) not in (export / "target" / "config.json").read_text()
    for place in (export, trained / "head"):
        assert read_json(place / "headstart.json")["quality"] == quality
    side = read_json(export / "headstart.json")["target"]
    assert side["served_as"] == "target" and side["adapter_rank"] == 4
    assert side["weight_hash"] == tuned.weight_hash() and side["base_weight_hash"] == base.weight_hash()
    assert f"vllm serve {export}/target --speculative-config" in result.err
    assert "drafts for a tuned target: serve the merged model 'target' with it, not the base" in result.err
    again = headstart("export", recipe, "export.dtype=float32")
    assert "quality: finished before" in again.err and "export: finished before" in again.err


def test_the_weights_are_written_as_the_export_asks(
    trained: Path, recipe: Path, tiny_target: Path, headstart: Call
) -> None:
    from safetensors.torch import load_file

    tune_by_hand(trained / "head", tiny_target, HARMLESS)
    assert headstart("export", recipe).code == 0
    tensors = load_file(trained / "export" / "target" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert read_json(trained / "export" / "target" / "config.json")["dtype"] == "bfloat16"
    wide = tokens_of(trained / "head" / "adapter", tiny_target).model.state_dict()
    assert all(torch.equal(tensor, wide[name].bfloat16()) for name, tensor in tensors.items())


def test_a_damaging_adapter_is_refused_with_the_numbers(
    trained: Path, recipe: Path, tiny_target: Path, headstart: Call
) -> None:
    tune_by_hand(trained / "head", tiny_target, DAMAGING)
    before, count = naive_perplexity(tokens_of(None, tiny_target).model, recipe)
    after, _ = naive_perplexity(tokens_of(trained / "head" / "adapter", tiny_target).model, recipe)
    assert after > 1.05 * before
    for forced in ([], ["export.force=true"]):
        result = headstart("export", recipe, *forced)
        assert result.code == 1 and not (trained / "export").exists()
        said = f"found a perplexity of {after:.6g} for the tuned target on {count} tokens of held-out answers, "
        said += f"{100 * (after / before - 1):.2f} % above the original's {before:.6g}, expected at most 1 %"
        assert said in result.err and "joint.loss=kl" in result.err and "(export.force does not)" in result.err
    quality = read_json(trained / "quality.json")
    assert not quality["passed"] and quality["answers"]["identical"] < 3
    # an evaluation goes on, and says so
    assert headstart("eval", recipe).code == 0
    notes = read_json(trained / "report.json")["notes"]
    assert any("drafts for a tuned target" in note and f"{100 * quality['rise']:+.2f} %" in note for note in notes)
    # knowingly
    raised = headstart("export", recipe, f"joint.max_perplexity_rise={quality['rise'] + 0.01}")
    assert raised.code == 0, raised.err
    assert "quality: finished before" in raised.err and read_json(trained / "quality.json")["passed"]
    assert read_json(trained / "export" / "headstart.json")["quality"]["passed"]


#: letters of each question below, and tokens of `<|im_start|>user` and a new line, which stand before them
LETTERS, BEFORE = 60, 6


@pytest.fixture
def letters_and_numbers(recipe: Path, conversations: Path, tmp_path: Path) -> Path:
    """Joint training on answers that are easy to learn, to questions of letters that no answer has."""
    letters, records = random.Random(0), []
    for number in range(24):
        question = "".join(letters.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=LETTERS))
        records.append({"prompt": question, "response": f"{number % 3} {number % 3} 7"})
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = recipe.read_text().replace(str(conversations), f"{tmp_path}/letters.jsonl")
    text = text.replace("epochs: 1, lr: 1e-3", "steps: 40, lr: 2e-2, warmup_steps: 1")
    text = text.replace("joint: {", "joint: {enabled: true, loss: ce, heads_only: 0.25, rank: 4, alpha: 8, ")
    recipe.write_text(text)
    return recipe


@torch.no_grad()
def naive_on_questions(model: Any, recipe: Path) -> tuple[float, int]:
    """(Perplexity, tokens) of the held-out questions, one token after the other; the same context counts once."""
    seen: set[tuple[int, ...]] = set()
    nats: list[float] = []
    for sample in prepare(Run(load_recipe(recipe), Console())).held_out:
        ids = sample.token_ids.tolist()
        for place in range(1, BEFORE + LETTERS):
            context = tuple(ids[: place + 1])
            if context not in seen:
                logits_V = model(input_ids=torch.tensor([ids[:place]])).logits[0, -1].double()
                nats.append(float(torch.logsumexp(logits_V, 0) - logits_V[ids[place]]))
            seen.add(context)
    return math.exp(sum(nats) / len(nats)), len(nats)


def test_a_target_that_learned_answers_and_lost_the_questions_is_refused(
    letters_and_numbers: Path, tiny_target: Path, headstart: Call, tmp_path: Path
) -> None:
    recipe, run = letters_and_numbers, tmp_path / "run"
    assert headstart("train", recipe).code == 0
    refused = headstart("export", recipe)
    quality = read_json(run / "quality.json")
    base, tuned = tokens_of(None, tiny_target), tokens_of(run / "head" / "adapter", tiny_target)
    (before, count), (after, _) = (naive_on_questions(target.model, recipe) for target in (base, tuned))
    found = quality["on_prompts"]
    assert found["tokens"] == count > FEWEST_TOKENS and found["judged"]
    assert found["perplexity_original"] == pytest.approx(before, rel=1e-5)
    assert found["perplexity_tuned"] == pytest.approx(after, rel=1e-5)
    # the answers alone would have let it pass
    assert quality["rise"] < -0.1 and found["rise"] == pytest.approx(after / before - 1, abs=2e-5)
    assert found["rise"] > 0.1 and not quality["passed"]
    assert refused.code == 1 and not (run / "export").exists()
    said = f"found a perplexity of {found['perplexity_tuned']:.6g} for the tuned target on {count} tokens of the"
    assert f"{said} prompts of the held-out conversations" in refused.err
    assert "joint.loss=kl, which keeps" in refused.err
    assert "it will not be exported, because of the prompts of the held-out conversations" in refused.err
    # what an older version measured, without prompts, is judged as it is; without the file it is measured anew
    marker = read_json(run / "steps" / "quality.json")
    del marker["result"]["on_prompts"]
    write_json(run / "steps" / "quality.json", marker)
    exported = headstart("export", recipe)
    assert exported.code == 0 and "quality: finished before" in exported.err
    assert "their prompts were not measured" in exported.err
    assert "on_prompts" not in read_json(run / "export" / "headstart.json")["quality"]
    (run / "quality.json").unlink()
    assert headstart("export", recipe).code == 1 and read_json(run / "quality.json") == quality


def test_all_tokens_trained_leave_both_texts_of_what_is_held_out(letters_and_numbers: Path) -> None:
    texts = []
    for supervise in ("answers", "all"):
        settings = load_recipe(letters_and_numbers, [f"data.supervise={supervise}"])
        held_out = prepare(Run(settings, Console())).held_out
        texts.append((answer_texts(held_out), prompt_texts(held_out)))
    assert texts[0] == texts[1] and all(any(scored) for text in texts[1] for _, scored in text)


def test_a_run_measures_before_it_evaluates(trained: Path, recipe: Path, tiny_target: Path, headstart: Call) -> None:
    tune_by_hand(trained / "head", tiny_target, HARMLESS)
    result = headstart("run", recipe, "--json")
    assert result.code == 0, result.err
    places = [
        result.err.index(line)
        for line in ("train: finished before", "quality: starts", "eval: starts", "export: starts")
    ]
    assert places == sorted(places)
    assert result.json["quality"]["passed"] and result.json["quality"] == read_json(trained / "quality.json")
    report = read_json(trained / "report.json")
    tuned = tokens_of(trained / "head" / "adapter", tiny_target)
    assert report["target"]["weight_hash"] == tuned.weight_hash() and not any("WARNING" in n for n in report["notes"])
    assert report["target"]["adapter"] == "a local adapter"
    assert report["greedy_identity"]["identical"] == report["greedy_identity"]["sequences"] == 2
    tune = headstart("tune", recipe, "tune.batch_sizes=[1]", "eval.max_new_tokens=6", "--json")
    assert tune.code == 0, tune.err
    assert f"target: tuned: the adapter {trained / 'head' / 'adapter'}" in tune.err
    assert tune.json["target"]["weight_hash"] == tuned.weight_hash()
    # the tree that was chosen does not make it another head
    assert "quality: finished before" in headstart("run", recipe).err


def test_a_saved_head_brings_its_adapter(
    trained: Path, recipe: Path, tiny_target: Path, headstart: Call, prompts: Path, tmp_path: Path
) -> None:
    head = trained / "head"
    tune_by_hand(head, tiny_target, HARMLESS)
    assert headstart("export", recipe, "export.dtype=float32").code == 0
    tuned = tokens_of(head / "adapter", tiny_target)

    def measured(*arguments: Any) -> tuple[Any, dict[str, Any]]:
        result = headstart(
            "eval", "--head", *arguments, "--data", prompts, "--out", tmp_path / "out", "eval.max_new_tokens=8"
        )
        assert result.code == 0, result.err
        return result, read_json(tmp_path / "out" / "report.json")

    # the base is loaded with the adapter; the tuned target as it is; neither is warned about
    for head_place, target in (
        (head, tiny_target),
        (trained / "export", tiny_target),
        (head, trained / "export" / "target"),
    ):
        result, report = measured(head_place, "--target", target)
        assert report["target"]["weight_hash"] == tuned.weight_hash() and "WARNING" not in result.err
        merges = f"target: tuned: the adapter {head_place / 'adapter'}"
        assert (merges in result.err) is (target == tiny_target)
    # a target with another adapter is neither
    save_random_adapter(tiny_target, tmp_path / "other", 0.01)
    result, report = measured(head, "--target", tiny_target, f"target.adapter={tmp_path / 'other'}")
    assert "WARNING: the head was trained on a target with another adapter" in result.err
    assert report["target"]["weight_hash"] != tuned.weight_hash()
    # nor is the base itself, for a copy that lost the adapter
    shutil.copytree(head, tmp_path / "bare", ignore=shutil.ignore_patterns("adapter"))
    result, _ = measured(tmp_path / "bare", "--target", tiny_target)
    assert "WARNING: the head was trained on a target with another adapter" in result.err
    # an adapter that was exchanged is refused
    shutil.rmtree(head / "adapter")
    shutil.copytree(tmp_path / "other", head / "adapter")
    result = headstart("eval", "--head", head, "--target", tiny_target, "--data", prompts)
    assert result.code == 1 and "is not the adapter that the head was trained with" in result.err
    checked = headstart("export", "--check", head)
    assert "headstart.json" in checked.out and "adapter" in checked.out and checked.code == 1


def test_a_saved_head_is_exported_with_what_was_measured(
    trained: Path, recipe: Path, tiny_target: Path, headstart: Call, tmp_path: Path
) -> None:
    tune_by_hand(trained / "head", tiny_target, HARMLESS)
    arguments = ("export", "--head", trained / "head", "--target", tiny_target, "--out", tmp_path / "out")
    refused = headstart(*arguments)
    assert refused.code == 1 and "was not measured" in refused.err and not (tmp_path / "out").exists()
    assert headstart("export", recipe).code == 0  # measures
    assert headstart(*arguments).code == 0
    assert read_json(tmp_path / "out" / "headstart.json")["quality"] == read_json(trained / "quality.json")
    assert (tmp_path / "out" / "target" / "model.safetensors").is_file()
    # into the same directory: a target that the new export does not write would be served with it
    assert headstart(*arguments, "export.adapter=separate").code == 0
    assert not (tmp_path / "out" / "target").exists() and (tmp_path / "out" / "adapter").is_dir()


def test_the_adapter_stays_separate(trained: Path, recipe: Path, tiny_target: Path, headstart: Call) -> None:
    tune_by_hand(trained / "head", tiny_target, HARMLESS)
    result = headstart("export", recipe, "export.adapter=separate")
    assert result.code == 0, result.err
    export = trained / "export"
    assert not (export / "target").exists() and (export / "adapter" / "adapter_model.safetensors").is_file()
    lora = f"--enable-lora --max-lora-rank 8 --lora-modules tuned={export}/adapter --speculative-config"
    assert f"vllm serve TARGET {lora}" in result.err and 'requests name the model "tuned"' in result.err
    refused = headstart("export", recipe, "export.adapter=separate", "export.engines=[tgi]")
    assert refused.code == 2 and "TGI is not known to apply an adapter" in refused.err
    assert headstart("export", recipe, "export.adapter=halfway").code == 2
    # merged and separate replace each other
    merged = headstart("export", recipe, "export.engines=[portable,tgi]")
    assert merged.code == 0, merged.err
    assert read_json(export / "tgi" / "config.json")["base_model_name_or_path"] == "target"
    assert f"cd {export} && text-generation-launcher --model-id {export}/tgi" in merged.err


def test_a_head_for_anyone_s_adapter(recipe: Path, tiny_target: Path, headstart: Call, tmp_path: Path) -> None:
    save_random_adapter(tiny_target, tmp_path / "lora", DAMAGING)
    adapted = f"target.adapter={tmp_path / 'lora'}"
    assert "lora" in headstart("doctor", recipe, adapted).out
    assert headstart("plan", recipe, adapted).code == 0
    result = headstart("run", recipe, adapted)
    assert result.code == 0, result.err
    export = tmp_path / "run" / "export"
    # that target is what it is: nothing is held against it
    assert not (tmp_path / "run" / "quality.json").exists() and "quality" not in read_json(export / "headstart.json")
    tuned = tokens_of(tmp_path / "lora", tiny_target)
    assert read_json(tmp_path / "run" / "report.json")["target"]["weight_hash"] == tuned.weight_hash()
    assert read_json(export / "headstart.json")["target"]["served_as"] == "target"
    assert load_target(TargetConfig(str(export / "target"), device="cpu")).weight_hash() == tuned.weight_hash()
    # without the adapter it is another target, whose run starts anew
    assert "train: done again, its inputs changed (data.target.adapter" in headstart("train", recipe).err
    broken = headstart("doctor", recipe, f"target.adapter={tmp_path}", "--json")
    assert broken.code == 1 and "found no adapter_config.json" in broken.out


def test_what_is_not_held_out_is_asked_for_before_training(recipe: Path, headstart: Call, tmp_path: Path) -> None:
    said = "joint.enabled: found true with data.held_out_fraction=0"
    for command in (("train",), ("plan", "--gpu-memory", "80")):
        result = headstart(*command, recipe, "joint.enabled=true", "data.held_out_fraction=0")
        assert result.code == 2 and said in result.err, command
    doctor = headstart("doctor", recipe, "joint.enabled=true", "data.held_out_fraction=0", "--json")
    assert doctor.code == 1 and [said in c["found"] for c in doctor.json["checks"] if c["status"] == "fail"] == [True]
    assert not (tmp_path / "run" / "head").exists()
    assert json.loads(headstart("train", recipe, "joint.enabled=true", "data.held_out_fraction=0", "--json").out)[
        "error"
    ]


def test_the_plan_counts_the_tuned_target(recipe: Path, tiny_target: Path, headstart: Call, tmp_path: Path) -> None:
    save_random_adapter(tiny_target, tmp_path / "lora", HARMLESS)
    parameters = sum(x.numel() for x in tokens_of(None, tiny_target).model.parameters())
    adapted = f"target.adapter={tmp_path / 'lora'}"
    # a plan is of this machine unless a card is named, and a CPU decodes in float32
    for overrides, size in (([adapted], 4 * parameters), ([], None), ([adapted, "export.adapter=separate"], None)):
        result = headstart("plan", recipe, *overrides, "--json")
        assert result.code == 0 and result.json["disk"].get("tuned target") == size


def test_training_goes_on_from_a_head_of_a_tuned_target(
    trained: Path, recipe: Path, tiny_target: Path, headstart: Call, tmp_path: Path
) -> None:
    shutil.copytree(trained / "head", tmp_path / "start")
    tune_by_hand(tmp_path / "start", tiny_target, HARMLESS)
    start, place = f"start_from={tmp_path / 'start'}", tmp_path / "start" / "adapter"
    refused = headstart("train", recipe, start)
    assert refused.code == 2 and f"set target.adapter={place} to go on" in refused.err
    result = headstart("run", recipe, start, f"target.adapter={place}")
    assert result.code == 0, result.err
    side = read_json(trained / "head" / "headstart.json")["target"]
    assert side["adapter_digest"] == read_json(tmp_path / "start" / "headstart.json")["target"]["adapter_digest"]


def test_an_adapter_is_not_trained_on_another(recipe: Path, tiny_target: Path, headstart: Call, tmp_path: Path) -> None:
    save_random_adapter(tiny_target, tmp_path / "lora", HARMLESS)
    result = headstart("plan", recipe, f"target.adapter={tmp_path / 'lora'}", "joint.enabled=true")
    assert result.code == 2 and "which trains an adapter of its own" in result.err


def test_joint_training_is_measured_and_exported(
    recipe: Path, tiny_target: Path, headstart: Call, tmp_path: Path
) -> None:
    joint = ("joint.enabled=true", "joint.max_perplexity_rise=10", "train.epochs=2", "export.dtype=float32")
    result = headstart("run", recipe, *joint, "--json")
    assert result.code == 0, result.err
    run = tmp_path / "run"
    base, tuned = tokens_of(None, tiny_target), tokens_of(run / "head" / "adapter", tiny_target)
    assert tuned.weight_hash() != base.weight_hash()
    quality = read_json(run / "quality.json")
    before, after = naive_perplexity(base.model, recipe)[0], naive_perplexity(tuned.model, recipe)[0]
    assert quality["rise"] == pytest.approx(after / before - 1, abs=2e-5) and quality["rise"] != 0
    report = read_json(run / "report.json")
    assert report["target"]["weight_hash"] == tuned.weight_hash()
    assert report["greedy_identity"]["identical"] == report["greedy_identity"]["sequences"]
    exported = tokens_of(None, run / "export" / "target")
    assert exported.weight_hash() == tuned.weight_hash()
    strict = headstart("export", recipe, *joint[:1], *joint[2:], f"joint.max_perplexity_rise={quality['rise'] / 2}")
    assert (strict.code == 1) is (quality["rise"] > 0)


def test_joint_training_goes_on_with_head_and_adapter(recipe: Path, headstart: Call, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    lora = ("joint.enabled=true", "joint.rank=4", "joint.modules=[q_proj,v_proj]")
    assert headstart("train", recipe, *lora).code == 0
    shutil.copytree(tmp_path / "run" / "head", tmp_path / "first")
    start = (*lora, f"start_from={tmp_path / 'first'}", f"run_dir={tmp_path / 'second'}")
    refused = headstart("train", recipe, *start)
    assert refused.code == 2 and "joint.heads_only: found 0.5" in refused.err
    for command in ("plan", "train"):
        other = headstart(command, recipe, *start, "joint.heads_only=0", "joint.rank=8")
        assert other.code == 2 and "another adapter than the recipe's: r 4" in other.err and "expected r 8" in other.err
    # without steps of any size it is the adapter that it went on from
    result = headstart("train", recipe, *start, "joint.heads_only=0", "train.lr=1e-12", "joint.dropout=0")
    assert result.code == 0, result.err
    first, second = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("first", "second/head")
    )
    assert first.keys() == second.keys() and any(
        tensor.abs().max() > 1e-5 for n, tensor in first.items() if "lora_B" in n
    )
    assert all(torch.allclose(first[name], second[name], atol=1e-9) for name in first)
