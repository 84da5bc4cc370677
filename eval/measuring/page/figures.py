"""Figures of the page: matplotlib draws them, and colours of the page's scheme replace the ones that it drew with."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headstart.heads.formats.plots import drawn

#: colours that stand in a figure for variables of the page's style sheet
FOREGROUND, GRID = "#010203", "#010204"
SERIES = tuple(f"#0102{10 + n:02x}" for n in range(6))
VARIABLES = {FOREGROUND: "var(--fg)", GRID: "var(--grid)"} | {
    color: f"var(--s{n + 1})" for n, color in enumerate(SERIES)
}
#: series are told apart without colour as well
MARKERS, DASHES = "os^Dv*", ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
HATCHES = ("", "///", "...", "xxx", "++", "oo")
#: inches: as wide as a telephone shows with readable text
WIDTH = 5.4
#: points of a curve up to which each is marked
MARKED = 40
#: marks of one group stand in so much of the space of a row
SPREAD = 0.5
SETTINGS = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and is small
    "svg.hashsalt": "headstart",
    "font.size": 9.5,
    "text.color": FOREGROUND,
    "axes.edgecolor": FOREGROUND,
    "axes.labelcolor": FOREGROUND,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": FOREGROUND,
    "ytick.color": FOREGROUND,
    "grid.color": GRID,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "axes.titlesize": 10,
}

Point = tuple[float, float]
#: label → points
Curves = dict[str, list[Point]]


@contextmanager
def drawing() -> Iterator[None]:
    """While open, figures are drawn in the page's colours."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        yield


def style(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of a series."""
    n = number % len(SERIES)
    return {"color": SERIES[n], "marker": MARKERS[n], "linestyle": DASHES[n], "markersize": 4.5, "linewidth": 1.6}


def new_axes(height: float, columns: int = 1, along: str = "y") -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # the object interface keeps no global state and needs no display

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = list(figure.subplots(1, columns, squeeze=False, sharey=columns > 1)[0])
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis=along, linewidth=0.7)
        axes.set_axisbelow(True)
    return figure, grid


def legend(figure: Any, axes: Any, names: int) -> None:
    """A legend below the axes, where it covers nothing."""
    if names > 1:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=1 if names > 6 else 2)


def lines(
    curves: Curves,
    x: str,
    y: str,
    *,
    one: bool = False,
    by_two: bool = False,
    top: float | None = None,
    ends: dict[str, list[Sequence[float] | None]] | None = None,
) -> Any:
    """Curves over a shared axis.

    Args: one: a line at 1, plain decoding. by_two: the axis is logarithmic, and each of its values has a tick.
        top: end of the vertical axis. ends: 95 % intervals of the points of a curve.
    """
    figure, (axes,) = new_axes(2.9 + 0.1 * len(curves))
    for number, (name, points) in enumerate(curves.items()):
        shown = style(number)
        if len(points) > MARKED:
            shown |= {"markevery": max(len(points) // 12, 1)}
        axes.plot(*zip(*points, strict=True), label=drawn(name, 60), **shown)
        for (place, _), interval in zip(points, (ends or {}).get(name, ()), strict=False):
            if interval is not None:
                axes.plot([place] * 2, list(interval), color=shown["color"], marker="_", linewidth=1.2)
    if one:
        axes.axhline(1, color=FOREGROUND, linewidth=1, linestyle=(0, (2, 2)))
    ticks = sorted({place for points in curves.values() for place, _ in points})
    if by_two:
        axes.set_xscale("log", base=2)
    if by_two or len(ticks) <= 12:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.set(xlabel=x, ylabel=y)
    low, high = min(0, axes.get_ylim()[0]), max(value for points in curves.values() for _, value in points)
    axes.set_ylim(low, top or max(axes.get_ylim()[1], high + 0.06 * (high - low)))
    legend(figure, axes, len(curves))
    return figure


#: label of a row → per series: value and its 95 % interval, or None
Marks = dict[str, list[tuple[float, Sequence[float] | None] | None]]


def marks(sides: Sequence[tuple[str, Marks]], series: Sequence[str]) -> Any:
    """Values with intervals and their numbers, one row per label; each side is a quantity with an axis of its own."""
    names = list(sides[0][1])
    figure, grid = new_axes(1.0 + (0.22 + 0.2 * len(series)) * len(names), len(sides), along="x")
    for axes, (title, rows) in zip(grid, sides, strict=True):
        for number in range(len(series)):
            shown = {**style(number), "linestyle": "none"}
            axes.plot([], [], **shown, label=drawn(series[number], 60))
            shift = 0.0 if len(series) == 1 else SPREAD * (number / (len(series) - 1) - 0.5)
            for row, name in enumerate(names):
                if (found := rows[name][number]) is None:
                    continue
                value, ends = found
                low, high = ends or (value, value)
                axes.plot([low, high], [row + shift] * 2, color=shown["color"], linewidth=1.6, solid_capstyle="butt")
                axes.plot([value], [row + shift], **shown)
                axes.annotate(f"{value:.2f}", (high, row + shift), (4, 0), textcoords="offset points", va="center",
                              fontsize=8.5)  # fmt: skip
        axes.axvline(1, color=FOREGROUND, linewidth=1, linestyle=(0, (2, 2)))
        axes.margins(x=0.16)
        axes.set(title=title)
        axes.set_yticks(range(len(names)), [drawn(name, 28) for name in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
    legend(figure, grid[0], len(series))
    return figure


def stacked(rows: dict[str, dict[str, float]], x: str) -> Any:
    """Parts of a whole, side by side: label of a row → part → value."""
    figure, (axes,) = new_axes(1.2 + 0.42 * len(rows), along="x")
    parts = list(dict.fromkeys(part for values in rows.values() for part in values))
    for row, values in enumerate(rows.values()):
        left = 0.0
        for number, part in enumerate(parts):
            if part in values:
                axes.barh(row, values[part], 0.62, left=left, color=SERIES[number], hatch=HATCHES[number],
                          edgecolor=FOREGROUND, linewidth=0.8)  # fmt: skip
                left += values[part]
        axes.annotate(f"{left:.2f}", (left, row), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    for number, part in enumerate(parts):
        axes.barh(0, 0, color=SERIES[number], hatch=HATCHES[number], edgecolor=FOREGROUND, label=part)
    axes.margins(x=0.1)
    axes.set_yticks(range(len(rows)), [drawn(name, 40) for name in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set(xlabel=x)
    legend(figure, axes, len(parts))
    return figure


def svg_of(figure: Any, name: str) -> str:
    """The figure as an SVG element whose parts are named after `name`, without a size of its own."""
    place = io.StringIO()
    with drawing():
        figure.savefig(place, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = place.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for color, variable in VARIABLES.items():
        text = text.replace(color, variable)
    text = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\1{name}-", text)
    text = text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None  # matplotlib always writes it
    head = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {box[0]} xmlns="http://www.w3.org/2000/svg">'
    return re.sub(r"\n\s*", "\n", head + text[text.index(">") + 1 :]).strip()
