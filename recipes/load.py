"""A recipe from its files: inherit, merge, override, validate.

Layers, later ones win: the schema's defaults ← the recipe that `inherit:` names (and what that inherits) ← the
recipe ← `key=value` overrides. Mappings merge key by key, lists are replaced. A layer that changes `head.type`
starts the head node afresh: the keys of another family mean nothing to it.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from headstart.heads import HEADS
from headstart.heads.errors import ConfigError
from headstart.recipes.schema import (
    DEFAULTS,
    Evaluation,
    Exporting,
    Recipe,
    check_eval,
    check_export,
    check_recipe,
    check_tune,
    recipe_class,
)


@dataclass(frozen=True)
class Layer:
    """One file or one list of overrides.

    Attributes:
        label: the file's path, or "override": how messages name it.
        values: nested plain mapping.
        lines: 1-based line of every dotted key (files only).
    """

    label: str
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """`file:line`, or the label alone for overrides."""
        return f"{self.label}:{self.lines[key]}" if key in self.lines else self.label


def shipped_recipes() -> dict[str, Path]:
    """Recipes that come with the package: {name without .yaml: path}. Files that start with `_` are fragments."""
    root = Path(str(resources.files("headstart.recipes")))
    return {path.stem: path for path in sorted(root.glob("*.yaml"))}


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge and validate a recipe.

    Args:
        recipe: a YAML file, or the name of a shipped recipe.
        overrides: `dotted.key=value` strings, values in YAML syntax.
    Raises:
        ConfigError: names the file and line (or the override), the key, what was found and what was expected.
    """
    path = find_recipe(recipe)
    layers = [*read_chain(path), read_overrides(overrides)]
    return build_recipe(layers, name=path.stem)


def find_recipe(recipe: str | Path, beside: Path | None = None) -> Path:
    """Path of a recipe given as a file (relative to `beside`, then to the working directory) or a shipped name."""
    text = str(recipe)
    given = Path(text).expanduser()
    for base in (beside, Path()):
        if base is not None and (base / given).is_file():
            return base / given
    shipped = shipped_recipes()
    name = given.name.removesuffix(".yaml")
    if name in shipped and given.parent.name in ("", "recipes"):
        return shipped[name]
    names = [n for n in shipped if not n.startswith("_")]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"{text}: no such recipe; {hint}Give a YAML file or a shipped recipe: {', '.join(names)}")


def read_chain(path: Path, seen: tuple[Path, ...] = ()) -> list[Layer]:
    """The layers of a recipe file, the most basic first."""
    resolved = path.resolve()
    if resolved in seen:
        circle = " → ".join(p.name for p in (*seen[seen.index(resolved) :], resolved))
        raise ConfigError(f"{path}: inherit goes in a circle: {circle}")
    layer = read_layer(path)
    inherit = layer.values.pop("inherit", None)
    parents = [inherit] if isinstance(inherit, str) else inherit or []
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(
            f"{layer.where('inherit')}: inherit: found {inherit!r}, expected a recipe name or a list of them"
        )
    chain: list[Layer] = []
    for parent in parents:
        try:
            parent_path = find_recipe(parent, beside=path.parent)
        except ConfigError as error:
            raise ConfigError(f"{layer.where('inherit')}: inherit: {error}") from None
        chain += read_chain(parent_path, (*seen, resolved))
    return [*chain, layer]


def read_layer(path: Path) -> Layer:
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False) if node is not None else {}
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', None) or error})") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from error
    if not isinstance(values, dict) or (node is not None and not isinstance(node, yaml.MappingNode)):
        raise ConfigError(f"{path}: found {type(values).__name__} at the top, expected `key: value` lines")
    return Layer(str(path), typing.cast(dict[str, Any], values), dict(_key_lines(node)))


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


def read_overrides(overrides: Sequence[str]) -> Layer:
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {text!r}: expected key=value, e.g. train.lr=1e-4")
    try:
        values = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)), resolve=False)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"override {' '.join(overrides)!r}: {_first_line(error)}") from error
    return Layer("override", typing.cast(dict[str, Any], values))


