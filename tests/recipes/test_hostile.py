"""Recipes, overrides and files that nobody should write: a message that names the place, no traceback, no hang."""

from __future__ import annotations

import os
import random
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from reference.hostile import VALUES, mutated, within_seconds

from headstart.heads.errors import ConfigError, HeadstartError
from headstart.recipes.load import load_evaluation, load_exporting, load_recipe, to_dict, to_yaml
from headstart.recipes.schema import Recipe

BASE = """
target: {name: some/model}
head: {type: eagle3, depth: 4, draft_vocab_size: 100}
data:
  sources: [{path: a.jsonl}]
train: {epochs: 1, lr: 1e-4, betas: [0.9, 0.95]}
"""
NINES = "9" * 5000


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def outcome(load: Callable[[], Recipe]) -> HeadstartError | None:
    """None where it loads, to something that reads back equal; the error otherwise, which fits on a screen."""
    with within_seconds(10):
        try:
            recipe = load()
        except HeadstartError as error:
            assert isinstance(error, ConfigError) and 0 < len(str(error)) < 1500
            str(error).encode()
            return error
    assert yaml.safe_load(to_yaml(recipe)) == to_dict(recipe)
    return None


#: override → what the message says; None: it is accepted
OVERRIDES = {
    "name=${oc.env:NOPE}": "override: run_dir: Environment variable 'NOPE' not found: set it",
    "run_dir=${oc.env:NOPE}/x": "override: run_dir: Environment variable 'NOPE' not found: set it",
    "name=${nope}": "override: name: Interpolation key 'nope' not found",
    "name=${name}": "override: name: Recursive interpolation",
    "name=${": "override 'name=${'",
    "train.lr=${eval}": "override: train.lr: While dereferencing",
    "train.lr=${train.eps}": None,
    "data.sources[0].path=x": None,
    "data.sources[0].limit=3": None,
    "train.betas[1]=0.5": None,
    "data.sources[1].path=x": "data.sources[1].path: data.sources has 1 entry, [0] to [0]: give it whole",
    "data.sources[-1].path=x": "data.sources has 1 entry",
    "data.sources[0].pth=x": "override: unknown key 'data.sources[0].pth'; did you mean 'data.sources[0].path'?",
    "data.source[0].path=x": "override: unknown key 'data.source'; did you mean 'data.sources'?",
    "data.sources[0]=x": "override: data.sources[0]: found 'x', expected a mapping",
    "data.sources[x].path=1": "expected one like train.lr or data.sources[0].path",
    "train.lr[0]=1": "train.lr[0]: train.lr is 0.0001, no list with entries",
    "train.betas[1]=x": "override: train.betas[1]: found 'x', expected a list of number",
    "head.feature_layers[0]=1": "head.feature_layers is None, no list with entries",
    "head[0]=1": "override: head: found [], expected a mapping",
    "=x": "expected key=value",
    "a..b=1": "expected one like train.lr",
    ".train=1": "expected one like train.lr",
    "a." * 3000 + "b=1": "expected one like train.lr",
    f"seed={NINES}": "found a number of 5000 digits",
    f"train.lr={NINES}.0": "digits",
    "seed=99999999999999999999": "override: seed: found 99999999999999999999, expected a whole number below 2^63",
    "head.depth=1000000": "head.depth: found 1000000, expected 1 to 64",
    "head.depth_decay=nan": "head.depth_decay: found nan",
    "head.intermediate_size=-1": "head.intermediate_size: found -1, expected 1 to",
    "head.hidden_size=9223372036854775807": "head.hidden_size: found 9223372036854775807, expected 1 to",
    "target.dtype=float8": "target.dtype: found 'float8', expected one of auto, float32",
    "target.parallel=x": "target.parallel: found 'x', expected one of",
    "eval.tree.depth=1000000": "eval.tree.depth: found 1000000, expected at most 1024",
    "eval.sweep_prompts=9223372036854775807": "eval.sweep_prompts: found",
    "eval.kv_bucket=64": "eval.kv_bucket: found 64, but it is no setting any more: it is always 128. Remove it",
    "eval.batch_sizes=[1,9223372036854775807]": "eval.batch_sizes[1]: found",
    "eval.tree.paths=[[true]]": "eval.tree.paths: found",
    "tune.depth=1000000": "tune.depth: found",
    "data.template_kwargs={messages: 5}": "data.template_kwargs: found 'messages'",
    "eval.template_kwargs={add_generation_prompt: false}": "eval.template_kwargs: found 'add_generation_prompt'",
    "train.lr=nan": "train.lr: found nan, expected a finite number",
    "train=[]": "override: train: found [], expected a mapping",
    "data.sources={path: x}": "override: data.sources: found {'path': 'x'}, expected a list",
    "data.template_kwargs=[1]": "override: data.template_kwargs: found [1], expected a mapping",
    "data.template_kwargs=" + "{a: " * 200 + "1" + "}" * 200: "more than 32 levels of nesting",
    "data.template_kwargs=" + "[" * 20000: "override",
    "data.template_kwargs={x: !!binary aGk=}": "override: data.template_kwargs.x: found b'hi', expected text",
    "data.template_kwargs={1: 2}": "override: data.template_kwargs",
    "name=!!python/object/apply:os.system [ls]": "could not determine a constructor",
    "name=&a [*a]": "recursive aliases",
    "name=half \udc80": "override",
    "target.name=half \ud83d": "override",
    "\udc80=1": "expected a key in UTF-8 text",
    "name=..": "name: found '..', expected the name of a folder below runs/",
    "name=../x": "below runs/",
    "name=a/../../x": "below runs/",
    "name=/abs": "below runs/",
    "name=a/": "below runs/",
    'name="a\\nb"': "below runs/",
    'name="\\e[31m"': "below runs/",
    f"name={'x' * 256}": "below runs/",
    f"name={'x/' * 600}x": "below runs/",
    'name=""': "below runs/",
    "name=a/b": None,
    "name=größer": None,
    'run_dir=""': "run_dir: found '', expected a name or a path",
    'run_dir="a\\0b"': "run_dir: found",
    'target.name=""': "target.name: found ''",
    "start_from=' '": "start_from: found ' '",
    "export.engines=[tgi]": "TGI does not serve eagle3",
    "export.max_shard_size=9e400": "export.max_shard_size: found",
}


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda text: ascii(text)[:40])
def test_overrides(base: Path, override: str) -> None:
    error, expected = outcome(lambda: load_recipe(base, [override])), OVERRIDES[override]
    assert (error is None) == (expected is None), error
    assert expected is None or expected in str(error)


