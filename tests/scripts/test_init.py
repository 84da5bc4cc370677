"""`headstart init`: options or answers → a commented recipe that loads, plans and fits."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from headstart import initial
from headstart.hardware import CARDS, hardware_of
from headstart.heads.errors import ConfigError
from headstart.heads.targets.load import weightless_target
from headstart.heads.targets.target import TargetConfig
from headstart.recipes.documented import meaning_of
from headstart.recipes.load import load_recipe, shipped_recipes
from headstart.recipes.schema import Recipe
from headstart.recipes.writing import commented


def loaded(path: Path) -> Recipe:
    return load_recipe(path)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """3,000 answered conversations of 300 to 310 tokens with the byte-level tokenizer."""
    place = tmp_path / "many.jsonl"
    with open(place, "w") as file:
        for n in range(3000):
            talk = [{"role": "user", "content": f"q{n:04}"}, {"role": "assistant", "content": f"{n:04} ok! " * 31}]
            file.write(json.dumps({"messages": talk}) + "\n")
    return place


@pytest.fixture
def target_8b(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Llama-3.1-8B by its config.json, without weights. The disk has a TiB free, whatever this machine's has."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 40}))
    place = tmp_path / "target-8b"
    place.mkdir()
    for file in tiny_target.glob("tokenizer*"):
        (place / file.name).write_bytes(file.read_bytes())
    (place / "chat_template.jinja").write_bytes((tiny_target / "chat_template.jinja").read_bytes())
    LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, eos_token_id=2,
    ).save_pretrained(place)  # fmt: skip
    return place


def test_a_recipe_for_the_cpu(headstart: Callable, tiny_target: Path, conversations: Path, tmp_path: Path) -> None:
    options = ("--target", tiny_target, "--data", conversations, "--gpu", "none", "--out", "mine.yaml")
    made = headstart("init", *options)
    assert made.code == 0, made.err
    assert made.out.splitlines() == ["headstart plan mine.yaml", "headstart run mine.yaml"]
    assert "24 conversations (messages)" in made.err and "few records (24): a head needs" in made.err
    recipe = loaded(tmp_path / "mine.yaml")
    assert recipe.name == "mine" and recipe.target.name == str(tiny_target)
    assert (recipe.target.device, recipe.target.dtype) == ("cpu", "float32")
    # every engine but TGI loads EAGLE-3 for a Llama
    assert recipe.head.type == "eagle3" and "vLLM, SGLang, TensorRT-LLM, llama.cpp" in made.err
    assert recipe.head.depth == 4 and recipe.train.max_seconds == 420 and recipe.train.accumulation == 1
    assert recipe.head.start_layers == [-1]  # a short training goes further from the target's last layer
    assert recipe.data.pack_tokens == 1024 and recipe.data.features == "stored"
    # the longest of the conversations has fewer than 256 tokens; 24 of 24 held out would leave none: a fifth at most
    assert recipe.data.max_length == 256 and recipe.data.held_out_fraction == 0.2
    assert [source.path for source in recipe.data.sources] == [str(conversations)] and not recipe.data.distill.prompts
    planned = headstart("plan", "mine.yaml", "--json")
    assert planned.code == 0 and planned.json["fits"], planned.err
    assert not (tmp_path / "runs").exists(), "nothing but the recipe is written"


def test_a_layer_that_cannot_be_copied_is_not_started_from(
    headstart: Callable, tiny_target: Path, conversations: Path, tmp_path: Path
) -> None:
    other = tmp_path / "gelu"
    shutil.copytree(tiny_target, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    made = headstart("init", "--target", other, "--data", conversations, "--gpu", "none", "--out", "mine.yaml")
    assert made.code == 0, made.err
    recipe = loaded(tmp_path / "mine.yaml")
    assert recipe.head.type == "eagle3" and recipe.head.start_layers is None


def test_on_a_cpu_the_norms_are_those_that_llama_cpp_reads(
    tiny_target: Path, conversations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """smollm2-eagle3 norms each stream by itself, which no engine reads that serves on a CPU."""
    monkeypatch.setattr(initial, "base_recipe", lambda family, target: "smollm2-eagle3")
    monkeypatch.setattr(initial, "FAMILIES", {"eagle3": initial.FAMILIES["eagle3"]})
    settings = {"target.name": str(tiny_target), "data.sources": [{"path": str(conversations)}],
                "data.distill.prompts": [], "head.num_key_value_heads": None}  # fmt: skip
    target = weightless_target(TargetConfig(name=str(tiny_target), device="cpu"))
    (on_cpu,), _ = initial.candidates({**settings, "target.device": "cpu"}, target)
    assert on_cpu.settings["head.fc_norm"] == "concat" and on_cpu.settings["head.norm_output"] is False
    (on_gpu,), _ = initial.candidates(settings, target)
    assert "head.fc_norm" not in on_gpu.settings
    assert set(on_cpu.engines) - set(on_gpu.engines) == {"llama_cpp"}


def test_a_head_whose_features_are_normed_starts_at_random(tiny_target: Path, conversations: Path) -> None:
    data = [{"path": str(conversations)}]
    of_target = {"target.name": str(tiny_target), "data.sources": data, "head.draft_vocab_size": 0}
    target = weightless_target(TargetConfig(name=str(tiny_target), device="cpu"))
    assert initial._started(of_target, "_eagle3", target) == {"head.start_layers": [-1]}
    assert initial._started({**of_target, "head.fc_norm": "stream"}, "_eagle3", target) == {}


def test_the_recipe_runs(headstart: Callable, tiny_target: Path, conversations: Path, tmp_path: Path) -> None:
    options = ("--target", tiny_target, "--data", conversations, "--gpu", "none", "--out", "mine.yaml")
    assert headstart("init", *options).code == 0
    trained = headstart("train", "mine.yaml", "train.steps=1")
    assert trained.code == 0, trained.err
    assert (tmp_path / "runs/mine/head/model.safetensors").is_file()


def test_a_paper_s_warm_up_does_not_outlast_a_small_run(
    headstart: Callable, tiny_target: Path, conversations: Path, tmp_path: Path
) -> None:
    """Hydra's authors warm up for 100 steps; 24 conversations make fewer in their 10 epochs."""
    options = ("--data", conversations, "--gpu", "24GB", "--head", "hydra", "--out", "mine.yaml")
    made = headstart("init", "--target", tiny_target, *options)
    assert made.code == 0, made.err
    assert loaded(tmp_path / "mine.yaml").train.warmup_steps is None
    plan = ("plan", "mine.yaml", "--gpu-memory", "24", "--json")
    planned = headstart(*plan)
    assert planned.code == 0 and 0 < planned.json["steps"] < 100, planned.err
    assert headstart(*plan, "train.warmup_steps=100").code == 2


