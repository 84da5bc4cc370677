"""`headstart train RECIPE --plan`."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaConfig


def test_a_plan_counts_the_data_and_loads_nothing(
    headstart: Callable, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("headstart.heads.target.Target.load", refuse)
    shown = headstart("train", recipe, "--plan", "--gpus", "2", "--gpu-memory", "80", "--json")
    assert shown.code == 0, shown.err
    plan = shown.json
    assert plan["fits"] and plan["steps"] > 0 and plan["layout"]["ranks"] == 2
    assert plan["memory"]["target weights"] > 0 and plan["hours"] > 0
    assert any("at 60% of 780 TFLOP/s a card (an H100" in note for note in plan["notes"])
    assert not (tmp_path / "run" / "head").exists()


def test_a_plan_in_words(headstart: Callable, recipe: Path) -> None:
    stated = ("--samples", "1000", "--mean-tokens", "64", "--tokens-per-s", "1000")
    shown = headstart("train", recipe, "--plan", *stated, "train.epochs=2", "train.accumulation=1")
    assert shown.code == 0, shown.err
    for words in ("target weights", "optimiser moments", "peak", "steps of", "disk:", "1000 samples of 64 tokens"):
        assert words in shown.out


def test_what_cannot_fit_is_shown_and_refused(headstart: Callable, recipe: Path) -> None:
    refused = headstart("train", recipe, "--plan", "--gpus", "1", "--gpu-memory", "0.01")
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
    shown = headstart("train", recipe_70b, "--plan", *cards, "--json", "target.parallel=fsdp2")
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
    refused = headstart("train", recipe_70b, "--plan", *cards)
    assert refused.code == 2
    said = " ".join(refused.err.split())
    found = re.search(
        r"the run needs ([\d.]+) GiB per rank, and a card has 80.0 GiB\. With (.*) it needs ([\d.]+)", said
    )
    assert found, said
    assert float(found[1]) > 131 and float(found[3]) < 80
    assert "target.parallel=fsdp2" in found[2].split()
    accepted = headstart("train", recipe_70b, "--plan", *cards, *found[2].split())
    assert accepted.code == 0, accepted.err
