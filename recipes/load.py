"""Makes a recipe from its files: inherit, merge, override, validate.

Layers, later ones win: the schema's defaults ← the recipe that `inherit:` names (and what that inherits) ← the
recipe ← `key=value` overrides. Mappings merge key by key, lists are replaced (`key[0]=value` changes one entry). A
layer that changes `head.type` starts with an empty head node, because another family has other keys.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
import typing
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from headstart.eval.config import RETIRED
from headstart.heads.errors import ConfigError, first_line
from headstart.heads.families import FAMILIES
from headstart.heads.files import is_file
from headstart.recipes.consent import require_consent
from headstart.recipes.environment import from_environment, put_back
from headstart.recipes.keys import all_keys, check_keys, keep_words, wrong_type
from headstart.recipes.read import (
    PARSING,
    SHOWN,
    Layer,
    apply_edit,
    nested,
    read_layer,
    read_overrides,
    require_plain,
    shown,
)
from headstart.recipes.schema import (
    DEFAULTS,
    Evaluation,
    Exporting,
    Recipe,
    check_eval,
    check_export,
    check_recipe,
    check_target,
    check_tune,
    check_variables,
    recipe_class,
)

#: most files of one recipe
MAX_FILES = 64


def shipped_recipes() -> dict[str, Path]:
    """Recipes that come with the package: {name without .yaml: path}. Files that start with `_` are fragments."""
    root = Path(str(resources.files("headstart.recipes")))
    return {path.stem: path for path in sorted(root.glob("*.yaml"))}


def load_recipe(recipe: str | Path, overrides: Sequence[str] = (), values: dict[str, Any] | None = None) -> Recipe:
    """Read, merge and validate a recipe.

    Args:
        recipe: a YAML file, or the name of a shipped recipe.
        overrides: `dotted.key=value` strings, values in YAML syntax.
        values: dotted keys from command-line options, None = not given. They overrule everything else.
    Raises:
        ConfigError: names the file and line (or the override), the key, what was found and what was expected. Also
            where code from elsewhere would run only because a file says so (see `consent`).
    """
    path = find_recipe(recipe)
    options = _options(values)
    layers = [*read_chain(path), *read_overrides(overrides), *([options] if options.values else [])]
    made = build_recipe(layers, name=path.stem)
    require_consent(made.target, layers, shipped_recipes().values())
    return made


def find_recipe(recipe: str | Path, beside: Path | None = None) -> Path:
    """Path of a recipe given as a file (relative to `beside`, then to the working directory) or a shipped name."""
    text = str(recipe)
    try:
        given = Path(text).expanduser()
        places = [base / given for base in (beside, Path()) if base is not None]
        file = next((place for place in places if place.is_file()), None)
        other = next((place for place in places if place.exists()), None)
    except (OSError, ValueError, RuntimeError) as error:  # an over-long name, a null character, ~nobody
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{shown(text)}: no such recipe ({cause}): give a YAML file or a shipped recipe") from None
    if file is not None:
        return file
    shipped = shipped_recipes()
    name = given.name.removesuffix(".yaml")
    if name in shipped and given.parent.name in ("", "recipes"):
        return shipped[name]
    names = [n for n in shipped if not n.startswith("_")]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if other is not None:
        hint = f"what is there is {'a directory' if other.is_dir() else 'no regular file'}. "
        if is_file(other / "recipe.yaml"):
            hint = f"what is there is a run's directory; its recipe is {other / 'recipe.yaml'}. "
    # quoted if it is empty, long or not printable
    quoted = text if text.isprintable() and 0 < len(text) <= SHOWN else shown(text)
    said = f"; {hint}" if hint else ". "
    raise ConfigError(f"{quoted}: no such recipe{said}Give a YAML file or a shipped recipe: {', '.join(names)}")


def read_chain(path: Path, seen: tuple[Path, ...] = (), read: list[Path] | None = None) -> list[Layer]:
    """The layers of a recipe file, the most basic first.

    Args: seen: the files on the way to this one; read: every file that was read, this call's added.
    """
    read = [] if read is None else read
    resolved = path.resolve()
    if resolved in seen:
        circle = " → ".join(p.name for p in (*seen[seen.index(resolved) :], resolved))
        raise ConfigError(f"{path}: inherit goes in a circle: {circle}")
    read.append(resolved)
    if len(read) > MAX_FILES:
        raise ConfigError(f"{path}: inherit: found more than {MAX_FILES} files, expected fewer")
    layer = read_layer(path)
    inherit = layer.values.pop("inherit", None)
    parents = [inherit] if isinstance(inherit, str) else inherit or []
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(
            f"{layer.where('inherit')}: inherit: found {shown(inherit)}, expected a recipe name or a list of them"
        )
    chain: list[Layer] = []
    for parent in parents:
        try:
            parent_path = find_recipe(parent, beside=path.parent)
        except ConfigError as error:
            raise ConfigError(f"{layer.where('inherit')}: inherit: {error}") from None
        chain += read_chain(parent_path, (*seen, resolved), read)
    return [*chain, layer]


def build_recipe(layers: Sequence[Layer], name: str | None = None) -> Recipe:
    """Validate each layer against the schema and merge them; `name` is the run's name where no layer gives one."""
    head_type, layers = _settle_head(layers)
    if head_type not in FAMILIES:
        where = _place_of_head_type(layers)
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"{where}: head.type: found {shown(head_type)}, expected one of {known}")
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
        values: as `load_recipe`.
    """
    if recipe is not None:
        loaded = load_recipe(recipe, overrides, values)
        return Evaluation(loaded.seed, loaded.target, loaded.eval, loaded.tune, loaded.environment)
    basics = Layer("defaults", {"eval": {"seed": DEFAULTS["eval"]["seed"]}})
    settings = typing.cast(Evaluation, merge([basics, *read_overrides(overrides), _options(values)], Evaluation))
    check_target(settings.target)
    check_variables("eval.template_kwargs", settings.eval.template_kwargs)
    check_eval(settings.eval)
    check_tune(settings.tune)
    return settings


def load_exporting(
    recipe: str | Path | None, overrides: Sequence[str] = (), values: dict[str, Any] | None = None
) -> Exporting:
    """Target and export settings, as `load_evaluation`."""
    if recipe is not None:
        loaded = load_recipe(recipe, overrides, values)
        return Exporting(loaded.target, loaded.export, loaded.environment)
    settings = typing.cast(Exporting, merge([*read_overrides(overrides), _options(values)], Exporting))
    check_target(settings.target)
    check_export(settings.export)
    return settings


def _options(values: dict[str, Any] | None) -> Layer:
    given = Layer("option", {})
    for key, value in (values or {}).items():
        if value is not None:
            node, _, leaf = key.partition(".")
            given.values.setdefault(node, {})[leaf] = value
            require_plain(given, value, key)
    return given


def merge(layers: Sequence[Layer], schema: type) -> Any:
    """An instance of the dataclass `schema`, each layer checked against it; ConfigError names layer, line and key."""
    merged = OmegaConf.structured(schema)
    known = sorted(all_keys(schema))
    for layer in map(_without_retired, layers):
        layer = _whole_list(layer, merged, schema, known) if layer.edit is not None else layer
        layer = keep_words(layer, schema)
        check_keys(layer, layer.values, schema, "", known)
        try:
            merged = typing.cast(DictConfig, OmegaConf.merge(merged, layer.values))
        except PARSING as error:
            raise wrong_type(layer, error, schema, layer.values) from error
    label = next((layer.label for layer in reversed(layers) if layer.lines), layers[-1].label)
    try:
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise ConfigError(
                f"{label}: {missing[0]} is not set: add it to the recipe, or give {missing[0]}=… as override"
            )
        made: Any = OmegaConf.to_object(merged)
        environment = from_environment(merged)
    except PARSING as error:
        raise _unresolved(layers, label, error) from error
    made.environment = environment
    return made


def _without_retired(layer: Layer) -> Layer:
    """The layer without settings of earlier versions.

    Raises: ConfigError for one with another value than the one that is always used now.
    """
    node = layer.values.get("eval")
    if not isinstance(node, dict):
        return layer
    for name, value in RETIRED.items():
        if node.get(name, value) != value:
            key = f"eval.{name}"
            found = f"found {shown(node[name])}, but it is no setting any more: it is always {value}. Remove it"
            raise ConfigError(f"{layer.where(key)}: {key}: {found}")
    kept = {name: value for name, value in node.items() if name not in RETIRED}
    return replace(layer, values={**layer.values, "eval": kept})


def _unresolved(layers: Sequence[Layer], label: str, error: BaseException) -> ConfigError:
    """The error for a value that refers to a key or an environment variable that does not exist."""
    key = str(getattr(error, "full_key", None) or "")
    said = [layer for layer in layers if layer.gives(key)]
    if key == "run_dir" and (not said or "${name}" in str(said[-1].values.get(key))):  # it is made of the name
        said += [layer for layer in layers if layer.gives("name")]
    where = said[-1].where(key) if said else label
    raised = re.fullmatch(r"\w+ raised while resolving interpolation: \"?(.*?)\"?", first_line(error))
    cause = raised[1] if raised else first_line(error)
    variable = "oc.env" in cause or "Environment variable" in cause
    remedy = ": set it, or give a value for where it is not set, ${oc.env:NAME,value}" if variable else ""
    return ConfigError(f"{where}: {f'{key}: ' if key else ''}{cause}{remedy}")


def _whole_list(layer: Layer, merged: DictConfig, schema: type, known: list[str]) -> Layer:
    """The layer that gives the whole list in which `layer` changes an entry."""
    edit = layer.edit
    assert edit is not None
    names = typing.cast(list[str], list(itertools.takewhile(lambda part: isinstance(part, str), edit.path)))
    check_keys(layer, nested(names, []), schema, "", known)
    current: Any = OmegaConf.to_container(merged, resolve=False)
    for name in names:
        current = current.get(name) if isinstance(current, dict) else None
    path, value = apply_edit(edit, current, layer.label)
    return Layer(layer.label, nested(path, value))


def _settle_head(layers: Sequence[Layer]) -> tuple[str, list[Layer]]:
    """The family of the last layer that names one. Head nodes of layers for another family are left out."""
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
        where = layers[-2 if len(layers) > 1 else -1].label
        raise ConfigError(f"{where}: head.type is not set; expected one of {', '.join(FAMILIES)}")
    return family, kept


def _place_of_head_type(layers: Sequence[Layer]) -> str:
    return [layer for layer in layers if layer.gives("head.type")][-1].where("head.type")


def to_dict(recipe: Recipe | Evaluation | Exporting) -> dict[str, Any]:
    """The resolved recipe, or these parts of one, as plain JSON-able values.

    Those that came from the environment are `${oc.env:NAME}`.
    """
    shown = {place: written.shown for place, written in recipe.environment.items()}
    return put_back(_settings(recipe), shown)


def _settings(recipe: Recipe | Evaluation | Exporting) -> dict[str, Any]:
    values = dataclasses.asdict(recipe)
    return {f.name: values[f.name] for f in dataclasses.fields(recipe) if f.metadata.get("setting", True)}


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as a file that `load_recipe` reads back to an equal recipe.

    What came from the environment comes from there again: no password or path of a machine is written down.
    """
    written = {place: variable.text for place, variable in recipe.environment.items()}
    values = put_back(_settings(recipe), written)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
