"""Shows a report: tables for the terminal, report.md with its plots, and report.html."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from headstart.eval.measuring.fitted import Fitted
from headstart.eval.measuring.page.page import Said, write_page
from headstart.eval.measuring.report import Numbers, Report, Section
from headstart.eval.measuring.verdict import markdown_of
from headstart.eval.measuring.wording import (
    TAU_NOTE,
    identical_text,
    interval_text,
    number,
    rates_text,
    speedup_text,
)
from headstart.heads.counting import counted
from headstart.heads.errors import HeadstartError
from headstart.heads.escape import code, markdown, plain, table
from headstart.heads.files import write_text
from headstart.heads.formats.flags import LOSSLESS_RULES, TITLES
from headstart.heads.formats.plots import draw_plots, first_plot_note

COLUMNS = (
    "task", "prompts", "τ", "95 %", "acceptance by position", "plain tokens/s", "spec. tokens/s", "speed-up (clock)",
    "identical",
)  # fmt: skip
#: one more column for batches, whose rows end at different times
ROW_COLUMN = "speed-up (row time)"
#: shapes that are shown of every batch size: those that ran most
SHOWN_SHAPES = 3
ROW_NOTE = (
    "speed-up (clock): tokens of all rows by the wall clock, places that stay empty included; "
    "speed-up (row time): by the time that rows spent decoding, as on a server where no place is ever empty"
)


def _by_row(report: Report) -> bool:
    """Whether the speed-up by row time is shown as well: at batch 1 it is the same as by the clock."""
    return report.batch_size > 1 and report.row_speedup is not None


def _columns(report: Report) -> tuple[str, ...]:
    return (*COLUMNS[:-1], *([ROW_COLUMN] if _by_row(report) else []), COLUMNS[-1])


def number_cells(numbers: Numbers) -> list[str]:
    """From prompts to the speed-up by the clock."""
    return [
        str(numbers.prompts),
        number(numbers.tau),
        interval_text(numbers.tau_ci95),
        rates_text(numbers.per_position_acceptance),
        number(numbers.baseline_tokens_per_s, 1),
        number(numbers.tokens_per_s, 1),
        speedup_text(numbers.speedup, numbers.speedup_ci95),
    ]


def _cells(name: str, section: Section, by_row: bool) -> tuple[str, ...]:
    row_speedup = [number(section.row_speedup, 2, "×")] if by_row else []
    return (name, *number_cells(section), *row_speedup, identical_text(section.identity))


def _sections(report: Report) -> list[tuple[str, Section]]:
    tasks = sorted(report.tasks.items()) if len(report.tasks) > 1 else []
    return [*tasks, ("all", report.total)]


def _title(report: Report) -> str:
    acceptance = "lossless" if report.flag is None else TITLES[report.flag]
    if report.verification in LOSSLESS_RULES:
        acceptance += f" ({report.verification} verification)"
    cut = report.cut or {"cut": 0}
    limit = ""
    if cut["cut"]:
        tokens = counted(report.max_new_tokens, "tokens")
        limit = f" · {cut['cut']} of {counted(cut['answers'], 'answers')} cut at {tokens}"
    if report.longer is not None:
        limit += f", τ {report.longer['tau']:.2f} with up to {report.longer['max_new_tokens']}"
    return (
        f"{report.drafter} on {report.target['name']} · {report.tree['label']} · temperature {report.temperature:g} · "
        f"{acceptance} · {report.dtype} · batch {report.batch_size} · {report.device}{limit}"
    )


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
    """(title, columns, rows) of the tables after the first: latency and sweeps."""
    if report.latency is not None:
        title = f"latency in ms, median / 95th percentile, batch {report.batch_size} (first token = prefill)"
        yield title, LATENCY_COLUMNS, [(name, *latency_cells(section.latency)) for name, section in _sections(report)]
    sweeps = report.sweeps or {}
    for name, points in ((name, sweep["points"]) for name, sweep in sweeps.items()):
        title = "speed-up by batch" if name == "batch" else f"speed-up by context, batch {report.batch_size}"
        yield title, (name, *SWEEP_COLUMNS), [_sweep_cells(name, point) for point in points]


def latency_cells(latency: dict[str, dict[str, float | None] | None] | None) -> list[str]:
    """Plain first token, plain per token, and both for speculation; each "median / 95th percentile" in ms."""
    shown = []
    for way in WAYS:
        values = (latency or {}).get(way) or {}
        for what in ("first_token", "token"):
            pair = [values.get(f"{what}_p{percent}_ms") for percent in (50, 95)]
            shown.append("–" if pair[0] is None else " / ".join(number(value) for value in pair))
    return shown


SWEEP_COLUMNS = (
    "rows", "prompts", "plain tokens/s", "spec. tokens/s", COLUMNS[-2], ROW_COLUMN, "τ", "plain per token",
    "spec. per token", "active",
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


def _cost_text(cost: dict[str, float] | None) -> str:
    if cost is None:
        return ""
    wall, device = (number(cost[key], 1) for key in ("wall_ms", "device_ms"))
    if cost["wall_ms"] == cost["device_ms"]:
        return f". A plain cycle took {wall} ms, replayed on the card without the host"
    return f". A plain cycle took {wall} ms, of which the card worked at most {device} ms and otherwise waited"


def shape_text(shape: dict[str, Any]) -> str:
    """A cycle's shape in words. Args: shape: of the report; nodes are of a row, rows of the whole batch."""
    levels, nodes, rows = (shape[name] for name in ("levels", "nodes", "rows"))
    if levels == 0:
        return "plain decoding"
    size = f"chain of {levels}" if nodes is None else f"tree of {nodes} on {levels} levels"
    return size + ("" if rows is None else f" cut to {rows} rows of the batch")


