"""What a process shows of its work: at the bottom of a terminal lines that move, elsewhere plain lines.

    screen = Screen()
    with screen.phase("loading the target"):             # a name, and since when
        …
    with screen.bar("features", "tokens") as bar:        # a count, its rate and the time left
        bar.update(1200, 8000)

While a phase or a bar is open, a thread looks after it: where nothing was shown for SILENT_S, it says what is being
done and since when. The innermost phase and the innermost bar are shown.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import Progress
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from headstart.heads.counting import noun_of

#: longest silence, and least time between two lines of one count where stderr is not a terminal, in seconds
SILENT_S = 5.0
#: seconds between two looks of the thread
LOOK_S = 1.0
#: seconds over which a rate is taken
RATE_S = 300.0
#: most characters of a name beside a bar
NAME_CHARACTERS = 24


def plain(text: str) -> str:
    """`text` without control characters. The import stands inside because help must be answered at once."""
    from headstart.heads.escape import plain as escaped

    return escaped(text)


def count_text(number: float) -> str:
    """12,345 in full, larger numbers as 123.4k, 12.3M or 1.2G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= max(size, 1e5):
            return f"{number / size:.1f}{unit}"
    return f"{number:,.0f}"


def rate_text(rate: float) -> str:
    return f"{rate:.2g}" if rate < 10 else count_text(rate)


def duration(seconds: float) -> str:
    """0:01:15; seconds below a minute as 12 s."""
    return f"{seconds:.0f} s" if seconds < 59.5 else str(timedelta(seconds=round(seconds)))


class Note:
    """What stands below a bar: parts with two spaces between them. Those that the line has no room for are left out."""

    def __init__(self, text: str):
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        first, *others = self.text.split("  ")
        for part in others:
            if cell_len(f"{first}  {part}") > options.max_width:
                break
            first += f"  {part}"
        yield Text(first, no_wrap=True, overflow="ellipsis")


class Phase:
    """Work without a count.

    Attributes:
        name: what is being done.
        since: when it began, by the screen's clock.
        drawn: whether a terminal shows it in a line that moves; otherwise only silence is broken.
    """

    def __init__(self, name: str, since: float, drawn: bool = True):
        self.name, self.since, self.drawn = plain(name), since, drawn

    def line(self, now: float) -> str:
        return f"{self.name}: {duration(now - self.since)} so far"

    def rows(self, now: float) -> list[RenderableType]:
        """What a terminal shows."""
        return [Spinner("dots", Text(self.line(now), no_wrap=True, overflow="ellipsis"))]


class Bar(Phase):
    """Work with a count. Units: "s" counts seconds of a limit of time.

    Attributes:
        note: what stands beside the count, such as the loss; a terminal shows it in a line of its own.
        first: what is said of the time until the count first grows, if that differs from the time of later ones.
    """

    def __init__(self, name: str, unit: str, total: float | None, clock: Callable[[], float]):
        super().__init__(name, clock())
        self.unit, self.note, self.grown, self.told = plain(unit), "", self.since, -1.0
        self.first: str | None = None
        self._clock, self._first_grown = clock, math.inf
        # not started: it draws nothing, and estimates
        self._progress = Progress(auto_refresh=False, get_time=clock, speed_estimate_period=RATE_S)
        self._progress.add_task(self.name, total=total)
        self._task = self._progress.tasks[0]

    @property
    def done(self) -> float:
        return self._task.completed

    @property
    def total(self) -> float | None:
        return self._task.total

    @property
    def over(self) -> bool:
        return self.total is not None and self.done >= self.total

    def update(self, done: float, total: float | None = None, note: str | None = None) -> None:
        if done > self.done:
            self.grown, self.first = self._clock(), None
            self._first_grown = min(self._first_grown, self.grown)
        self._progress.update(self._task.id, completed=done, total=total)
        self.note = self.note if note is None else plain(note)

    def rate(self) -> float | None:
        """Units per second. None of a limit of time, and before counts cover LOOK_S: answers of a batch may come in
        one moment, which tells no rate."""
        if self.unit == "s" or self.grown - self._first_grown < LOOK_S:
            return None
        return self._task.speed or None

    def left(self) -> float | None:
        """Seconds that the rest takes at the present rate; None where no rate is known, and at the end."""
        if self.over or self.total is None:
            return None
        if self.unit == "s":
            return self.total - self.done
        return None if self.rate() is None else self._task.time_remaining

    def counted(self) -> str:
        """12 of 280 steps."""
        if self.unit == "s":
            return duration(self.done) + ("" if self.total is None else f" of {duration(self.total)}")
        of = "" if self.total is None else f" of {count_text(self.total)}"
        return f"{count_text(self.done)}{of} {noun_of(self.done if self.total is None else self.total, self.unit)}"

    def waited(self, now: float) -> str | None:
        """How long the count has not grown, where that is longer than SILENT_S."""
        still = now - self.grown >= SILENT_S and not self.over
        return f"this one for {duration(now - self.grown)}" if still else None

    def line(self, now: float) -> str:
        parts = [self.counted()]
        if (rate := self.rate()) is not None and not self.note:
            parts.append(f"{rate_text(rate)} {self.unit}/s")
        if (left := self.left()) is not None:
            parts.append(f"{duration(left)} left")
        if (waited := self.waited(now)) is not None:
            parts.append(f"{self.first} {duration(now - self.grown)}" if self.first else waited)
        return f"{self.name}: {', '.join(parts)}" + (f"  {self.note}" if self.note else "")

    def rows(self, now: float) -> list[RenderableType]:
        left, rate = self.left(), self.rate()
        right = [self.counted()]
        if (waited := self.waited(now)) is not None:  # a bar that stands still says that work goes on
            right.append(waited)
        elif rate is not None and not self.note:
            right.append(f"{rate_text(rate)}/s")
        if left is not None:
            right.append(f"{duration(left)} left")
        name = self.name if len(self.name) <= NAME_CHARACTERS else f"{self.name[: NAME_CHARACTERS - 1]}…"
        bar = ProgressBar(total=self.total, completed=self.done, animation_time=now, pulse=self.total is None)
        table = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
        table.add_row(Text(name), bar, Text("  ".join(right)))
        rows: list[RenderableType] = [table]
        if self.note:
            rows.append(Note(self.note))
        return rows