@pytest.mark.slow
def test_a_recipe_for_two_cards(headstart: Callable, target_8b: Path, many: Path, tmp_path: Path) -> None:
    made = headstart("init", "--target", target_8b, "--data", many, "--gpu", "2xH100", "--out", "two.yaml", "--json")
    assert made.code == 0, made.err
    recipe = loaded(tmp_path / "two.yaml")
    # 2,940 conversations of about 300 tokens make 0.88 M: 27 steps of 2 × 16,384 in an epoch, 20 are wanted
    assert (recipe.data.pack_tokens, recipe.train.accumulation) == (16384, 2)
    assert recipe.data.max_length == 512 and recipe.data.held_out_fraction == 0.02
    # each rank would hold its own: features come from the target as it runs
    assert recipe.data.features == "online" and recipe.target.parallel == "none"
    assert made.json["next"] == [
        "headstart plan two.yaml --gpus 2 --gpu-memory 79.1",
        "accelerate launch --config_file $(headstart launch ddp-2) --num_processes 2 -m headstart.train two.yaml",
    ]
    planned = headstart(*made.json["next"][0].split()[1:], "--json")
    assert planned.code == 0 and planned.json["fits"]
    assert planned.json["peak"] / 2**30 == pytest.approx(made.json["peak_gib"]) and made.json["peak_gib"] < 79.1


@pytest.mark.slow
def test_a_small_card_gets_what_fits(headstart: Callable, target_8b: Path, many: Path, tmp_path: Path) -> None:
    """16 GB of weights leave 32 GiB: with the packs of a large card the plan would refuse."""
    made = headstart("init", "--target", target_8b, "--data", many, "--gpu", "36GiB", "--out", "one.yaml", "--json")
    assert made.code == 0, made.err
    recipe = loaded(tmp_path / "one.yaml")
    assert recipe.train.activation_checkpointing, "the plan's first remedy"
    assert 20 < made.json["peak_gib"] <= 36
    assert headstart("plan", "one.yaml", "--gpus", "1", "--gpu-memory", "36").code == 0
    larger = headstart("plan", "one.yaml", "--gpus", "1", "--gpu-memory", "36", "data.pack_tokens=16384", "--json",
                       "train.activation_checkpointing=false")  # fmt: skip
    assert larger.code == 2 and larger.json["plan"]["peak"] / 2**30 > 36


