"""Trains and measures cells in one process. The target is loaded once for all cells that train, once for all whose τ is
measured, and once for all that are timed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout

from headstart import identity
from headstart.comparing.cells import Cell, Work, as_overrides
from headstart.comparing.config import SPEED
from headstart.comparing.data import SharedData, positions_of_steps
from headstart.console import Console
from headstart.data.memory import SharedFeatures
from headstart.directory_lock import locked
from headstart.eval.config import EvalConfig, identity_of
from headstart.eval.measuring.report import Report
from headstart.eval.prompts import describe_data
from headstart.evaluation import measure
from headstart.heads.errors import HeadstartError, StorageError, explain_memory, in_one_line
from headstart.heads.files import read_json, write_json
from headstart.heads.host_memory import forget_peak, peak_bytes
from headstart.heads.targets.load import resolve_device
from headstart.heads.targets.target import Target, TargetConfig
from headstart.pipeline.data import counted_samples, prepare, trained_samples
from headstart.pipeline.features import features_kind
from headstart.pipeline.markers import Begin
from headstart.pipeline.run import Run
from headstart.pipeline.train import is_trained, train
from headstart.recipes.load import load_evaluation, to_dict
from headstart.recipes.schema import Recipe
from headstart.saved_heads import bound_head, recipe_of_head, target_of_head
from headstart.sigterm import stop_if_asked
from headstart.targets import loaded_target

#: file of a cell with what its training cost
COST = "cost.json"
#: the step before measurements
TRAIN = "train"

#: exit code of a process of several that met CardLost
LOST_CODE = 3


class CardLost(HeadstartError):
    """A CUDA error that ends every later call of the process."""


class Failures:
    """Cells that failed, one file each: {"cell", "step", "type", "error"}."""

    def __init__(self, folder: Path):
        self.place = folder / "failed"

    def has(self, cell: Cell) -> bool:
        return self._path(cell).is_file()

    def add(self, cell: Cell, step: str, kind: str, error: str) -> None:
        write_json(self._path(cell), {"cell": cell.name, "step": step, "type": kind, "error": error})

    def read(self, cell: Cell) -> dict[str, Any] | None:
        return read_json(self._path(cell)) if self.has(cell) else None

    def forget(self) -> None:
        """Let every cell be tried again."""
        for path in self.place.glob("*.json"):
            path.unlink()

    def _path(self, cell: Cell) -> Path:
        return self.place / f"{cell.name}.json"


class Worker:
    """What one process does of a comparison.

    Args:
        begun: called with a cell's name when its work begins, with None when it is over.
    """

    def __init__(self, work: Work, console: Console, begun: Callable[[str | None], None] = lambda name: None):
        self.work, self.console, self.begun = work, console, begun
        self.failures = Failures(work.folder)
        self.data, self.held = SharedData(), SharedFeatures()
        self._target: tuple[TargetConfig, Target] | None = None

    def target(self, config: TargetConfig) -> Target:
        """The target of this configuration. One is in memory at a time."""
        if self._target is None or self._target[0] != config:
            self.drop_target()
            self._target = (config, loaded_target(config, self.console))
        return self._target[1]

    def drop_target(self) -> None:
        self._target = None
        self.held.clear()
        release()

    def train_all(self) -> None:
        """Train every cell that is not trained, and that no other process works on. Cells of one seed follow each
        other, because they have the same data.
        """
        for number, cell in enumerate(sorted(self.work.cells, key=lambda cell: cell.seed), 1):
            self._attempt(cell, TRAIN, f"cell {number} of {len(self.work.cells)}", partial(self.train, cell))

    def measure_all(self) -> None:
        """τ of every trained cell on every set."""
        for name in self.work.measure["sets"]:
            for cell in self.work.cells:
                self._attempt(cell, name, f"τ on {name}", partial(self.measure, name))

    def time_all(self) -> None:
        """The speed-up of every trained cell, if it is asked for. Nothing else should run on the card."""
        if self.work.measure["speed"]["enabled"]:
            for cell in self.work.cells:
                self._attempt(cell, SPEED, "speed-up", partial(self.measure, SPEED))

    def _attempt(self, cell: Cell, step: str, title: str, work: Callable[[Run], None]) -> None:
        """Do a step of a cell, unless another process works on it. A failure is written down, and the next cell's turn
        comes.
        """
        place = self.work.folder / "cells" / cell.name
        if self.failures.has(cell) or self._finished(cell, step):
            return
        stop_if_asked()
        try:
            with claimed(place) as free:
                if not free or self._finished(cell, step):
                    return
                self.begun(cell.name)
                self.console.say(f"{title}: {cell.name}")
                run = Run(self.work.recipe(cell), self.console)
                run.tidy()
                work(run)
        except Exception as error:  # noqa: BLE001 - one cell must not stop the others
            stop_if_asked(error)  # then it may be the signal's doing
            self._note_failure(cell, step, error)
        finally:
            self.begun(None)
        release()

    def _finished(self, cell: Cell, step: str) -> bool:
        """Whether a step needs nothing more: it is done, or what it is made from is not there."""
        place = self.work.folder / "cells" / cell.name
        if step == TRAIN:
            return (place / COST).is_file()
        return not (place / COST).is_file()

    def _note_failure(self, cell: Cell, step: str, error: Exception) -> None:
        """Write a failure down. Raises: CardLost after an error with which the process cannot go on."""
        told = explain_memory(error) or error
        message = str(told) if isinstance(told, HeadstartError) else in_one_line(told, 500)
        self.failures.add(cell, step, type(told).__name__, message)
        self.console.say(f"{cell.name}: failed: {message}", style="red")
        if "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError":
            raise CardLost(
                f"{cell.name}: {message}. This process can no longer use the card; the same command goes on with the "
                "other cells"
            ) from error

    def train(self, cell: Cell, run: Run) -> None:
        """Train a cell's head, or go on with it."""
        recipe = run.recipe
        if begun_otherwise(run):
            self.console.say(f"{recipe.name}: begun with other settings: it starts anew")
            recipe.train.resume = False
        if recipe.joint.enabled:  # it changes the target, which is then this cell's own
            self.drop_target()
        else:
            run = Run(recipe, self.console, self.target(recipe.target), held=self.held)
        self.data.give(run)
        device = resolve_device(recipe.target.device)
        finished = is_trained(run)  # by a process that ended before it wrote the cost
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        known = not finished and (device.type == "cuda" or forget_peak())
        trained = train(run)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_bytes()
        write_json(run.dir / COST, {
            "peak_memory_bytes": peak if known else None,
            "positions": positions_of_steps(recipe, counted_samples(run), trained["step"]),
            "conversations": len({sample.id for sample in prepare(run).train}),
            "samples": len(trained_samples(run)),
            "steps": trained["step"],
            "seconds": trained["seconds"],
            "features": features_kind(run),
        })  # fmt: skip

    def measure(self, name: str, run: Run) -> None:
        """Decode a set of prompts with a cell's head, or time it. Args: name: of the set, or SPEED."""
        config, target, inputs = measurement(self.work, run, name)
        place = run.dir / "measured" / name
        run.markers.do(
            f"measure-{name}", inputs, [place / "report.json"],
            lambda begin: self._decode(run, target, config, place, begin),
        )  # fmt: skip

    def _decode(
        self, run: Run, config: TargetConfig, settings: EvalConfig, place: Path, begin: Begin
    ) -> dict[str, Any]:
        target = self.target(config)
        head = bound_head(run.head_dir, target)
        recipe = {**recipe_of_head(to_dict(run.recipe), run.head_dir), "eval": asdict(settings)}
        settings = replace(settings, samples=0)  # no page shows them
        report = measure(target, head, settings, self.console, recipe, {"path": str(run.head_dir)}, False, run.head_dir)
        begin()
        return {"report": str(report.save(place)), "tau": report.tau}


