"""The code of the documentation does what it says: blocks of bash are parsed and resolved, and run where they can."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from doc_blocks import HOW, PLACEHOLDER, ROOT, Block, blocks, commands

from headstart import walkthrough
from headstart.cli import app
from headstart.commands.common import split_recipe
from headstart.comparing.cells import make_cells
from headstart.comparing.config import load_comparison
from headstart.data.config import SourceConfig
from headstart.data.sources.sources import load_conversations
from headstart.recipes.load import load_evaluation, load_exporting, load_recipe

BASH = blocks("bash")
#: what a name for the reader to fill in is taken to be
NAMES = {
    name: "smollm2-eagle3"
    for name in ("RECIPE", "mine.yaml", "served.yaml", "card.yaml", "runs/mine/recipe.yaml", "runs/card/recipe.yaml")
}
#: programs that are not ours → what is checked of them
OTHERS = {
    "sglang.launch_server", "trtllm-serve", "llama-server", "text-generation-launcher", "printf",
    "convert_hf_to_gguf.py", "curl",
}  # fmt: skip
SHELL = {".", "cd", "git", "python3", "mkdir", "head", "ls", "cat", "export"}


def recipe_of(name: str) -> str:
    return NAMES.get(name, name)


@cache
def resolve(name: str, *overrides: str) -> None:
    """Resolve a recipe with overrides. Pages name the same ones again and again."""
    load_recipe(recipe_of(name), overrides)


def check_headstart(words: list[str]) -> None:
    """Parse the words by the command line, and resolve recipe and overrides."""
    command: Any = typer.main.get_command(app)
    verb, rest = "", list(words)
    while hasattr(command, "commands"):
        verb = rest.pop(0)
        command = command.commands[verb]
    check_settings(verb, command.make_context(verb, rest).params)


def check_settings(verb: str, given: dict[str, Any]) -> None:
    if "recipe" in given:
        resolve(given["recipe"], *(given.get("overrides") or []))
    elif "arguments" in given and given.get("check") is None:
        recipe, overrides = split_recipe(given["arguments"])
        named = None if recipe is None else recipe_of(recipe)
        if verb == "doctor":
            load_evaluation(named, overrides)
        elif verb == "export":
            load_exporting(named, overrides, {"target.name": given["target"]})
        elif given.get("engine") is None:
            values = {"target.name": given["target"], "eval.data": (given["data"] or [None])[0]}
            settings = load_evaluation(named, overrides, values)
            assert named is not None or settings.eval.data, "nothing to measure on"
    if verb == "compare" and given["file"] not in NAMES and not PLACEHOLDER.fullmatch(given["file"]):
        config, settings, file = load_comparison(given["file"], given.get("overrides") or [])
        assert all(cell.load(Path("x")) for cell in make_cells(config, settings, file))
    if verb == "launch" and given.get("name"):
        from headstart.commands.launch import launch_files

        assert given["name"] in launch_files()
    if verb == "recipe" and given.get("keys"):
        from headstart.recipes.documented import find_settings

        find_settings(given["words"])


class Parsed(Exception):
    """A parser has accepted its arguments."""


def check_module(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a module's own parser read the words."""
    if module == "headstart.train":
        words = [word for word in words if word != "--only-distill"]
        resolve(*words)
        return
    words = ["Llama" if word == "NAME" else word for word in words]
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        real(self, words, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(Parsed):
        importlib.import_module(module).main()


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def check_launch(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch` and `torchrun`: their file, and what they start."""
    if "--config_file" in words:
        file = after(words, "--config_file")
        if not file.startswith("$("):
            assert (ROOT / file).is_file() or Path(file).name == file, file
    start = words.index("-m")
    check_module(words[start + 1], words[start + 2 :], monkeypatch)


def check_install(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        if match := re.fullmatch(r"(?:\.|headstart)\[(.*)\]", word):
            assert set(match[1].split(",")) <= set(known), word
        assert not word.endswith(".txt") or (ROOT / word).is_file(), word


#: fields of vLLM's --speculative-config that exports write
VLLM = {"method", "model", "num_speculative_tokens", "parallel_drafting", "num_speculative_tokens_per_batch_size"}


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One command of a page. Raises, or fails, where it is wrong, or where nothing is known of its program."""
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    if not words:
        return
    program, rest = words[0].removeprefix(".venv-test/bin/").removeprefix(".venv/bin/"), words[1:]
    if (
        program in ("python", "python3")
        and rest[:1] == ["-m"]
        and rest[1] in ("headstart", "venv", "pip", "http.server")
    ):
        program, rest = rest[1], rest[2:]
    if program == "headstart":
        check_headstart(rest)
    elif program in ("accelerate", "torchrun"):
        check_launch(rest, monkeypatch)
    elif program in ("bash", "sbatch", "pytest") or program.startswith("scripts/"):
        script = program if "/" in program else next(word for word in rest if not word.startswith("-"))
        assert (ROOT / script).exists(), script
        if "scripts/launch/" in " ".join(words):
            resolve(rest[-1])
    elif program == "pip":
        check_install(rest)
    elif program == "vllm":
        assert rest[0] == "serve"
        if len(rest) > 2:
            config = json.loads(after(rest, "--speculative-config"))
            assert set(config) <= VLLM and {"method", "model"} <= set(config)
    elif program == "python" and rest[:1] == ["-m"] and rest[1].startswith("headstart."):
        check_module(rest[1], rest[2:], monkeypatch)
    elif program == "mkdocs":
        assert rest[0] == "build" and (ROOT / "mkdocs.yml").is_file()
    elif program == "ruff":
        assert rest[0] == "check"
    else:
        asked = program if program != "python" else rest[1] if rest[0] == "-m" else rest[0]
        assert asked in OTHERS | SHELL | {"venv"}, (
            f"{program}: say in tests/scripts/docs/test_blocks.py how it is checked"
        )


@pytest.mark.parametrize("block", BASH, ids=str)
def test_commands_are_what_the_command_line_takes(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    assert block.how in HOW, f"{block}: write one of {HOW} in a comment above the block"
    if block.how == "needs: names":
        assert PLACEHOLDER.search(block.text), f"{block}: no name to fill in: say `run`, or what it needs"
    if block.how == "needs: server":
        assert re.search(r"vllm|sglang|http|llama-server", block.text)
    found = commands(block.text)
    assert found
    for words in found:
        with monkeypatch.context() as patch:
            check(words, patch)


@pytest.mark.parametrize(
    "line",
    [
        "headstart run smollm2-eagle3 train.larning_rate=1",
        "headstart run smollm2-eagle4",
        "headstart plan smollm2-eagle3 --gpu 2",
        "headstart export smollm2-eagle3 'export.engines=[vlm]'",
        "headstart eval --head DIR --target T",
        "headstart launch --print ddp-3",
        "headstart recipe --keys nothing.like.it",
        "accelerate launch --config_file recipes/accelerate/ddp-3.yaml -m headstart.train RECIPE",
        "python -m headstart.bench.train --presets llama-3.1-8b",
        "bash scripts/quick.sh",
        'vllm serve T --speculative-config \'{"methods": "eagle3"}\'',
        "pip install -e '.[documentation]'",
        "frobnicate",
    ],
)
def test_a_wrong_command_is_found(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (words,) = commands(line)
    with pytest.raises(BaseException):  # noqa: B017 - each parser has an error of its own
        check(words, monkeypatch)


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_recipes_of_pages_load(block: Block, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("inherit: smollm2-eagle3\n")  # what a page's recipe may inherit
    place = tmp_path / "page.yaml"
    place.write_text(block.text)
    if "cells" in yaml.safe_load(block.text):
        config, _, file = load_comparison(str(place))
        assert all(cell.load(tmp_path) for cell in make_cells(config, [], file))
        return
    assert "inherit" in yaml.safe_load(block.text)
    load_recipe(place)


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_records_of_pages_are_read(block: Block, tmp_path: Path) -> None:
    place = tmp_path / "records.jsonl"
    place.write_text(block.text)
    assert len(list(load_conversations([SourceConfig(path=str(place))]))) == len(block.text.splitlines())


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_of_pages_runs(block: Block) -> None:
    assert "assert " in block.text, f"{block}: say what comes out, with assert"
    exec(compile(block.text, str(block), "exec"), {})


#: settings of seconds; those of heads where the family has them
QUICK = ["train.epochs=2", "joint.heads_only=0.5", "joint.max_perplexity_rise=1000", "train.tau_prompts=0",
         "eval.limit=2", "eval.max_new_tokens=8", "eval.warmup_tokens=0", "data.distill.max_new_tokens=8",
         "data.max_length=512"]  # fmt: skip
SMALL = {"draft_vocab_size": 64, "intermediate_size": 64, "rank": 8, "mask_token_id": 250, "num_key_value_heads": 2,
         "feature_layers": "null"}  # fmt: skip
#: verbs that take settings
VERBS = ("plan", "inspect", "doctor", "distill", "train", "run", "export", "eval", "tune")


def run_tiny(words: list[str], target: Path, call: Callable[..., Any]) -> Any:
    """Run a command with the tiny target and settings of seconds."""
    words = [str(target) if word == "smollm2-135m-instruct" else word for word in words[1:]]
    if words[0] in VERBS and "--head" in words:
        words += [word for word in QUICK if word.startswith("eval.")]
    elif words[0] in VERBS:
        head = load_recipe(words[1], [word for word in words[2:] if "=" in word and not word.startswith("-")]).head
        small = [f"head.{name}={value}" for name, value in SMALL.items() if hasattr(head, name)]
        words += [f"target.name={target}", *small, *QUICK]
        words += ["tune.prompts=4", "tune.batch_sizes=[1]"] if words[0] == "tune" else []
    return call(*words)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that pages speak of."""
    talks = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"{n} {n} and {n}"}]}
        for n in range(40)
    ]
    (tmp_path / "my_conversations.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    prompts = "".join(json.dumps({"prompt": f"Say {n}"}) + "\n" for n in range(16))
    (tmp_path / "my_prompts.jsonl").write_text(prompts)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", [block for block in BASH if block.how == "run"], ids=str)
def test_blocks_run(block: Block, reader: Path, headstart: Callable[..., Any]) -> None:
    for words in commands(block.text):
        assert words[0] == "headstart"
        done = headstart(*words[1:])
        assert done.code == 0, done.err


@pytest.mark.slow
@pytest.mark.parametrize("page", dict.fromkeys(block.page for block in BASH if block.how == "run: tiny"))
def test_blocks_run_with_a_tiny_target(
    page: str, reader: Path, tiny_target: Path, headstart: Callable[..., Any]
) -> None:
    """All of a page, one after the other: later commands go on with what earlier ones made."""
    blocks_of_page = [block for block in BASH if block.how == "run: tiny" and block.page == page]
    for block in blocks_of_page:
        for words in commands(block.text):
            assert words[0] == "headstart"
            done = run_tiny(words, tiny_target, headstart)
            assert done.code == 0, f"{block}: {words}\n{done.err}"


def test_the_script_that_follows_the_laptop_walk_through_types_its_commands() -> None:
    page = [words for block in BASH if block.page == "docs/walkthrough-laptop.md" for words in commands(block.text)]
    typed = [words for line in walkthrough.COMMANDS for words in commands(line)]
    places = [page.index(words) for words in typed]
    assert places == sorted(places) and len(places) >= 6
    first = [words for words in page if words[:2] == walkthrough.CLONE.split()]
    assert page.index(first[0]) < places[0]


def test_the_readme_and_the_laptop_walk_through_have_the_same_commands() -> None:
    def of(page: str) -> list[list[str]]:
        found = [words for block in BASH if block.page == page for words in commands(block.text)]
        return [words for words in found if words[0] in ("headstart", ".") or "scripts/install.sh" in words]

    laptop = of("docs/walkthrough-laptop.md")
    own = [words for words in of("README.md") if "--head" not in words]
    assert len(own) == 5 and all(words in laptop for words in own)


def test_some_blocks_run() -> None:
    runs = [block.how for block in BASH]
    assert runs.count("run") >= 2 and runs.count("run: tiny") >= 4
