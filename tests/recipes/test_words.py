"""Words that YAML takes for true or false stay words in settings that are text."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.heads.errors import ConfigError
from headstart.recipes.load import load_recipe, to_yaml

WORDS = [("capture", "off"), ("capture", "on"), ("mixed_precision", "no")]


@pytest.mark.parametrize(("name", "word"), WORDS)
def test_a_word_is_kept_on_the_command_line_in_a_file_and_in_the_saved_recipe(name: str, word: str, tmp_path: Path):
    said = load_recipe("quickstart", [f"train.{name}={word}"])
    nested = load_recipe("quickstart", [f"train={{{name}: {word}}}"])
    file = tmp_path / "mine.yaml"
    file.write_text(f"inherit: quickstart\ntrain:\n  {name}: {word}\n")
    saved = tmp_path / "saved.yaml"
    saved.write_text(to_yaml(load_recipe(file)))
    for recipe in (said, nested, load_recipe(file), load_recipe(saved)):
        assert getattr(recipe.train, name) == word


def test_the_last_of_several_words_counts():
    assert load_recipe("quickstart", ["train.capture=on", "train.capture=off"]).train.capture == "off"
    assert load_recipe("quickstart", ["train.capture=on", "train.capture=auto"]).train.capture == "auto"


def test_words_of_settings_that_are_true_or_false_are_read_as_before():
    recipe = load_recipe("quickstart", ["eval.scheduler=on", "train.resume=no", "data.template_kwargs={thinking: off}"])
    assert recipe.eval.scheduler is True and recipe.train.resume is False
    assert recipe.data.template_kwargs == {"thinking": False}


def test_a_word_in_an_entry_of_a_list():
    recipe = load_recipe("quickstart", ["data.sources=[{path: yes, columns: {prompt: q}}]"])
    assert recipe.data.sources[0].path == "yes"


def test_a_wrong_word_is_shown_as_it_was_written():
    with pytest.raises(ConfigError, match=r"train.select: found 'yes', expected one of last, best"):
        load_recipe("quickstart", ["train.select=yes"])
