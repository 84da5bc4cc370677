"""Every setting of a recipe with its type, its default and what it does, in the words beside its field in the code."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from headstart.heads.base import HeadConfig
from headstart.heads.errors import ConfigError
from headstart.heads.families import FAMILIES
from headstart.recipes.keys import dataclass_of, describe
from headstart.recipes.schema import DEFAULTS, Recipe


@dataclass(frozen=True)
class Setting:
    """One key of a recipe.

    Attributes:
        key: dotted; `data.sources[].path` is a key of an entry of a list.
        type: in words.
        default: as YAML text; `???` must be set.
        meaning: what it does.
        heads: the families that have it, for keys of `head`; empty for all other keys.
    """

    key: str
    type: str
    default: str
    meaning: str
    heads: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rsplit(".", 1)[-1]


@functools.cache
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
                above: list[str] = []
                at = node.lineno - 2
                while lines[at].strip().startswith("#:"):
                    above.insert(0, lines[at].strip().removeprefix("#:").strip())
                    at -= 1
                if above:
                    found[node.target.id] = " ".join(above)
    return found


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass's field."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def nodes_of(schema: type) -> dict[str, type]:
    """Name → class of the settings of a schema that are mappings with settings of their own."""
    settings = [field for field in dataclasses.fields(schema) if field.metadata.get("setting", True)]
    values = {field.name: default_of(field) for field in settings}
    return {n: type(v) for n, v in values.items() if dataclasses.is_dataclass(v) and not isinstance(v, type)}


def settings_of(schema: type, node: str = "") -> Iterator[Setting]:
    """The settings of one node, without those of the nodes below it. Args: node: dotted name of the node."""
    hints, said, below = typing.get_type_hints(schema), sentences(schema), nodes_of(schema)
    for field in dataclasses.fields(schema):
        if not field.metadata.get("setting", True) or field.name in below:
            continue
        default = DEFAULTS.get(node, {}).get(field.name, default_of(field))
        text = json.dumps(default, ensure_ascii=False).strip('"')
        key = f"{node}.{field.name}".lstrip(".")
        assert field.name in said, f"{schema.__name__}.{field.name}: say what it is in `#:` lines above it"
        yield Setting(key, describe(hints[field.name]), text, said[field.name])


def _tree(schema: type, node: str = "") -> Iterator[Setting]:
    """The settings of a node and of those below it; `head` has those that every family has."""
    yield from settings_of(schema, node)
    for name, inner in nodes_of(schema).items():
        below = f"{node}.{name}".lstrip(".")
        if inner is HeadConfig:
            yield from _heads(below)
        else:
            yield from _tree(inner, below)
    for name, hint in typing.get_type_hints(schema).items():
        if name not in nodes_of(schema) and (entry := dataclass_of(hint)) is not None:
            yield from settings_of(entry, f"{node}.{name}[]")


def _heads(node: str) -> Iterator[Setting]:
    """The settings of the heads. Families in which a setting is the same share one entry."""
    found: dict[Setting, list[str]] = {}
    for name, family in FAMILIES.items():
        for setting in settings_of(family.config, node):
            if setting.name == "type":  # its default is the family itself
                setting = replace(setting, default="???")
            found.setdefault(setting, []).append(name)
    order = list(dict.fromkeys(setting.key for setting in found))
    for setting in sorted(found, key=lambda each: order.index(each.key)):
        yield replace(setting, heads=tuple(found[setting]))


@functools.cache
def all_settings() -> tuple[Setting, ...]:
    """Every setting that a recipe can have, in the order of docs/settings.md."""
    return tuple(_tree(Recipe))


def find_settings(words: str) -> list[Setting]:
    """The settings whose key begins with `words`; where none does, those whose key holds them.

    Raises: ConfigError where no key does, with the parts of a recipe.
    """
    settings = all_settings()
    found = [each for each in settings if each.key.startswith(words)] or [e for e in settings if words in e.key]
    if not found:
        nodes = ", ".join(f"{node}." for node in nodes_of(Recipe))
        raise ConfigError(f"{words!r}: no key of a recipe begins with or holds it; the parts of a recipe are {nodes}")
    return found


def meaning_of(key: str, head: str | None = None) -> str:
    """What a key does. Args: head: the family whose key it is, for keys of `head`."""
    return next(each.meaning for each in all_settings() if each.key == key and (not each.heads or head in each.heads))
