"""The cells of a comparison: every one is a run of its own, of a recipe with overrides."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headstart.comparing.config import CompareConfig, EntryConfig, recipe_of
from headstart.heads.errors import ConfigError, HeadstartError
from headstart.heads.files import read_json, write_json
from headstart.recipes.load import load_recipe
from headstart.recipes.read import read_overrides
from headstart.recipes.schema import Recipe

#: most characters of a cell's name
LONGEST = 120
#: steps with which a cell is checked before the data tells how many its positions take
UNKNOWN_STEPS = 10**6
#: settings of a recipe that the comparison gives every cell → where it says them
GIVEN = {
    "name": "the entry's name", "run_dir": "folder", "seed": "seeds", "train.steps": "budget",
    "train.epochs": "budget", "train.max_seconds": "budget",
}  # fmt: skip
#: file of a comparison's folder that tells its processes what to do
WORK = "work.json"


@dataclass(frozen=True)
class Cell:
    """One training and its measurement.

    Attributes:
        name: its folder below `cells/`.
        recipe: name of a shipped recipe, or a file.
        overrides: settings, `key=value`, without those of the budget.
        lever, value: what it changes, for the rows; value is None without a grid.
        baseline: whether others are compared with it.
        budget: {"kind": seconds | steps | positions, "value"}.
        steps: of a budget of positions; None until its data was counted.
        auto: overrides for what the recipe leaves to the device's memory (`auto`); kept from the first start on.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...]
    lever: str
    value: Any
    seed: int
    baseline: bool
    budget: dict[str, Any]
    steps: int | None = None
    auto: tuple[str, ...] = ()

    @property
    def limits(self) -> list[str]:
        """The budget as settings of the recipe."""
        kind, value = self.budget["kind"], self.budget["value"]
        seconds = value if kind == "seconds" else None
        steps = value if kind == "steps" else (self.steps or UNKNOWN_STEPS) if kind == "positions" else None
        given = {"epochs": None, "max_seconds": seconds, "steps": steps}
        return [f"train.{name}={json.dumps(number)}" for name, number in given.items()]

    def load(self, folder: Path, template_date: str | None = None) -> Recipe:
        """The recipe that the cell trains. Raises ConfigError that names the cell."""
        place = as_overrides({"name": self.name, "run_dir": str(folder / "cells" / self.name)})
        try:
            recipe = load_recipe(self.recipe, [*self.overrides, *self.auto, *self.limits, *place])
        except ConfigError as error:
            raise ConfigError(f"cell {self.name}: {error}") from None
        if recipe.target.template_date is None and template_date is not None:
            recipe.target = replace(recipe.target, template_date=template_date)
        return recipe


@dataclass
class Work:
    """A comparison as every process of it sees it.

    Attributes:
        folder: where everything lies.
        measure: the settings of `config.MeasureConfig`, sets that are null left out.
        command: command line that started it.
        side_by_side: processes that train on a card at the same time.
        template_date: the day that chat templates show, if they show one.
    """

    name: str
    folder: Path
    cells: list[Cell]
    measure: dict[str, Any]
    command: str
    budget: dict[str, Any]
    side_by_side: int = 1
    template_date: str | None = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._recipes: dict[Any, Recipe] = {}

    def kept(self) -> dict[str, tuple[str, ...]]:
        """`auto` of the cells as an earlier command chose it, by name: of those whose settings are the same."""
        if not (self.folder / WORK).is_file():
            return {}
        try:
            before = Work.read(self.folder / WORK).cells
        except (HeadstartError, KeyError, TypeError):  # another version wrote it
            return {}
        now = {cell.name: cell for cell in self.cells}
        return {old.name: old.auto for old in before if old.auto and old.name in now
                and (old.recipe, old.overrides) == (now[old.name].recipe, now[old.name].overrides)}  # fmt: skip

    def save(self) -> Path:
        values = asdict(self)
        values["folder"] = str(self.folder)
        write_json(self.folder / WORK, values)
        return self.folder / WORK

    @classmethod
    def read(cls, path: Path) -> Work:
        values = read_json(path)
        texts = ("overrides", "auto")
        cells = [Cell(**{**cell, **{name: tuple(cell[name]) for name in texts}}) for cell in values.pop("cells")]
        return cls(cells=cells, folder=Path(values.pop("folder")), **values)

    def recipe(self, cell: Cell) -> Recipe:
        """The cell's recipe, a copy of its own. It is read once: reading takes a tenth of a second and more."""
        key = (cell.name, cell.steps, cell.auto, self.template_date)
        if key not in self._recipes:
            self._recipes[key] = cell.load(self.folder, self.template_date)
        return deepcopy(self._recipes[key])


