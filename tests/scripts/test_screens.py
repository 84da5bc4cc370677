"""What a person sees of a command: in a terminal of 80 columns, in a pipe, and at Ctrl-C."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from terminals import in_terminal, lines_of

from headstart.cli import main

#: what bars of other libraries say
THEIRS = ("Loading weights", "Fetching", "it/s", "Map:", "shards:")


def command(*arguments: str | Path) -> Callable[[], int]:
    return lambda: main([str(argument) for argument in arguments])


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_every_screen_of_a_run_fits_80_columns(recipe: Path) -> None:
    written, code = in_terminal(command("run", recipe, "train.epochs=6"))
    lines = lines_of(written)
    assert code == 0, written
    # launch commands and paths are whole, so that they can be copied
    whole = r"# |vllm |python -m sglang|trtllm| *speculative_model: |report: |exported head|/\S+$"
    launch = [line for line in lines if re.match(whole, line)]
    assert [line for line in lines if cell_len(line) > 80 and line not in launch] == []
    assert [line for line in lines for words in THEIRS if words in line] == []
    moving = [line for line in lines if re.match(r"train [━╸╺]", line)]
    assert moving and all(re.search(r"\d+ of \d+ steps(  \d+ s left)?$", line) for line in moving)
    assert any(re.match(r"train: held out at step \d+:  loss .* \(1: [\d.]+, 2: [\d.]+\)", line) for line in lines)
    assert " ".join(lines).count("The accepted length (τ) is") == 1
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h")


def test_a_pipe_gets_plain_lines_and_json_alone(headstart: Callable, recipe: Path) -> None:
    trained = headstart("train", recipe, "--json")
    assert trained.code == 0, trained.err
    assert trained.json["step"] > 0
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", trained.err)
    assert [words for words in THEIRS if words in trained.err] == []
    lines = trained.err.splitlines()
    steps = [line for line in lines if re.match(r"train: \d+ of \d+ steps", line)]
    assert 2 <= len(steps) <= 6 and steps[0].startswith("train: 1 of ")  # one every five seconds
    assert all(re.search(r"loss [\d.]+  accepted length [\d.]+  [\d,]+ tokens/s", line) for line in steps)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stops", [1, 2])
def test_ctrl_c_in_training(recipe: Path, tmp_path: Path, stops: int) -> None:
    """Once: the step is finished and saved. Twice: it ends now, and what was saved before stays."""
    words = command("train", recipe, "train.epochs=4000", "train.save_every=5", "train.tau_prompts=0")
    written, code = in_terminal(words, stop_after=["9 of", "stopping after this step"][:stops])
    said = " ".join(lines_of(written))
    assert code == 130 and "Traceback" not in said
    assert "stopping after this step, then saving; Ctrl-C again to stop now" in said
    assert said.endswith("the same command continues")
    assert (tmp_path / "run/checkpoints/latest").is_file()
    if stops == 1:
        assert "stopped by a signal at step" in said
