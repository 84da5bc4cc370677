"""How τ grows with data and time: a line fitted to measurements, for `headstart plan`.

    τ = a + b · log2(conversations) + c · log2(seconds)

is fitted by least squares to the rows of a comparison (compare.json) or to rows with the same keys.
recipes/scaling.json holds the lines that were fitted to published measurements; it is empty until there are some.

    python -m headstart.scaling_line ROWS.json … --set NAME --target T --source TEXT [--into recipes/scaling.json]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from headstart.heads.counting import counted
from headstart.heads.errors import ConfigError, DataError
from headstart.heads.files import read_json, write_json

SCHEMA = 1
#: file of the package with the lines
LINES = "scaling.json"
#: fewest rows behind a line, and how many times its smallest value the largest of a quantity must be
LEAST_ROWS, LEAST_RANGE = 4, 1.5
#: how many times as much data `headstart plan` speaks of, and how far beyond the measurements it does
MORE, BEYOND = 4, 4.0


@dataclass(frozen=True)
class Line:
    """A fitted line.

    Attributes:
        head: family of the heads. target: name of their target. set: prompts on which τ was measured.
        at_one: τ at one conversation and one second, by the line. per_double_data, per_double_time: τ gained when the
            conversations, or the seconds, double; None where all rows had the same.
        residual: root mean square of what the line misses, in τ.
        rows: number of measurements. conversations, seconds: smallest and largest of them.
        source: where the measurements stand, in words. card, git_revision: of the measurements.
    """

    head: str
    target: str
    set: str
    at_one: float
    per_double_data: float | None
    per_double_time: float | None
    residual: float
    rows: int
    conversations: tuple[int, int]
    seconds: tuple[float, float]
    source: str
    card: str
    git_revision: str

    def gain(self, times: float) -> float | None:
        """τ that `times` as much data is expected to give, at equal time; None where data was not varied."""
        return None if self.per_double_data is None else self.per_double_data * math.log2(times)


def fit_line(rows: Sequence[dict[str, Any]], head: str, target: str, name: str, source: str) -> Line:
    """Fit the line of one family. Args: rows: with head, conversations, train_seconds and tau_NAME. name: of the set.

    Raises: DataError for too few rows of this family, rows without a number, or rows that vary neither data nor time.
    """
    found = [row for row in rows if row.get("head") == head and row.get(f"tau_{name}") is not None]
    if len(found) < LEAST_ROWS:
        raise DataError(f"{counted(len(found), 'rows')} of {head} with tau_{name}, expected {LEAST_ROWS} or more")
    for key in ("conversations", "train_seconds"):
        if odd := [row.get(key) for row in found if not (isinstance(row.get(key), int | float) and row[key] > 0)]:
            raise DataError(f"rows of {head}: {key}: found {odd[0]!r}, expected a number above 0")
    data = np.log2([float(row["conversations"]) for row in found])
    time = np.log2([float(row["train_seconds"]) for row in found])
    tau = np.array([float(row[f"tau_{name}"]) for row in found])
    varied = [bool(np.ptp(axis) >= math.log2(LEAST_RANGE)) for axis in (data, time)]
    if not any(varied):
        raise DataError(
            f"rows of {head}: neither conversations nor seconds differ by {LEAST_RANGE} ×; expected some that do"
        )
    columns = [np.ones(len(tau)), *(axis for axis, differs in zip((data, time), varied, strict=True) if differs)]
    solution, _, rank, _ = np.linalg.lstsq(np.stack(columns, 1), tau, rcond=None)
    if rank < len(columns):
        raise DataError(f"rows of {head}: data and time grow together; expected rows that tell them apart")
    slopes = iter(solution[1:])
    by_data, by_time = (float(next(slopes)) if differs else None for differs in varied)
    missed = tau - np.stack(columns, 1) @ solution
    counts = [int(row["conversations"]) for row in found]
    times = [float(row["train_seconds"]) for row in found]
    return Line(
        head, target, name, float(solution[0]), by_data, by_time, float(np.sqrt(np.mean(missed**2))), len(found),
        (min(counts), max(counts)), (min(times), max(times)), source, _one(found, "card"), _one(found, "git_revision"),
    )  # fmt: skip


def _one(rows: Sequence[dict[str, Any]], key: str) -> str:
    return ", ".join(sorted({str(row.get(key, "unknown")) for row in rows}))


def packaged_lines(path: Path | None = None) -> list[Line]:
    """The lines that come with the package. Raises: DataError for a file of another form."""
    place = path or Path(str(resources.files("headstart.recipes"))) / LINES
    value = read_json(place)
    names = {f.name for f in fields(Line)}
    lines = value.get("lines") if isinstance(value, dict) and value.get("schema") == SCHEMA else None
    if not isinstance(lines, list) or not all(isinstance(one, dict) and set(one) == names for one in lines):
        raise DataError(
            f"{place}: expected {{schema: {SCHEMA}, lines: […]}} with the fields {', '.join(sorted(names))}"
        )
    spans = ("conversations", "seconds")
    return [Line(**{**one, **{span: tuple(one[span]) for span in spans}}) for one in lines]


def save_lines(lines: Sequence[Line], path: Path) -> None:
    write_json(path, {"schema": SCHEMA, "lines": [asdict(line) for line in lines]})


def more_data(head: str, target: str, conversations: int, lines: Sequence[Line]) -> str | None:
    """What four times as much data is expected to give, in words; None where nothing was measured for this family, or
    the data is far from what was measured.

    Args: head: family. conversations: of the plan; 0 = unknown.
    """
    known = sorted((one for one in lines if one.head == head), key=lambda one: one.target != target)
    if not known or (gain := known[0].gain(MORE)) is None:
        return None
    line = known[0]
    low, high = line.conversations
    if conversations and not low / BEYOND <= conversations * MORE <= high * BEYOND:
        return None
    other = "" if line.target == target else f", another target ({line.target})"
    return (
        f"another {MORE} × data: about {gain:+.1f} accepted length, at equal training time. Fitted to {line.rows} "
        f"measurements on {line.set} (±{line.residual:.2f}) with {low:,} to {high:,} conversations{other}; "
        f"{line.source}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m headstart.scaling_line", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("rows", nargs="+", type=Path, help="compare.json, or a JSON list of rows")
    parser.add_argument("--set", required=True, help="set whose τ is fitted: tau_NAME")
    parser.add_argument("--target", required=True, help="name of the target, as recipes give it")
    parser.add_argument("--source", required=True, help="where the measurements stand, for the sentence of the plan")
    parser.add_argument("--into", type=Path, help="file of lines to add these to; a family's earlier line is replaced")
    given = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for path in given.rows:
        value = read_json(path)
        found = value.get("rows") if isinstance(value, dict) else value
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise DataError(f"{path}: expected a comparison's compare.json, or a list of rows")
        rows += found
    heads = sorted({str(row.get("head")) for row in rows if row.get(f"tau_{given.set}") is not None})
    if not heads:
        raise ConfigError(f"--set {given.set}: no row has tau_{given.set}")
    lines = [fit_line(rows, head, given.target, given.set, given.source) for head in heads]
    print(json.dumps([asdict(line) for line in lines], indent=1))
    if given.into is not None:
        mine = {(line.head, line.target) for line in lines}
        earlier = packaged_lines(given.into) if given.into.is_file() else []
        save_lines([*(line for line in earlier if (line.head, line.target) not in mine), *lines], given.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
