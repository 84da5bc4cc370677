"""docs/settings.md says what every setting of a recipe is, in the words that stand beside its field in the code.

HEADSTART_WRITE_SETTINGS=1 pytest tests/recipes/test_settings.py     writes the page anew
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from headstart.data.config import ServerConfig, SourceConfig
from headstart.heads.families import FAMILIES
from headstart.recipes.documented import default_of, nodes_of, settings_of
from headstart.recipes.schema import Recipe, recipe_class

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
INTRODUCTION = """# Settings of a recipe

Every setting with its type, its default and what it does. Set one in a recipe file (`train: {lr: 1e-4}`) or on the
command line (`train.lr=1e-4`). `???` means that you must set it. Shipped recipes set some of them to the values of a
paper. A run's own `recipe.yaml` shows what the run used.

Two keys stand for more than a value: `inherit` names the recipes that this one builds on, and `head.type` decides
which settings `head` has.
"""


def table(title: str, schema: type, node: str = "", known: frozenset[str] = frozenset()) -> list[str]:
    """One node's table; mappings with settings of their own get a table each, after it."""
    rows = [
        f"| `{each.name}` | {each.type} | `{each.default}` | {each.meaning.replace('|', chr(92) + '|')} |"
        for each in settings_of(schema, node)
        if each.name not in known
    ]
    later = []
    for name, inner in nodes_of(schema).items():
        key = f"{node}.{name}".lstrip(".")
        later += [] if name == "head" else table(f"`{key}`", inner, key)
    return ["", f"## {title}", "", "| name | type | default | what it does |", "|---|---|---|---|", *rows, *later]


def page() -> str:
    nodes = table("The recipe itself", Recipe)
    heads: list[str] = []
    for name, family in FAMILIES.items():
        heads += table(f"`head` of type `{name}`", family.config, "head", frozenset({"type"}))
    sources = table("An entry of `data.sources`, `data.held_out` and `data.distill.prompts`", SourceConfig)
    servers = table("An entry of `data.distill.servers`", ServerConfig)
    return "\n".join([INTRODUCTION.rstrip(), *nodes, *heads, *sources, *servers]) + "\n"


def test_the_page_of_settings_is_what_the_code_says() -> None:
    if os.environ.get("HEADSTART_WRITE_SETTINGS"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: see the top of this file"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_setting_of_a_recipe_is_on_the_page(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")

    def names(schema: type) -> list[str]:
        settings = [field for field in dataclasses.fields(schema) if field.metadata.get("setting", True)]
        values = {field.name: default_of(field) for field in settings}
        inner = [type(value) for value in values.values() if dataclasses.is_dataclass(value)]
        return [key for key in values if type(values[key]) not in inner] + [
            key for each in inner for key in names(each)
        ]

    missing = [key for key in names(recipe_class(name)) if key != "type" and f"| `{key}` |" not in text]
    assert not missing
