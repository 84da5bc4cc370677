"""No command runs code that comes with a target because a recipe's file says so; with consent it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]
CODE = """
import pathlib
from transformers import {base}

pathlib.Path({mark!r}).write_text("imported")


class Own{kind}({base}):
    {body}
"""


@pytest.fixture
def code_target(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model of a type that transformers does not know, with code that leaves a file when it is imported."""
    directory, mark = tmp_path / "own-code", tmp_path / "imported"
    shutil.copytree(tiny_target, directory)
    config = json.loads((directory / "config.json").read_text())
    places = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": places}
    (directory / "config.json").write_text(json.dumps(config))
    settings = CODE.format(base="LlamaConfig", kind="Config", body='model_type = "own_llama"', mark=str(mark))
    (directory / "configuration_own.py").write_text(settings)
    model = CODE.format(base="LlamaForCausalLM", kind="ForCausalLM", body="config_class = OwnConfig", mark=str(mark))
    (directory / "modeling_own.py").write_text("from .configuration_own import OwnConfig\n" + model)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)  # of an earlier test, in another directory
    return directory, mark


@pytest.fixture
def theirs(recipe: Path, tiny_target: Path, code_target: tuple[Path, Path]) -> Path:
    """A recipe that says yes for whoever runs it."""
    text = recipe.read_text()
    said = f"target: {{name: {tiny_target}}}"
    assert said in text
    recipe.write_text(text.replace(said, f"target: {{name: {code_target[0]}, trust_remote_code: true}}"))
    return recipe


@pytest.mark.parametrize(
    "verb", ["distill", "inspect", "plan", "train", "eval", "tune", "export", "run", "train --plan", "doctor"]
)
def test_no_command_runs_code_because_a_recipe_says_so(
    theirs: Path, code_target: tuple[Path, Path], headstart: Call, tmp_path: Path, verb: str
) -> None:
    name, *options = verb.split()
    result = headstart(name, theirs, *options)
    assert result.code == 2
    assert f"{theirs}:" in result.err and f"code that comes with the target {code_target[0]}" in result.err
    assert "give target.trust_remote_code=true on the command line" in result.err
    assert not code_target[1].exists() and not (tmp_path / "run").exists()


def test_a_run_directorys_recipe_does_not_count(theirs: Path, code_target: tuple[Path, Path], headstart: Call) -> None:
    """Not even after the command line of that run has said yes: whoever copies the directory has not."""
    assert headstart("plan", theirs, "target.trust_remote_code=true").code == 0
    assert code_target[1].exists()
    code_target[1].unlink()
    saved = theirs.parent / "run" / "recipe.yaml"
    saved.parent.mkdir()
    shutil.copy(theirs, saved)
    assert headstart("export", saved).code == 2 and not code_target[1].exists()


def test_with_consent_the_target_trains(theirs: Path, code_target: tuple[Path, Path], headstart: Call) -> None:
    result = headstart("train", theirs, "target.trust_remote_code=true", "train.epochs=1", "data.distill.prompts=[]")
    assert result.code == 0, result.err
    assert code_target[1].exists()
    assert "trust_remote_code: true" in (theirs.parent / "run" / "recipe.yaml").read_text()
    # the same command goes on without a question
    again = headstart("train", theirs, "target.trust_remote_code=true", "train.epochs=1", "data.distill.prompts=[]")
    assert again.code == 0 and "finished before" in again.err
    # a head says what it was made for, and that is no consent
    code_target[1].unlink()
    head, prompt = theirs.parent / "run" / "head", theirs.parent / "prompts.jsonl"
    assert '"trust_remote_code": true' in (head / "headstart.json").read_text()
    result = headstart("eval", "--head", head, "--target", code_target[0], "--data", prompt)
    assert result.code == 1 and not code_target[1].exists()
    assert "read that code, then give target.trust_remote_code=true on the command line" in result.err


def test_without_trust_no_code_runs_and_the_error_says_what_to_do(
    recipe: Path, code_target: tuple[Path, Path], headstart: Call
) -> None:
    result = headstart("plan", recipe, f"target.name={code_target[0]}")
    assert result.code == 1 and not code_target[1].exists()
    assert "read that code, then give target.trust_remote_code=true on the command line" in result.err


def test_training_on_ranks_asks_nobody(theirs: Path, code_target: tuple[Path, Path]) -> None:
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "headstart.train", str(theirs)]
    result = subprocess.run(command, env=environment, input="y\n", capture_output=True, text=True, timeout=300)
    assert result.returncode == 2 and not code_target[1].exists()
    assert "give target.trust_remote_code=true on the command line" in result.stderr
