"""Inheritance, overrides, and what every mistake in a recipe says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from headstart.heads.errors import ConfigError
from headstart.heads.families import FAMILIES
from headstart.recipes.load import load_evaluation, load_recipe, shipped_recipes, to_dict, to_yaml

BASE = """
target: {name: some/model}
head: {type: eagle3, depth: 4, draft_vocab_size: 100}
data:
  sources: [{path: a.jsonl}]
train: {epochs: 1, lr: 1e-4, betas: [0.9, 0.95]}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_layers_merge_key_by_key_and_replace_lists(base: Path, tmp_path: Path) -> None:
    child = write(tmp_path, "child.yaml", "inherit: base.yaml\nname: kid\ntrain: {lr: 2e-4, betas: [0.8, 0.9]}\n")
    recipe = load_recipe(child, ["train.lr=3e-4", "seed=7", "data.sources=[{path: b.jsonl, limit: 3}]"])
    assert (recipe.name, recipe.run_dir, recipe.seed) == ("kid", "runs/kid", 7)
    assert (recipe.train.lr, recipe.train.betas, recipe.train.epochs) == (3e-4, [0.8, 0.9], 1.0)
    assert [(s.path, s.limit) for s in recipe.data.sources] == [("b.jsonl", 3)]
    assert type(recipe.head) is FAMILIES["eagle3"].config and recipe.head.depth == 4


def test_defaults(base: Path) -> None:
    recipe = load_recipe(base, ["seed=5"])
    assert recipe.name == "base"  # the file's name
    assert (recipe.train.seed, recipe.eval.seed) == (5, 5)
    assert load_recipe(base, ["seed=5", "train.seed=6"]).train.seed == 6


def test_evaluation_uses_the_template_as_training_does(base: Path) -> None:
    recipe = load_recipe(base, ["data.template_kwargs={enable_thinking: false}"])
    assert recipe.eval.template_kwargs == {"enable_thinking": False}
    assert load_recipe("qwen3-8b-eagle3").eval.template_kwargs == {"enable_thinking": False}
    assert load_recipe(base, ["eval.template_kwargs={a: 1}"]).eval.template_kwargs == {"a": 1}
    assert load_recipe(base).eval.template_kwargs == {}


def test_several_parents_later_ones_win(base: Path, tmp_path: Path) -> None:
    write(tmp_path, "fast.yaml", "train: {lr: 1e-2}\n")
    child = write(tmp_path, "child.yaml", "inherit: [base.yaml, fast.yaml]\n")
    assert load_recipe(child).train.lr == 1e-2


def test_shipped_recipes_are_found_by_name_and_inherited(tmp_path: Path) -> None:
    child = write(tmp_path, "mine.yaml", "inherit: smollm2-eagle3\ntrain: {epochs: 1}\n")
    recipe = load_recipe(child)
    assert recipe.target.name == "smollm2-135m-instruct" and recipe.train.epochs == 1 and recipe.head.type == "eagle3"
    assert load_recipe("smollm2-eagle3").name == "smollm2-eagle3"
    assert load_recipe("recipes/smollm2-eagle3.yaml").name == "smollm2-eagle3"  # from any directory


def test_another_head_type_starts_the_head_afresh(base: Path) -> None:
    recipe = load_recipe(base, ["head.type=medusa"])
    assert type(recipe.head) is FAMILIES["medusa"].config
    assert recipe.head == FAMILIES["medusa"].config()  # nothing of the eagle3 node is left


