"""What a command prints: its result on stdout, progress and messages on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment

#: reports progress: (how many are done, of how many, a message or "")
Advance = Callable[[int, int, str], None]
#: seconds between two progress lines where stderr is not a terminal
QUIET_S = 15.0


def plain(text: str) -> str:
    """`text` without control characters. The import brings torch, which help must not load, so it stands inside."""
    from headstart.heads.escape import plain as escaped

    return escaped(text)


class Harmless:
    """Something to show in which control characters are made visible, because text of others (a task's name, a server's
    answer) may hold some. The codes that rich adds for the terminal stay."""

    def __init__(self, shown: RenderableType):
        self.shown = shown

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.shown, options):
            yield Segment(text if control else plain(text), style, control)


class Console:
    """Prints for one command.

    Args:
        as_json: print exactly one JSON value on stdout, the one given to `result`. What else is printed goes to stderr.
        silent: print nothing (ranks other than the first).
    """

    def __init__(self, as_json: bool = False, silent: bool = False):
        self.as_json, self.silent = as_json, silent
        self._out = sys.stdout
        self._console = RichConsole(stderr=True, highlight=False, markup=False, quiet=silent)

    def say(self, message: str, style: str | None = None) -> None:
        self._console.print(plain(message), style=style, soft_wrap=True)

    def result(self, value: Any, shown: RenderableType | Callable[[], RenderableType] | None = None) -> None:
        """Print the command's result: `value` as JSON, or else `shown`, which may be a function that makes it."""
        if self.silent:
            return
        if self.as_json:
            print(_json_line(value, self._out.encoding), file=self._out, flush=True)
        elif shown is not None:
            # characters that the terminal cannot show are escaped: an error here would hide that the work is done
            encoding = self._out.encoding or "utf-8"
            made = self._made(shown) if callable(shown) else shown
            width = None if self._out.isatty() else 140
            console = RichConsole(file=self._out, highlight=False, markup=False, width=width)
            with console.capture() as kept:
                if isinstance(made, str):
                    console.print(plain(made), soft_wrap=True)
                else:
                    console.print(Harmless(made))
            self._out.write(kept.get().encode(encoding, "backslashreplace").decode(encoding))
            self._out.flush()

    def _made(self, shown: Callable[[], RenderableType]) -> RenderableType:
        """What `shown` makes, or a message that it failed: the result is saved all the same."""
        try:
            return shown()
        except Exception as error:  # noqa: BLE001 - the work is done and saved
            return f"the result cannot be shown ({type(error).__name__}: {error}); --json prints its values"

    @contextmanager
    def stdout_guard(self) -> Iterator[None]:
        """Inside, what libraries print to stdout goes to stderr, so that `--json` prints JSON alone."""
        if not self.as_json:
            yield
            return
        with redirect_stdout(sys.stderr):
            yield

    @contextmanager
    def progress(self, label: str, unit: str = "") -> Iterator[Advance]:
        """On a terminal a bar with the time left; elsewhere a line every QUIET_S seconds."""
        if self._console.is_terminal and not self.silent:
            with _bar(self._console, label, unit) as advance:
                yield advance
            return
        yield self._lines(label, unit)

    def _lines(self, label: str, unit: str) -> Advance:
        """Progress without a terminal: messages as they come, a count every QUIET_S seconds and at the end."""
        last, before = 0.0, -1

        def advance(done: int, total: int, message: str = "") -> None:
            nonlocal last, before
            now = time.monotonic()
            if message and message != "done":
                self.say(f"{label}: {message}")
            if (done >= total and done != before) or now - last >= QUIET_S:
                last = now
                self.say(f"{label}: {done} of {total} {unit}".rstrip())
            before = done

        return advance


def _json_line(value: Any, encoding: str | None) -> str:
    """`value` as JSON. Where the stream's encoding cannot hold a character, all others than ASCII are escaped."""
    from headstart.heads.escape import in_json

    text = in_json(json.dumps(value, ensure_ascii=False, default=str))
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, default=str)
    return text


@contextmanager
def _bar(console: RichConsole, label: str, unit: str) -> Iterator[Advance]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit, markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(label, total=None)

        def advance(done: int, total: int, message: str = "") -> None:
            bar.update(task, completed=done, total=total)
            if message and message != "done":
                bar.console.print(plain(f"{label}: {message}"))

        yield advance
