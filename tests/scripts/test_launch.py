"""`headstart launch` and `headstart recipe`: what comes with Headstart, listed and printed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headstart.heads.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]


def narrow(text: str) -> bool:
    return all(len(line) <= 80 for line in text.splitlines())


def test_launch_lists_what_it_can_print(headstart: Callable) -> None:
    shown = headstart("launch")
    files = [*(ROOT / "recipes/accelerate").iterdir(), *(ROOT / "scripts/launch").iterdir()]
    names = [line.split()[0] for line in shown.out.splitlines() if not line.startswith(" ")]
    assert shown.code == 0 and sorted(names) == sorted(path.stem for path in files) and narrow(shown.out)
    rows = {row["name"]: row for row in headstart("launch", "--json").json}
    assert rows["ddp-2"]["about"].startswith("2 GPUs of one machine")
    assert rows["slurm"]["about"].startswith("Slurm, two")
    for path in files:
        printed = headstart("launch", "--print", path.stem)
        assert printed.code == 0 and printed.out == path.read_text(encoding="utf-8"), path
    place = headstart("launch", "ddp-2").out.strip()
    assert Path(place).read_text() == headstart("launch", "--print", "ddp-2.yaml").out


def test_launch_writes_a_file_and_never_over_another(headstart: Callable, tmp_path: Path) -> None:
    made = headstart("launch", "zero2", "--out", "mine/zero.yaml")
    place = tmp_path / "mine/zero.yaml"
    assert made.out.strip() == "mine/zero.yaml"
    assert place.read_bytes() == (ROOT / "recipes/accelerate/zero2.yaml").read_bytes()
    assert headstart("launch", "zero2", "--out", place).code == 0, "the same again is no harm"
    refused = headstart("launch", "zero3", "--out", place)
    assert refused.code == 1 and "exists and holds something else" in refused.err and "--force" in refused.err
    assert place.read_bytes() == (ROOT / "recipes/accelerate/zero2.yaml").read_bytes()
    assert headstart("launch", "zero3", "--out", place, "--force").code == 0
    assert place.read_bytes() == (ROOT / "recipes/accelerate/zero3.yaml").read_bytes()
    assert headstart("launch", "node", "--out", "node.sh").code == 0 and os.access(tmp_path / "node.sh", os.X_OK)
    assert "is a folder" in headstart("launch", "node", "--out", tmp_path / "mine").err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("ddp2",), "did you mean 'ddp-2'?"), (("--print",), "--print and --out need the name of a file: node,")],
)
def test_launch_explains_a_wrong_name(headstart: Callable, arguments: tuple[str, ...], says: str) -> None:
    wrong = headstart("launch", *arguments)
    assert wrong.code == 2 and wrong.out == "" and says in wrong.err


def test_keys_have_default_and_meaning(headstart: Callable) -> None:
    every = headstart("recipe", "--keys")
    assert every.code == 0 and narrow(every.out)
    page = (ROOT / "docs/settings.md").read_text()
    keys = headstart("recipe", "--keys", "--json").json
    for each in keys:
        assert each["key"] == "head.type" or each["meaning"].replace("|", "\\|") in page, each["key"]
    said = {(each["key"], *each["heads"]): each for each in keys}
    assert said[("train.lr",)] == {
        "key": "train.lr", "type": "number", "default": "0.0001", "meaning": "Peak learning rate.", "heads": [],
    }  # fmt: skip
    assert said[("train.seed",)]["default"] == "${seed}"
    assert said[("data.distill.servers[].concurrency",)]["default"] == "32"
    assert {family for each in keys for family in each["heads"]} == set(FAMILIES)


def test_keys_of_one_part(headstart: Callable) -> None:
    heads = headstart("recipe", "--keys", "head.", "--json").json
    assert {each["key"].split(".")[0] for each in heads} == {"head"}
    for name, family in FAMILIES.items():
        own = {each["key"]: each["default"] for each in heads if name in each["heads"]}
        assert own["head.depth"] == str(family.config().depth) and own["head.type"] == "???"
        assert set(own) == {f"head.{field}" for field in vars(family.config())}
    answers = headstart("recipe", "--keys", "data.distill", "--json").json
    assert len(answers) > 20 and all(each["key"].startswith("data.distill.") for each in answers)
    within = [each["key"] for each in headstart("recipe", "--keys", "pack_tok", "--json").json]
    assert within == ["data.pack_tokens"], "where no key begins so, those that hold it"
    wrong = headstart("recipe", "--keys", "optimiser")
    assert wrong.code == 2 and wrong.out == ""
    assert "'optimiser': no key of a recipe" in wrong.err and "train." in wrong.err


def test_recipe_lists_the_shipped_ones(headstart: Callable) -> None:
    names = {path.stem for path in (ROOT / "recipes").glob("*.yaml") if not path.stem.startswith("_")}
    shown = headstart("recipe", "--json").json
    assert set(shown) == names and shown["smollm2-eagle3"] == "EAGLE-3 for SmolLM2-135M-Instruct: minutes on one GPU"
    assert narrow(headstart("recipe").out)
    assert set(headstart("recipe", "qwen", "--json").json) == {name for name in names if name.startswith("qwen")}
    assert "no shipped recipe begins with it" in headstart("recipe", "gpt5").err