def test_an_entry_of_a_list_is_changed_and_the_others_stay(base: Path, tmp_path: Path) -> None:
    def sources(*overrides: str) -> list[tuple[str | None, int | None]]:
        return [(source.path, source.limit) for source in load_recipe(base, overrides).data.sources]

    two = "data.sources=[{path: b.jsonl, limit: 1}, {path: c.jsonl}]"
    assert sources("data.sources[0].path=x.jsonl") == [("x.jsonl", None)]
    assert sources(two, "data.sources[1].limit=5") == [("b.jsonl", 1), ("c.jsonl", 5)]
    assert sources("data.sources[0].limit=5", two) == [("b.jsonl", 1), ("c.jsonl", None)]  # the later one wins
    assert sources(two, "data.sources[0]={path: d.jsonl}") == [("d.jsonl", None), ("c.jsonl", None)]
    changed = ("train.betas[0]=0.5", "train.lr=1", "eval.tree.paths=[[0],[0,0]]", "eval.tree.paths[1][1]=2")
    recipe = load_recipe(base, [*changed, "head.feature_layers=[1,5,9]", "head.feature_layers[2]=8"])
    assert recipe.train.betas == [0.5, 0.95] and recipe.eval.tree.paths == [[0], [0, 2]]
    assert recipe.head.feature_layers == [1, 5, 8]  # type: ignore[attr-defined]
    mine = {"target.name": "t", "eval.data": ["a.jsonl", "b.jsonl"]}
    assert load_evaluation(None, ["eval.batch_sizes=[1,2]", "eval.batch_sizes[1]=4"], mine).eval.batch_sizes == [1, 4]


