"""A recipe's file cannot make code from elsewhere run: the command line can, or a person at the terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from headstart.heads.errors import ConfigError
from headstart.recipes import load
from headstart.recipes.load import load_evaluation, load_exporting, load_recipe

KEY = "target.trust_remote_code"
#: the rest of a recipe
REST = "head: {type: eagle3}\ndata: {sources: [{path: talk.jsonl}]}\ntrain: {steps: 1}\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(path: Path, more: str = "", trust: str = "true") -> Path:
    path.write_text(f"{more}target:\n  name: some/model\n  trust_remote_code: {trust}\n{REST}")
    return path


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch):
    """Call it with what a person types; returns what the terminal shows."""

    def sits(answer: str) -> Terminal:
        shown = Terminal()
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        monkeypatch.setattr("sys.stderr", shown)
        return shown

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))  # a pipe that says yes is no person
    return sits


@pytest.mark.parametrize("read", [load_recipe, load_evaluation, load_exporting])
def test_a_file_is_refused_where_nobody_can_be_asked(tmp_path: Path, terminal, read) -> None:
    recipe = written(tmp_path / "theirs.yaml")
    with pytest.raises(ConfigError) as refused:
        read(recipe)
    assert f"{recipe}:3 sets {KEY}=true: code that comes with the target some/model" in str(refused.value)
    assert str(refused.value).endswith(f"then give {KEY}=true on the command line")
    assert read(recipe, [f"{KEY}=true"]).target.trust_remote_code
    assert not read(recipe, [f"{KEY}=false"]).target.trust_remote_code
    assert read(recipe, ["target={trust_remote_code: true}"]).target.trust_remote_code


def test_an_inherited_file_is_named(tmp_path: Path, terminal) -> None:
    base = written(tmp_path / "base.yaml")
    child = tmp_path / "child.yaml"
    child.write_text("inherit: base.yaml\nname: mine\n")
    with pytest.raises(ConfigError, match=f"{base}:3 sets"):
        load_recipe(child)
    child.write_text("inherit: base.yaml\ntarget: {trust_remote_code: false}\n")
    assert not load_recipe(child).target.trust_remote_code


@pytest.mark.parametrize("trust", ["'true'", "yes", "1", "${shorter_chains}", "${oc.env:TRUSTS}"])
def test_other_ways_to_write_true_are_no_way_round(
    tmp_path: Path, terminal, trust: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUSTS", "true")
    with pytest.raises(ConfigError, match="on the command line"):
        load_recipe(written(tmp_path / "theirs.yaml", "shorter_chains: true\n", trust))


def test_a_file_named_like_an_override_is_a_file(tmp_path: Path, terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("override"))
    with pytest.raises(ConfigError, match="override:3 sets"):
        load_recipe("override")


def test_a_terminal_is_asked_and_the_default_is_no(tmp_path: Path, terminal) -> None:
    recipe = written(tmp_path / "theirs.yaml")
    for answer in ("", "\n", "n\n", "maybe\n"):
        shown = terminal(answer)
        with pytest.raises(ConfigError, match="on the command line"):
            load_recipe(recipe)
        asked = shown.getvalue()
        assert f"{recipe}:3" in asked and "some/model (revision: whichever is newest)" in asked and "[y/N]" in asked
    for answer in ("y\n", "Yes\n"):
        terminal(answer)
        assert load_recipe(recipe).target.trust_remote_code
    shown = terminal("n\n")
    with pytest.raises(ConfigError, match="on the command line"):
        load_recipe(recipe, [f"target.name={tmp_path}"])
    assert f"the target {tmp_path} would run" in shown.getvalue(), "a directory has no revision"
    shown = terminal("y\n")
    load_recipe(recipe, [f"{KEY}=true"])
    assert shown.getvalue() == ""


def test_a_question_that_nobody_sees_is_not_asked(tmp_path: Path, terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal("y\n")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with pytest.raises(ConfigError, match="on the command line"):
        load_recipe(written(tmp_path / "theirs.yaml"))


def test_the_question_shows_no_control_characters(tmp_path: Path, terminal) -> None:
    recipe = tmp_path / "theirs.yaml"
    text = 'target: {name: some/model, revision: "a\\e[2Jb", trust_remote_code: true}\n' + REST
    recipe.write_text(text)
    shown = terminal("y\n")
    load_recipe(recipe)
    assert "\x1b" not in shown.getvalue() and "\\x1b[2J" in shown.getvalue()


def test_ranks_of_a_launch_are_not_asked(tmp_path: Path, terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal("y\n")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="on the command line"):
        load_recipe(written(tmp_path / "theirs.yaml"))
    assert shown.getvalue() == ""


def test_files_of_the_package_are_taken_at_their_word(
    tmp_path: Path, terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = written(tmp_path / "ours.yaml")
    monkeypatch.setattr(load, "shipped_recipes", lambda: {"ours": ours})
    assert load_recipe("ours").target.trust_remote_code
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("inherit: ours\ntarget: {name: other/model}\n")
    # the file that names another target does not say that its code may run
    with pytest.raises(ConfigError, match=f"{theirs}:2 changes target.name where {ours}:3 sets"):
        load_recipe(theirs)
    theirs.write_text("inherit: ours\ntarget: {revision: newer}\n")
    with pytest.raises(ConfigError, match=f"{theirs}:2 changes target.revision where {ours}:3 sets"):
        load_recipe(theirs)


def test_an_attention_implementation_from_the_hub_is_code_too(tmp_path: Path, terminal) -> None:
    recipe = tmp_path / "theirs.yaml"
    recipe.write_text("target:\n  name: some/model\n  attn_implementation: some/kernels\n" + REST)
    with pytest.raises(ConfigError, match=r":3 sets target\.attn_implementation=some/kernels"):
        load_recipe(recipe)
    assert load_recipe(recipe, ["target.attn_implementation=sdpa"]).target.attn_implementation == "sdpa"
