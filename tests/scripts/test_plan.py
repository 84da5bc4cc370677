"""`headstart plan RECIPE`."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from headstart.data.features import parameters_per_row
from headstart.heads.families import build_head
from headstart.heads.targets.load import weightless_target
from headstart.heads.targets.target import TargetConfig
from headstart.recipes.load import load_recipe
from headstart.refusals import planned_head


def test_a_plan_counts_the_data_and_loads_nothing(
    headstart: Callable, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    shown = headstart("plan", recipe, "--gpus", "2", "--gpu-memory", "80", "--json")
    assert shown.code == 0, shown.err
    plan = shown.json
    assert plan["fits"] and plan["steps"] > 0 and plan["layout"]["ranks"] == 2
    assert plan["memory"]["target weights"] > 0 and plan["hours"] > 0
    assert any("which is 60% of 780 TFLOP/s per card (an H100" in note for note in plan["notes"])
    assert not (tmp_path / "run" / "head").exists()


def test_a_plan_counts_no_gradient_of_matrices_that_keep_still(headstart: Callable, recipe: Path) -> None:
    moving, still = (
        headstart("plan", recipe, "--json", "--gpus", "1", "--gpu-memory", "80", f"train.token_rate={rate}").json
        for rate in (1, 0)
    )
    head = planned_head(load_recipe(recipe), weightless_target(TargetConfig(name=load_recipe(recipe).target.name)))
    output = head.lm_head.weight.numel()
    saved = {name: moving["memory"][name] - still["memory"][name] for name in moving["memory"]}
    assert {name: size for name, size in saved.items() if size} == {
        "gradients": 4 * output, "optimiser moments": 8 * output
    }  # fmt: skip
    assert still["hours"] < moving["hours"]


@pytest.mark.parametrize(
    ("head", "multiply_adds"),
    [
        # each of the two heads multiplies with the target's output matrix
        ("{type: medusa, depth: 2, lm_head: shared}", lambda own, output, rows, anchors: (own + 2 * output) * anchors),
        ("{type: medusa, depth: 2, lm_head: lowrank}", lambda own, output, rows, anchors: (own + 2 * output) * anchors),
        ("{type: eagle}", lambda own, output, rows, anchors: own * rows + output * anchors),
    ],
)
def test_the_hours_know_the_targets_output_matrix(
    headstart: Callable, recipe: Path, tiny_target: Path, head: str, multiply_adds: Callable[..., float]
) -> None:
    lines = recipe.read_text().splitlines()
    recipe.write_text("\n".join(f"head: {head}" if line.startswith("head:") else line for line in lines))
    rows = 512
    shown = headstart(
        "plan", recipe, "--json", "--samples", "1000", "--mean-tokens", "64", "--tflops", "0.001", "train.epochs=1",
        f"data.pack_tokens={rows}", "train.accumulation=1", "export.engines=[portable]",
    )  # fmt: skip
    assert shown.code == 0, shown.err
    target = weightless_target(TargetConfig(name=str(tiny_target)))
    with torch.device("meta"):
        own = build_head(load_recipe(recipe).head, target.dims).trained_parameters()
    # as one document: its last two rows have no next token but one
    products = multiply_adds(own, target.dims.vocab_size * target.dims.hidden_size, rows, rows - 2)
    flops = 6 * products + 2 * parameters_per_row(target) * rows
    assert shown.json["hours"] == pytest.approx(64_000 / (0.6 * 1e9 * rows / flops) / 3600)


def test_a_plan_in_words(headstart: Callable, recipe: Path) -> None:
    stated = ("--samples", "1000", "--mean-tokens", "64", "--tokens-per-s", "1000")
    shown = headstart("plan", recipe, *stated, "train.epochs=2", "train.accumulation=1")
    assert shown.code == 0, shown.err
    for words in ("target weights", "optimiser moments", "peak", "steps of", "disk:", "1000 samples of 64 tokens"):
        assert words in shown.out
    assert "to plan for FSDP2" not in shown.out, "one process is no launch"
    assert "to plan for FSDP2" in headstart("plan", recipe, *stated, "--gpus", "2").out


def test_what_cannot_fit_is_shown_and_refused(headstart: Callable, recipe: Path) -> None:
    refused = headstart("plan", recipe, "--gpus", "1", "--gpu-memory", "0.01")
    assert refused.code == 2
    assert "optimiser moments" in refused.out
    assert "plan: the run needs" in refused.err and "lower data.pack_tokens" in refused.err


@pytest.fixture
def recipe_70b(recipe: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe with a target that is Llama-3.1-70B by its config.json and has no weights at all.

    Its checkpoints would take 29 GiB: the disk has a TiB free, whatever this machine's has.
    """
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 40}))
    place = tmp_path / "target-70b"
    place.mkdir()
    for file in tiny_target.glob("tokenizer*"):
        (place / file.name).write_bytes(file.read_bytes())
    LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
    ).save_pretrained(place)  # fmt: skip
    path = tmp_path / "70b.yaml"
    path.write_text(
        f"inherit: {recipe}\ntarget: {{name: {place}, dtype: bfloat16}}\n"
        "head: {type: eagle3, depth: 7, draft_vocab_size: 32000}\n"
        "data: {pack_tokens: 8192}\ntrain: {epochs: 1, accumulation: 8}\n"
    )
    return path


