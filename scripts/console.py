"""What a command says: results on stdout, progress and messages on stderr."""

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

#: (done, total, a line worth showing or "")
Advance = Callable[[int, int, str], None]
#: seconds between two progress lines where stderr is not a terminal
QUIET_S = 15.0


def plain(text: str) -> str:
    """`text` without control characters. The import stands inside because it brings torch, which help must not load."""
    from headstart.heads.escape import plain as escaped

    return escaped(text)


class Harmless:
    """Something to show, whose control characters are made visible: others may have written them (a task's name, a
    server's answer). Those of the terminal are added later and stay."""

    def __init__(self, shown: RenderableType):
        self.shown = shown

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.shown, options):
            yield Segment(text if control else plain(text), style, control)


class Console:
    """Speaks for one command.

    Args:
        as_json: stdout gets exactly one JSON value, given to `result`; anything else printed there goes to stderr.
        silent: say nothing (ranks other than the first).
    """

    def __init__(self, as_json: bool = False, silent: bool = False):
        self.as_json, self.silent = as_json, silent
        self._out = sys.stdout
        self._console = RichConsole(stderr=True, highlight=False, markup=False, quiet=silent)

    def say(self, message: str, style: str | None = None) -> None:
        """One message on stderr."""
        self._console.print(plain(message), style=style, soft_wrap=True)

    def result(self, value: Any, shown: RenderableType | Callable[[], RenderableType] | None = None) -> None:
        """The command's answer: `value` as JSON, or `shown` for a person (a function is called here)."""
        if self.silent:
            return
        if self.as_json:
            print(_json_line(value, self._out.encoding), file=self._out, flush=True)
        elif shown is not None:
            # what the terminal cannot show is escaped: an error here would hide that the work is done
            encoding = self._out.encoding or "utf-8"
            made = self._made(shown) if callable(shown) else shown
            terminal = self._out.isatty()
            console = RichConsole(file=self._out, highlight=False, markup=False, width=None if terminal else 140)
            with console.capture() as kept:
                if isinstance(made, str):
                    console.print(plain(made), soft_wrap=True)
                else:
                    console.print(Harmless(made))
            self._out.write(kept.get().encode(encoding, "backslashreplace").decode(encoding))
            self._out.flush()

    def _made(self, shown: Callable[[], RenderableType]) -> RenderableType:
        """What `shown` makes. Where it fails, that is said instead: the result is saved all the same."""
        try:
            return shown()
        except Exception as error:  # noqa: BLE001 - the work is done and saved
            return f"the result cannot be shown ({type(error).__name__}: {error}); --json prints its values"

    @contextmanager
    def stdout_guard(self) -> Iterator[None]:
        """Inside, whatever libraries print to stdout lands on stderr, so that `--json` stays parseable."""
        if not self.as_json:
            yield
            return
        with redirect_stdout(sys.stderr):
            yield

    @contextmanager
    def progress(self, label: str, unit: str = "") -> Iterator[Advance]:
        """A bar with time left on a terminal; elsewhere a line now and then."""
        if self._console.is_terminal and not self.silent:
            with _bar(self._console, label, unit) as advance:
                yield advance
            return
        yield self._lines(label, unit)

    def _lines(self, label: str, unit: str) -> Advance:
        """Progress where there is no terminal: messages as they come, a count every QUIET_S seconds and at the end."""
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
    """JSON in the stream's encoding; what that cannot hold is escaped as JSON allows."""
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