def test_features_stay_on_a_card_that_has_room(
    headstart: Callable, tiny_target: Path, many: Path, tmp_path: Path
) -> None:
    made = headstart("init", "--target", tiny_target, "--data", many, "--gpu", "24GB", "--out", "one.yaml", "--json")
    assert made.code == 0, made.err
    recipe = loaded(tmp_path / "one.yaml")
    # 0.88 M rows of 4 streams × 32 numbers × 2 bytes are 0.25 GB
    assert recipe.data.features == "memory" and recipe.target.device == "auto"
    # 53 packs of 16,384 an epoch
    assert recipe.data.pack_tokens == 16384 and recipe.head.depth == 7


def test_a_shipped_recipe_s_auto_becomes_the_pack_that_suits_the_data(
    headstart: Callable, tiny_target: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial, "base_recipe", lambda family, target: f"smollm2-{family}")
    options = ("--data", conversations, "--gpu", "24GB", "--head", "eagle", "--out", "one.yaml", "--json")
    made = headstart("init", "--target", tiny_target, *options)
    assert made.code == 0, made.err
    assert made.json["inherit"] == "smollm2-eagle" and load_recipe("smollm2-eagle").data.pack_tokens == "auto"
    assert loaded(tmp_path / "one.yaml").data.pack_tokens == 1024  # a few hundred tokens
    assert headstart("plan", "one.yaml", "--gpus", "1", "--gpu-memory", "22.4").code == 0


@pytest.mark.slow
def test_what_fits_nowhere_is_refused_and_nothing_is_written(
    headstart: Callable, target_8b: Path, conversations: Path, tmp_path: Path
) -> None:
    before = set(tmp_path.iterdir())
    refused = headstart("init", "--target", target_8b, "--data", conversations, "--gpu", "8GB", "--out", "no.yaml")
    assert refused.code == 2 and refused.out == ""
    assert "--gpu: nothing fits. plan: the run needs" in refused.err and "a card has 7.5 GiB" in refused.err
    assert "smaller --target" in refused.err
    assert set(tmp_path.iterdir()) == before


def test_prompts_are_answered_first(headstart: Callable, tiny_target: Path, prompts: Path, tmp_path: Path) -> None:
    made = headstart("init", "--target", tiny_target, "--data", prompts, "--gpu", "none", "--out", "ask.yaml")
    assert made.code == 0, made.err
    assert "2 prompts, which the target answers before training (prompt)" in made.err
    data = loaded(tmp_path / "ask.yaml").data
    assert [source.path for source in data.distill.prompts] == [str(prompts)] and data.sources == []
    assert data.distill.max_new_tokens == 128 and data.max_length == 256


def test_a_shipped_recipe_of_the_same_target_and_head_is_built_on() -> None:
    from headstart.initial import base_recipe

    assert base_recipe("eagle3", "smollm2-135m-instruct") == "smollm2-eagle3"
    assert base_recipe("hydra", "HuggingFaceTB/SmolLM2-135M-Instruct") == "smollm2-hydra"
    assert base_recipe("dspark", "qwen/qwen3-8b") == "qwen3-8b-dspark"
    assert base_recipe("eagle", "Qwen/Qwen3-8B") == "_eagle"
    assert all(base_recipe(family, "own/model") in shipped_recipes() for family in ("medusa", "jetspec", "peagle"))


def test_every_key_has_the_comment_of_its_field(
    headstart: Callable, tiny_target: Path, target_8b: Path, conversations: Path, tmp_path: Path
) -> None:
    for gpu, head, target in (("none", "medusa", tiny_target), ("2xH200", "dspark", target_8b)):
        file = f"{head}.yaml"
        options = ("--data", conversations, "--gpu", gpu, "--head", head, "--out", file)
        made = headstart("init", "--target", target, *options, "--json")
        assert made.code == 0, made.err
        text = (tmp_path / file).read_text()
        flat = re.sub(r"\s*\n\s*# ", " ", text)
        for key in made.json["settings"]:
            name = key.split(".")[-1]
            assert re.search(rf"{re.escape(meaning_of(key, head))}\n\s*{name}:", flat), key
        assert all(len(line) <= 120 for line in text.splitlines() if str(tmp_path.parent) not in line)


