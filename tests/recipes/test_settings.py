"""docs/settings.md says what every setting of a recipe is, in the words that stand beside its field in the code.

HEADSTART_WRITE_SETTINGS=1 pytest tests/recipes/test_settings.py     writes the page anew
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from headstart.data.config import ServerConfig, SourceConfig
from headstart.heads.families import FAMILIES
from headstart.recipes.keys import describe
from headstart.recipes.schema import DEFAULTS, Recipe, recipe_class

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
INTRODUCTION = """# Settings of a recipe

Every setting with its type, its default and what it does. Set one in a recipe file (`train: {lr: 1e-4}`) or on the
command line (`train.lr=1e-4`). `???` means that you must set it. Shipped recipes set some of them to the values of a
paper. A run's own `recipe.yaml` shows what the run used.

Two keys stand for more than a value: `inherit` names the recipes that this one builds on, and `head.type` decides
which settings `head` has.
"""


def sentences(schema: type) -> dict[str, str]:
    """Field → the `#:` lines above it, of the class and of those that it extends."""
    found: dict[str, str] = {}
    for each in reversed(schema.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        try:
            lines = textwrap.dedent(inspect.getsource(each)).splitlines()
        except (OSError, TypeError):  # made by make_dataclass: all that it has, its parents explain
            continue
        body = ast.parse("\n".join(lines)).body[0]
        assert isinstance(body, ast.ClassDef)
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                above, at = [], node.lineno - 2
                while lines[at].strip().startswith("#:"):
                    above.insert(0, lines[at].strip().removeprefix("#:").strip())
                    at -= 1
                if above:
                    found[node.target.id] = " ".join(above)
    return found


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def table(title: str, schema: type, node: str = "", known: frozenset[str] = frozenset()) -> list[str]:
    """One node's table; mappings with settings of their own get a table each, after it."""
    hints = inspect.get_annotations(schema, eval_str=True)
    for each in schema.__mro__:
        hints = {**(inspect.get_annotations(each, eval_str=True) if dataclasses.is_dataclass(each) else {}), **hints}
    said, rows, later = sentences(schema), [], []
    for field in dataclasses.fields(schema):
        value = default_of(field)
        if not field.metadata.get("setting", True) or field.name in known:
            continue
        key = f"{node}.{field.name}".lstrip(".")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            later += [] if field.name == "head" else table(f"`{key}`", type(value), key)
            continue
        assert field.name in said, f"{schema.__name__}.{field.name}: say what it is in `#:` lines above it"
        followed = DEFAULTS.get(node, {}).get(field.name, value)
        shown = json.dumps(followed, ensure_ascii=False).strip('"')
        cells = (f"`{field.name}`", describe(hints[field.name]), f"`{shown}`", said[field.name].replace("|", "\\|"))
        rows.append(f"| {' | '.join(cells)} |")
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