def scheduler_lines(scheduler: dict[str, Any]) -> list[str]:
    """Rows per cycle, and the shapes that ran most at every batch size. Args: scheduler: a report's."""
    spent = number(scheduler["verified_per_cycle"])
    lines = [
        f"scheduler: a cycle verified {spent} rows per sequence on average, the root included; acceptance by position "
        "counts drafts that were left out as not accepted"
    ]
    for batch, book in sorted(scheduler["batches"].items(), key=lambda item: int(item[0])):
        total = sum(shape["cycles"] for shape in book["shapes"])
        often = sorted(book["shapes"], key=lambda shape: -shape["cycles"])[:SHOWN_SHAPES]
        shares = [f"{shape_text(s)} in {s['cycles'] / total:.0%} of the cycles" for s in often if s["cycles"]]
        if shares:
            lines.append(f"scheduler at batch {batch}: {', '.join(shares)}")
    return lines


def remarks(report: Report) -> list[str]:
    """Sentences that go with the tables."""
    lines = [ROW_NOTE] if _by_row(report) or report.sweeps else []
    for sweep in (report.sweeps or {}).values():
        lines += [sweep[key] for key in ("says", "note") if sweep.get(key)]
    if report.sweeps:
        lines.append("active: rows that a cycle decoded, plain / spec.; per token in ms, median / 95th percentile")
    if report.engine_note is not None:
        lines.append(report.engine_note + _cost_text(report.engine_cost))
    if report.cycle is not None:
        named = ("draft", "verify", "rest")
        spent = ", ".join(f"{name} {number(report.cycle[f'{name}_ms'], 2)}" for name in named)
        lines.append(f"parts of a cycle in ms, batch {report.batch_size}: {spent}")
    if report.scheduler is not None:
        lines += scheduler_lines(report.scheduler)
    if (ready := report.timing.get("ready_s")) is not None:
        lines.append(f"measuring began {number(ready, 1)} s after the target was loaded")
    if report.generate is not None:
        hf = report.generate
        rate = number(hf["tokens_per_s"], 1)
        contexts = counted(hf["prompts"], "contexts")
        lines.append(f"{hf['label']}: {rate} tokens/s at batch 1 on {contexts}, prefill apart")
    return lines