def eval_settings(recipe: Recipe, measured: dict[str, Any], name: str, held_out: Path) -> EvalConfig:
    """How a cell is decoded: its recipe's node `eval`, then the comparison's settings for all sets, then the set's.

    Args: name: of a set, or SPEED. held_out: the prompts of the conversations that the cell held out.
    """
    speed = measured["speed"]
    layers = [{"baseline": False, "cycle_parts": measured["cycle_parts"], "samples": 0}, measured["eval"]]
    if name == SPEED:
        first, *others = speed["batch_sizes"]
        fields = [settings["task_field"] for settings in measured["sets"].values() if settings.get("task_field")]
        fixed = {"baseline": True, "cycle_parts": True, "batch_size": first, "batch_sizes": others}
        layers += [fixed | {"limit_per_task": speed["prompts"], "task_field": (fields or ["auto"])[0]}, speed["eval"]]
    else:
        layers.append(measured["sets"][name])
    given = [text for layer in layers for text in as_overrides({f"eval.{key}": v for key, v in layer.items()})]
    base = {"target.name": recipe.target.name, "eval.template_kwargs": recipe.eval.template_kwargs}
    tree = {f"eval.tree.{key}": value for key, value in asdict(recipe.eval.tree).items()}
    words = as_overrides({**base, **tree, "eval.seed": recipe.seed})
    config = deepcopy(_evaluation((*words, *given)))
    if name == SPEED and config.data is None:
        parts = [part for settings in measured["sets"].values() for part in _parts(settings.get("data"))]
        config.data = [part for n, part in enumerate(parts) if part not in parts[:n]]  # sets may share their prompts
    if config.data is None or config.data == []:
        config.data = str(held_out)
    elif isinstance(config.data, list):
        config.data = [str(held_out) if part is None else part for part in config.data]
        config.data = config.data[0] if len(config.data) == 1 else config.data
    return config


