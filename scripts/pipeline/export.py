"""The steps `export` and `publish`: the trained head as serving engines load it, here and on the Hub."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from headstart import identity
from headstart.exporting import prove_parity, report_exports
from headstart.heads.errors import FormatError
from headstart.heads.files import read_json
from headstart.heads.formats import check_export, export_head, push_export
from headstart.heads.formats.sidecar import notes
from headstart.heads.provenance import provenance
from headstart.heads.published import published
from headstart.pipeline.data import prepare
from headstart.pipeline.markers import Begin
from headstart.pipeline.run import Run
from headstart.recipes.environment import names_of
from headstart.saved_heads import bound_head, recipe_of_head

#: tokens of each of two samples whose features are compared between training and serving before an export
PARITY_TOKENS = 96
#: settings of the export node that say where it is uploaded
PUBLISHING = ("push_to_hub", "private", "commit_message")


def export(run: Run) -> dict[str, Any]:
    """Write the head for serving engines, check what was written, and upload it where the recipe asks for it."""
    if not run.head_dir.is_dir():
        raise FormatError(f"{run.head_dir}: no trained head there; run `headstart train` first")
    config = run.recipe.export
    settings = identity.without(dataclasses.asdict(config), *PUBLISHING)
    inputs = {"head": identity.of_saved_head(run.head_dir), "export": settings}
    if tuned := notes(run.head_dir).get("tuned"):
        inputs["tuned"] = tuned
    # what a refused export has written can be made again in a minute: the export before it is worth more
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


def _export(run: Run, begin: Begin) -> dict[str, Any]:
    recipe, side = run.recipe, read_json(run.head_dir / "headstart.json")
    check_export(recipe.export, side.get("type"))
    target = run.target
    head = bound_head(run.head_dir, target, torch.float32)
    origin = {**side.get("provenance", {}), **provenance(target.device)}
    origin |= {"recipe": recipe_of_head(run.inputs.recipe_facts(), run.head_dir), "target": target.fingerprint()}
    data = prepare(run)
    samples = [sample for sample in [*data.held_out, *data.train] if len(sample) >= 4][:2]
    texts = [sample.token_ids[:PARITY_TOKENS].tolist() for sample in samples]
    parity = prove_parity(target, head, texts, recipe.export.force, run.console)
    origin |= {"serving_parity": parity, "tuned": notes(run.head_dir).get("tuned")}
    begin()
    names = names_of(recipe.environment)
    return report_exports(export_head(head, run.dir / "export", recipe.export, published(origin, names)), run.console)
