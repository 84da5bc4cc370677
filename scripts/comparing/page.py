"""The rows of a comparison as a table for the terminal, a plot, and one page that needs no other file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from headstart.comparing.rows import by_lever
from headstart.eval.measuring.fitted import Fitted
from headstart.eval.measuring.page.figures import FOREGROUND, drawing, legend, new_axes, style, svg_of
from headstart.eval.measuring.page.page import environment
from headstart.eval.measuring.rendering import number
from headstart.heads.counting import counted
from headstart.heads.escape import line
from headstart.heads.files import write_text
from headstart.heads.formats.plots import drawn

PAGE = "compare.html"
GIB = 2**30
#: heading of walked τ, and what it is
WALKED = "walked τ"
DIAGNOSIS = f"{WALKED}: training's look at held-out text, a diagnosis of the training; nothing was decoded"
#: rows from which on the plot names only those of the front
NAMED = 24


def value_text(value: Any) -> str:
    """A setting's value as one line."""
    if value is None:
        return "–"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 48 else text[:47] + "…"


def lacks_tau(values: dict[str, Any]) -> bool:
    """Whether a cell that is trained has no τ yet. The terminal shows walked τ then, the page always."""
    return any(all(row.get(f"tau_{name}") is None for name in values["sets"]) for row in values["rows"])


