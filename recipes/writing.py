"""Writes a recipe in which a comment above every key says what it does, in the words of docs/settings.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from headstart.recipes.documented import meaning_of

WIDTH = 100


def commented(values: Mapping[str, Any], about: str, family: str, inherit: str) -> str:
    """A recipe file as text.

    Args:
        values: dotted key → value, in any order; a list of mappings is written with comments of its own.
        about: lines for the top.
        family: `head.type`, whose keys `head` has.
        inherit: the recipe that gives all other values.
    """
    lines = [f"# {line}".rstrip() for line in about.splitlines()]
    lines += ["", *_comment("The recipe that gives every value which is not set below.", ""), f"inherit: {inherit}"]
    nodes: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        node = nodes
        for part in path:
            node = node.setdefault(part, {})
        node[name] = _Leaf(key, value)
    for name, node in nodes.items():
        lines += ["", *_written(name, node, "", family)]
    return "\n".join(lines) + "\n"


class _Leaf:
    """A key with its value, so that a value that is a mapping is not taken for a node."""

    def __init__(self, key: str, value: Any):
        self.key, self.value = key, value


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _written(name: str, node: Any, indent: str, family: str) -> Iterator[str]:
    if not isinstance(node, _Leaf):
        yield f"{indent}{name}:"
        for inner, below in node.items():
            yield from _written(inner, below, f"{indent}  ", family)
        return
    yield from _comment(meaning_of(node.key, family), indent)
    entries = node.value
    if not (isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)):
        yield f"{indent}{name}: {in_yaml(entries)}"
        return
    yield f"{indent}{name}:"
    for entry in entries:
        for number, (key, value) in enumerate(entry.items()):
            yield from _comment(meaning_of(f"{node.key}[].{key}"), f"{indent}  {'' if number == 0 else '  '}")
            yield f"{indent}  {'- ' if number == 0 else '  '}{key}: {in_yaml(value)}"


def in_yaml(value: Any) -> str:
    """A value on one line, as YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1 << 30)
    return text.removesuffix("\n").removesuffix("\n...")
