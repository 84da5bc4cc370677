"""Panels of what a head's run recorded: curves of the training, and numbers about its data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from headstart.eval.measuring.page.figures import Curves, lines
from headstart.eval.measuring.page.panel import (
    Cell,
    Panel,
    Plot,
    Runs,
    Table,
    count,
    num,
    run_cells,
    run_columns,
    several,
    text,
)
from headstart.heads.counting import counted

#: curve of a report → what a person calls it
NAMES = {
    "train/walked_tau": "training data, walked", "valid/walked_tau": "held out, walked",
    "valid/tau": "held out, decoded", "train/loss": "training data", "valid/loss": "held out", "lr": "learning rate",
}  # fmt: skip
#: title, curves, axis
PLOTS = (
    ("Accepted length", r"(train|valid)/walked_tau|valid/tau", "accepted length τ"),
    ("Loss, the weighted sum of its terms", r"(train|valid)/loss", "loss"),
    ("Loss by term, held out", r"valid/loss_\w+", "loss"),
    ("Loss by term, training data", r"train/loss_\w+", "loss"),
    ("Right first choice by depth, training data", r"train/acc_\d+", "share"),
    ("Learning rate", r"lr", "learning rate"),
)
#: with several runs only these are drawn, because the others differ by what a head learns
COMPARED = ("Accepted length", "Learning rate")
ABSENT = (
    "Nothing is known of the training: the head does not lie in a run of Headstart, nothing was trained, or an earlier "
    "version wrote the report."
)

NO_DATA = "Nothing is known of the training data, for the reasons given under Training."


def name_of(curve: str) -> str:
    """What a person calls a curve: `valid/loss_2` is depth 2."""
    term = re.fullmatch(r"(?:train|valid)/(?:loss|acc)_(\w+)", curve)
    if term is None:
        return NAMES.get(curve, curve)
    return f"depth {term[1]}" if term[1].isdigit() else f"term {term[1]}"


def _curves(report: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    found = (report.get("training") or {}).get("curves") or {}
    return {str(name): [(float(step), float(value)) for step, value in points] for name, points in found.items()}


def training(runs: Runs) -> Panel:
    title = "Training"
    by_run = {label: found for label, report in runs.items() if (found := _curves(report))}
    if not by_run:
        return Panel("training", title, absent=ABSENT)
    says = [
        "The walked accepted length is found along given text, the decoded one by decoding as in serving. Each depth "
        "of the loss is one drafted token further ahead."
    ]
    rows = []
    for label, curves in by_run.items():
        about = runs[label]["training"]
        if about.get("seconds") is not None and about.get("steps") is not None:
            named = f"{label}: " if several(runs) else ""
            says.append(f"{named}{counted(int(about['steps']), 'steps', ',')} took {float(about['seconds']):,.0f} s.")
        for name, points in curves.items():
            values = [value for _, value in points]
            rows.append([text(f"{name_of(name)} ({name})"), *([text(label)] if several(runs) else []),
                         count(len(points)), *(_small(v) for v in (values[0], min(values), max(values), values[-1])),
                         num(points[-1][0], 0)])  # fmt: skip
    columns = ["curve", *(["run"] if several(runs) else []), "points", "first", "least", "largest", "last",
               "last step"]  # fmt: skip
    return Panel("training", title, says, [*_plots(by_run), Table("Ends of the curves", columns, rows)])


def _small(value: float) -> Cell:
    return Cell(f"{value:.4g}", value)


def _plots(by_run: dict[str, dict[str, list[tuple[float, float]]]]) -> Iterator[Plot]:
    many = len(by_run) > 1
    for title, pattern, axis in PLOTS:
        if many and title not in COMPARED:
            continue
        chosen: Curves = {}
        for label, curves in by_run.items():
            for name, points in curves.items():
                if re.fullmatch(pattern, name) and len(points) > 1:
                    chosen[f"{label}, {name_of(name)}" if many else name_of(name)] = points
        if chosen:
            ends = "; ".join(f"{name}: from {p[0][1]:.3g} to {p[-1][1]:.3g}" for name, p in chosen.items())
            yield Plot(title, ends + ".", partial(lines, chosen, "step", axis))


#: groups of numbers that come first, and what a person calls them
GROUPS = {
    "train": "conversations", "held_out": "held-out conversations", "statistics": "training samples",
}  # fmt: skip


def data(runs: Runs) -> Panel:
    """Numbers about the data that the head was trained on, and the prompts that it was measured on."""
    tables = []
    for label, report in runs.items():
        numbers = (report.get("training") or {}).get("data") or {}
        rows = []
        for group, title in GROUPS.items():
            rows += [[text(f"{title}: {name}"), _quantity(value)] for name, value in _flat(numbers.get(group) or {})]
        named = f", {label}" if several(runs) else ""
        if rows:
            tables.append(Table(f"Training data{named}", ["number of", "value"], rows))
    rows = []
    for label, report in runs.items():
        told = report["data"]
        rows.append(run_cells(runs, label, text(told.get("path", "–")), count(report["prompts"]),
                              count(report["max_new_tokens"]), text(str(told.get("sha256") or "–")[:16])))  # fmt: skip
    columns = run_columns(runs, "prompts of the evaluation", "prompts", "most new tokens", "SHA-256")
    says = [] if tables else [NO_DATA]
    return Panel("data", "Data", says, [*tables, Table("What the head was measured on", columns, rows)])


def _flat(value: dict[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for name, item in value.items():
        shown = f"{before}{name.replace('_', ' ')}"
        if isinstance(item, dict):
            yield from _flat(item, f"{shown}, ")
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield shown, item


def _quantity(value: float) -> Cell:
    return count(value) if isinstance(value, int) else Cell(f"{value:.4g}", float(value))