@lru_cache(maxsize=1024)
def _evaluation(words: tuple[str, ...]) -> EvalConfig:
    return load_evaluation(None, words).eval


def _parts(data: Any) -> list[Any]:
    return list(data) if isinstance(data, list) else [data]


def measured_target(recipe: Recipe, measured: dict[str, Any], name: str) -> TargetConfig:
    """The target as a measurement loads it."""
    dtype = measured["dtype"]
    if name == SPEED and resolve_device(recipe.target.device).type == "cuda":
        dtype = measured["speed"]["dtype"]
    return replace(recipe.target, dtype=dtype)


@contextmanager
def claimed(place: Path) -> Iterator[bool]:
    """Inside, no other process works in the cell's folder; False where another one does."""
    inside = False
    try:
        with locked(place, "folder=…"):
            inside = True
            yield True
    except StorageError as error:
        if inside or not isinstance(error.__context__, Timeout):
            raise
        yield False


def begun_otherwise(run: Run) -> bool:
    """Whether the run's training was begun, and not finished, with other inputs. Elsewhere it would go on with the new
    settings; a cell is trained with one budget and one set of settings from its first step on.
    """
    marker = run.markers.read("train")
    return marker.get("status") == "started" and not run.markers.same("train", run.inputs.train)


def forget_changed(work: Work) -> None:
    """Let cells train again whose settings or data have changed since."""
    for cell in work.cells:
        place = work.folder / "cells" / cell.name / COST
        if place.is_file() and not is_trained(Run(work.recipe(cell), Console(silent=True))):
            place.unlink()


def refuse_measuring(recipe: Recipe, measured: dict[str, Any], name: str, planned: Target) -> None:
    """Raise what a measurement of the cell would raise. `planned`: the target without weights."""
    from headstart.eval.measuring.benchmark import check_evaluation
    from headstart.eval.prompts import eval_prompts
    from headstart.refusals import planned_head

    missing = Path(recipe.run_dir) / "data" / "held_out.jsonl"
    config = eval_settings(recipe, measured, name, missing)
    check_evaluation(planned, planned_head(recipe, planned), config)
    parts = [part for part in _parts(config.data) if part != str(missing)]
    if len(parts) < len(_parts(config.data)) and not recipe.data.held_out and recipe.data.held_out_fraction == 0:
        raise HeadstartError(
            f"measure.sets.{name}: it has no data and data.held_out_fraction=0 holds no conversation out: set one"
        )
    if parts:
        eval_prompts(replace(config, data=parts))


def release() -> None:
    """Give the memory of what is no longer used back to the card."""
    if torch.cuda.is_initialized():  # on a CPU, memory comes back by itself
        gc.collect()
        torch.cuda.empty_cache()


def measurement(
    work: Work, run: Run, name: str, head: str | None = None
) -> tuple[EvalConfig, TargetConfig, dict[str, Any]]:
    """(How a set is decoded, the target, what the numbers depend on). Args: head: identity of the head, if known."""
    recipe = run.recipe
    config = eval_settings(recipe, work.measure, name, run.held_out_path)
    target = target_of_head(run.head_dir, measured_target(recipe, work.measure, name))
    inputs = {
        "head": head or identity.of_saved_head(run.head_dir),
        "target": identity.of_target(target),
        "dtype": target.dtype,
        "eval": identity_of(config),
        "data": describe_data(config.data),
    }
    return config, target, inputs


def reports_of(work: Work, cell: Cell) -> dict[str, Report]:
    """The reports of a cell's finished measurements by set, SPEED among them. Those of an earlier head, or of other
    settings, do not count.
    """
    run = Run(work.recipe(cell), Console(silent=True))
    if not (run.dir / COST).is_file() or not run.head_dir.is_dir():
        return {}
    head, found = identity.of_saved_head(run.head_dir), {}
    for name in [*work.measure["sets"], *([SPEED] if work.measure["speed"]["enabled"] else [])]:
        place = run.dir / "measured" / name
        if (place / "report.json").is_file():
            inputs = measurement(work, run, name, head)[2]
            if run.markers.is_done(f"measure-{name}", inputs, [place / "report.json"]):
                found[name] = Report.read(place)
    return found
