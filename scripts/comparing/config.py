"""What the file of a comparison holds, and how it is read: a YAML file, or the name of a shipped one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, cast

from headstart.heads.errors import ConfigError
from headstart.heads.numerics import DTYPES
from headstart.recipes.load import find_recipe, merge
from headstart.recipes.read import Layer, read_layer, read_overrides, shown
from headstart.recipes.schema import Recipe, check_name, check_place

#: name of a set of prompts: it becomes a key of the rows
SET_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
#: name of the measurement of the speed-up, beside those of the sets; how the key of an interval ends
SPEED, INTERVAL = "speed", "_ci95"
KINDS = ("seconds", "steps", "positions")


@dataclass
class BudgetConfig:
    """What every cell may spend: exactly one of them."""

    #: Seconds of training, validations and checkpoints included.
    seconds: float | None = None
    #: Optimiser steps.
    steps: int | None = None
    #: Supervised positions that training passes over, repeats counted. A cell ends with the first step that reaches
    #: them.
    positions: int | None = None

    def check(self) -> None:
        given = {name: getattr(self, name) for name in KINDS if getattr(self, name) is not None}
        if len(given) != 1:
            found = " and ".join(f"{name}={value:g}" for name, value in given.items()) or "none"
            raise ConfigError(f"budget: found {found}, expected exactly one of {', '.join(KINDS)}")
        name, value = next(iter(given.items()))
        if not 0 < value < 1e15:
            raise ConfigError(f"budget.{name}: found {value:g}, expected a number above 0")

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def label(self) -> str:
        """`75s`, `1000steps` or `2000000positions`: part of the folder's name."""
        return f"{getattr(self, self.kind):g}{'s' if self.kind == 'seconds' else self.kind}".replace("+", "")


@dataclass
class EntryConfig:
    """One or several cells: a recipe with settings, times the values of a grid, times the seeds."""

    #: Name of the cells; null takes the recipe's.
    name: str | None = None
    #: Recipe, or a list of them; null takes `base`.
    recipe: Any = None
    #: Settings of these cells, as in a recipe; `train.lr: 1e-3` may be written with dots.
    settings: dict[str, Any] = field(default_factory=dict)
    #: Setting → its values. Several settings make a cell of every combination.
    grid: dict[str, Any] = field(default_factory=dict)
    #: Seeds of these cells; null takes those of the comparison.
    seeds: list[int] | None = None
    #: What the cells change, for the table; null takes the settings of the grid, or the name.
    lever: str | None = None
    #: Whether the table compares the other cells with these, seed by seed.
    baseline: bool = False


@dataclass
class SpeedConfig:
    """How the speed-up is measured."""

    #: Whether it is measured.
    enabled: bool = True
    #: Batch sizes. The time of a draft is that of the first one.
    batch_sizes: list[int] = field(default_factory=lambda: [1, 16])
    #: Prompts of each task that are decoded.
    prompts: int = 4
    #: Dtype of the target on a GPU; on a CPU that of measure.dtype is taken.
    dtype: str = "bfloat16"
    #: Settings of the node `eval`, besides.
    eval: dict[str, Any] = field(default_factory=dict)


@dataclass
class MeasureConfig:
    """How every cell is decoded."""

    #: Name → settings of the node `eval` for these prompts (data, task_field, limit, …); null leaves a set out. Without
    #: `data` they are the conversations that the cell held out. With `task_field` every task has a τ of its own.
    sets: dict[str, Any] = field(default_factory=dict)
    #: Settings of the node `eval` of all sets.
    eval: dict[str, Any] = field(default_factory=dict)
    #: Dtype of the target where τ is measured.
    dtype: str = "float32"
    #: How the speed-up is measured.
    speed: SpeedConfig = field(default_factory=SpeedConfig)