def test_a_70b_target_in_shards_over_eight_cards_is_planned_from_its_shapes(
    headstart: Callable, recipe_70b: Path
) -> None:
    """80 layers and 141 GB of weights; nothing of it takes memory here."""
    cards = ("--gpus", "8", "--gpu-memory", "80", "--samples", "50000", "--mean-tokens", "1000")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shown = headstart("plan", recipe_70b, *cards, "--json", "target.parallel=fsdp2")
    assert shown.code == 0, shown.err
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    plan = shown.json
    assert plan["fits"] and plan["layout"]["ranks"] == 8
    layers = 2 * (70_553_706_496 - 2 * 128256 * 8192 - 8192)
    ends = 2 * (128256 * 8192 + 8192 + 128256 * 8192 // 8 + 32000 * 8192)
    assert plan["memory"]["target weights"] == pytest.approx(layers / 8 + ends, rel=1e-6)
    assert plan["steps"] == -(-50_000 // (8192 // 1000 * 8))
    rate = plan["steps"] * plan["tokens_per_step"] / plan["hours"] / 3600
    # 8 cards at 468 TFLOP/s; at least 2 · 68.5e9 per token for the target
    assert 0.5 * 8 * 468e12 / 137e9 < rate < 8 * 468e12 / 137e9


def test_a_whole_70b_target_on_every_card_is_refused_with_what_fits(headstart: Callable, recipe_70b: Path) -> None:
    cards = ("--gpus", "8", "--gpu-memory", "80", "--samples", "50000", "--mean-tokens", "1000")
    refused = headstart("plan", recipe_70b, *cards)
    assert refused.code == 2
    said = " ".join(refused.err.split())
    found = re.search(
        r"the run needs ([\d.]+) GiB per rank, and a card has 80.0 GiB\. With (.*) it needs ([\d.]+)", said
    )
    assert found, said
    assert float(found[1]) > 131 and float(found[3]) < 80
    assert "target.parallel=fsdp2" in found[2].split()
    accepted = headstart("plan", recipe_70b, *cards, *found[2].split())
    assert accepted.code == 0, accepted.err


#: recipe → GPUs, GiB of weights on a rank, B parameters per token, and words of the line about the target
SHIPPED = {
    "qwen3-8b-eagle3": (1, 15.3, 7.57, "144 KiB a token"),
    "qwen3-30b-a3b-eagle3": (1, 56.9, 3.04, "(8 of 128 experts); the cache takes 96 KiB a token"),
    "gpt-oss-20b-eagle3": (1, 39.0, 3.61, "(4 of 32 experts); the cache takes 24 KiB a token, 24 KiB a token of"),
    "gemma-3-12b-eagle3": (1, 22.7, 11.77, "64 KiB a token, 320 KiB a token of the last 1024"),
    # an eighth of the layers and of the output matrix; embeddings and the 32,000 rows that are drafted whole
    "llama-3.3-70b-eagle3": (8, (68.45 / 8 + 1.051 + 1.051 / 8 + 0.262) * 2 / 1.073741824, 69.5, "320 KiB a token"),
    "qwen3-next-80b-a3b-eagle3": (
        8, (79.05 / 8 + 0.311 + 0.311 / 8 + 0.0655) * 2 / 1.073741824, 3.56,
        "(10 of 512 experts); the cache takes 24 KiB a token, 74.25 MiB of states a sequence",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_are_planned_from_the_published_configs(
    name: str, headstart: Callable, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the Hub is asked and nothing is loaded: config.json and a tokenizer are there."""
    from headstart.heads.targets import quantised

    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 40}))
    monkeypatch.setattr(quantised, "_installed", lambda module: False)  # no kernels for MXFP4
    place = tmp_path / "target"
    place.mkdir()
    for file in (*tiny_target.glob("tokenizer*"), *tiny_target.glob("chat_template*")):
        (place / file.name).write_bytes(file.read_bytes())
    configs = Path(__file__).resolve().parents[1] / "fixtures" / "configs"
    source = configs / f"{load_recipe(name).target.name.rsplit('/', 1)[-1]}.json"
    (place / "config.json").write_bytes(source.read_bytes())
    gpus, weights, active, words = SHIPPED[name]
    stated = ("--gpus", str(gpus), "--gpu-memory", "141", "--samples", "50000", "--mean-tokens", "1000")
    shown = headstart(
        "plan", name, *stated, "--json", f"target.name={place}", f"run_dir={tmp_path / 'run'}",
        f"train.accumulation={max(gpus, 2)}",
    )  # fmt: skip
    assert shown.code == 0, shown.err
    plan = shown.json
    assert plan["memory"]["target weights"] / 2**30 == pytest.approx(weights, rel=0.02)
    assert plan["target"]["active"] / 1e9 == pytest.approx(active, rel=0.02)
    told = headstart(
        "plan", name, *stated, f"target.name={place}", f"run_dir={tmp_path / 'run'}",
        f"train.accumulation={max(gpus, 2)}",
    )  # fmt: skip
    assert words in " ".join(told.out.split())
    rate = plan["steps"] * plan["tokens_per_step"] / plan["hours"] / 3600
    assert rate < gpus * 0.6 * 780e12 / (2e9 * (active - 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nodes", "0"), "--nodes: found 0, expected a whole number of 1 or more"),
        (("--gpus", "-1"), "--gpus: found -1, expected a whole number of 1 or more"),
        (("--samples", "0"), "--samples: found 0, expected a whole number of 1 or more"),
        (("--samples", "-3"), "--samples: found -3"),
        (("--gpu-memory", "nan"), "--gpu-memory: found nan, expected a number above 0"),
        (("--gpu-memory", "0"), "--gpu-memory: found 0.0, expected a number above 0"),
        (("--gpu-memory", "-5"), "--gpu-memory: found -5.0"),
        (("--tokens-per-s", "0"), "--tokens-per-s: found 0.0"),
        (("--tokens-per-s", "inf"), "--tokens-per-s: found inf"),
        (("--tflops", "0"), "--tflops: found 0.0"),
        (("--tflops", "1e-320"), "--tflops: found 1e-320"),
        (("--samples", "5", "--mean-tokens", "0"), "--mean-tokens: found 0.0"),
        (("--mean-tokens", "5"), "--mean-tokens: found 5 without --samples"),
        (("--samples", "5", "--mean-tokens", "1e9"), "--mean-tokens: found 1e+09, expected 1 to data.max_length="),
        (("--gpus", "4", "target.parallel=fsdp2", "target.shard_ranks=3"), "target.shard_ranks: found 3"),
        (("--gpus", "1", "target.parallel=fsdp2"), "target.parallel: found fsdp2 in a process that is alone"),
        (("--gpus", "1", "train.parallel=fsdp2"), "train.parallel: found fsdp2 with one rank"),
        (("--gpus", "2", "train.parallel=zero2", "train.nonfinite=skip"), "train.nonfinite: found skip"),
        (("--nodes", "2", "target.parallel=device_map"), "target.parallel: found device_map with 2 ranks"),
    ],
)
def test_numbers_and_layouts_that_no_training_would_take_are_refused(
    headstart: Callable, recipe: Path, options: tuple[str, ...], message: str
) -> None:
    refused = headstart("plan", recipe, "--json", *options)
    assert refused.code == 2 and refused.json["error"]["type"] == "ConfigError"
    assert refused.json["error"]["message"].startswith(message)


def test_a_refused_plan_is_one_json_document_with_the_plan(headstart: Callable, recipe: Path) -> None:
    refused = headstart("plan", recipe, "--gpus", "1", "--gpu-memory", "0.01", "--json")
    assert refused.code == 2
    assert not refused.json["plan"]["fits"] and refused.json["plan"]["memory"]["optimiser moments"] > 0
    assert refused.json["error"]["message"].startswith("plan: the run needs")


def test_stated_data_of_any_size_is_counted_as_real_data_is(headstart: Callable, recipe: Path) -> None:
    from headstart.data.packing import make_packs
    from headstart.plan import DataShape

    for samples, length, budget in ((1, 7, 30), (1023, 7, 30), (5000, 7, 30), (3000, 40, 30), (2048, 30, 30)):
        stated = DataShape.equal(samples, length, budget, "")
        assert stated.packs == len(make_packs([length] * samples, budget)) and stated.tokens == samples * length
    many = headstart("plan", recipe, "--json", "--gpus", "1", "--samples", "1000000000", "--mean-tokens", "64")
    assert many.code == 0, many.err
    assert many.json["tokens_per_step"] == pytest.approx(128 * many.json["layout"]["accumulation"], rel=0.01)


def test_ranks_that_wait_are_told_and_counted(headstart: Callable, recipe: Path) -> None:
    def plan(accumulation: int) -> dict:
        stated = ("--gpus", "8", "--samples", "8192", "--mean-tokens", "64", "train.epochs=1")
        return headstart("plan", recipe, "--json", *stated, f"train.accumulation={accumulation}").json

    idle, busy = plan(2), plan(8)
    assert idle["hours"] == pytest.approx(4 * busy["hours"], rel=1e-3)
    told = "train.accumulation=2 over 8 ranks leaves ranks idle 75% of the time"
    notes = [note for note in idle["notes"] if note.startswith(told)]
    assert len(notes) == 1 and not [note for note in busy["notes"] if "train.accumulation" in note]


def test_conversations_count_beside_prompts_that_are_not_answered(headstart, recipe: Path) -> None:
    def tokens(*overrides: str) -> float:
        found = headstart("plan", recipe, "--json", "data.held_out_fraction=0", *overrides)
        assert found.code == 0, found.err
        return found.json["steps"] * found.json["tokens_per_step"]

    both, prompts, conversations = tokens(), tokens("data.sources=[]"), tokens("data.distill.prompts=[]")
    assert conversations > 0 and both == pytest.approx(prompts + conversations, rel=0.05)


def test_train_dash_dash_plan_is_the_same(headstart: Callable, recipe: Path) -> None:
    """The older spelling of the verb."""
    stated = ("--gpus", "2", "--nodes", "3", "--gpu-memory", "80", "--tokens-per-s", "1e4", "--samples", "9000")
    arguments = (*stated, "--mean-tokens", "64", "--tflops", "500", "--json", "train.epochs=2")
    plan, older = headstart("plan", recipe, *arguments), headstart("train", recipe, "--plan", *arguments)
    assert plan.code == 0, plan.err
    assert plan.json == older.json and plan.json["layout"]["ranks"] == 6
    assert plan.json["device_bytes"] == 80 * 2**30
