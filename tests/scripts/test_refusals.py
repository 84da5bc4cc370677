"""What saving, evaluating or exporting would refuse is refused before anything costs, in the later step's own words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headstart.heads.errors import ConfigError, FormatError, HeadstartError, TargetError
from headstart.heads.families import build_head
from headstart.heads.families.eagle3.head import Eagle3Head
from headstart.heads.formats import save_head
from headstart.heads.targets.load import load_target, weightless_target, with_attention
from headstart.heads.targets.target import TargetConfig
from headstart.recipes.load import load_recipe
from headstart.refusals import planned_head, refuse_ahead, require_decoding
from headstart.serving_check import compare_features

SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SMALL = {"head_dim": 8}


@pytest.fixture
def target_of(tmp_path: Path, tiny_target: Path) -> Callable[..., Path]:
    """A target directory of another architecture, without weights: looking must need none."""

    def make(name: str, weights: bool = False, **changes: Any) -> Path:
        place = tmp_path / "target"
        shutil.copytree(tiny_target, place, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "gen*"))
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
        if weights:
            torch.manual_seed(0)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
        config.save_pretrained(place)
        return place

    return make


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
GATED = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
#: what is asked → (target, its settings, overrides, error, words)
CASES: dict[str, tuple[str, dict[str, Any], list[str], type[HeadstartError], str]] = {
    "rope": (
        "Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "swirl": 2.0}}, [],
        ConfigError, "rope field swirl = 2.0 is not known",
    ),
    "attention kinds": (
        "Llama", {"layer_types": ["compressed_sparse_attention"] * 8}, [],
        TargetError, "layers of kind .'compressed_sparse_attention'. keep their past in a form that cannot verify",
    ),
    "trees for recurrent states": (
        "Qwen3Next", {**SMALL, **GATED, "num_experts": 4, "num_experts_per_tok": 2}, ["eval.tree.kind=dynamic"],
        ConfigError, "eval.tree.kind: found 'dynamic', but qwen3_next verifies chains only: .*set eval.tree.kind=chain",
    ),
    "a scheduler for recurrent states": (
        "Qwen3Next", {**SMALL, **GATED, "num_experts": 4, "num_experts_per_tok": 2},
        ["eval.tree.kind=chain", "eval.tree.depth=3", "eval.scheduler=on"],
        ConfigError, "eval.scheduler: found true, but layers of qwen3_next hold recurrent states; .*eval.scheduler=fal",
    ),
    "fused layers for recurrent states": (
        "Qwen3Next", {**SMALL, **GATED, "num_experts": 4, "num_experts_per_tok": 2},
        ["eval.tree.kind=chain", "eval.tree.depth=3", "eval.engine=fused"],
        ConfigError, "eval.engine: found 'fused', but its layers of kind .*linear_attention.*set eval.engine=transf",
    ),
    "attention implementation": (
        "Llama", {}, ["target.attn_implementation=flex_attention"],
        TargetError, "'flex_attention' takes no tree mask; load the target with target.attn_implementation=sdpa",
    ),
    "feature layers": (
        "Llama", {}, ["head.feature_layers=[1,4,8]"], ConfigError, "3 distinct ascending ids in 1 … 7, .*set head.feat",
    ),
    "layers to start from": (
        "Qwen2", {}, ["head.start_layers=[1]"], ConfigError, "layer 1 of the target is not of Llama's or Qwen3's type",
    ),
    "layers to start from, in shards": (
        "Llama", {}, ["head.start_layers=[1]", "target.parallel=fsdp2"],
        ConfigError, "target.parallel: found fsdp2 with head.start_layers",
    ),
    "activation": (
        "Gemma", SMALL, ["head.hidden_act=gelu_pytorch_tanh"],
        FormatError, "vLLM .* refuses: hidden_act is 'gelu_pytorch_tanh'.*export.force",
    ),
    "positions": (
        "Llama", {"max_position_embeddings": 512}, [],
        ConfigError, "data.max_length: found 2048, the target has 512 positions: set data.max_length=512",
    ),
    "positions of LongRoPE": (
        "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 1024}, [],
        ConfigError, "found 2048, the target has 1024 positions .of 2048: beyond the first 1024 its LongRoPE uses",
    ),
    "answers": (
        "Llama", {}, ["data.distill.max_new_tokens=2048"],
        ConfigError, "data.distill.max_new_tokens: found 2048, the target has 2048 positions: set .*=2047 or less",
    ),
    "contexts": (
        "Llama", {}, ["eval.context_lengths=[64,4096]"],
        ConfigError, "eval.context_lengths: found 4096 with eval.max_new_tokens=8, the target has 2048 positions",
    ),
    "a tree that the head does not draft": (
        "Llama", {}, ["head={type: medusa, depth: 2}", "eval.tree.kind=dynamic"],
        ConfigError, "eval.tree.kind: medusa drafts a chain or a static tree or a ddtree, found 'dynamic': set",
    ),
    "a tree for blocks": (
        "Llama", {"vocab_size": 260}, ["head={type: dspark, depth: 3}", "eval.tree.kind=ddtree"],
        ConfigError, "eval.tree.kind: dspark drafts a chain, found 'ddtree': set eval.tree.kind=chain",
    ),
    "a scheduler for prompt lookup": (
        "Llama", {}, ["eval.scheduler=on", "eval.drafter=ngram"],
        ConfigError, r"eval\.scheduler: found true, but the host drafts.*\(eval\.drafter=ngram\); expected a head",
    ),
    "no token to mask with": (
        "Llama", {}, ["head={type: dspark, depth: 3}"], ConfigError, "head.mask_token_id: found null, and no token of",
    ),
    "soft-cap": (
        "Gemma2", SMALL, ["inherit=[]", "head={type: medusa}"], ConfigError, "medusa needs .*a soft-cap of 30",
    ),
    "buffers of a sharded target": (
        "Gemma2", SMALL, ["target.parallel=fsdp2"], TargetError, "cannot compute the buffers of .*target.parallel=none",
    ),
    "activation checkpointing": (
        "Llama", {}, ["head={type: medusa, depth: 2}", "train.activation_checkpointing=true"],
        ConfigError, "activation_checkpointing: found true, medusa heads have no layer whose activations could",
    ),
    "patience without held-out text": (
        "Llama", {}, ["train.patience=2", "train.eval_every=1", "data.held_out_fraction=0", "data.held_out=[]"],
        ConfigError, "train.patience: found 2, but no text is held out",
    ),
    "patience without validations": (
        "Llama", {}, ["train.patience=2", "train.eval_every=0"], ConfigError, "train.eval_every: found 0 with",
    ),
    "patience that cannot end the run": (
        "Llama", {}, ["train.patience=2", "train.eval_every=4", "train.steps=12"],
        ConfigError, "train.patience: found 2 with train.eval_every=4, which ends a run at step 12 at the earliest",
    ),
    "more warm-up than steps": (
        "Llama", {}, ["train.warmup_steps=13", "train.steps=12"],
        ConfigError, r"train.warmup_steps: found 13, expected 12 at most: the run has no more steps \(train.steps\)",
    ),
    "more rounds than steps": (
        "Llama", {}, ["train.rounds=3", "train.steps=2"],
        ConfigError, r"train.rounds: found 3, expected 2 at most: the run has no more steps \(train.steps\)",
    ),
    "one file": (
        "Llama", {}, ["head={type: medusa, depth: 2}", "export.engines=[tgi]", "export.max_shard_size=20KB"],
        FormatError, "export.max_shard_size: .* its readers open no second file",
    ),
}  # fmt: skip


def retyped(recipe: Path, overrides: list[str]) -> list[str]:
    """Overrides without `head={…}`, which becomes the recipe's own head."""
    for word in overrides:
        if word.startswith("head={"):
            lines = recipe.read_text().splitlines()
            recipe.write_text("\n".join("head: " + word[5:] if line.startswith("head:") else line for line in lines))
    return [word for word in overrides if not word.startswith(("head={", "inherit="))]


