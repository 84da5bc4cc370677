"""The steps `export` and `publish`: writes the trained head as serving engines load it, and uploads it to the Hub."""

from __future__ import annotations

import dataclasses
from typing import Any

from headstart import identity
from headstart.exporting import measured_by, write_exports
from headstart.heads.errors import FormatError
from headstart.heads.files import read_json
from headstart.heads.formats import check_export, push_export
from headstart.heads.formats.sidecar import ADDED, notes
from headstart.heads.targets.tuned import adapter_of_head
from headstart.pipeline.data import prepare
from headstart.pipeline.markers import Begin
from headstart.pipeline.quality import quality
from headstart.pipeline.run import Run
from headstart.quality_guard import require_quality
from headstart.recipes.environment import names_of
from headstart.saved_heads import recipe_of_head

#: tokens of each of the two samples on which an export compares the features of training and serving
PARITY_TOKENS = 96
#: settings of `export` that say how it is uploaded
PUBLISHING = ("push_to_hub", "private", "commit_message")
#: settings of `export` that matter to a tuned target only
OF_TARGET = ("adapter",)


def export(run: Run) -> dict[str, Any]:
    """Write the head for serving engines, check what was written, and upload it where the recipe asks for it."""
    if not run.head_dir.is_dir():
        raise FormatError(f"{run.head_dir}: there is no trained head; run `headstart train` first")
    config = run.recipe.export
    if (cost := quality(run)) is not None:
        require_quality(cost, config.force)
    settings = identity.without(dataclasses.asdict(config), *PUBLISHING, *OF_TARGET)
    inputs: dict[str, Any] = {"head": identity.of_saved_head(run.head_dir), "export": settings}
    kept = notes(run.head_dir)
    inputs |= {name: kept[name] for name in ADDED if kept.get(name)}
    if (measured := _measured(run)) is not None:
        inputs["measured"] = measured
    if adapter_of_head(run.head_dir) is not None or run.recipe.target.adapter is not None:
        inputs["target"] = {"published_as": config.push_to_hub, **{name: getattr(config, name) for name in OF_TARGET}}
    # an export takes a minute to make again, so one that was refused is worth less than the one before it
    result = run.markers.do(
        "export", inputs, [run.dir / "export"], lambda begin: _export(run, begin), worth=lambda: False
    )
    return result if config.push_to_hub is None else {**result, **publish(run)}


def publish(run: Run) -> dict[str, Any]:
    """Upload the export with a model card written from report.json."""
    place, report = run.dir / "export", run.dir / "report.json"
    inputs = {
        "export": identity.of_file(place / "headstart.json"),
        "report": identity.of_file(report) if report.is_file() else None,
        "hub": {name: getattr(run.recipe.export, name) for name in PUBLISHING},
    }

    def push(begin: Begin) -> dict[str, Any]:
        begin()
        measured = read_json(report) if report.is_file() else None
        names = names_of(run.recipe.environment)
        return {"url": push_export(place, run.recipe.export, measured, environment=names)}

    return run.markers.do("publish", inputs, [], push)


def _measured(run: Run) -> dict[str, Any] | None:
    """What the run's evaluation says about its head; None without one, or where it measured an earlier head."""
    report, marker = run.dir / "report.json", run.markers.read("eval")
    if marker.get("status") != "done" or not report.is_file():
        return None
    same = marker["inputs"].get("head") == identity.of_saved_head(run.head_dir)
    return measured_by(read_json(report)) if same else None


def _export(run: Run, begin: Begin) -> dict[str, Any]:
    check_export(run.recipe.export, notes(run.head_dir).get("type"))
    target, data, out = run.drafted_target, prepare(run), run.dir / "export"
    samples = [sample for sample in [*data.held_out, *data.train] if len(sample) >= 4][:2]
    texts = [sample.token_ids[:PARITY_TOKENS].tolist() for sample in samples]
    recipe, names = recipe_of_head(run.inputs.recipe_facts(), run.head_dir), names_of(run.recipe.environment)
    return write_exports(
        run.head_dir, target, run.recipe.export, out, run.console, recipe, names, texts, begin, measured=_measured(run)
    )
