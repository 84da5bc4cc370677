"""The report of an evaluation: one JSON (schema 1) from which the terminal table and the Markdown are rendered."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from headstart.heads.errors import DataError, HeadstartError
from headstart.heads.escape import code, line, markdown, plain, table
from headstart.heads.files import read_json, write_json, write_text
from headstart.heads.formats.flags import TITLES, flag_of
from headstart.heads.formats.plots import draw_plots
from headstart.heads.published import published

SCHEMA = 1


@dataclass
class Numbers:
    """What was measured on some prompts. τ is methods §0's: tokens committed per target forward after prefill.

    Attributes:
        per_position_acceptance: unconditional, accepted at depth d ÷ number of drafts.
        per_position_conditional: given that all earlier depths were accepted.
        baseline_tokens_per_s, tokens_per_s: decode phase only, plain and speculative, in the same loop.
        speedup: by the clock, so what a batch loses as its rows end counts.
        speedup_ci95: of prompts resampled, at batch 1.
        row_speedup: by the time that rows spent decoding, as where a server replaces ended rows at once.
        latency: of "baseline" and "speculative" (None where it did not run): `first_token_p50_ms`, `first_token_p95_ms`
            (prefill; a batch's prompts wait together), `token_p50_ms`, `token_p95_ms` (a cycle's time ÷ its tokens).
    """

    prompts: int
    forwards: int
    tokens: int
    tau: float
    tau_ci95: list[float] | None
    per_position_acceptance: list[float]
    per_position_conditional: list[float | None]
    tokens_per_s: float | None
    baseline_tokens_per_s: float | None
    speedup: float | None
    latency: dict[str, dict[str, float | None] | None] | None = None
    speedup_ci95: list[float] | None = None
    row_speedup: float | None = None

    def numbers(self) -> dict[str, Any]:
        """By name, what both a task's section and a report hold."""
        return {f.name: getattr(self, f.name) for f in fields(Numbers)}


@dataclass
class Section(Numbers):
    """Numbers of one task, or of all of them.

    Attributes:
        identity: {"sequences", "identical"} of speculative against plain, greedy runs with a baseline only.
    """

    identity: dict[str, int] | None = None


