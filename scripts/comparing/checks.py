"""Before the first cell starts: refuses what one of them cannot do, and plans time and memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Group
from rich.text import Text

from headstart import auto, identity
from headstart.comparing.cells import Cell, Work
from headstart.comparing.config import SPEED
from headstart.comparing.data import SharedData, with_steps
from headstart.comparing.work import refuse_measuring
from headstart.console import Console
from headstart.data.choosing.asked import read_prompts
from headstart.data.sources.sources import load_conversations
from headstart.eval.measuring.fitted import Fitted
from headstart.fit import in_dtype, run_layout
from headstart.heads.counting import counted
from headstart.heads.errors import ConfigError, HeadstartError, first_line
from headstart.heads.files import require_disk
from headstart.heads.targets.load import resolve_device, weightless_target
from headstart.heads.targets.target import Target
from headstart.heads.targets.template_date import shown_date
from headstart.pipeline.data import counted_samples
from headstart.pipeline.run import Run
from headstart.plan import Launch, card_flops
from headstart.recipes.schema import Recipe
from headstart.refusals import QUESTIONS, ask_export, planned_training
from headstart.train.plan import GIB, disk_of, expected_rate, local_device_bytes, memory_of


@dataclass
class CellPlan:
    """What a cell is expected to take.

    Attributes:
        peak: bytes of memory. disk: bytes.
        steps: None where time ends the training, or the data is not known yet.
        seconds: of training; None where it cannot be told.
        known: whether the data was counted.
    """

    peak: int
    disk: int
    steps: int | None
    seconds: float | None
    known: bool


class Checks:
    """Asks of every cell what its steps would refuse. Loads no weights.

    Attributes:
        plans: what each cell takes, in the order of the cells.
        device_bytes: memory of the device.
    """

    def __init__(self, work: Work, console: Console):
        self.work, self.console = work, console
        self.plans: list[CellPlan] = []
        self.device = torch.device("cpu")
        self.device_bytes = 0
        self.flops_from = ""
        self._flops: float | None = None
        self._targets: dict[str, Target] = {}
        self._read: set[str] = set()
        self._asked: dict[tuple[str, ...], tuple[CellPlan, tuple[str, ...]]] = {}
        self._kept = work.kept()
        self._data = SharedData()

    def ask(self) -> None:
        """Raises: HeadstartError that names the cell. Sets the steps of cells with a budget of positions."""
        with self.console.phase("checking the cells"):
            for number, cell in enumerate(self.work.cells):
                try:
                    self.work.cells[number] = self._ask(cell)
                except HeadstartError as error:
                    named = str(error).startswith(f"cell {cell.name}")
                    raise type(error)(str(error) if named else f"cell {cell.name}: {error}") from error
        self._require_memory()
        require_disk(self.work.folder, sum(plan.disk for plan in self.plans), "the cells (checkpoints, heads)")

    def _ask(self, cell: Cell) -> Cell:
        """Ask what the cell's steps would refuse. Cells that differ in their seed alone are asked once."""
        key = (cell.recipe, *(text for text in cell.overrides if not text.startswith("seed=")))
        if key in self._asked and cell.budget["kind"] != "positions":
            plan, chosen = self._asked[key]
            self.plans.append(plan)
            return replace(cell, auto=self._kept.get(cell.name, chosen))
        cell = self._ask_anew(cell)
        self._asked[key] = (self.plans[-1], cell.auto)
        return cell

    def _ask_anew(self, cell: Cell) -> Cell:
        cell = replace(cell, auto=self._kept.get(cell.name, ()))
        recipe = self.work.recipe(cell)
        target = self._target(recipe)
        self.device = resolve_device(recipe.target.device)
        self.device_bytes = local_device_bytes(self.device)
        if auto.is_auto(recipe):
            cell = replace(cell, auto=self._packs(recipe, target))
            recipe = self.work.recipe(cell)
        for question in (ask for name, ask in QUESTIONS.items() if name != "export"):
            question(recipe, target)
        self._note_export(cell, recipe, target)
        for name in [*self.work.measure["sets"], *([SPEED] if self.work.measure["speed"]["enabled"] else [])]:
            refuse_measuring(recipe, self.work.measure, name, target)
        self._read_files(recipe)
        run = Run(recipe, Console(silent=True), target)
        known = not recipe.data.distill.asks or run.distilled_path.is_file()
        if known:
            self._data.give(run)
            if recipe.data.features == "auto":
                cell = replace(cell, auto=(*cell.auto, f"data.features={self._features(recipe, target, run)}"))
                recipe.data.features = self.work.recipe(cell).data.features
            cell = with_steps(cell, run)
            recipe.train.steps = cell.steps or recipe.train.steps
        self.plans.append(self._plan(cell, recipe, target, run if known else None))
        return cell

    def _packs(self, recipe: Recipe, target: Target) -> tuple[str, ...]:
        """What `data.pack_tokens=auto` means for this cell, whose device others may share."""
        found = auto.choose(recipe, target, self.device, self.device_bytes // self.work.side_by_side)
        again = "true" if found.activation_checkpointing else "false"
        return (
            f"data.pack_tokens={found.pack_tokens}", f"train.accumulation={found.accumulation}",
            f"train.activation_checkpointing={again}",
        )  # fmt: skip

    def _features(self, recipe: Recipe, target: Target, run: Run) -> str:
        """What `data.features=auto` means for this cell: memory or online."""
        in_dtype(target, recipe, self.device)
        tokens = sum(len(sample) for sample in counted_samples(run))
        layout = run_layout(recipe, self.device, 1, 1, 1, 1.0, tokens)
        memory = self.device_bytes // self.work.side_by_side
        return auto.features_within(recipe, target, planned_training(recipe, target), layout, memory)

    def _note_export(self, cell: Cell, recipe: Recipe, target: Target) -> None:
        """A comparison exports nothing, but whoever takes the cell's settings wants to know."""
        try:
            ask_export(recipe, target)
        except HeadstartError as error:
            self.work.notes.append(f"{cell.name}: an export with these settings is refused: {first_line(error)}")

    def _target(self, recipe: Recipe) -> Target:
        """The target without weights. The first one tells the day that its template shows."""
        key = json.dumps([identity.of_target(recipe.target), recipe.target.dtype], default=str)
        if key not in self._targets:
            self._targets[key] = target = weightless_target(recipe.target)
            shown = shown_date(target.tokenizer)
            if shown is not None and self.work.template_date is None:
                self.work.template_date = shown
        return self._targets[key]

    def _read_files(self, recipe: Recipe) -> None:
        """Find bad lines of the data now. A file is read once, however many cells read it."""
        data = recipe.data
        sources = [s for s in (*data.sources, *data.held_out, *data.exclude) if s.path is not None]
        key = json.dumps(identity.of_sources(sources), default=str)
        if data.distill.prompts and (asked := json.dumps(identity.of_sources(data.distill.prompts), default=str)):
            key += asked
        if key in self._read:
            return
        self._read.add(key)
        if data.distill.prompts:
            for source in data.distill.prompts:
                if source.path is not None:
                    read_prompts([source], seed=recipe.seed)
        for _ in load_conversations(sources):
            pass

    def _plan(self, cell: Cell, recipe: Recipe, target: Target, run: Run | None) -> CellPlan:
        device = self.device
        samples = counted_samples(run) if run is not None else []
        tokens = sum(len(sample) for sample in samples)
        supervised = sum(sample.supervised for sample in samples) / tokens if tokens else 1.0
        in_dtype(target, recipe, device)
        head = planned_training(recipe, target)
        layout = run_layout(recipe, device, 1, 1, 1, supervised, tokens)
        steps = recipe.train.steps if cell.budget["kind"] != "positions" else cell.steps
        seconds = recipe.train.max_seconds
        if seconds is None and steps is not None:
            if self._flops is None:
                self._flops, self.flops_from = card_flops(Launch(), device)
            per_step = recipe.data.pack_size * recipe.train.accumulation
            seconds = steps * per_step / expected_rate(target, head, layout, self._flops)
        disk = sum(disk_of(target, head, recipe.train, layout, steps, tokens).values())
        return CellPlan(memory_of(target, head, layout)[1], disk, steps, seconds, run is not None)

    def _require_memory(self) -> None:
        """Raises: ConfigError where the cells that train side by side do not fit the device."""
        side = min(self.work.side_by_side, len(self.plans))
        largest = sum(sorted((plan.peak for plan in self.plans), reverse=True)[:side])
        check = all(self.work.recipe(cell).train.check_memory for cell in self.work.cells[:1])
        if check and self.device_bytes and largest > self.device_bytes:
            beside = f"--side-by-side {side}: the {side} largest cells need" if side > 1 else "the largest cell needs"
            remedy = "train fewer side by side" if side > 1 else "lower data.pack_tokens, or set data.features=online"
            raise ConfigError(
                f"{beside} {largest / GIB:.1f} GiB by the plan, and the device has "
                f"{self.device_bytes / GIB:.1f} GiB: {remedy} (train.check_memory=false tries it all the same)"
            )

    @property
    def seconds(self) -> float | None:
        """Seconds in which all cells train, one after another; None where it cannot be told."""
        each = [plan.seconds for plan in self.plans]
        return None if None in each else float(sum(second or 0.0 for second in each))

    def to_json(self, processes: int) -> dict[str, Any]:
        cells = [
            {"cell": cell.name, "recipe": cell.recipe, "lever": cell.lever, "value": cell.value, "seed": cell.seed,
             "settings": [*cell.overrides, *cell.auto, *cell.limits], "steps": plan.steps, "seconds": plan.seconds,
             "peak_bytes": plan.peak}
            for cell, plan in zip(self.work.cells, self.plans, strict=True)
        ]  # fmt: skip
        total = self.seconds
        return {
            "name": self.work.name, "folder": str(self.work.folder), "budget": self.work.budget, "cells": cells,
            "processes": processes, "train_seconds": None if total is None else total / processes,
            "device_bytes": self.device_bytes, "disk_bytes": sum(plan.disk for plan in self.plans),
            "sets": list(self.work.measure["sets"]), "speed": self.work.measure["speed"]["enabled"],
        }  # fmt: skip

    def render(self, processes: int) -> Group:
        """The plan as a table and lines of text."""
        rows: list[tuple[str, ...]] = [
            (
                cell.name, str(cell.lever), "–" if cell.value is None else str(cell.value),
                "–" if plan.steps is None else f"{plan.steps:,}",
                "–" if plan.seconds is None else f"{plan.seconds:,.0f}",
                f"{plan.peak / GIB:.2f}" + ("" if plan.known else " + data"),
            )
            for cell, plan in zip(self.work.cells, self.plans, strict=True)
        ]  # fmt: skip
        budget = counted(self.work.budget["value"], self.work.budget["kind"], ",g")
        budget += " each" if len(self.work.cells) > 1 else ""
        total = self.seconds
        time = "unknown" if total is None else f"{total / processes / 60:,.0f} minutes"
        lines = [
            f"{counted(len(self.work.cells), 'cells')} of {budget}, {processes} at a time; folder "
            f"{self.work.folder}",
            f"training: {time} in all"
            + (f", estimated from {self._flops / 1e12:.2f} TFLOP/s ({self.flops_from})" if self._flops else "")
            + "; measuring comes on top",
            f"memory: {self.device_bytes / GIB:.1f} GiB on the device; disk: "
            f"{sum(plan.disk for plan in self.plans) / GIB:.1f} GiB",
            f"measured: τ on {', '.join(self.work.measure['sets'])}"
            + (", speed-up" if self.work.measure["speed"]["enabled"] else ""),
            *(f"note: {note}" for note in self.work.notes),
        ]
        columns = ("cell", "lever", "value", "steps", "seconds", "GiB")
        return Group(Fitted("", columns, rows), *map(Text, lines))


def with_unknown_steps(work: Work, console: Console) -> None:
    """Set the steps of cells with a budget of positions whose data came from answers that are there now."""
    data = SharedData()
    for number, cell in enumerate(work.cells):
        if cell.budget["kind"] == "positions" and cell.steps is None:
            recipe = work.recipe(cell)
            run = Run(recipe, Console(silent=True), weightless_target(replace(recipe.target)))
            data.give(run)
            work.cells[number] = with_steps(cell, run)
