"""What a command prints: its result on stdout, progress and messages on stderr."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from headstart.train.tracking.screen import Phase, Screen, plain

#: reports progress: (how many are done, of how many, a message or "")
Advance = Callable[[int, int, str], None]
#: how a line begins that is a command to copy
COMMAND = re.compile(r" *(headstart|accelerate|python3?|vllm|pip) ")


def wrapped_lines(text: str, width: int) -> str:
    """`text` in lines of at most `width` columns, broken between words. A command to copy and a path stay whole."""
    lines = []
    for line in text.split("\n"):
        start = re.match(r" *(- )?", line)
        assert start is not None
        if len(line) <= width or COMMAND.match(line):
            lines.append(line)
            continue
        lines += textwrap.wrap(
            line[start.end() :], width, initial_indent=start[0], subsequent_indent=" " * start.end(),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join(lines)


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
    Attributes:
        screen: what shows phases, bars and messages, for work that has no Console.
    """

    def __init__(self, as_json: bool = False, silent: bool = False):
        self.as_json, self.silent = as_json, silent
        self._out = sys.stdout
        self.screen = Screen(not silent)

    def say(self, message: str, style: str | None = None, whole: bool = False) -> None:
        """Print a message on stderr. Args: whole: a command to copy, which is not wrapped."""
        self.screen.say(message, style, whole)

    def phase(self, name: str, said: bool = True, drawn: bool = True) -> AbstractContextManager[Phase]:
        """While open, this is what the command does; see Screen.phase."""
        return self.screen.phase(name, said, drawn)

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
            # a pipe may end in a terminal, whose width COLUMNS then tells
            narrow = self._out.isatty() or "COLUMNS" in os.environ
            console = RichConsole(file=self._out, highlight=False, markup=False, width=None if narrow else 140)
            with console.capture() as kept:
                if isinstance(made, str):
                    made = wrapped_lines(made, console.width) if narrow else made
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
    def progress(
        self, label: str, unit: str = "", notes: bool = False, first: str | None = None
    ) -> Iterator[Advance]:
        """On a terminal a bar with the time left; elsewhere a line every few seconds.

        Args:
            notes: messages stand beside the count; otherwise each is a line of its own.
            first: see Bar.
        """
        with self.screen.bar(label, unit) as bar:
            bar.first = first

            def advance(done: int, total: int, message: str = "") -> None:
                message = "" if message == "done" else message
                if message and not notes:
                    self.say(f"{label}: {message}")
                bar.update(done, total, message if notes else None)
                self.screen.tell(bar)

            yield advance


def _json_line(value: Any, encoding: str | None) -> str:
    """`value` as JSON. Where the stream's encoding cannot hold a character, all others than ASCII are escaped."""
    from headstart.heads.escape import in_json

    text = in_json(json.dumps(value, ensure_ascii=False, default=str))
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, default=str)
    return text
