"""Checks a layer of a recipe against the schema: unknown keys and wrong types, with the nearest key that there is."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from headstart.heads.errors import ConfigError, first_line
from headstart.recipes.read import PARSING, Layer, shown


def dataclass_of(hint: Any) -> type | None:
    """The dataclass inside a type hint: X, X | None, list[X], dict[str, X]."""
    if dataclasses.is_dataclass(hint):
        return typing.cast(type, hint)
    return next((inner for part in typing.get_args(hint) if (inner := dataclass_of(part)) is not None), None)


def _hints(schema: type) -> dict[str, Any]:
    """Name → type of a schema's settings."""
    hints = typing.get_type_hints(schema)
    # fields made by make_dataclass carry the type itself
    settings = [f for f in dataclasses.fields(schema) if f.metadata.get("setting", True)]
    return {f.name: f.type if not isinstance(f.type, str) else hints[f.name] for f in settings}


def all_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Dotted keys of all settings below a schema."""
    for name, hint in _hints(schema).items():
        if dataclasses.is_dataclass(hint):
            yield from all_keys(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            yield prefix + name


def keep_words(layer: Layer, schema: type) -> Layer:
    """The layer with the words themselves where YAML read true or false and the setting is text.

    `train.capture=off` and `train.mixed_precision=no` are the words `off` and `no`, which YAML takes for false.
    """
    values = copy.deepcopy(layer.values)
    for key, word in layer.words.items():
        node: Any = values
        hint: Any = schema
        *parents, last = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", key)]
        for part in (*parents, last):
            inner = dataclass_of(hint)
            if isinstance(part, str):
                hint = _hints(inner).get(part) if inner is not None else None
        for part in parents:
            node = node[part] if isinstance(node, dict | list) and _holds(node, part) else None
        # a later override may have put another value there
        if hint in (str, str | None) and isinstance(node, dict | list) and _holds(node, last):
            node[last] = word if isinstance(node[last], bool) else node[last]
    return dataclasses.replace(layer, values=values)


def _holds(node: dict[Any, Any] | list[Any], part: str | int) -> bool:
    if isinstance(node, list):
        return isinstance(part, int) and part < len(node)
    return part in node


def check_keys(layer: Layer, values: Any, schema: type, prefix: str, known: list[str]) -> None:
    """Raise ConfigError for the first key that the schema does not have, with the nearest one that it has."""
    if not isinstance(values, dict):
        name = prefix.removesuffix(".")
        raise ConfigError(
            f"{layer.where(name)}: {name}: found {shown(values)}, expected a mapping of {', '.join(_hints(schema))}"
        )
    hints = _hints(schema)
    for key, value in values.items():
        full = f"{prefix}{key}"
        if key not in hints:
            raise ConfigError(_unknown(layer, full, str(key), list(hints), prefix, known))
        _check_kind(layer, full, value, hints[key])
        inner = dataclass_of(hints[key])
        if inner is None:
            continue
        if isinstance(value, list):
            for index, item in enumerate(value):
                check_keys(layer, item, inner, f"{full}[{index}].", known)
                try:
                    OmegaConf.merge(OmegaConf.structured(inner), item)
                except PARSING as error:
                    raise wrong_type(layer, error, inner, item, f"{full}[{index}].") from error
        elif dataclasses.is_dataclass(hints[key]):
            check_keys(layer, value, inner, f"{full}.", known)


def _check_kind(layer: Layer, full: str, value: Any, hint: Any) -> None:
    """Raise ConfigError for a list where a mapping is expected, or the other way round."""
    parts = [part for part in (typing.get_args(hint) or ()) if part is not type(None)]
    kind = typing.get_origin(hint)
    if kind in (types.UnionType, typing.Union) and len(parts) == 1:
        kind = typing.get_origin(parts[0])
    wrong = (kind is list and isinstance(value, dict)) or (kind is dict and isinstance(value, list))
    if wrong or (dataclasses.is_dataclass(hint) and isinstance(value, list)):
        raise ConfigError(f"{layer.where(full)}: {full}: found {shown(value)}, expected {describe(hint)}")


def _unknown(layer: Layer, full: str, key: str, siblings: list[str], prefix: str, known: list[str]) -> str:
    same_name = [name for name in known if name.rsplit(".", 1)[-1] == key]
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    best = prefix + near[0] if near else same_name[0] if same_name else None
    if best is None:
        best = next(iter(difflib.get_close_matches(full, known, n=1, cutoff=0.7)), None)
    hint = f"; did you mean {best!r}?" if best else "."
    name, colon, rest = key.partition(":")
    if colon and rest and name in siblings:
        hint = f": YAML needs a space behind the colon, `{name}: {rest}`."
    node = prefix.removesuffix(".") or "the recipe"
    return f"{layer.where(full)}: unknown key {full!r}{hint} Keys of {node}: {', '.join(siblings)}"


def wrong_type(layer: Layer, error: BaseException, schema: type, values: Any, prefix: str = "") -> ConfigError:
    """The error for a value that the schema's type does not take, of which OmegaConf tells the key."""
    key = str(getattr(error, "full_key", None) or "")
    found: Any = values
    hint: Any = schema
    for part in key.replace("[", ".[").split(".") if key else []:
        index = part[1:-1] if part.startswith("[") else None
        try:
            found = found[int(index)] if index is not None else found[part]
        except (KeyError, IndexError, TypeError, ValueError):
            break
        inner = dataclass_of(hint)
        if index is None and inner is not None:
            hint = _hints(inner).get(part, Any)
    expected = f", expected {describe(hint)}" if key else ""
    full = prefix + key
    return ConfigError(f"{layer.where(full)}: {full}: found {shown(found)}{expected} ({first_line(error)})")


def describe(hint: Any) -> str:
    """A type hint in words a user knows: `number`, `list of text`, `text or null`."""
    words = {
        int: "whole number",
        float: "number",
        str: "text",
        bool: "true or false",
        type(None): "null",
        Any: "anything",
    }
    if hint in words:
        return words[hint]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(part) for part in parts)
    if origin is list:
        return f"a list of {describe(parts[0])}"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "a mapping"
    return getattr(hint, "__name__", str(hint))