def as_overrides(settings: dict[str, Any]) -> list[str]:
    """A mapping of settings as `key=value` words. JSON is YAML as well."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]


def make_cells(config: CompareConfig, given: Sequence[str], file: Path) -> list[Cell]:
    """All cells, in the order of the file. Args: given: overrides of all cells' recipes from the command line.

    Raises: ConfigError for a cell that is there twice, an empty grid, an override of what a grid varies, or a setting
        that the comparison gives itself (GIVEN).
    """
    _refuse_given("settings", as_overrides(config.settings))
    _refuse_given("override", given)
    cells = [cell for n, entry in enumerate(config.cells) for cell in _of_entry(config, entry, n, given, file)]
    names = [cell.name for cell in cells]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"cells: {repeated[0]} is there more than once: give the entries names of their own")
    return cells


def _of_entry(
    config: CompareConfig, entry: EntryConfig, number: int, given: Sequence[str], file: Path
) -> Iterator[Cell]:
    where = f"cells[{number}]"
    recipes = entry.recipe if isinstance(entry.recipe, list) else [entry.recipe or config.base]
    if not recipes or not all(isinstance(recipe, str) for recipe in recipes):
        raise ConfigError(f"{where}.recipe: found {entry.recipe!r}, expected a recipe; or give base=…")
    for key, values in entry.grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}.grid.{key}: found {values!r}, expected a list of at least one value")
        if taken := [text for text in given if text.partition("=")[0].strip() == key]:
            raise ConfigError(f"override {taken[0]!r}: {where}.grid varies {key}: leave one of them out")
        _refuse_given(f"{where}.grid", as_overrides({key: values}))
    _refuse_given(f"{where}.settings", as_overrides(entry.settings))
    budget = {"kind": config.budget.kind, "value": getattr(config.budget, config.budget.kind)}
    common = (*as_overrides(config.settings), *given, *as_overrides(entry.settings))
    seeds = config.seeds if entry.seeds is None else entry.seeds
    for recipe in recipes:
        found = recipe_of(str(recipe), file)
        title = entry.name or Path(found).stem
        if entry.name and len(recipes) > 1:
            title = f"{entry.name}-{Path(found).stem}"
        for chosen in itertools.product(*entry.grid.values()):
            varied = dict(zip(entry.grid, chosen, strict=True))
            value = chosen[0] if len(chosen) == 1 else varied or None
            lever = entry.lever or "+".join(entry.grid) or title
            for seed in seeds:
                name = cell_name(title, varied, seed)
                yield Cell(
                    name, found, (*common, *as_overrides(varied), f"seed={seed}"), lever, value, seed, entry.baseline,
                    budget,
                )  # fmt: skip


def _refuse_given(where: str, words: Sequence[str]) -> None:
    """Raise ConfigError for a setting of GIVEN: its value would be replaced, and the cell would seem to have it."""
    for layer in read_overrides(words):
        for key, instead in GIVEN.items():
            node: Any = layer.values
            for part in key.split("."):
                node = node.get(part) if isinstance(node, dict) else None
            if node is not None:
                raise ConfigError(
                    f"{where}: found {key}={json.dumps(node)}, which the comparison gives every cell: leave it out, "
                    f"and set {instead}"
                )


def cell_name(title: str, varied: dict[str, Any], seed: int) -> str:
    """Name of a cell's folder.

    >>> cell_name("base", {"train.lr": 0.001}, 1)
    'base-lr=0.001-s1'
    """
    parts = [f"{key.rpartition('.')[2]}={value if isinstance(value, str) else json.dumps(value)}"
             for key, value in varied.items()]  # fmt: skip
    text = "-".join([title, *parts])
    return re.sub(r"[^\w.=+-]+", "_", text)[:LONGEST].strip("_.") + f"-s{seed}"
