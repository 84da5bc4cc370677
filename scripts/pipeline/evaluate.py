"""The step `eval`: measures acceptance and speed of the trained head, and writes the report."""

from __future__ import annotations

import dataclasses
from typing import Any

from headstart import identity
from headstart.ahead import ask_evaluation
from headstart.eval.config import identity_of
from headstart.eval.measuring.rendering import render_saved
from headstart.eval.measuring.report import RENDERED
from headstart.eval.prompts import describe_data
from headstart.evaluation import UNTRAINED, measure, say_own_data
from headstart.heads.errors import ConfigError, FormatError
from headstart.pipeline.markers import Begin
from headstart.pipeline.run import EVAL_DATA, Run, dated_target
from headstart.recipes.load import to_dict
from headstart.saved_heads import bound_head, recipe_of_head, target_of_head, untrained_head

#: numbers of a report that a person asks for first
FIRST = (
    "tau",
    "tau_ci95",
    "per_position_acceptance",
    "baseline_tokens_per_s",
    "tokens_per_s",
    "speedup",
    "greedy_identity",
)


def evaluate(run: Run) -> dict[str, Any]:
    """Measure the trained head and write report.json, report.md and report.html.

    Raises: FormatError without a trained head, unless acceptance is synthetic; ConfigError without prompts.
    """
    config, held_out = run.recipe.eval, run.held_out_path
    trained = run.head_dir.is_dir()
    if not trained and config.synthetic_acceptance is None:
        raise FormatError(
            f"{run.head_dir}: there is no trained head; run `headstart train` first, or give --head DIR, or see what a "
            "head would gain with eval.synthetic_acceptance=0.8 eval.data=FILE.jsonl"
        )
    if not config.data and not (held_out.is_file() and held_out.stat().st_size):
        raise ConfigError(f"eval.data: not set, and {held_out} holds no prompt. {EVAL_DATA}")
    data = config.data or str(held_out)
    inputs = {
        "head": identity.of_saved_head(run.head_dir) if trained else run.recipe.head.identity(),
        "target": identity.of_target(run.recipe.target),
        "eval": identity_of(config),
        "data": describe_data(data),
        "shorter_chains": run.recipe.shorter_chains,
        "longer_answers": run.recipe.longer_answers,
    }
    report, rendered = run.dir / "report.json", [run.dir / name for name in RENDERED]
    # these are made from report.json, so a lost one is made again without measuring
    result = run.markers.do("eval", inputs, [report], lambda begin: _measure(run, data, begin), leftovers=rendered)
    if not all(path.is_file() for path in rendered):
        render_saved(report, run.console.say)
    say_own_data(config.data, run.console)
    return result


def _measure(run: Run, data: Any, begin: Begin) -> dict[str, Any]:
    run.check_eval_data()
    place = run.head_dir if run.head_dir.is_dir() else None
    config = dataclasses.replace(run.recipe.eval, data=data)
    ask_evaluation(target_of_head(place, dated_target(run.recipe)), place, config, place is None, run.recipe.head)
    target = run.drafted_target
    if place is not None:
        head, info = bound_head(place, target), {"path": str(place)}
    else:
        head, info = untrained_head(run.recipe.head, target), UNTRAINED
    values = recipe_of_head(to_dict(run.recipe), run.head_dir)
    recipe = run.recipe
    report = measure(
        target, head, config, run.console, values, info, recipe.shorter_chains, place, recipe.longer_answers
    )
    begin()
    path = report.save(run.dir)
    return {"report": str(path), **summary(report.to_json())}


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The result of the step: those numbers of a report, its tree, notes and verdict."""
    return {name: report[name] for name in FIRST} | {
        "tree": report["tree"]["label"], "notes": report["notes"], "verdict": report.get("verdict")
    }  # fmt: skip
