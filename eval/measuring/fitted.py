"""A table that fits into the terminal, whatever its width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from headstart.heads.escape import line, plain

#: longest word, in characters, for which a column is made wide enough; paths may be longer
WORD = 24


@dataclass(frozen=True)
class Fitted:
    """A table for the terminal. Where it is too wide it is cut into parts, each with the first column.

    Lines break between words only, and within words longer than WORD, which are paths.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    caption: str = ""
    #: left-aligned columns (None: all), and rows below which a line is drawn
    left: tuple[int, ...] | None = (0,)
    lines: tuple[int, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns, rows = tuple(map(line, self.columns)), [tuple(map(line, row)) for row in self.rows]
        cells = [(column, *(row[n] for row in rows)) for n, column in enumerate(columns)]
        words = [[cell_len(word) for text in texts for word in text.split()] for texts in cells]
        widths = [min(max(lengths, default=1), WORD) for lengths in words]
        parts: list[list[int]] = []
        taken = options.max_width
        for n in range(1, len(widths)):
            # a column takes a border and a space on either side; one border closes the table
            if taken + widths[n] + 3 > options.max_width:
                parts.append([])
                taken = widths[0] + 4
            parts[-1].append(n)
            taken += widths[n] + 3
        if self.title:
            yield Text(line(self.title), style="italic")
        for part in parts:
            grid = Table()
            spare = options.max_width - 1 - sum(widths[n] + 3 for n in (0, *part))
            for n in (0, *part):
                justify: JustifyMethod = "left" if self.left is None or n in self.left else "right"
                # whole lines where there is room for them
                more = max(0, min(spare, max(map(cell_len, cells[n])) - widths[n]))
                spare -= more
                grid.add_column(Text(columns[n]), justify=justify, width=widths[n] + more, overflow="fold")
            for place, row in enumerate(rows):
                grid.add_row(*(Text(row[n]) for n in (0, *part)), end_section=place in self.lines)
            yield grid
        if self.caption:
            yield Text(plain(self.caption), style="dim italic")
