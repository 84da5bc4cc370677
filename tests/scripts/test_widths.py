"""Every screen of the walk-through fits a terminal of 80 columns, whatever command shows it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len
from terminals import in_terminal, lines_of

from headstart.cli import main

#: lines to copy, which are not broken: launch commands, and sentences that end in such a command
WHOLE = r"# |vllm |python -m sglang|trtllm| *speculative_model: |accelerate launch |headstart |report: |exported head"
#: words that a line may be longer for: a path or an address has no place to break it at
UNBROKEN = r"\S*(/|://)\S+"


def too_wide(written: str) -> list[str]:
    """Lines of more than 80 columns, but for commands to copy, and for paths and addresses that fill a line alone."""
    wide = []
    for line in lines_of(written):
        if cell_len(line) <= 80 or re.match(WHOLE, line.strip()):
            continue
        # a path is wrapped to a line of its own, which nothing can make shorter
        if not re.fullmatch(UNBROKEN, line.strip()):
            wide.append(line)
    return wide


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory that the commands are typed in. Its name is short, as a person's is."""
    folder = tmp_path_factory.mktemp("w")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def walked(place: Path, tiny_target: Path, conversations: Path) -> str:
    """Names a recipe whose run is done, made by init."""
    (place / "target").symlink_to(tiny_target)
    (place / "my_conversations.jsonl").write_bytes(conversations.read_bytes())
    written, code = show("init", "--target", "target", "--data", "my_conversations.jsonl", "--gpu", "none", "--yes")
    assert code == 0 and too_wide(written) == [], written
    small = [
        "train.epochs=2", "train.max_seconds=null", "train.tau_tokens=8", "eval.limit=4", "eval.max_new_tokens=8",
        "eval.tree={kind: chain, depth: 2}", "tune.batch_sizes=[1]", "eval.warmup_tokens=0",
    ]  # fmt: skip
    written, code = show("run", "my_conversations.yaml", "name=mine", *small)
    assert code == 0, written
    assert too_wide(written) == []
    assert "Verdict: " in written
    shutil.copytree("runs/mine", "runs/other")
    return "runs/mine/recipe.yaml"


def show(*arguments: str, answers: list[tuple[str, str]] | None = None) -> tuple[str, int]:
    return in_terminal(lambda: main(list(arguments)), answers=answers or [])


def command_of(words: str) -> Callable[[str], tuple[str, int]]:
    return lambda recipe: show(*words.replace("RECIPE", recipe).split("|"))


SHOWN = {
    "plan": "plan|RECIPE",
    "plan of several cards": "plan|RECIPE|target.device=auto|--gpus|4|--gpu-memory|80",
    "doctor": "doctor|RECIPE",
    "inspect": "inspect|RECIPE",
    "inspect statistics": "inspect|RECIPE|--stats",
    "run again": "run|RECIPE",
    "eval": "eval|--head|runs/mine/head|--target|target|--data|my_conversations.jsonl|eval.limit=2|"
    "eval.max_new_tokens=8|eval.warmup_tokens=0",
    "eval again": "eval|RECIPE",
    "tune": "tune|RECIPE",
    "report": "report|runs/mine|runs/other|--out|both",
    "export": "export|RECIPE",
    "check": "export|--check|runs/mine/export",
    "keys": "recipe|--keys|data.",
    "all keys": "recipe|--keys",
    "recipes": "recipe",
    "launch files": "launch",
    "help": "--help",
    "help of eval": "eval|--help",
    "help of plan": "plan|--help",
    "targets": "target|list",
}
#: what goes wrong → a command that shows it, and its exit code
WRONG = {
    "no such recipe": ("run|my_conversation.yaml", 2),
    "unknown key": ("run|RECIPE|train.epocs=3", 2),
    "wrong type": ("plan|RECIPE|data.max_length=many", 2),
    "unknown engine": ("run|RECIPE|export.engines=[vlm]", 2),
    "no such target": ("plan|RECIPE|target.name=smollm2-135m-instrct", 1),
    "no such data": ("run|RECIPE|name=other|data.sources=[{path: my_conversation.jsonl}]", 1),
    "does not fit": ("plan|RECIPE|--gpus|1|--gpu-memory|0.1|target.device=auto", 2),
    "no such head": ("eval|--head|runs/min/head|--target|target|--data|my_conversations.jsonl", 1),
    "wrong usage": ("run", 2),
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", SHOWN)
def test_a_screen_fits_80_columns(name: str, walked: str) -> None:
    written, code = command_of(SHOWN[name])(walked)
    assert code == 0, written
    assert too_wide(written) == []
    assert len(lines_of(written)) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_explained_in_80_columns(name: str, walked: str) -> None:
    words, expected = WRONG[name]
    written, code = command_of(words)(walked)
    assert code == expected and "Traceback" not in written, written
    assert too_wide(written) == []


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_questions_of_init_fit_80_columns(walked: str, place: Path) -> None:
    answers = [
        ("Target (registered", "target"), ("Data (file", "nothing.jsonl"), ("Data (file", "my_conversations.jsonl"),
        ("GPU (H100", "H10"), ("GPU (H100", "none"), ("Recipe file", "asked.yaml"), ("Head [", ""),
    ]  # fmt: skip
    written, code = show("init", answers=answers)
    assert code == 0, written
    assert too_wide(written) == []
    assert (place / "asked.yaml").is_file()
    said = " ".join(lines_of(written))
    assert "nothing.jsonl" in said and "did you mean H100?" in said


def test_a_wide_line_is_noticed() -> None:
    words, path = "word " * 17, "/" + "place/" * 20
    assert too_wide(words + "\n") == [words]
    assert too_wide(f"{path}\n# {words}\nvllm serve {words}\n") == []
    assert too_wide(f"see {path}\n") == [f"see {path}"]
    assert json.dumps(too_wide("short")) == "[]"