def alias_bomb(levels: int = 9) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


#: content of a file → what the message says; None: it is accepted
FILES: dict[str, tuple[str | bytes, str | None]] = {
    "empty": ("", "head.type is not set"),
    "scalar": ("5\n", "found '5' at the top, expected `key: value` lines"),
    "list": ("- a\n", "found a list at the top"),
    "tab": ("train:\n\tlr: 1\n", "bad.yaml:2: not valid YAML"),
    "byte order mark": ("\ufeff" + BASE, None),
    "carriage returns": (BASE.replace("\n", "\r\n"), None),
    "utf-16": (BASE.encode("utf-16"), "not UTF-8 text"),
    "binary": (bytes(range(256)), "not UTF-8 text"),
    "null characters": (b"name: a\0b\n", "not valid YAML"),
    "half a pair": ('name: "\\uD800"\n', "bad.yaml:1: not valid YAML"),
    "twice": (BASE + "train: {lr: 3}\n", "bad.yaml:7: not valid YAML (found duplicate key train)"),
    "bomb": (alias_bomb(), "not valid YAML"),
    "bomb where anything goes": (
        BASE + "eval: {template_kwargs:\n" + "".join(f"  {line},\n" for line in alias_bomb().splitlines()) + "}\n",
        "not valid YAML",
    ),
    "itself": ("name: &a [*a]\n", "recursive aliases"),
    "deep list": ("a: " + "[" * 3000 + "]" * 3000, "bad.yaml:1: found more than 32 levels"),
    "deep mapping": ("a: " + "{a: " * 3000 + "}" * 3000, "found more than 32 levels"),
    "long number": (BASE + f"seed: {NINES}\n", "bad.yaml:7: found a number of 5000 digits"),
    "long hex": (BASE + "seed: 0x" + "f" * 5000 + "\n", "digits"),
    "long sexagesimal": (BASE + "seed: " + "1:" * 5000 + "1\n", "digits"),
    "null key": (BASE + "null: x\n", "Incompatible key type"),
    "list key": (BASE + "? [a]\n: x\n", "bad.yaml:7: not valid YAML"),
    "number key": (BASE + "5: x\n", "bad.yaml:7: unknown key '5'"),
    "tag": (BASE + "name: !foo x\n", "bad.yaml:7: not valid YAML"),
    "python": (BASE + "name: !!python/name:os.system\n", "bad.yaml:7: not valid YAML"),
    "two documents": (BASE + "---\n" + BASE, "not valid YAML"),
    "huge": ("# " + "a" * 300_000, "it holds more than 262144 bytes"),
    "inherits itself": ("inherit: bad.yaml\n", "inherit goes in a circle"),
    "inherits its directory": ("inherit: .\n", "what is there is a directory"),
    "inherits nothing": ("inherit: ''\n" + BASE, "inherit: ''"),
    "inherits a null character": ('inherit: "a\\0b"\n', "no such recipe"),
    "inherits a long name": ("inherit: " + "x" * 5000 + "\n", "File name too long"),
    "a variable that is not set": (BASE + "name: ${oc.env:NOPE}\n", "Environment variable 'NOPE' not found"),
    "a run_dir with such a variable": (BASE + "run_dir: ${oc.env:NOPE}/x\n", "bad.yaml:7: run_dir: Environment"),
    "a list as head": ("head: [eagle3]\n", "head.type is not set"),
    "a list as family": (BASE.replace("eagle3", "[eagle3]"), "bad.yaml:3: head.type: found"),
}


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path: Path, name: str) -> None:
    content, expected = FILES[name]
    path = tmp_path / "bad.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    error = outcome(lambda: load_recipe(path))
    assert (error is None) == (expected is None), error
    assert expected is None or (expected in str(error) and "bad.yaml" in str(error))


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "link.yaml").symlink_to("link.yaml")
    places = (tmp_path, tmp_path / "pipe.yaml", "/dev/zero", "", "a\0b", "\udc80", "x" * 5000, "~nobody/x",
              tmp_path / "link.yaml", "a\nb")  # fmt: skip
    for place in places:
        error = outcome(lambda place=place: load_recipe(place))
        assert "no such recipe" in str(error)


