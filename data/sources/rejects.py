"""Rows that cannot be read: the first stops a run, or each is left out, counted and written to a file."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import SpooledTemporaryFile

from headstart.data.records.messages import Where
from headstart.heads.counting import counted
from headstart.heads.errors import DataError
from headstart.heads.files import atomic_write

#: what is done with a bad row: takes the error, the row's place as the error names it, and its number
Bad = Callable[[DataError, Where, int], None]
#: what differs between rows with the same fault: positions, numbers that were found, quoted text
NUMBER = re.compile(r"\[\d+\]|(?<=column )\d+|(?<=byte )\d+|(?<=found int )[-\d]+|(?<=found float )[-+\w.]+")
QUOTED = re.compile("'[^'…]*['…]|\"[^\"…]*[\"…]")
#: most reasons that are counted apart, and most bytes of rejects kept in memory; more of them wait in a temporary file
MOST_REASONS, IN_MEMORY = 100, 1 << 20


def stop(error: DataError, where: Where, row: int) -> None:
    """`on_bad: stop`. Raises: the error itself."""
    raise error


class Rejects:
    """`on_bad: skip`: the rows that were left out.

    Attributes: counts: reason → number of rows. Numbers and quoted text are left out of a reason, so that rows with the
        same fault are counted together.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lines = SpooledTemporaryFile(IN_MEMORY, "w+", encoding="utf-8")  # noqa: SIM115

    def add(self, error: DataError, where: Where, row: int) -> None:
        reason = str(error).removeprefix(where).lstrip(": ")
        file = where.removesuffix(str(row)).removesuffix(": record ").removesuffix(":")
        kind = QUOTED.sub("'…'", NUMBER.sub("…", reason))
        self.counts[kind if kind in self.counts or len(self.counts) < MOST_REASONS else "other reasons"] += 1
        self._lines.write(json.dumps({"file": file, "row": row, "reason": reason}) + "\n")

    def lines(self) -> list[str]:
        """In words, one reason a line."""
        return [f"left out {counted(count, 'bad rows')}: {reason}" for reason, count in self.counts.most_common()]

    def write(self, path: Path) -> None:
        """One line of JSON a row: file, row, reason. Without rejects, no file; one written before is removed."""
        if not self.counts:
            path.unlink(missing_ok=True)
            return

        def copy(place: Path) -> None:
            self._lines.seek(0)
            with open(place, "w", encoding="utf-8") as out:
                shutil.copyfileobj(self._lines, out)

        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, copy)