@dataclass(kw_only=True)
class Report(Numbers):
    """Everything an evaluation measured, of all tasks together and of each, and what it was made from."""

    target: dict[str, Any]
    head: dict[str, Any] | None
    drafter: str
    data: dict[str, Any]
    dtype: str
    device: str
    temperature: float
    lossless: bool
    tree: dict[str, Any]
    batch_size: int
    max_new_tokens: int
    tasks: dict[str, Section]
    greedy_identity: dict[str, Any] | None
    timing: dict[str, float | None]
    sampling: dict[str, Any]
    recipe: dict[str, Any]
    versions: dict[str, str]
    git_revision: str
    notes: list[str] = field(default_factory=list)
    #: the running server that was measured (name, version, url, model), or None for Headstart's own loop
    engine: dict[str, Any] | None = None
    #: acceptance by level that was asked for (eval.synthetic_acceptance), τ is not the head's; None: the target decided
    synthetic: list[float] | None = None
    #: plain and speculative decoding over batch sizes ("batch") and context lengths ("context"), where asked for
    sweeps: dict[str, Any] | None = None
    #: milliseconds of a cycle's parts: draft_ms, verify_ms, rest_ms
    cycle: dict[str, float] | None = None
    #: HF generate at batch 1, where asked for; its label stands beside it
    generate: dict[str, Any] | None = None
    #: command line of the process that measured this
    command: str | None = None
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def published(self) -> Report:
        """The report as others may see it (`heads/published.py`): evaluations give no other."""
        return Report.from_json(published(self.to_json()))

    @classmethod
    def from_json(cls, value: dict[str, Any], where: str = "report") -> Report:
        """Raises DataError when the schema is another or a field is missing."""
        if not isinstance(value, dict):
            raise DataError(f"{where}: found {type(value).__name__}, expected a JSON object")
        if value.get("schema") != SCHEMA:
            raise DataError(f"{where}: schema: found {value.get('schema')!r}, expected {SCHEMA}")
        kept = _known(cls, value, where)
        if not isinstance(kept["tasks"], dict):
            raise DataError(f"{where}: tasks: found {type(kept['tasks']).__name__}, expected a JSON object")
        kept["tasks"] = {
            name: Section(**_known(Section, section, f"{where}: tasks.{name}"))
            for name, section in kept["tasks"].items()
        }
        return cls(**kept)

    @classmethod
    def read(cls, directory: Path | str) -> Report:
        path = Path(directory) / "report.json"
        return cls.from_json(read_json(path), str(path))

    def save(self, directory: Path | str) -> Path:
        """Write report.json (atomically), from which everything else is made; returns its path.

        It is shown to others: of paths, files and servers it holds what `heads/published.py` lets out.
        """
        directory = Path(directory)
        write_json(directory / "report.json", published(self.to_json()))
        (directory / "report.md").unlink(missing_ok=True)  # of another measurement
        return directory / "report.json"

    def render(self, directory: Path | str) -> None:
        """Write report.md and its plots beside report.json (atomically)."""
        directory, shown = Path(directory), self.published()
        images = "".join(f"\n![{Path(name).stem}]({name})\n" for name in draw_plots(shown.to_json(), directory))
        write_text(directory / "report.md", render_markdown(shown) + images)

    def write(self, directory: Path | str, say: Callable[[str], None] = print) -> Path:
        """`save`, then `render`, whose failure is told and costs nothing; returns the path of report.json."""
        path = self.save(directory)
        render_saved(path, say)
        return path

    @property
    def flag(self) -> str | None:
        """LOSSY or SYNTHETIC: what stands beside τ and speed-up; None where the output is the target's own."""
        return flag_of({"synthetic": self.synthetic, "lossless": self.lossless})

    @property
    def total(self) -> Section:
        identity = self.greedy_identity
        counts = {name: identity[name] for name in ("sequences", "identical")} if identity else None
        return Section(**self.numbers(), identity=counts)


def render_saved(path: Path, say: Callable[[str], None]) -> bool:
    """Render a saved report.json; False where that failed, which `say` is told with the remedy."""
    try:
        Report.read(path.parent).render(path.parent)
    except Exception as error:  # noqa: BLE001 - whatever a renderer meets, the measurement is saved
        cause = str(error) if isinstance(error, HeadstartError) else f"{type(error).__name__}: {error}"
        say(
            f"WARNING: {path} holds the measurement, but report.md and its plots could not be written ({cause}). "
            f"`headstart report {shlex.quote(str(path.parent))}` makes them again"
        )
        return False
    return True