def test_a_tree_of_recipes_is_not_read_for_ever(tmp_path: Path) -> None:
    """Twenty files that each inherit the one below twice would be a million."""
    (tmp_path / "r0.yaml").write_text(BASE)
    for n in range(1, 20):
        (tmp_path / f"r{n}.yaml").write_text(f"inherit: [r{n - 1}.yaml, r{n - 1}.yaml]\n")
    assert "more than 64 files" in str(outcome(lambda: load_recipe(tmp_path / "r19.yaml")))


def test_options_are_values_too() -> None:
    for name in ("${nope}", "half \udc80", "", "a\0b"):
        for load in (load_evaluation, load_exporting):
            with pytest.raises(ConfigError, match="target.name"):
                load(None, [], {"target.name": name})


@contextmanager
def seeded(number: int) -> Iterator[random.Random]:
    """What fails says with which seed."""
    try:
        yield random.Random(number)
    except BaseException as error:
        error.add_note(f"seed {number}")
        raise


KEYS = ("name", "run_dir", "seed", "start_from", "target.name", "target.dtype", "head.depth", "head.type",
        "head.feature_layers", "data.sources", "data.sources[0]", "data.sources[0].path", "data.distill.prompts",
        "data.template_kwargs", "data.held_out_fraction", "data.max_length", "train", "train.lr", "train.betas",
        "train.betas[0]", "train.epochs", "train.steps", "train.resume", "eval.data", "eval.tree", "eval.tree.paths",
        "eval.tree.depth", "eval.synthetic_acceptance", "eval.batch_sizes", "tune.k", "export.engines",
        "export.max_shard_size", "export.push_to_hub")  # fmt: skip


def test_random_overrides(base: Path) -> None:
    accepted = 0
    for number in range(110):
        with seeded(number) as dice:
            key, value = dice.choice(KEYS), yaml.safe_dump(dice.choice(VALUES), default_flow_style=True, width=10**6)
            word = f"{key}={value.removesuffix(chr(10)).removesuffix('...').strip()}"
            if dice.random() < 0.4:
                word = mutated(word, dice)
            accepted += outcome(lambda word=word: load_recipe(base, [word])) is None
    assert 10 < accepted < 100  # neither everything nor nothing


def test_random_files(tmp_path: Path) -> None:
    text = yaml.safe_dump(to_dict(load_recipe("quickstart")), sort_keys=False)
    lines = [*text.splitlines(), "", "inherit: quickstart", "- x", "?", "%YAML 1.1", "name: &a *a", "---", "\ttab: 1"]
    path, accepted = tmp_path / "recipe.yaml", 0
    for number in range(60):
        with seeded(number) as dice:
            kept = list(text.splitlines())
            for _ in range(dice.randint(1, 3)):
                place = dice.randrange(len(kept))
                what = dice.randrange(4)
                if what == 0:
                    kept[place] = mutated(kept[place], dice)
                elif what == 1:
                    del kept[place]
                elif what == 2:
                    kept.insert(place, dice.choice(lines))
                else:
                    name = kept[place].partition(":")[0]
                    kept[place] = f"{name}: {dice.choice(VALUES)!r}"
            path.write_bytes("\n".join(kept).encode("utf-8", "surrogatepass"))
            accepted += outcome(lambda: load_recipe(path)) is None
    assert 0 < accepted < 60


def test_random_keys(base: Path) -> None:
    for number in range(60):
        with seeded(number) as dice:
            word = "".join(dice.choice(string.printable + "[].=$\udc80é") for _ in range(dice.randint(1, 12)))
            outcome(lambda word=word: load_recipe(base, [word]))