def test_the_resolved_recipe_reads_back_equal(base: Path, tmp_path: Path) -> None:
    recipe = load_recipe(base, ["head.feature_layers=[1,5,9]"])
    again = load_recipe(write(tmp_path, "resolved.yaml", to_yaml(recipe)))
    assert again == recipe and yaml.safe_load(to_yaml(again))["head"]["feature_layers"] == [1, 5, 9]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", "unknown key 'train.lrr'; did you mean 'train.lr'?"),
        ("lr=1", "unknown key 'lr'; did you mean 'train.lr'?"),
        ("head.dpth=1", "did you mean 'head.depth'?"),
        ("head.num_layers=1", "unknown key 'head.num_layers'"),  # medusa's, not eagle3's
        ("data.sources=[{pth: x}]", "unknown key 'data.sources[0].pth'; did you mean 'data.sources[0].path'?"),
        (
            "data.sources=[{path:x.jsonl}]",
            "unknown key 'data.sources[0].path:x.jsonl': YAML needs a space behind the colon, `path: x.jsonl`. Keys of",
        ),
        ("train={epochs:3}", "unknown key 'train.epochs:3': YAML needs a space behind the colon, `epochs: 3`. Keys of"),
        ("train={epoch:3}", "unknown key 'train.epoch:3'"),
        ("eval.tree.dept=1", "did you mean 'eval.tree.depth'?"),
        ("train.lr=fast", "train.lr: found 'fast', expected number"),
        ("train.keep=1.5", "train.keep: found 1.5, expected whole number"),
        ("train.epochs=[1]", "train.epochs: found [1], expected number or null"),
        ("train.resume=perhaps", "train.resume: found 'perhaps', expected true or false"),
        ("train.betas=3", "train.betas: found 3, expected a list of number"),
        ("data.sources=[{path: x, limit: many}]", "data.sources[0].limit: found 'many', expected whole number or null"),
        ("train=fast", "train: found 'fast', expected a mapping"),
        ("head.type=eagel3", "head.type: found 'eagel3', expected one of"),
        ("train.lr", "expected key=value"),
        ("data.sources=[{path: x}", "override"),
        ("train.epochs=null", "no budget is set"),
        ("data.sources=[]", "no sources"),
        ("eval.tree.kind=bush", "eval.tree.kind: found 'bush'"),
        ("head.depth=0", "head.depth: found 0"),
        ("train.lr=-1", "train.lr"),
    ],
)
def test_mistakes_name_the_key_the_value_and_what_was_expected(base: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(base, [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: x\nhead:\n  type: eagle3\n  dpth: 3\n",
            "bad.yaml:4: unknown key 'head.dpth'; did you mean 'head.depth'?",
        ),
        ("train:\n  steps: 1\n  lr: soon\nhead: {type: eagle}\n", "bad.yaml:3: train.lr: found 'soon'"),
        ("data:\n  sources:\n    - path: x\n      limt: 3\nhead: {type: eagle}\n", "bad.yaml:4: unknown key"),
        ("a:\n - b\n c\n", "not valid YAML (could not find expected"),
        ("train: {lr: 1}\ntrain: {lr: 2}\n", "duplicate key"),
        ("- a\n- b\n", "expected `key: value` lines"),
        ("train: {steps: 1}\n", "head.type is not set"),
        ("inherit: bad.yaml\n", "inherit goes in a circle: bad.yaml → bad.yaml"),
        ("inherit: gone.yaml\n", "bad.yaml:1: inherit: gone.yaml: no such recipe"),
        ("inherit: {a: 1}\n", "expected a recipe name or a list of them"),
        ("head: {type: eagle}\ntrain: {steps: 1}\ndata: {sources: [{path: x}]}\n", "target.name is not set"),
    ],
)
def test_mistakes_in_a_file_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "bad.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert message in str(caught.value) and "bad.yaml" in str(caught.value)


def test_longer_circle(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "inherit: b.yaml\n")
    write(tmp_path, "b.yaml", "inherit: [c.yaml]\n")
    write(tmp_path, "c.yaml", "inherit: a.yaml\n")
    with pytest.raises(ConfigError, match=r"a\.yaml → b\.yaml → c\.yaml → a\.yaml"):
        load_recipe(tmp_path / "a.yaml")


def test_no_such_recipe_suggests_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'smollm2-eagle3'"):
        load_recipe("smollm-eagle3")
    assert "quickstart" in shipped_recipes()


def test_evaluation_settings_without_a_recipe() -> None:
    settings = load_evaluation(
        None, ["eval.tree.depth=3", "seed=4"], {"target.name": "t", "eval.data": "d", "x.y": None}
    )
    assert (settings.target.name, settings.eval.data, settings.eval.tree.depth) == ("t", "d", 3)
    with pytest.raises(ConfigError, match="unknown key 'train'"):
        load_evaluation(None, ["train.lr=1"], {"target.name": "t"})
    with pytest.raises(ConfigError, match="target.name is not set"):
        load_evaluation(None)


def test_evaluation_settings_of_a_recipe(base: Path) -> None:
    settings = load_evaluation(base, ["eval.limit=3"], {"eval.data": "mine.jsonl"})
    assert (settings.target.name, settings.eval.data, settings.eval.limit) == ("some/model", "mine.jsonl", 3)


def test_values_of_the_environment_are_used_and_not_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2-and-more")
    monkeypatch.setenv("MY_SEED", "77")
    monkeypatch.delenv("MY_OTHER", raising=False)
    text = """
    inherit: quickstart
    name: mine
    seed: ${oc.env:MY_SEED}
    run_dir: ${oc.env:MY_SECRET}/runs/${name}
    data:
      template_kwargs: {a.b: "${oc.env:MY_SECRET}", list: [1, "x-${oc.env:MY_OTHER,/home/me}"]}
    train: {project: "${oc.env:MY_SECRET}"}
    """
    recipe = load_recipe(write(tmp_path, "mine.yaml", text), ["head.depth=3"])
    assert (recipe.seed, recipe.run_dir, recipe.train.seed) == (77, "hunter2-and-more/runs/mine", 77)
    assert recipe.data.template_kwargs == {"a.b": "hunter2-and-more", "list": [1, "x-/home/me"]}
    assert recipe.eval.template_kwargs == recipe.data.template_kwargs
    shown, kept = to_dict(recipe), to_yaml(recipe)
    assert "hunter2" not in f"{shown}{kept}" and "/home/me" not in str(shown)
    assert shown["seed"] == "${oc.env:MY_SEED}" and shown["train"]["seed"] == "${seed}" and shown["head"]["depth"] == 3
    assert shown["eval"]["template_kwargs"]["list"] == [1, "x-${oc.env:MY_OTHER}"]
    assert "environment" not in shown
    again = load_recipe(write(tmp_path, "recipe.yaml", kept))
    assert again == recipe and to_dict(again) == shown
    assert to_dict(replace(again, name="other"))["seed"] == shown["seed"]
    with pytest.raises(ConfigError, match="unknown key 'environment'"):
        load_recipe("quickstart", ["environment={a: b}"])