def _known(cls: type, value: Any, where: str) -> dict[str, Any]:
    """The fields of a dataclass that a JSON object holds. Raises DataError when one without a default is missing."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: found {type(value).__name__}, expected a JSON object")
    needed = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(needed - set(value)):
        raise DataError(f"{where}: fields missing: {missing}")
    return {f.name: value[f.name] for f in fields(cls) if f.name in value}


TAU_NOTE = "τ = tokens committed per target forward after prefill (plain decoding = 1)"

COLUMNS = (
    "task",
    "prompts",
    "τ",
    "95 %",
    "acceptance by position",
    "plain tok/s",
    "spec. tok/s",
    "speed-up (clock)",
    "identical",
)
#: beside it where rows end apart
ROW_COLUMN = "speed-up (row time)"
ROW_NOTE = (
    "speed-up (clock): tokens of whole batches by the wall clock, the places of ended rows stay empty; "
    "speed-up (row time): by the time that rows spent decoding, as where a server fills those places at once"
)


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{suffix}"


def rates_text(values: list[float] | list[float | None]) -> str:
    return " ".join("–" if v is None else f"{v:.3f}".replace("0.", ".", 1) for v in values) or "–"


def interval_text(interval: list[float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}"


def speedup_text(speedup: float | None, interval: list[float] | None) -> str:
    """`1.80×`, with its interval where there is one: `1.80× (1.72–1.88)`."""
    return number(speedup, 2, "×") + ("" if interval is None else f" ({interval_text(interval)})")


def _by_row(report: Report) -> bool:
    """Whether the report tells the speed-up by row time as well: alone in a batch, a row's time is the clock's."""
    return report.batch_size > 1 and report.row_speedup is not None


def _columns(report: Report) -> tuple[str, ...]:
    return (*COLUMNS[:-1], *([ROW_COLUMN] if _by_row(report) else []), COLUMNS[-1])


def _cells(name: str, section: Section, by_row: bool) -> tuple[str, ...]:
    identity = section.identity
    return (
        name,
        str(section.prompts),
        number(section.tau),
        interval_text(section.tau_ci95),
        rates_text(section.per_position_acceptance),
        number(section.baseline_tokens_per_s, 1),
        number(section.tokens_per_s, 1),
        speedup_text(section.speedup, section.speedup_ci95),
        *([number(section.row_speedup, 2, "×")] if by_row else []),
        "–" if identity is None else f"{identity['identical']}/{identity['sequences']}",
    )


def _sections(report: Report) -> list[tuple[str, Section]]:
    tasks = sorted(report.tasks.items()) if len(report.tasks) > 1 else []
    return [*tasks, ("all", report.total)]


def _title(report: Report) -> str:
    acceptance = "lossless" if report.flag is None else TITLES[report.flag]
    return (
        f"{report.drafter} on {report.target['name']} · {report.tree['label']} · temperature {report.temperature:g} · "
        f"{acceptance} · {report.dtype} · batch {report.batch_size} · {report.device}"
    )


#: longest word, in characters, that a column of the terminal is kept wide enough for: paths may be longer
WORD = 24


@dataclass(frozen=True)
class Fitted:
    """A table for the terminal, in as many parts as the width asks for, each with the first column.

    Lines break between words only; words longer than WORD, which are paths, go on in the next line.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    caption: str = ""
    #: columns that are read from the left (None: all), and rows below which a line is drawn
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


def render_table(report: Report) -> Fitted:
    """Terminal table: one row per task and one for everything."""
    rows = [_cells(name, section, _by_row(report)) for name, section in _sections(report)]
    # the last row is the total of the others
    return Fitted(
        _title(report), _columns(report), rows, "\n".join([TAU_NOTE, *report.notes]), (0, 4), (len(rows) - 2,)
    )


def render_tables(report: Report) -> Group:
    """Everything for the terminal: `render_table`, latency, sweeps, HF `generate`."""
    more = [Fitted(title, columns, rows) for title, columns, rows in _more_tables(report)]
    return Group(render_table(report), *more, *(Text(plain(remark)) for remark in remarks(report)))


WAYS = ("baseline", "speculative")
LATENCY_COLUMNS = ("task", *(f"{way} {what}" for way in ("plain", "spec.") for what in ("first token", "per token")))


def _more_tables(report: Report) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """(title, columns, rows) of everything that was timed beside the main numbers."""
    if report.latency is not None:
        title = f"latency in ms, median / 95th percentile, batch {report.batch_size} (first token = prefill)"
        yield title, LATENCY_COLUMNS, [(name, *latency_cells(section.latency)) for name, section in _sections(report)]
    sweeps = report.sweeps or {}
    for name, points in ((name, sweep["points"]) for name, sweep in sweeps.items()):
        title = "speed-up by batch" if name == "batch" else f"speed-up by context, batch {report.batch_size}"
        yield title, (name, *SWEEP_COLUMNS), [_sweep_cells(name, point) for point in points]


def latency_cells(latency: dict[str, dict[str, float | None] | None] | None) -> list[str]:
    """Plain first token, plain per token, the same of speculation; each "median / 95th percentile" in ms."""
    shown = []
    for way in WAYS:
        values = (latency or {}).get(way) or {}
        for what in ("first_token", "token"):
            pair = [values.get(f"{what}_p{percent}_ms") for percent in (50, 95)]
            shown.append("–" if pair[0] is None else " / ".join(number(value) for value in pair))
    return shown


