"""What a page consists of: panels of tables, plots and sentences. The template shows them, in this order."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.eval.measuring.wording import number
from headstart.heads.escape import plain

#: label of a run → its report.json as parsed. A page of one run does not show the label.
Runs = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """A cell of a table. Attributes: value: the number that `text` shows, as report.json has it; None = no number."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """A table. The first cell of every row is its header."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    kind = "table"

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, or pairs of them."""
        return [any(_is_numeric(row[n]) for row in self.rows) for n in range(len(self.columns))]


def _is_numeric(cell: Cell) -> bool:
    return cell.value is not None or re.fullmatch(r"[\d.]+[–/][\d.]+", cell.text) is not None


@dataclass(frozen=True)
class Plot:
    """A plot.

    Attributes:
        title: above it.
        says: what it shows, for who cannot see it.
        draw: makes the matplotlib figure.
    """

    title: str
    says: str
    draw: Callable[[], Any]

    kind = "plot"


@dataclass(frozen=True)
class Panel:
    """A section of the page.

    Attributes:
        name: its anchor.
        says: sentences above its items.
        absent: why there is nothing to show; None where there is something.
    """

    name: str
    title: str
    says: list[str] = field(default_factory=list)
    items: list[Table | Plot] = field(default_factory=list)
    absent: str | None = None


def text(value: object) -> Cell:
    """A cell of words that others may have written."""
    return Cell(plain(str(value)))


def num(value: float | None, digits: int = 2, suffix: str = "") -> Cell:
    """A cell of a number; None = not measured."""
    checked = None if value is None else float(value)
    return Cell(number(checked, digits, suffix), checked)


def count(value: int | None) -> Cell:
    """A cell of a whole number."""
    return Cell("–" if value is None else f"{value:,}", None if value is None else float(value))


def interval(value: Sequence[float] | None) -> Cell:
    """A cell of a 95 % interval."""
    if value is None:
        return Cell("–")
    low, high = value
    return Cell(f"{float(low):.2f}–{float(high):.2f}")


def several(runs: Runs) -> bool:
    return len(runs) > 1


def run_columns(runs: Runs, *columns: str) -> list[str]:
    """The columns of a table, after one for the run where there are several."""
    return [*(["run"] if several(runs) else []), *columns]


def run_cells(runs: Runs, label: str, *cells: Cell) -> list[Cell]:
    """A row of such a table."""
    return [*([text(label)] if several(runs) else []), *cells]