def render_markdown(report: Report) -> str:
    heading = markdown(f"{report.drafter} on {report.target['name']}")
    verdict = [] if report.verdict is None else markdown_of(report.verdict, markdown)
    lines = [f"# {heading}", "", *verdict, markdown(_title(report)), ""]
    lines += table(_columns(report), [_cells(name, section, _by_row(report)) for name, section in _sections(report)])
    lines += ["", f"{TAU_NOTE}.", ""]
    lines += [f"Acceptance given all earlier positions: {rates_text(report.per_position_conditional)}.", ""]
    for title, columns, rows in _more_tables(report):
        lines += [f"## {title[0].upper()}{title[1:]}", "", *table(columns, rows), ""]
    for remark in remarks(report):
        lines += [markdown(_sentence(remark)), ""]
    identity = report.greedy_identity
    if identity:
        lines.append(
            f"Greedy identity with plain decoding ({identity['dtype']}): "
            f"{identity['identical']} of {counted(identity['sequences'], 'sequences')}."
        )
        for case in identity["divergences"]:
            place = f"turn {case['turn'] + 1}, token {case['position']}"
            gap = f"target's top-2 logit gap {case['gap']:.4g}"
            lines.append(f"- {markdown(case['id'])}: first differs at {place}, {gap}")
        lines.append("")
    lines += [f"- {markdown(note)}" for note in report.notes]
    data = markdown(report.data["path"])
    lines += [f"- data: {data}, {counted(report.prompts, 'prompts')}, at most {report.max_new_tokens} new tokens"]
    lines += [f"- {name}: {number(value, 2)}" for name, value in report.timing.items()]
    lines += [f"- command: {code(report.command)}"] if report.command else []
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines += [f"- revision {report.git_revision}; {markdown(versions)}"]
    return "\n".join(lines) + "\n"


def write_report(report: Report, directory: Path | str, say: Callable[[str], None] = print) -> Path:
    """Save report.json and render it; returns its path. If rendering fails, `say` gets a warning."""
    path = report.save(directory)
    render_saved(path, say)
    return path


def page_said(reports: Mapping[str, Report], differences: Sequence[str] = ()) -> Said:
    """What the HTML page says beside the numbers of these runs."""
    titles = {label: _title(report) for label, report in reports.items()}
    notes = {label: [*report.notes, *map(_sentence, remarks(report))] for label, report in reports.items()}
    return Said(titles, notes, differences)


def _sentence(remark: str) -> str:
    return f"{remark[0].upper()}{remark[1:]}."


def render_report(report: Report, directory: Path) -> None:
    """Write report.md, its plots and report.html beside report.json (atomically)."""
    shown = report.published()
    write_page({"": shown.to_json()}, directory / "report.html", page_said({"": shown}))
    images = "".join(f"\n![{Path(name).stem}]({name})\n" for name in draw_plots(shown.to_json(), directory))
    write_text(directory / "report.md", render_markdown(shown) + images)


def render_saved(path: Path, say: Callable[[str], None]) -> bool:
    """Render a saved report.json. Returns whether that worked; if not, `say` gets the cause and the remedy."""
    try:
        if (note := first_plot_note()) is not None:
            say(note)
        render_report(Report.read(path.parent), path.parent)
    except Exception as error:  # noqa: BLE001 - no failure of rendering may lose the run: the measurement is saved
        cause = str(error) if isinstance(error, HeadstartError) else f"{type(error).__name__}: {error}"
        say(
            f"WARNING: {path} holds the measurement, but report.md, report.html or their plots could not be written "
            f"({cause}). "
            f"`headstart report {shlex.quote(str(path.parent))}` makes them again"
        )
        return False
    return True
