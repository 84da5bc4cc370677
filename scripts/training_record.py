"""What the run that made a head recorded of its training, for reports: curves, numbers about the data, what it cost."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from headstart.heads.errors import DataError
from headstart.heads.files import read_json

#: file of a run that holds the prompts that the target wrote itself
WRITTEN_PROMPTS = "data/written.jsonl"
#: most points of a curve in a report
POINTS = 200
#: most curves: those of deeper terms are left out
CURVES = 60
#: names of metrics.jsonl that a report shows
SHOWN = re.compile(r"(train|valid)/(loss(_\w+)?|acc_\d+|walked_tau|tau)|lr")


def run_of(head: Path | None) -> Path | None:
    """The directory of the run that a head lies in; None where it lies in none."""
    run = head.resolve().parent if head is not None else None
    return run if run is not None and (run / "steps").is_dir() else None


def files_of_training(head: Path | None) -> set[Path]:
    """Files and folders whose conversations or prompts the run of a head read; none where the head lies in no run."""
    run, found = run_of(head), set()
    if run is not None:
        with suppress(OSError, UnicodeError, yaml.YAMLError, AttributeError, TypeError, ValueError):
            data = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))["data"]
            sources = [*(data.get("sources") or []), *((data.get("distill") or {}).get("prompts") or [])]
            found = {_whole(source["path"]) for source in sources if source.get("path")}
            if (written := run / WRITTEN_PROMPTS).is_file():  # prompts that the target wrote itself
                found.add(written.resolve())
    return found


def _whole(path: str) -> Path:
    return Path(os.path.expanduser(path)).resolve()


def measured_on_training(head: Path | None, paths: Iterable[str]) -> bool:
    """Whether the run of a head trained on one of these files of prompts, or on a folder that one lies in."""
    trained = files_of_training(head)
    return any(trained.intersection((place, *place.parents)) for place in map(_whole, paths))


def training_record(head: Path | None) -> dict[str, Any] | None:
    """A report's `training`. It is no measurement: what cannot be read of a damaged file is left out.

    Returns: {"curves": {name: [[step, value], …]}, "steps", "seconds" (None = not known), "data"}; None without a run.
    """
    run = run_of(head)
    if run is None:
        return None
    records: list[dict[str, Any]] = []
    with suppress(OSError, UnicodeError):
        records = list(_records((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()))
    data: dict[str, Any] = {}
    with suppress(OSError, DataError, AttributeError, TypeError, ValueError):
        data = numbers_of(read_json(run / "data" / "report.json"))
    last = records[-1] if records else {}
    seconds = next((r["seconds"] for r in reversed(records) if _is_number(r.get("seconds"))), None)
    return {"curves": curves(records), "steps": last.get("step"), "seconds": seconds, "data": data}


def _records(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        with suppress(ValueError):  # a kill can cut the last one
            record = json.loads(line)
            if isinstance(record, dict) and _is_number(record.get("step")):
                yield record


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def curves(records: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Name → [[step, value], …] of what a report shows, each with `POINTS` points at most, the last one among them."""
    found: dict[str, list[list[float]]] = {}
    for record in records:
        for name, value in record.items():
            if SHOWN.fullmatch(name) and _is_number(value):
                found.setdefault(name, []).append([record["step"], value])
    return {name: thinned(found[name]) for name in sorted(found)[:CURVES]}


def thinned(points: list[list[float]]) -> list[list[float]]:
    """At most `POINTS` of the points, evenly by place, the last one among them.

    >>> [len(thinned([[n, 0.0] for n in range(count)])) for count in (3, 200, 201, 5000)]
    [3, 200, 101, 200]
    """
    every = -(-len(points) // POINTS)
    return points[(len(points) - 1) % every :: every] if every else []


def numbers_of(report: dict[str, Any]) -> dict[str, Any]:
    """What data/report.json says in numbers: names of conversations are private."""
    kept: dict[str, Any] = {}
    for part in ("train", "held_out"):
        counts = report.get(part)
        if isinstance(counts, dict):
            kept[part] = {name: value for name, value in counts.items() if _is_number(value)}
    if isinstance(found := report.get("statistics"), dict):
        kept["statistics"] = _only_numbers(found)
    return kept


def _only_numbers(value: dict[str, Any]) -> dict[str, Any]:
    """Numbers, and tables of them, without the tables whose keys are names of tasks or sources."""
    kept: dict[str, Any] = {}
    for name, item in value.items():
        if _is_number(item):
            kept[name] = item
        elif isinstance(item, dict) and name not in ("tasks", "sources", "mix") and (inner := _only_numbers(item)):
            kept[name] = inner
    return kept