SWEEP_COLUMNS = (
    "rows", "prompts", "plain tok/s", "spec. tok/s", COLUMNS[-2], ROW_COLUMN, "τ", "plain per token", "spec. per token",
    "active",
)  # fmt: skip


def _sweep_cells(name: str, point: dict[str, Any]) -> tuple[str, ...]:
    if point.get("out_of_memory"):
        return (str(point[name]), "out of memory", *["–"] * (len(SWEEP_COLUMNS) - 1))
    cells = latency_cells({way: point.get(f"{way}_latency") for way in WAYS})
    active = [point.get(f"{way}_active_rows") for way in WAYS]
    return (
        str(point[name]), str(point["rows"]), str(point["prompts"]), number(point["baseline_tokens_per_s"], 1),
        number(point.get("speculative_tokens_per_s"), 1), number(point.get("speedup"), 2, "×"),
        number(point.get("row_speedup"), 2, "×"), number(point.get("tau")), cells[1], cells[3],
        " / ".join(number(value, 1) for value in active),
    )  # fmt: skip


def remarks(report: Report) -> list[str]:
    """Sentences that go with the tables."""
    lines = [ROW_NOTE] if _by_row(report) or report.sweeps else []
    for sweep in (report.sweeps or {}).values():
        lines += [sweep[key] for key in ("says", "note") if sweep.get(key)]
    if report.sweeps:
        lines.append("active: rows that a cycle decoded, plain / spec.; per token in ms, median / 95th percentile")
    if report.cycle is not None:
        named = ("draft", "verify", "rest")
        spent = ", ".join(f"{name} {number(report.cycle[f'{name}_ms'], 2)}" for name in named)
        lines.append(f"parts of a cycle in ms, batch {report.batch_size}: {spent}")
    if (ready := report.timing.get("ready_s")) is not None:
        lines.append(f"measuring began {number(ready, 1)} s after the target was loaded")
    if report.generate is not None:
        found = report.generate
        rate = number(found["tokens_per_s"], 1)
        lines.append(f"{found['label']}: {rate} tokens/s at batch 1 on {found['prompts']} contexts, prefill apart")
    return lines


def render_markdown(report: Report) -> str:
    heading = markdown(f"{report.drafter} on {report.target['name']}")
    lines = [f"# {heading}", "", markdown(_title(report)), ""]
    lines += table(_columns(report), [_cells(name, section, _by_row(report)) for name, section in _sections(report)])
    lines += ["", f"{TAU_NOTE}.", ""]
    lines += [f"Acceptance given all earlier positions: {rates_text(report.per_position_conditional)}.", ""]
    for title, columns, rows in _more_tables(report):
        lines += [f"## {title[0].upper()}{title[1:]}", "", *table(columns, rows), ""]
    for remark in remarks(report):
        lines += [f"{markdown(remark[0].upper() + remark[1:])}.", ""]
    identity = report.greedy_identity
    if identity:
        lines.append(
            f"Greedy identity with plain decoding ({identity['dtype']}): "
            f"{identity['identical']} of {identity['sequences']} sequences."
        )
        for case in identity["divergences"]:
            place = f"turn {case['turn'] + 1}, token {case['position']}"
            gap = f"target's top-2 logit gap {case['gap']:.4g}"
            lines.append(f"- {markdown(case['id'])}: first differs at {place}, {gap}")
        lines.append("")
    lines += [f"- {markdown(note)}" for note in report.notes]
    data = markdown(report.data["path"])
    lines += [f"- data: {data}, {report.prompts} prompts, at most {report.max_new_tokens} new tokens"]
    lines += [f"- {name}: {number(value, 2)}" for name, value in report.timing.items()]
    lines += [f"- command: {code(report.command)}"] if report.command else []
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines += [f"- revision {report.git_revision}; {markdown(versions)}"]
    return "\n".join(lines) + "\n"