def table_of(values: dict[str, Any], walked: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and cells of the table of all rows. Args: walked: whether walked τ is among them."""
    rows, sets = values["rows"], values["sets"]
    sizes = sorted({int(key.split("_")[2]) for row in rows for key in row if key.startswith("speedup_batch_")
                    and key.count("_") == 2})  # fmt: skip
    gains = any(f"gain_{name}" in row for row in rows for name in sets)
    columns = ["cell", "value", "seed", *([WALKED] if walked else [])]
    for name in sets:
        columns += [f"τ {name}", "95 %", *(["gain"] if gains else [])]
    columns += [f"speed-up, batch {size}" for size in sizes]
    columns += ["draft ms", "front", "s", "steps", "positions", "GiB", "M parameters"]
    return tuple(columns), [_cells(row, sets, sizes, gains, walked) for row in rows]


def _cells(
    row: dict[str, Any], sets: Sequence[str], sizes: Sequence[int], gains: bool, walked: bool
) -> tuple[str, ...]:
    cells = [row["cell"], value_text(row["value"]), str(row["seed"])]
    cells += [number(row["walked_tau"], 3)] if walked else []
    for name in sets:
        interval = row.get(f"tau_{name}_ci95")
        cells += [number(row.get(f"tau_{name}"), 3)]
        cells += ["–" if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}"]
        cells += [_signed(row.get(f"gain_{name}"))] if gains else []
    cells += [number(row.get(f"speedup_batch_{size}"), 2, "×") for size in sizes]
    cells += [number(row["draft_ms"], 3), ", ".join(name for name in sets if row.get(f"front_{name}")) or "–"]
    peak = row["peak_memory_bytes"]
    cells += [
        f"{row['train_seconds']:.0f}", f"{row['steps']:,}", f"{row['positions'] / 1e6:.2f}M",
        number(None if peak is None else peak / GIB, 2),
        number(None if row["parameters"] is None else row["parameters"] / 1e6, 2),
    ]  # fmt: skip
    return tuple(cells)


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"


def seeds_table(values: dict[str, Any], walked: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]] | None:
    """Means over seeds; None where every cell has one seed. Args: walked: as `table_of`."""
    means, sets = by_lever(values["rows"], values["sets"]), values["sets"]
    if all(len(mean["seeds"]) < 2 for mean in means):
        return None
    columns = ("cells", "seeds", *([f"mean {WALKED}", "apart"] if walked else []))
    columns += tuple(text for name in sets for text in (f"mean τ {name}", "apart", "mean gain"))
    return columns, [
        (
            mean["cells"], ", ".join(map(str, mean["seeds"])),
            *([number(mean.get("walked_tau"), 3), number(mean.get("walked_tau_spread"), 3)] if walked else []),
            *(text for name in sets for text in (
                number(mean.get(f"tau_{name}"), 3), number(mean.get(f"tau_{name}_spread"), 3),
                _signed(mean.get(f"gain_{name}")),
            )),
        )
        for mean in means
    ]  # fmt: skip


def sentences(values: dict[str, Any], walked: bool) -> list[str]:
    """What to know beside the table. Args: walked: as `table_of`."""
    budget = counted(values["budget"]["value"], values["budget"]["kind"], ",g")
    said = [f"every cell: {budget}; τ: tokens committed per forward of the target"]
    said += [DIAGNOSIS] if walked else []
    said += [f"{row['cell']}: {what}" for row in values["failed"] for what in [f"failed ({row['error']})"]]
    if values["unfinished"]:
        them = "it" if len(values["unfinished"]) == 1 else "them"
        said.append(f"not finished: {', '.join(values['unfinished'])}; the same command goes on with {them}")
    return [*said, *values["notes"]]


def render(values: dict[str, Any]) -> Group:
    """For the terminal."""
    walked = lacks_tau(values)
    columns, rows = table_of(values, walked)
    parts: list[Any] = [Fitted("", columns, rows)] if rows else []
    if (seeds := seeds_table(values, walked)) is not None:
        parts.append(Fitted("over seeds", *seeds))
    return Group(*parts, *(Text(line(sentence)) for sentence in sentences(values, walked)))


def draw(values: dict[str, Any]) -> list[str]:
    """τ against the time of a draft, one SVG per set; none where no draft was timed.

    Cells of one head share a colour and a mark. Those of the front are joined, and named.
    """
    timed = [row for row in values["rows"] if row.get("draft_ms") is not None]
    families = sorted({str(row["head"]) for row in timed})
    drawings: list[str] = []
    with drawing():
        for name in values["sets"]:
            rows = [row for row in timed if row.get(f"tau_{name}") is not None]
            if rows:
                figure, (axes,) = new_axes(4.0)
                _panel(axes, rows, name, families)
                legend(figure, axes, len(families) + 1)
                drawings.append(svg_of(figure, f"front-{len(drawings)}"))
    return drawings


def _panel(axes: Any, rows: list[dict[str, Any]], name: str, families: Sequence[str]) -> None:
    key = f"tau_{name}"
    for row in rows:
        shown = {**style(families.index(str(row["head"]))), "linestyle": "none"}
        low, high = row.get(f"{key}_ci95") or (row[key], row[key])
        axes.plot([row["draft_ms"]] * 2, [low, high], color=shown["color"], linewidth=0.8)
        axes.plot([row["draft_ms"]], [row[key]], **shown)
    for number_of, family in enumerate(families):
        axes.plot([], [], **{**style(number_of), "linestyle": "none"}, label=drawn(family))
    front = sorted((row for row in rows if row.get(f"front_{name}")), key=lambda row: row["draft_ms"])
    axes.plot([row["draft_ms"] for row in front], [row[key] for row in front], color=FOREGROUND, linewidth=1, zorder=0,
              label="Pareto front")  # fmt: skip
    for row in rows if len(rows) <= NAMED else front:
        axes.annotate(drawn(row["cell"]), (row["draft_ms"], row[key]), xytext=(4, 4), textcoords="offset points",
                      fontsize=7)  # fmt: skip
    axes.set(xlabel="draft time per cycle, ms", ylabel=f"τ, {drawn(name)}")
    axes.margins(x=0.12)


def write_page(values: dict[str, Any], folder: Path) -> Path:
    """Write compare.html; returns its path. All text is escaped; the page loads nothing."""
    template = resources.files("headstart.comparing").joinpath("page.html").read_text(encoding="utf-8")
    columns, rows = table_of(values, True)
    text = environment().from_string(template).render(
        values=values, columns=columns, rows=rows, seeds=seeds_table(values, True), sentences=sentences(values, True),
        plots=draw(values),
    )  # fmt: skip
    write_text(folder / PAGE, text)
    return folder / PAGE