def build_recipe(layers: Sequence[Layer], name: str | None = None) -> Recipe:
    """Validate each layer against the schema and merge them; `name` is the run's name where no layer gives one."""
    head_type, layers = _settle_head(layers)
    if head_type not in HEADS:
        where = _who_says_head_type(layers)
        raise ConfigError(f"{where}: head.type: found {head_type!r}, expected one of {', '.join(sorted(HEADS))}")
    schema = recipe_class(head_type)
    basics = {**DEFAULTS, "name": name} if name else DEFAULTS
    recipe = typing.cast(Recipe, merge([Layer("defaults", basics), *layers], schema))
    check_recipe(recipe)
    return recipe


def load_evaluation(
    recipe: str | Path | None, overrides: Sequence[str] = (), values: dict[str, Any] | None = None
) -> Evaluation:
    """Target and evaluation settings: of a recipe, or of the schema's defaults, with overrides.

    Args:
        values: dotted keys given by other means (command-line options), None = not given; they win over everything.
    """
    if recipe is not None:
        loaded = _load_with(recipe, overrides, values)
        return Evaluation(loaded.seed, loaded.target, loaded.eval, loaded.tune)
    basics = Layer("defaults", {"eval": {"seed": DEFAULTS["eval"]["seed"]}})
    settings = typing.cast(Evaluation, merge([basics, read_overrides(overrides), _options(values)], Evaluation))
    check_eval(settings.eval)
    check_tune(settings.tune)
    return settings


def load_exporting(
    recipe: str | Path | None, overrides: Sequence[str] = (), values: dict[str, Any] | None = None
) -> Exporting:
    """Target and export settings, as `load_evaluation`."""
    if recipe is not None:
        loaded = _load_with(recipe, overrides, values)
        return Exporting(loaded.target, loaded.export)
    settings = typing.cast(Exporting, merge([read_overrides(overrides), _options(values)], Exporting))
    check_export(settings.export)
    return settings


def _load_with(recipe: str | Path, overrides: Sequence[str], values: dict[str, Any] | None) -> Recipe:
    path = find_recipe(recipe)
    return build_recipe([*read_chain(path), read_overrides(overrides), _options(values)], name=path.stem)


def _options(values: dict[str, Any] | None) -> Layer:
    given = Layer("option", {})
    for key, value in (values or {}).items():
        if value is not None:
            node, _, leaf = key.partition(".")
            given.values.setdefault(node, {})[leaf] = value
    return given


def merge(layers: Sequence[Layer], schema: type) -> Any:
    """An instance of the dataclass `schema`, each layer checked against it; ConfigError names layer, line and key."""
    merged = OmegaConf.structured(schema)
    all_keys = sorted(_all_keys(schema))
    for layer in layers:
        _check_keys(layer, layer.values, schema, "", all_keys)
        try:
            merged = typing.cast(DictConfig, OmegaConf.merge(merged, layer.values))
        except OmegaConfBaseException as error:
            raise _wrong_type(layer, error, schema, layer.values) from error
    label = next((layer.label for layer in reversed(layers) if layer.lines), layers[-1].label)
    if missing := sorted(OmegaConf.missing_keys(merged)):
        raise ConfigError(f"{label}: {missing[0]} is not set: add it to the recipe, or give {missing[0]}=… as override")
    try:
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{label}: {getattr(error, 'full_key', None) or ''}: {_first_line(error)}") from error


def _settle_head(layers: Sequence[Layer]) -> tuple[str, list[Layer]]:
    """The family the last layer that names one asks for; head nodes written for another family are left out."""
    kept: list[Layer] = []
    family: str | None = None
    for layer in layers:
        node = layer.values.get("head")
        named = node.get("type") if isinstance(node, dict) else None
        if named is not None and family is not None and named != family:
            kept = [replace(old, values={k: v for k, v in old.values.items() if k != "head"}) for old in kept]
        family = str(named) if named is not None else family
        kept.append(layer)
    if family is None:
        raise ConfigError(
            f"{layers[-2].label if len(layers) > 1 else layers[-1].label}: head.type is not set: {', '.join(HEADS)}"
        )
    return family, kept