@dataclass
class CompareConfig:
    """A comparison.

    An override of another key than these is a setting of all cells' recipes.
    """

    #: Name of the comparison.
    name: str = "???"
    #: Folder of everything that it makes; null takes runs/compare/NAME-BUDGET.
    folder: str | None = None
    #: Recipe of entries that name none.
    base: str | None = None
    #: Settings of all cells, as in a recipe.
    settings: dict[str, Any] = field(default_factory=dict)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    #: Seeds of every entry that gives none. A seed decides the split of the data, the order and the first weights.
    seeds: list[int] = field(default_factory=lambda: [0])
    cells: list[EntryConfig] = field(default_factory=list)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    environment: dict[str, Any] = field(default_factory=dict, compare=False, repr=False, metadata={"setting": False})

    @property
    def place(self) -> Path:
        return (
            Path(self.folder) if self.folder is not None else Path("runs/compare") / f"{self.name}-{self.budget.label}"
        )

    def check(self) -> None:
        """Raise ConfigError naming the first key that cannot work."""
        check_name(self.name)
        check_place("folder", self.folder)
        self.budget.check()
        _check_seeds("seeds", self.seeds)
        if not self.cells:
            raise ConfigError("cells: found none, expected at least one entry, e.g. cells: [{recipe: mine.yaml}]")
        for number, entry in enumerate(self.cells):
            if entry.seeds is not None:
                _check_seeds(f"cells[{number}].seeds", entry.seeds)
        self._check_measure()

    def _check_measure(self) -> None:
        measure, speed = self.measure, self.measure.speed
        for name, dtype in (("measure.dtype", measure.dtype), ("measure.speed.dtype", speed.dtype)):
            if dtype not in ("auto", *DTYPES):
                raise ConfigError(f"{name}: found {dtype!r}, expected one of auto, {', '.join(DTYPES)}")
        sizes = speed.batch_sizes
        if not sizes or len(set(sizes)) < len(sizes) or min(sizes) < 1:
            raise ConfigError(f"measure.speed.batch_sizes: found {sizes}, expected different numbers of 1 or more")
        if speed.prompts < 1:
            raise ConfigError(f"measure.speed.prompts: found {speed.prompts}, expected 1 or more")
        if not self.sets:
            raise ConfigError("measure.sets: found none, expected at least one, e.g. {held_out: {limit: 24}}")
        for name, settings in self.sets.items():
            if not SET_NAME.fullmatch(name):
                raise ConfigError(f"measure.sets: found {shown(name)}, expected a name of letters, digits and _")
            if name == SPEED or name.endswith(INTERVAL):
                raise ConfigError(
                    f"measure.sets: found {shown(name)}, expected another name: {SPEED} is the measurement of the "
                    f"speed-up, and keys that end in {INTERVAL} are intervals"
                )
            if not isinstance(settings, dict):
                raise ConfigError(
                    f"measure.sets.{name}: found {shown(settings)}, expected settings of eval, such as {{data: FILE}}"
                )

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        """The sets that are measured: those that no later layer set to null."""
        return {name: settings for name, settings in self.measure.sets.items() if settings is not None}


def _check_seeds(key: str, seeds: Sequence[int]) -> None:
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"{key}: found {list(seeds)}, expected different whole numbers of 0 or more")


def shipped_comparisons() -> dict[str, Path]:
    """Comparisons that come with the package: {name without .yaml: path}."""
    root = Path(str(resources.files("headstart.recipes"))) / "compare"
    return {path.stem: path for path in sorted(root.glob("*.yaml"))}


def find_comparison(file: str) -> Path:
    """Path of a comparison given as a file or a shipped name. Raises ConfigError with the nearest name."""
    place = Path(file).expanduser()
    if place.is_file():
        return place
    known = shipped_comparisons()
    name = place.name.removesuffix(".yaml")
    if name in known and place.parent.name in ("", "compare"):
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"{shown(file)}: no such comparison; {hint}Give a YAML file or a shipped one: {', '.join(known)}")


def load_comparison(file: str, overrides: Sequence[str] = ()) -> tuple[CompareConfig, list[str], Path]:
    """(The comparison, the overrides that are settings of all its cells, its file).

    Raises: ConfigError naming the file and line (or the override), the key, what was found and what was expected.
    """
    path = find_comparison(file)
    own, settings = split_overrides(overrides)
    read, given = read_layer(path), read_overrides(own)
    if any("budget" in layer.values for layer in given):  # one of another kind takes the place of the file's
        read.values.pop("budget", None)
    config = cast(CompareConfig, merge([Layer("defaults", {"name": path.stem}), read, *given], CompareConfig))
    config.check()
    return config, settings, path


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(Overrides of the comparison's own keys, those of all cells' recipes)."""
    own = {"name", "folder", "base", "settings", "budget", "seeds", "cells", "measure"}
    refused = {"run_dir": "folder", "seed": "seeds"}
    recipes = set(Recipe.__dataclass_fields__)
    mine: list[str] = []
    theirs: list[str] = []
    for text in overrides:
        key = re.split(r"[.\[=]", text.strip(), maxsplit=1)[0].strip()
        if key in refused:
            raise ConfigError(f"override {shown(text)}: every cell has its own {key}: give {refused[key]}=… instead")
        if key not in own and key not in recipes:
            near = difflib.get_close_matches(key, [*own, *recipes], n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"override {shown(text)}: unknown key {key!r}; {hint}Expected one of the comparison "
                f"({', '.join(sorted(own))}) or a setting of the recipes, e.g. train.lr=1e-3"
            )
        (mine if key in own else theirs).append(text)
    return mine, theirs


def recipe_of(name: str, file: Path) -> str:
    """A recipe that the file names, as any process finds it: a path, or a shipped name."""
    try:
        path = find_recipe(name, beside=file.parent)
    except ConfigError as error:
        raise ConfigError(f"{file}: recipe: {error}") from None
    root = Path(str(resources.files("headstart.recipes")))
    return path.stem if path.parent == root else str(path.resolve())
