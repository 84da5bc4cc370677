"""A target's directory is looked at before transformers is: nothing is waited for, every bad file is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaConfig

from headstart.heads.errors import TargetError
from headstart.heads.targets.fetch import locate_target
from headstart.heads.targets.load import read_template, weightless_target
from headstart.heads.targets.target import TargetConfig


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    LlamaConfig(hidden_size=64, num_hidden_layers=1).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, zero, Path.mkdir], ids=["pipe", "device", "directory"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"])
def test_what_is_no_file_is_refused_at_once(model: Path, name: str, make: Callable[[Path], None]) -> None:
    (model / name).unlink(missing_ok=True)
    make(model / name)
    with pytest.raises(TargetError, match=rf"target.name: .*{name}: cannot be read \(it is a .*copy the model again"):
        locate_target(str(model))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "config.json: JSON nested too deeply"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "config.json: not valid JSON"),
        ("{", "config.json:1: not valid JSON"),
        ("[]", "config.json: found no JSON object, expected one"),
        ("\xff", "config.json: not UTF-8 text"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_json_that_no_parser_takes_is_named(model: Path, name: str, content: str, message: str) -> None:
    (model / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(TargetError, match=message.replace("config.json", name)):
        locate_target(str(model))


def test_a_head_or_a_run_in_place_of_the_target_is_named(model: Path, tmp_path: Path) -> None:
    head = tmp_path / "run" / "head"
    head.mkdir(parents=True)
    (head / "headstart.json").write_text("{}")
    (head / "config.json").write_text('{"model_type": "llama"}')
    for place, found in ((head, "a draft head (it holds headstart.json)"), (head.parent, "a run's directory")):
        with pytest.raises(TargetError) as caught:
            locate_target(str(place))
        assert str(caught.value).startswith(f"target.name: {place} is {found}")
        assert "expected the model that the head drafts for" in str(caught.value)
    # a model that somebody keeps together with its head
    head.rename(model / "head")
    assert locate_target(str(model)) == (str(model), None)


def test_a_model_without_its_tokenizer_is_told_what_is_missing(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(TargetError, match="no tokenizer that transformers reads lies beside the model. Copy its files"):
        weightless_target(TargetConfig(name=str(model)))


def test_a_sound_directory_and_names_that_none_can_have(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_target(str(model)) == (str(model), None)
    monkeypatch.setenv("HOME", str(model.parent))
    assert locate_target("~/model") == (str(model), None)
    for name in ("x" * 5000, "/" + "x" * 5000, "~nobody-of-that-name/model", "./nu\0ll"):
        with pytest.raises(TargetError, match="target.name: ") as caught:
            locate_target(name)
        assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    "make", [os.mkfifo, zero, Path.mkdir, lambda path: None], ids=["pipe", "device", "dir", "none"]
)
def test_a_template_that_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "chat.jinja")
    with pytest.raises(TargetError, match="target.chat_template: .*chat.jinja: .*; expected a Jinja file"):
        read_template(tmp_path / "chat.jinja")


def test_a_template_of_other_bytes(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_bytes(b"\xff")
    with pytest.raises(TargetError, match="target.chat_template: .*decode.*expected a Jinja file"):
        read_template(tmp_path / "chat.jinja")
    (tmp_path / "chat.jinja").write_text(json.dumps("ü"))
    assert read_template(tmp_path / "chat.jinja") == json.dumps("ü")
