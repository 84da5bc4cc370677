"""Reads a recipe file or a list of overrides into nested values. Size and depth are limited; nothing is merged yet.

An override names a key: `train.lr=1e-4`, or `data.sources[0].path=mine.jsonl` for an entry of a list that an earlier
layer gives. Its value is YAML.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from headstart.heads.counting import counted
from headstart.heads.errors import ConfigError, first_line
from headstart.heads.files import read_bounded

#: limits far above any recipe: long or deeply nested text would take the parser's time or overflow its stack
MAX_BYTES, MAX_DEPTH, MAX_DIGITS = 1 << 18, 32, 400
#: whole numbers must be smaller, because libraries keep them in 64 bits
MAX_WHOLE = 1 << 63
#: most characters of a value in an error message
SHOWN = 160
#: exceptions of parsing YAML and building values
PARSING = (
    OmegaConfBaseException,
    yaml.YAMLError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    RecursionError,
)

_NUMBER = re.compile(r"[-+]?[0-9][0-9a-fA-F_:.xo]*")
_KEY = re.compile(r"[^.\[\]=]+|\[\s*-?[0-9]+\s*\]")


@dataclass(frozen=True)
class Edit:
    """A change to one entry of a list that an earlier layer gives: `data.sources[0].path=x`.

    Attributes:
        key: the key as it was written, for messages.
        path: names and list indices on the way to the entry.
    """

    key: str
    path: tuple[str | int, ...]
    value: Any


@dataclass(frozen=True)
class Layer:
    """One file or one list of overrides.

    Attributes:
        label: the file's path, or "override", for messages.
        values: nested mapping.
        lines: dotted key → line number from 1 (files only).
        words: dotted key → the word that YAML reads as true or false there: no, on, … A setting that is text keeps it.
        edit: a change to a list of an earlier layer, instead of values.
        file: the file that it was read from; None for what the command line says.
    """

    label: str
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    edit: Edit | None = None
    file: Path | None = None

    def where(self, key: str) -> str:
        """`file:line`, or the label alone for overrides."""
        return f"{self.label}:{self.lines[key]}" if key in self.lines else self.label

    def gives(self, key: str) -> bool:
        """Whether the layer gives a value for a dotted key."""
        node: Any = self.values
        for name in key.split("."):
            if not isinstance(node, dict) or name not in node:
                return False
            node = node[name]
        return True


def shown(value: Any) -> str:
    """A value as error messages show it: its repr, cut if it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"


