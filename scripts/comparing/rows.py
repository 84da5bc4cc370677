"""What a comparison measured: one row per cell, for compare.json, the table, the plot and the page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from headstart.comparing.cells import Cell, Work
from headstart.comparing.config import INTERVAL, SPEED
from headstart.comparing.work import COST, Failures, reports_of
from headstart.console import Console
from headstart.eval.measuring.report import Report
from headstart.heads.counting import counted, noun_of
from headstart.heads.files import read_json, write_json
from headstart.heads.published import published
from headstart.heads.published_names import name_of_data
from headstart.pipeline.run import Run

SCHEMA = 1
#: keys of a row, and where a report has them
OF_REPORT = {
    "dtype": "dtype", "batch": "batch_size", "temperature": "temperature", "max_new_tokens": "max_new_tokens",
    "card": "device", "git_revision": "git_revision", "versions": "versions",
}  # fmt: skip


def collect(work: Work) -> dict[str, Any]:
    """Everything that is finished, as JSON values.

    Returns: schema, name, budget, command, sets (keys of τ without `tau_`), rows, failed, unfinished, notes. A row has
        `walked_tau` and, once it is measured, `tau_SET`, `tau_SET_ci95` and, where there is a baseline, `gain_SET` over
        the baseline's of the same seed.
    """
    failures = Failures(work.folder)
    rows, failed, unfinished = [], [], []
    measured = [*work.measure["sets"], *([SPEED] if work.measure["speed"]["enabled"] else [])]
    for cell in work.cells:
        if (failure := failures.read(cell)) is not None:
            failed.append(failure)
        reports = reports_of(work, cell)
        if failure is None and len(reports) < len(measured):
            unfinished.append(cell.name)
        row = row_of(work, cell, reports)
        if row is not None:
            rows.append(row)
    sets = list(dict.fromkeys(key[4:] for row in rows for key in row if key.startswith("tau_") and _is_tau(key)))
    add_gains(rows, sets)
    for name in sets:
        mark_front(rows, name)
    values = {
        "schema": SCHEMA, "name": work.name, "budget": work.budget, "command": work.command, "sets": sets,
        "rows": rows, "failed": failed, "unfinished": unfinished, "notes": notes_of(work, rows),
    }  # fmt: skip
    return published(values)


def _is_tau(key: str) -> bool:
    return not key.endswith(INTERVAL)


def row_of(work: Work, cell: Cell, found: dict[str, Report]) -> dict[str, Any] | None:
    """The row of a cell; None where it is not trained. What its reports tell is null before there is one.

    Args: found: its reports (reports_of).
    """
    run = Run(work.recipe(cell), Console(silent=True))
    if not (run.dir / COST).is_file() or not run.head_dir.is_dir():
        return None
    reports = {name: report for name, report in found.items() if name != SPEED}
    speed, first = found.get(SPEED), next(iter(reports.values()), None)
    spent = read_json(run.dir / COST)
    head: dict[str, Any] = (first.head if first is not None else None) or {}
    row: dict[str, Any] = {
        "cell": cell.name, "recipe": cell.recipe, "head": head.get("type", run.recipe.head.type), "lever": cell.lever,
        "value": cell.value, "seed": cell.seed, "baseline": cell.baseline, "walked_tau": walked_tau(run),
        **taus(work, reports),
    }  # fmt: skip
    row |= speeds(speed) if speed is not None else {}
    timed = speed or first
    cycle = (timed.cycle if timed is not None else None) or {}
    row |= {
        "draft_ms": cycle.get("draft_ms"), "verify_ms": cycle.get("verify_ms"),
        "draft_ms_from": _how(timed) if timed is not None and cycle else None,
        "train_seconds": spent["seconds"], "steps": spent["steps"], "positions": spent["positions"],
        "conversations": spent["conversations"], "peak_memory_bytes": spent["peak_memory_bytes"],
        "features": spent.get("features"),
        "parameters": head.get("parameters"), "side_by_side": work.side_by_side, "budget": work.budget,
        "tree": first.tree["label"] if first is not None else None,
        **{key: getattr(first, name, None) for key, name in OF_REPORT.items()},
        "prompts": sum(report.prompts for report in reports.values()), "data": data_of(work, cell),
        "settings": [*cell.overrides, *cell.auto, *cell.limits], "command": work.command,
    }  # fmt: skip
    return row


def walked_tau(run: Run) -> float | None:
    """The accepted length along given held-out text that training saw last, or with train.select=best when it saved the
    head. It diagnoses training; nothing is decoded. None without held-out text.
    """
    seen: dict[int, float] = {}
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # a damaged line gives none
        for text in (run.dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(text)
            if record.get("valid/walked_tau") is not None:
                seen[int(record["step"])] = float(record["valid/walked_tau"])
    best = (run.markers.read("train").get("result") or {}).get("best")
    if run.recipe.train.select == "best" and best is not None:
        return seen.get(best["step"])
    return seen[max(seen)] if seen else None


def taus(work: Work, reports: dict[str, Report]) -> dict[str, Any]:
    """`tau_SET` and its interval; of a set with `task_field`, `tau_TASK` for each task. The set's name stands before
    the task's where the key would be another's: that of a set, or of a task of another set.
    """
    found: dict[str, Any] = {}
    sets = work.measure["sets"]
    several = sum(bool(settings.get("task_field")) for settings in sets.values()) > 1
    for name, report in reports.items():
        by_task = bool(sets[name].get("task_field"))
        parts = dict(report.tasks) if by_task else {name: report.total}
        for part, numbers in parts.items():
            key = "".join(letter if letter.isalnum() else "_" for letter in part)
            key = f"{name}_{key}" if by_task and (several or key in sets) else key
            found |= {f"tau_{key}": numbers.tau, f"tau_{key}{INTERVAL}": numbers.tau_ci95}
    return found


def speeds(report: Report) -> dict[str, Any]:
    """`speedup_batch_N` of every batch size that was timed."""
    found: dict[str, Any] = {
        f"speedup_batch_{report.batch_size}": report.speedup,
        f"speedup_batch_{report.batch_size}_ci95": report.speedup_ci95,
    }
    for point in ((report.sweeps or {}).get("batch") or {}).get("points", []):
        found[f"speedup_batch_{point['batch']}"] = point.get("speedup")
    return found


def _how(report: Report) -> str:
    return f"{report.dtype}, batch {report.batch_size}"


def data_of(work: Work, cell: Cell) -> list[str]:
    """The sources that a cell trained on, as others may see them."""
    data = work.recipe(cell).data
    named = [str(source.path or source.dataset) for source in data.sources]
    asked = [f"answers to {name_of_data(str(s.path or s.dataset))}" for s in data.distill.prompts]
    written = data.distill.written
    own = [f"answers to {counted(written, 'prompts', ',')} of the target itself, at most"] if written else []
    return [*map(name_of_data, named), *asked, *own]


def add_gains(rows: list[dict[str, Any]], sets: Sequence[str]) -> None:
    """Add `gain_SET` to every row that has a baseline of its seed; of several, that of its recipe, else the first."""
    for row in rows:
        bases = [base for base in rows if base["baseline"] and base["seed"] == row["seed"]]
        bases.sort(key=lambda base: base["recipe"] != row["recipe"])
        for name in sets:
            key = f"tau_{name}"
            if bases and not row["baseline"] and bases[0].get(key) is not None and row.get(key) is not None:
                row[f"gain_{name}"] = row[key] - bases[0][key]


def mark_front(rows: list[dict[str, Any]], name: str) -> None:
    """Set `front_SET`: whether no other cell has a larger τ at the same or less draft time, or the same τ at less."""
    points = [(row.get("draft_ms"), row.get(f"tau_{name}")) for row in rows]
    for row, (time, tau) in zip(rows, points, strict=True):
        if time is None or tau is None:
            row[f"front_{name}"] = None
            continue
        others = [(t, u) for t, u in points if t is not None and u is not None]
        row[f"front_{name}"] = not any(t <= time and u >= tau and (t, u) != (time, tau) for t, u in others)


def notes_of(work: Work, rows: Sequence[dict[str, Any]]) -> list[str]:
    """How to read the numbers."""
    notes = list(work.notes)
    within = [row["cell"] for row in rows if row["features"] == "online"]
    if work.budget["kind"] == "seconds" and 0 < len(within) < len(rows):
        notes.append(
            f"the seconds are not equal: the target's features of {', '.join(within)} were made within them "
            f"(data.features=online), those of the other {noun_of(len(rows) - len(within), 'cells')} before: set "
            "data.features alike"
        )
    if work.budget["kind"] == "positions":
        notes.append("positions are supervised positions that training passed over, whatever share a head draws")
    return notes


def by_lever(rows: Sequence[dict[str, Any]], sets: Sequence[str]) -> list[dict[str, Any]]:
    """The cells that differ in their seed alone, as one: mean τ and gain, and how far the seeds lie apart."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["cell"].rsplit("-s", 1)[0], []).append(row)
    means = []
    for name, members in groups.items():
        mean: dict[str, Any] = {"cells": name, "seeds": [row["seed"] for row in members]}
        for key in ["walked_tau", *(f"{kind}_{part}" for part in sets for kind in ("tau", "gain"))]:
            values = [row[key] for row in members if row.get(key) is not None]
            if values:
                mean[key] = statistics.fmean(values)
                mean[f"{key}_spread"] = max(values) - min(values)
        means.append(mean)
    return means


def save(work: Work, values: dict[str, Any]) -> None:
    """Write compare.json."""
    write_json(work.folder / "compare.json", values)