@pytest.mark.parametrize("case", CASES)
def test_later_refusals_come_first(case: str, recipe: Path, target_of: Callable[..., Path]) -> None:
    name, changes, overrides, kind, words = CASES[case]
    overrides = [f"target.name={target_of(name, **changes)}", *retyped(recipe, overrides)]
    settings = load_recipe(recipe, overrides)
    with pytest.raises(kind, match=words):
        refuse_ahead(settings, weightless_target(settings.target))


def test_tensors_that_shards_cannot_be_filled_from(
    recipe: Path, target_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Mixtral is saved under other names than transformers computes with."""
    place = target_of("Mixtral", weights=True, **SMALL, num_local_experts=2, num_experts_per_tok=1)
    sharded = load_recipe(recipe, [f"target.name={place}", "target.parallel=fsdp2"])
    with pytest.raises(TargetError, match="do not hold the model's tensors as it names them: missing"):
        refuse_ahead(sharded, weightless_target(sharded.target))
    whole = load_recipe(recipe, [f"target.name={place}"])
    refuse_ahead(whole, weightless_target(whole.target))
    shutil.rmtree(place)
    sharded = load_recipe(recipe, [f"target.name={target_of('Llama', weights=True)}", "target.parallel=fsdp2"])
    refuse_ahead(sharded, weightless_target(sharded.target))
    shutil.rmtree(tmp_path / "target")
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}  # files hold each by itself
    stacked = target_of("Qwen3Moe", weights=True, **SMALL, **experts)
    sharded = load_recipe(recipe, [f"target.name={stacked}", "target.parallel=fsdp2"])
    refuse_ahead(sharded, weightless_target(sharded.target))


@pytest.mark.parametrize("name", ["Llama", "Gemma", "Gemma2", "GptOss", "Phi", "Starcoder2", "Nemotron", "GPTNeoX"])
@pytest.mark.parametrize("head", ["{type: eagle3, draft_vocab_size: 64}", "{type: eagle}", "{type: medusa, depth: 2}"])
def test_what_works_is_not_refused(name: str, head: str, recipe: Path, target_of: Callable[..., Path]) -> None:
    if "medusa" in head and name in ("Gemma2", "Phi"):
        pytest.skip("a soft-cap or a bias, which Medusa's matrices cannot copy")
    engines = {"eagle3": "[portable, vllm, sglang, tensorrt_llm]", "eagle}": "[portable, vllm, sglang]"}
    wanted = next((found for key, found in engines.items() if key in head), "[portable, vllm, tgi, tensorrt_llm]")
    overrides = retyped(recipe, [f"head={head}"]) + [f"export.engines={wanted}"]
    settings = load_recipe(recipe, [f"target.name={target_of(name, **SMALL)}", *overrides])
    refuse_ahead(settings, weightless_target(settings.target))


def test_an_optimiser_without_matrices_is_refused_first(
    recipe: Path, target_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_recipe(recipe, [f"target.name={target_of('Llama')}", "train.optimizer=muon"])
    refuse_ahead(settings, weightless_target(settings.target))
    monkeypatch.setattr(Eagle3Head, "without_muon", ("",))  # no name is left
    with pytest.raises(ConfigError, match="train.optimizer: found muon, but this head has no matrix"):
        refuse_ahead(settings, weightless_target(settings.target))


def test_every_command_asks(headstart: Callable, recipe: Path, target_of: Callable[..., Path], tmp_path: Path) -> None:
    place = target_of("Gemma", **SMALL)
    overrides = (f"target.name={place}", "head.hidden_act=gelu")
    doctor = headstart("doctor", recipe, *overrides, "--json")
    status = {check["name"]: check["status"] for check in doctor.json["checks"]}
    assert doctor.code == 1 and status["export"] == "fail"
    assert [status[name] for name in ("target", "head", "positions", "decoding")] == ["ok"] * 4
    plan = headstart("plan", recipe, *overrides, "--gpu-memory", "80", "--samples", "9")
    commands = [headstart(command, recipe, *overrides) for command in ("run", "distill", "train")]
    for result in (plan, *commands):
        assert result.code == 1 and "hidden_act is 'gelu': the draft layer computes silu" in result.err
        assert "Traceback" not in result.err and "loading target" not in result.err
    assert not (tmp_path / "run" / "data" / "distilled.jsonl").exists()
    assert headstart("doctor", recipe, *overrides, "export.force=true").code == 0


def test_a_head_to_go_on_from_is_asked_too(recipe: Path, target_of: Callable[..., Path], tmp_path: Path) -> None:
    place = target_of("Gemma", **SMALL)
    settings = load_recipe(recipe, [f"target.name={place}"])
    target = weightless_target(settings.target)
    given = build_head(replace(settings.head, hidden_act="gelu"), target.dims)
    given.draft_ids_U.copy_(torch.arange(64))
    save_head(given, tmp_path / "given", {})
    settings = replace(settings, start_from=str(tmp_path / "given"))
    # it stays what it is: training it further makes a head that no engine computes
    with pytest.raises(ConfigError, match="start_from: .* another head than the recipe's: set head.hidden_act=gelu"):
        planned_head(settings, target)
    settings = replace(settings, head=replace(settings.head, hidden_act="gelu"))
    assert planned_head(settings, target).hidden_act == "gelu"
    with pytest.raises(FormatError, match="hidden_act is 'gelu'"):
        refuse_ahead(settings, target)


def test_features_that_decoding_would_not_give_stop_before_training(
    tiny_target: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart import serving_check

    target = load_target(TargetConfig(name=str(tiny_target), device="cpu"))
    spec = planned_head(load_recipe(recipe), target).spec
    require_decoding(target, spec, force=False)
    original = serving_check._serving_features

    def shifted(*args: Any) -> dict[str, torch.Tensor]:
        return {name: value.roll(1, 0) for name, value in original(*args).items()}

    monkeypatch.setattr(serving_check, "_serving_features", shifted)
    assert not compare_features(target, spec, [[3, 4, 5, 6, 7, 8, 9, 10]]).passed
    with pytest.raises(TargetError, match="the decode loop's features differ from those the head was trained on"):
        require_decoding(target, spec, force=False)
    require_decoding(target, spec, force=True)

    def broken(*args: Any) -> None:
        raise AttributeError("no such cache")

    monkeypatch.setattr(serving_check, "_serving_features", broken)
    with pytest.raises(TargetError, match="in the decode loop: .* fails with AttributeError: no such cache"):
        require_decoding(target, spec, force=False)


def test_packages_that_are_missing_are_named(headstart: Callable, recipe: Path, target_of: Callable[..., Path]) -> None:
    place = target_of("Llama", weights=True)
    for command in ("doctor", "distill"):
        result = headstart(command, recipe, f"target.name={place}", "target.attn_implementation=flash_attention_2")
        said = result.out + result.err
        assert result.code == 1 and "Traceback" not in said
        assert "Install the package it names" in said and "target.attn_implementation=sdpa" in said
    config = json.loads((place / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (place / "config.json").write_text(json.dumps(config))
    for load in (weightless_target, load_target):
        with pytest.raises(TargetError, match="cannot be loaded: (?s:.*)weights are not quantised"):
            load(TargetConfig(name=str(place), device="cpu"))


@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
def test_no_sdpa_means_eager_and_is_said(name: str, target_of: Callable[..., Path]) -> None:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1} if name == "GptOss" else {}
    config = TargetConfig(name=str(target_of(name, weights=True, **SMALL, **experts)), device="cpu")
    for target in (weightless_target(config), load_target(config)):
        assert target.model.config._attn_implementation == "eager"
        said = [note for note in target.notes if note.startswith(f"{name}ForCausalLM has no sdpa attention")]
        assert len(said) == 1 and said[0].endswith("target.attn_implementation=eager is taken")


def test_sdpa_would_leave_a_soft_cap_out() -> None:
    """transformers 5.17 lets Gemma 2 run with sdpa attention, which computes no cap."""
    asked: list[str] = []

    def make(attention: str) -> Any:
        asked.append(attention)
        config = transformers.LlamaConfig(**SIZES, attn_logit_softcapping=20.0)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)

    model, notes = with_attention(make, "sdpa")
    assert asked == ["sdpa"] and model.config._attn_implementation == "eager"
    assert notes == [
        "LlamaForCausalLM has no sdpa attention with a soft-cap of 20: target.attn_implementation=eager is taken"
    ]
    model, notes = with_attention(make, "eager")
    assert model.config._attn_implementation == "eager" and notes == []


def test_a_config_that_its_code_does_not_fit_is_a_clear_error(target_of: Callable[..., Path]) -> None:
    place = target_of("Llama", weights=True)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_type": "spiral"}}))
    for load in (weightless_target, load_target):
        with pytest.raises(TargetError, match="cannot be loaded: KeyError: 'spiral'. Its config or its code does not"):
            load(TargetConfig(name=str(place), device="cpu"))


def test_doctor_looks_at_the_data(headstart: Callable, recipe: Path, tmp_path: Path) -> None:
    """As training would, a few records of each file: one that names its field otherwise is found before the target
    is loaded, and so is one of which the template leaves something out."""
    files = ("data.distill.prompts=[]",)
    shown = {check["name"]: check for check in headstart("doctor", recipe, *files, "--json").json["checks"]}
    assert shown["data"]["found"] == "1 source; 24 records read"
    said = '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "reasoning": "Be kind"}]'
    for line, found in (
        ('{"text": "Hi"}', "mine.jsonl:1: found fields 'text'"),
        (f'{{"messages": {said}}}', "dropped 1: the chat template leaves out the reasoning of an answer (mine:1)"),
        ('{"prompt": "Hi"}', "prompts alone belong in data.distill.prompts"),
    ):
        (tmp_path / "mine.jsonl").write_text(line + "\n")
        result = headstart("doctor", recipe, *files, "data.sources=[{path: mine.jsonl}]", "--json")
        (check,) = (check for check in result.json["checks"] if check["name"] == "data")
        assert result.code == 1 and check["status"] == "fail" and found in check["found"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 9}, "model.layers.8.input_layernorm.weight is missing .and 8 more"),
        ({"model_type": "qwen3"}, "model.layers.0.self_attn.k_norm.weight is missing"),
        ({"attention_bias": True}, "model.layers.0.self_attn.k_proj.bias is missing"),
        ({"vocab_size": 300}, r"lm_head.weight is \[259, 32\], expected \[300, 32\] .and 1 more"),
    ],
)
def test_weights_that_would_be_made_up_are_refused(
    changes: dict[str, Any], words: str, target_of: Callable[..., Path]
) -> None:
    place = target_of("Llama", weights=True)
    config = json.loads((place / "config.json").read_text())
    assert load_target(TargetConfig(name=str(place), device="cpu")).dims.num_layers == 8
    (place / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(TargetError, match=f"its weights are not those of its config.json: {words}"):
        load_target(TargetConfig(name=str(place), device="cpu"))