def read_layer(path: Path) -> Layer:
    """The values of a YAML file. Raises ConfigError naming file, line and what is wrong."""
    try:
        text = read_bounded(path, MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        _require_small(text, str(path))
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return Layer(str(path), {}, file=path)
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else shown(node.value)
            raise ConfigError(f"{path}: found {kind} at the top, expected `key: value` lines")
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', None) or error})") from error
    except PARSING as error:
        raise ConfigError(f"{path}: {first_line(error)}") from error
    lines, words = dict(_key_lines(node)), dict(_words(node))
    layer = Layer(str(path), typing.cast(dict[str, Any], values), lines, words, file=path)
    require_plain(layer, layer.values)
    return layer


def _require_small(text: str, where: str) -> None:
    """Raise ConfigError for text that is nested too deeply or has a number with too many digits for the parser."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark is not None else 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.ScalarEvent) and event.style is None and len(event.value) > MAX_DIGITS:
            if _NUMBER.fullmatch(event.value):
                found = f"found a number of {len(event.value)} digits, expected at most {MAX_DIGITS}"
                raise ConfigError(f"{where}:{line}: {found}")
        if depth > MAX_DEPTH:
            raise ConfigError(f"{where}:{line}: found more than {MAX_DEPTH} levels of nesting, expected fewer")


def _key_lines(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            yield name, key.start_mark.line + 1
            yield from _key_lines(value, f"{name}.")
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            name = f"{prefix.removesuffix('.')}[{index}]"
            yield name, value.start_mark.line + 1
            yield from _key_lines(value, f"{name}.")


def _words(node: yaml.Node | None, name: str = "") -> Iterator[tuple[str, str]]:
    """The words of a YAML text that are read as true or false, by dotted key."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _words(value, f"{name}.{key.value}".lstrip("."))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _words(value, f"{name}[{index}]")
    elif isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:bool":
        yield name, node.value


def require_plain(layer: Layer, value: Any, key: str = "") -> None:
    """Raise ConfigError for values that reports cannot write or libraries cannot take: odd text, types or numbers."""
    if isinstance(value, dict):
        for name, item in value.items():
            require_plain(layer, item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            require_plain(layer, item, f"{key}[{index}]")
    elif isinstance(value, str):
        if not _encodes(value):
            raise ConfigError(f"{layer.where(key)}: {key}: found {shown(value)}, expected UTF-8 text")
    elif isinstance(value, int) and not -MAX_WHOLE <= value < MAX_WHOLE:
        raise ConfigError(f"{layer.where(key)}: {key}: found {shown(value)}, expected a whole number below 2^63")
    elif value is not None and not isinstance(value, bool | int | float):
        raise ConfigError(
            f"{layer.where(key)}: {key}: found {shown(value)}, expected text, a number, true, false, null, a list or a "
            "mapping"
        )


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_overrides(overrides: Sequence[str]) -> list[Layer]:
    """Layers of `key=value` words, in order. Neighbouring plain keys share a layer; every list entry has its own.

    Raises: ConfigError naming the override.
    """
    layers: list[Layer] = [Layer("override", {})]
    for text in overrides:
        left, equals, value_text = text.partition("=")
        key = left.strip()
        if not equals or not key:
            raise ConfigError(f"override {shown(text)}: expected key=value, e.g. train.lr=1e-4")
        path = _path(key, text)
        value = _value(value_text, text)
        if all(isinstance(part, str) for part in path):
            if layers[-1].edit is not None:
                layers.append(Layer("override", {}))
            _put(layers[-1].values, typing.cast(tuple[str, ...], path), value)
            layers[-1].words.update(_words(yaml.compose(value_text, Loader=yaml.SafeLoader), ".".join(map(str, path))))
            require_plain(layers[-1], layers[-1].values)
        else:
            layers.append(Layer("override", {}, edit=Edit(key, path, value)))
            require_plain(layers[-1], value, key)
    return layers


def _path(key: str, text: str) -> tuple[str | int, ...]:
    """`data.sources[0].path` → ("data", "sources", 0, "path")."""
    if not _encodes(key):
        raise ConfigError(f"override {shown(text)}: expected a key in UTF-8 text")
    parts: list[str | int] = []
    place = 0
    while place < len(key):
        match = _KEY.match(key, place)
        is_index = match is not None and match[0].startswith("[")
        # a name follows a dot, an index follows a name or another index
        if match is None or (is_index and not parts):
            break
        parts.append(int(match[0][1:-1]) if is_index else match[0])
        place = match.end()
        if place == len(key):
            if len(parts) > MAX_DEPTH:
                break
            return tuple(parts)
        if key[place] == ".":
            place += 1
            if key[place : place + 1] == "[":
                break
        elif key[place] != "[":
            break
    raise ConfigError(
        f"override {shown(text)}: found key {shown(key)}, expected one like train.lr or data.sources[0].path"
    )


def _value(value: str, text: str) -> Any:
    try:
        _require_small(value, "value")
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)["value"]  # type: ignore
    except ConfigError as error:
        raise ConfigError(f"override {shown(text)}: {error}") from None
    except PARSING as error:
        raise ConfigError(f"override {shown(text)}: {first_line(error)}") from error


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set an entry of nested mappings. A mapping is merged into an existing one."""
    *nodes, leaf = path
    for name in nodes:
        inner = values.get(name)
        if not isinstance(inner, dict):
            inner = values[name] = {}
        values = inner
    there = values.get(leaf)
    if isinstance(there, dict) and isinstance(value, dict):
        for name, item in value.items():
            _put(there, (name,), item)
    else:
        values[leaf] = value


def nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    """`value` below the names of `path`."""
    for name in reversed(path):
        value = {name: value}
    return typing.cast(dict[str, Any], value)


def apply_edit(edit: Edit, found: Any, label: str) -> tuple[tuple[str, ...], Any]:
    """Apply an edit to the list of earlier layers; returns the list's path and the new list.

    Args: found: the value at that path; it is not changed.
    Raises: ConfigError if it is no list, or has no such entry.
    """
    first = next(n for n, part in enumerate(edit.path) if isinstance(part, int))
    names = typing.cast(tuple[str, ...], edit.path[:first])
    return names, _changed(found, edit.path[first:], edit, ".".join(names), label)


def _changed(found: Any, path: tuple[str | int, ...], edit: Edit, name: str, label: str) -> Any:
    """`found` with the edit's value at `path`; `name` is the key of `found`, for messages."""
    if not path:
        return edit.value
    part = path[0]
    if isinstance(part, int):
        if not isinstance(found, list):
            raise ConfigError(
                f"{label}: {edit.key}: {name} is {shown(found)}, no list with entries: give it whole, {name}=[…]"
            )
        if not 0 <= part < len(found):
            entries = f"{counted(len(found), 'entries')}, [0] to [{len(found) - 1}]" if found else "no entries"
            raise ConfigError(f"{label}: {edit.key}: {name} has {entries}: give it whole, {name}=[…]")
        entry = _changed(found[part], path[1:], edit, f"{name}[{part}]", label)
        return [*found[:part], entry, *found[part + 1 :]]
    inner = dict(found) if isinstance(found, dict) else {}
    inner[part] = _changed(inner.get(part), path[1:], edit, f"{name}.{part}", label)
    return inner