def test_values_are_written_as_yaml_reads_them(tmp_path: Path) -> None:
    odd = {
        "name": "yes", "target.name": "o'k: #1", "data.template_kwargs": {"a": [1, "x: y"]}, "train.lr": 1e-5,
        "data.sources": [{"path": "- a.jsonl", "limit": 3}, {"path": "b"}], "head.depth": 2, "train.epochs": 1.0,
    }  # fmt: skip
    place = tmp_path / "odd.yaml"
    place.write_text(commented(odd, "first\nsecond", "eagle3", "_eagle3"))
    recipe = loaded(place)
    assert (recipe.name, recipe.target.name, recipe.train.lr) == ("yes", "o'k: #1", 1e-5)
    assert recipe.data.template_kwargs == {"a": [1, "x: y"]}
    assert [(source.path, source.limit) for source in recipe.data.sources] == [("- a.jsonl", 3), ("b", None)]
    assert place.read_text().startswith("# first\n# second\n")


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--data", "nix.jsonl"), 1, "nix.jsonl: no such file"),
        (("--data", "wrong.jsonl"), 1, "wrong.jsonl:2: found fields 'text', expected one of messages"),
        (("--data", "empty.jsonl"), 1, "it holds no record"),
        ((), 2, "--data: not given, and there is no terminal to ask"),
        (("--data", "good.jsonl", "--gpu", "H1000"), 2, "did you mean H100?"),
        (("--data", "good.jsonl", "--gpu", "0xH100"), 2, "--gpu: found '0xH100'"),
        (("--data", "good.jsonl", "--head", "eagle4"), 2, "--head: found 'eagle4', expected one of eagle3,"),
        (("--data", "good.jsonl", "--target", "./nix"), 1, "target.name: ./nix is not a directory"),
        (("--data", "good.jsonl", "--out", "good.jsonl"), 1, "good.jsonl exists: give another name, or --force"),
    ],
)
def test_mistakes_are_explained_and_leave_no_file(
    headstart: Callable, tiny_target: Path, tmp_path: Path, options: tuple[str, ...], code: int, says: str
) -> None:
    (tmp_path / "good.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    given = options if "--target" in options else ("--target", str(tiny_target), *options)
    given = given if "--gpu" in given else (*given, "--gpu", "none")
    made = headstart("init", *given, "--yes")
    assert made.code == code and made.out == "" and says in made.err, made.err
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_file_is_replaced_only_by_force(
    headstart: Callable, tiny_target: Path, conversations: Path, tmp_path: Path
) -> None:
    place = tmp_path / "mine.yaml"
    place.write_text("precious")
    options = ("init", "--target", tiny_target, "--data", conversations, "--gpu", "none", "--out", place)
    assert headstart(*options).code == 1 and place.read_text() == "precious"
    assert headstart(*options, "--force").code == 0 and loaded(place).head.type == "eagle3"


@pytest.mark.parametrize(
    ("text", "gpus", "gib"),
    [
        ("24GB", 1, 24e9 / 2**30), ("24 GiB", 1, 24.0), ("h100", 1, 79.1), ("NVIDIA H200", 1, 139.8),
        ("2xH100", 2, 79.1), ("8 × 80GB", 8, 80e9 / 2**30), ("4090", 1, 23.5), ("RTX 4090", 1, 23.5),
        ("A100-80GB", 1, 79.1), ("a100-40gb", 1, 39.3),
    ],
)  # fmt: skip
def test_names_of_hardware(text: str, gpus: int, gib: float) -> None:
    found = hardware_of(text)
    assert (found.gpus, found.gib) == (gpus, pytest.approx(gib))


def test_every_card_is_found_by_its_name() -> None:
    assert {name: hardware_of(name).gib for name in CARDS} == CARDS
    assert hardware_of("none").gpus == hardware_of("CPU").gpus == 0 and hardware_of("none").gib > 1
    for wrong in ("", "x", "24TB", "0GB", "-1", "2x"):
        with pytest.raises(ConfigError, match="--gpu: found"):
            hardware_of(wrong)


def answered(command: list[str], folder: Path, answers: dict[str, list[str]]) -> tuple[int, str]:
    """(exit code, screen) of a command on a terminal, where each question gets its answers in turn."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    screen, seen, until = "", 0, time.monotonic() + 150
    while time.monotonic() < until:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                screen += os.read(ours, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                break
        elif process.poll() is not None:
            break
        for question, texts in answers.items():
            at = screen.find(question, seen)
            if at >= 0 and texts and screen.rstrip(" ").endswith(":"):
                seen = len(screen)
                os.write(ours, f"{texts.pop(0)}\n".encode())
    os.close(ours)
    return process.wait(timeout=30), screen


@pytest.mark.slow
def test_a_terminal_is_asked_until_an_answer_can_be_used(
    tiny_target: Path, conversations: Path, tmp_path: Path
) -> None:
    answers: dict[str, Any] = {
        "Target (": [str(tiny_target)],
        "Data (": ["nix.jsonl", str(conversations)],
        "GPU (": ["H1000", "none"],
        "Recipe file": [""],
        "Head [": ["medusa"],
    }
    code, screen = answered([sys.executable, "-m", "headstart", "init"], tmp_path, answers)
    assert code == 0, screen
    assert "nix.jsonl: no such file" in screen and "did you mean H100?" in screen
    assert "headstart run talk.yaml" in screen and not any(answers.values())
    assert loaded(tmp_path / "talk.yaml").head.type == "medusa"