class Screen:
    """Shows phases, bars and messages of one process on stderr.

    Args:
        show: False shows nothing.
        console: where to; None takes stderr.
        clock: seconds; tests give their own.
    """

    def __init__(
        self, show: bool = True, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self.console = console or Console(stderr=True, highlight=False, markup=False, quiet=not show)
        self.show, self._clock = show, clock
        self._open: list[Phase] = []
        self._last = clock()
        self._held = False
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def say(self, message: str, style: str | None = None, whole: bool = False) -> None:
        """Print a message. On a terminal it is wrapped between words. Args: whole: a command, which is not wrapped."""
        self._say_asked()
        self._print(message, style, whole)

    def ask(self, message: str) -> None:
        """Have `message` said at once. A signal handler may call it, whatever it interrupts."""
        self._asked.put(message)

    @contextmanager
    def phase(self, name: str, said: bool = True, drawn: bool = True) -> Iterator[Phase]:
        """While open, this is what the process does.

        Args:
            said: whether a line says that it begins; otherwise it is named where it takes longer than SILENT_S.
            drawn: see Phase.
        """
        phase = Phase(name, self._clock(), drawn)
        if said:
            self.say(f"{phase.name} …")
        self.begin(phase)
        try:
            yield phase
        finally:
            self.end(phase)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, a person may be asked something: silence is not broken."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    @contextmanager
    def bar(self, name: str, unit: str, total: float | None = None) -> Iterator[Bar]:
        bar = self.new_bar(name, unit, total)
        self.begin(bar)
        try:
            yield bar
        finally:
            self.end(bar)

    def new_bar(self, name: str, unit: str, total: float | None = None) -> Bar:
        return Bar(name, unit, total, self._clock)

    def begin(self, phase: Phase) -> None:
        self._open.append(phase)
        if not self.show:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_after, name="screen", daemon=True)
            self._thread.start()
        if phase.drawn and self._live is None and self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._drawing, transient=True, refresh_per_second=5)
            self._live.start()

    def end(self, phase: Phase) -> None:
        if phase not in self._open:
            return
        self._open.remove(phase)
        if self._live is not None and not any(each.drawn for each in self._open):
            self._live.stop()
            self._live, self._last = None, self._clock()
            if isinstance(phase, Bar) and phase.done:  # the bar is gone: what it came to stays
                self.say(phase.line(self._clock()))
        if self._thread is not None and not self._open:
            self._asked.put(None)
            self._thread.join()
            self._thread = None
        self._say_asked()

    def tell(self, bar: Bar, always: bool = False) -> None:
        """Elsewhere than on a terminal: a line for the bar's count, if it is due.

        Args: always: whether the line is due whatever was shown a moment ago.
        """
        if self._live is not None or (bar.told == bar.done and not always):
            return
        now = self._clock()
        if always or bar.told < 0 or bar.over or now - self._last >= SILENT_S:
            bar.told = bar.done
            self._print(bar.line(now), whole=True)

    def beat(self) -> None:
        """Say what is being done if nothing was shown for SILENT_S. What moves on a terminal needs no line."""
        opened, now = tuple(self._open), self._clock()
        if opened and self._live is None and not self._held and now - self._last >= SILENT_S:
            if isinstance(opened[-1], Bar):
                opened[-1].told = opened[-1].done
            self._print(opened[-1].line(now), whole=True)

    def doing(self) -> str | None:
        """The name of the innermost phase, if it is inside a bar."""
        opened = tuple(self._open)
        inside = any(isinstance(each, Bar) for each in opened) and not isinstance(opened[-1], Bar)
        return opened[-1].name if inside else None

    def _print(self, message: str, style: str | None = None, whole: bool = False) -> None:
        self._last = self._clock()
        if not self.show:
            return
        self.console.print(plain(message), style=style, soft_wrap=whole or not self.console.is_terminal)

    def _drawing(self) -> RenderableType:
        """The innermost bar, and the innermost phase inside it."""
        now, inner, rows = self._clock(), None, []
        for phase in reversed(self._open.copy()):
            if isinstance(phase, Bar):
                rows += phase.rows(now)
                break
            if inner is None and phase.drawn:
                inner = phase
        return Group(*rows, *(inner.rows(now) if inner is not None else []))

    def _look_after(self) -> None:
        while True:
            with suppress(queue.Empty):
                message = self._asked.get(timeout=LOOK_S)
                if message is None:
                    return
                self._print(message)
            self.beat()

    def _say_asked(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._print(self._asked.get_nowait() or "")
