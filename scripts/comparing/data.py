"""The samples of cells: made once for all cells that read the same data. And what a number of positions takes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from headstart import identity
from headstart.comparing.cells import Cell, Work
from headstart.console import Console
from headstart.data.prepare import PreparedData
from headstart.data.samples import Sample
from headstart.heads.errors import ConfigError
from headstart.heads.files import sha256_text
from headstart.heads.targets.target import Target
from headstart.pipeline.data import counted_samples, prepare
from headstart.pipeline.distill import distill
from headstart.pipeline.inputs import distilling
from headstart.pipeline.run import Run
from headstart.recipes.schema import Recipe
from headstart.train.stream import PackStream

#: most steps that a budget of positions may take
MOST_STEPS = 10**6


class SharedData:
    """Samples by what they are made of. Cells that differ in head and training alone get the same ones."""

    def __init__(self) -> None:
        self._made: dict[str, PreparedData] = {}

    def give(self, run: Run) -> None:
        """Prepare the run's samples, or give it those of an earlier run."""
        key = json.dumps(run.inputs.data, sort_keys=True, default=str)
        run.prepared = self._made.get(key)
        self._made[key] = prepare(run)


def position_counts(recipe: Recipe, samples: Sequence[Sample]) -> tuple[PackStream, list[int]]:
    """(The order of the packs in which training reads these samples, supervised positions of each sample)."""
    supervised = [sample.supervised for sample in samples]
    lengths = [len(sample) for sample in samples]
    return PackStream(lengths, recipe.data.pack_size, recipe.train.seed, supervised=supervised), supervised


def positions_of_steps(recipe: Recipe, samples: Sequence[Sample], steps: int) -> int:
    """Supervised positions that the first `steps` steps pass over, repeats counted."""
    stream, supervised = position_counts(recipe, samples)
    packs = stream.window(0, steps * recipe.train.accumulation)
    return sum(supervised[i] for pack in packs for i in pack.samples)


def steps_for_positions(recipe: Recipe, samples: Sequence[Sample], positions: int) -> int:
    """Fewest steps that pass over this many supervised positions. Raises: ConfigError where they are MOST_STEPS."""
    stream, supervised = position_counts(recipe, samples)
    passed = steps = 0
    while passed < positions:
        if steps == MOST_STEPS:
            raise ConfigError(
                f"budget.positions: found {positions:,}, of which the first {steps:,} steps pass over {passed:,}: give "
                "fewer positions, or more data"
            )
        window = stream.window(steps * recipe.train.accumulation, recipe.train.accumulation)
        passed += sum(supervised[i] for pack in window for i in pack.samples)
        steps += 1
    return steps


def with_steps(cell: Cell, run: Run) -> Cell:
    """The cell with the steps that its positions take; its data must be prepared."""
    if cell.budget["kind"] != "positions":
        return cell
    return replace(cell, steps=steps_for_positions(run.recipe, counted_samples(run), cell.budget["value"]))


def answers_key(recipe: Recipe) -> str:
    """What the answers to a recipe's prompts depend on, whatever the seed: a name for the folder of these answers."""
    settings = identity.without(distilling(recipe.data.distill), "weight", "cut_answers")
    inputs = [identity.of_target(recipe.target), settings, recipe.data.template_kwargs]
    return sha256_text(json.dumps(inputs, sort_keys=True, default=str))[:12]


def unanswered(work: Work) -> dict[str, list[Cell]]:
    """Cells whose recipes ask the target prompts, by the answers that they share."""
    groups: dict[str, list[Cell]] = {}
    for cell in work.cells:
        recipe = work.recipe(cell)
        if recipe.data.distill.asks:
            groups.setdefault(answers_key(recipe), []).append(cell)
    return groups


def share_answers(work: Work, console: Console, target: Target | None = None) -> None:
    """Have the prompts of the recipes answered once for all cells that ask the same ones."""
    for key, cells in unanswered(work).items():
        recipe = work.recipe(cells[0])
        recipe.run_dir = str(work.folder / "answers" / key)
        run = Run(recipe, console, target)
        with run.lock():
            distill(run)
        for cell in cells:
            place = work.folder / "cells" / cell.name
            for made in (run.distilled_path, run.dir / "steps" / "distill.json"):
                _same_file(made, place / made.relative_to(run.dir))


def _same_file(made: Path, place: Path) -> None:
    """Put the file at `place` too, as the same file where the disk allows it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):
        if place.exists() and place.samefile(made):
            return
    place.unlink(missing_ok=True)
    try:
        os.link(made, place)
    except OSError:
        shutil.copy(made, place)