def _who_says_head_type(layers: Sequence[Layer]) -> str:
    names = [layer for layer in layers if isinstance(layer.values.get("head"), dict) and "type" in layer.values["head"]]
    return names[-1].where("head.type")


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as plain JSON-able values."""
    return dataclasses.asdict(recipe)


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as a file that `load_recipe` reads back to an equal recipe."""
    return yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True, width=120)


def _dataclass_of(hint: Any) -> type | None:
    """The dataclass inside a type hint: X, X | None, list[X], dict[str, X]."""
    if dataclasses.is_dataclass(hint):
        return typing.cast(type, hint)
    return next((found for part in typing.get_args(hint) if (found := _dataclass_of(part)) is not None), None)


def _hints(schema: type) -> dict[str, Any]:
    hints = typing.get_type_hints(schema)
    # fields made by make_dataclass carry the type itself
    return {f.name: f.type if not isinstance(f.type, str) else hints[f.name] for f in dataclasses.fields(schema)}


def _all_keys(schema: type, prefix: str = "") -> Iterator[str]:
    for name, hint in _hints(schema).items():
        if dataclasses.is_dataclass(hint):
            yield from _all_keys(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            yield prefix + name


def _check_keys(layer: Layer, values: Any, schema: type, prefix: str, all_keys: list[str]) -> None:
    """Raise ConfigError for the first key that the schema does not have, with the nearest one that it has."""
    if not isinstance(values, dict):
        name = prefix.removesuffix(".")
        raise ConfigError(
            f"{layer.where(name)}: {name}: found {values!r}, expected a mapping of {', '.join(_hints(schema))}"
        )
    hints = _hints(schema)
    for key, value in values.items():
        full = f"{prefix}{key}"
        if key not in hints:
            raise ConfigError(_unknown(layer, full, str(key), list(hints), prefix, all_keys))
        inner = _dataclass_of(hints[key])
        if inner is None:
            continue
        if isinstance(value, list):
            for index, item in enumerate(value):
                _check_keys(layer, item, inner, f"{full}[{index}].", all_keys)
                try:
                    OmegaConf.merge(OmegaConf.structured(inner), item)
                except OmegaConfBaseException as error:
                    raise _wrong_type(layer, error, inner, item, f"{full}[{index}].") from error
        elif dataclasses.is_dataclass(hints[key]):
            _check_keys(layer, value, inner, f"{full}.", all_keys)


def _unknown(layer: Layer, full: str, key: str, siblings: list[str], prefix: str, all_keys: list[str]) -> str:
    same_name = [name for name in all_keys if name.rsplit(".", 1)[-1] == key]
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    best = prefix + near[0] if near else same_name[0] if same_name else None
    if best is None:
        best = next(iter(difflib.get_close_matches(full, all_keys, n=1, cutoff=0.7)), None)
    hint = f"; did you mean {best!r}?" if best else "."
    node = prefix.removesuffix(".") or "the recipe"
    return f"{layer.where(full)}: unknown key {full!r}{hint} Keys of {node}: {', '.join(siblings)}"


def _wrong_type(
    layer: Layer, error: OmegaConfBaseException, schema: type, values: Any, prefix: str = ""
) -> ConfigError:
    key = str(getattr(error, "full_key", None) or "")
    found: Any = values
    hint: Any = schema
    for part in key.replace("[", ".[").split(".") if key else []:
        index = part[1:-1] if part.startswith("[") else None
        try:
            found = found[int(index)] if index is not None else found[part]
        except (KeyError, IndexError, TypeError, ValueError):
            break
        inner = _dataclass_of(hint)
        if index is None and inner is not None:
            hint = _hints(inner).get(part, Any)
    expected = f", expected {describe(hint)}" if key else ""
    full = prefix + key
    return ConfigError(f"{layer.where(full)}: {full}: found {found!r}{expected} ({_first_line(error)})")


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


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
