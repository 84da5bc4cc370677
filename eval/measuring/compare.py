"""Several reports side by side: a terminal table, Markdown, a page, and a plot of the speed-up by batch size."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from headstart.eval.measuring.fitted import Fitted
from headstart.eval.measuring.page.page import contents, write_page
from headstart.eval.measuring.rendering import latency_cells, number_cells, page_said, remarks, render_markdown
from headstart.eval.measuring.report import Report
from headstart.eval.measuring.wording import TAU_NOTE, identical_text, number
from headstart.heads.errors import DataError, in_one_line
from headstart.heads.escape import markdown, table
from headstart.heads.files import atomic_write, write_text
from headstart.heads.formats.flags import LOSSLESS_RULES, MEANINGS
from headstart.heads.formats.plots import drawn, save_figure

BATCHES, PAGE = "batches.png", "comparison.html"
COLUMNS = (
    "run", "target", "drafter", "tree", "temperature", "acceptance", "batch", "prompts", "τ", "95 %", "by position",
    "plain tokens/s", "spec. tokens/s", "speed-up (clock)", "first token ms", "plain ms/token", "spec. ms/token",
    "identical", "device",
)  # fmt: skip
#: rows of the terminal's table below which a line is drawn
GROUPS = ("prompts", "by position", "speed-up (clock)", "spec. ms/token")

LATENCY_NOTE = "latencies: median / 95th percentile; first token = prefill"


def read_reports(places: list[Path]) -> dict[str, Report]:
    """Label → report. A label is the end of a path, as short as tells the runs apart.

    Args: places: directories with a report.json.
    Raises: DataError when one is missing, cannot be read, or is named twice.
    """
    resolved = [place.resolve() for place in places]
    repeated = sorted({str(place) for place in resolved if resolved.count(place) > 1})
    if repeated:
        raise DataError(f"report: {repeated[0]} is given more than once: name each run once")
    for place in places:
        if not (place / "report.json").is_file():
            raise DataError(
                f"report: {place}: no report.json there; expected a folder written by headstart eval or run"
            )
    parts = max(len(place.parts) for place in resolved)
    length = next(n for n in range(1, parts + 1) if len({place.parts[-n:] for place in resolved}) == len(resolved))
    reports = {}
    for place in resolved:
        label = "/".join(place.parts[-length:])
        reports[label] = Report.read(place)
        _require_legible(label, reports[label], place)
    return reports


def _require_legible(label: str, report: Report, place: Path) -> None:
    """Raise DataError for a report with values of other types than an evaluation writes."""
    one = {label: report}
    try:
        differences(one), speedups_by_batch(one), comparison_markdown(one), render_markdown(report)
        contents({label: report.published().to_json()}, page_said(one))
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            Console(file=nowhere).print(comparison_table(one))
    except Exception as error:  # noqa: BLE001 - a value of another type can fail anywhere
        raise DataError(
            f"{place / 'report.json'}: holds a value that no evaluation writes and that cannot be shown "
            f"({in_one_line(error)}): restore the file, or evaluate again"
        ) from error


def kind_of_acceptance(report: Report) -> str:
    """lossless, LOSSY or SYNTHETIC: shown beside every τ."""
    return report.flag or "lossless"


def _marked(label: str, report: Report) -> str:
    """The label for places that do not show the kind of acceptance: `label (LOSSY)`."""
    return label if report.flag is None else f"{label} ({report.flag})"


def _legend(reports: dict[str, Report]) -> list[str]:
    """The meanings of the flags that these reports have."""
    return [meaning for flag, meaning in MEANINGS.items() if any(report.flag == flag for report in reports.values())]


def _cells(label: str, report: Report) -> tuple[str, ...]:
    plain_first, plain_token, first, token = latency_cells(report.latency)
    return (
        label, str(report.target["name"]), report.drafter, str(report.tree["label"]), f"{report.temperature:g}",
        kind_of_acceptance(report), str(report.batch_size), *number_cells(report),
        plain_first if first == "–" else first, plain_token, token, identical_text(report.greedy_identity),
        report.device,
    )  # fmt: skip


def differences(reports: dict[str, Report]) -> list[str]:
    """Why the numbers of the runs cannot be compared: other prompts, target, sampling, length limit, dtype or card.

    Drafter, tree and batch size may differ: runs are compared to see what these change.
    """
    runs = list(reports.values())
    sentences = []
    for what, differs in (
        ("prompts", _several((r.data.get("sha256"), r.prompts, _half(r)) for r in runs)),
        ("targets", _several(r.target["name"] for r in runs)),
        ("the target's weights", _same_name_other_weights(runs)),
        ("tokenizer or chat template", _differ([r.target for r in runs], ("tokenizer_hash", "template_hash"))),
        ("temperature", _several(r.temperature for r in runs)),
        ("sampling", _differ([r.sampling for r in runs], ("top_k", "top_p", "min_p", "repetition_penalty"))),
        ("acceptance", _several((kind_of_acceptance(r), tuple(r.synthetic or ())) for r in runs)),
        ("verification", _several(r.verification for r in runs if r.verification in LOSSLESS_RULES)),
        ("max_new_tokens", _several(r.max_new_tokens for r in runs)),
        ("dtypes", _several(r.dtype for r in runs)),
        ("devices", _several(r.device for r in runs)),
        ("engines", _several((r.engine or {}).get("name", "Headstart") for r in runs)),
    ):
        if differs:
            sentences.append(f"the runs differ in {what}")
    return sentences


def _half(report: Report) -> str:
    """Which half of the prompts was asked, or "None" for all of them (`eval.half`)."""
    return str((report.recipe.get("eval") or {}).get("half"))


def _several(values: Iterable[Any]) -> bool:
    return len(set(values)) > 1


def _same_name_other_weights(runs: list[Report]) -> bool:
    """Whether targets of one name and dtype hold different weights."""
    known = {(r.target["name"], r.dtype, r.target["weight_hash"]) for r in runs if r.target.get("weight_hash")}
    return len(known) > len({key[:2] for key in known})


def _differ(tables: list[dict[str, Any]], names: tuple[str, ...]) -> bool:
    """Whether one of the fields has several values. Runs without the field do not count."""
    return any(_several(table[name] for table in tables if table.get(name) is not None) for name in names)


def comparison_table(reports: dict[str, Report]) -> Group:
    """For the terminal: one row per quantity and one column per run. Below it stand notes on how to read the numbers,
    what the flags mean, and in what the runs differ."""
    # the first cell is the label, which heads the column
    cells = [_cells(label, report)[1:] for label, report in reports.items()]
    rows = list(zip(COLUMNS[1:], *cells, strict=True))
    heads = (COLUMNS[0], *(_marked(label, report) for label, report in reports.items()))
    lines = tuple(n for n, row in enumerate(rows) if row[0] in GROUPS)
    notes = [TAU_NOTE, LATENCY_NOTE, *_legend(reports), *differences(reports)]
    return Group(Fitted("", heads, rows, left=None, lines=lines), *map(Text, notes))


def comparison_markdown(reports: dict[str, Report]) -> str:
    """The table, then τ and speed-up by task if there are several tasks, then the notes."""
    lines = ["# Runs side by side", ""]
    lines += table(COLUMNS, [_cells(label, report) for label, report in reports.items()])
    tasks = sorted({task for report in reports.values() for task in report.tasks})
    if len(tasks) > 1:
        marked = [_marked(label, report) for label, report in reports.items()]
        for title, text in (
            ("τ by task", lambda section: number(section.tau)),
            ("Speed-up (clock) by task", lambda section: number(section.speedup, 2, "×")),
        ):
            rows = [
                (task, *(text(r.tasks[task]) if task in r.tasks else "–" for r in reports.values())) for task in tasks
            ]
            lines += ["", f"## {title}", "", *table(("task", *marked), rows)]
    lines += ["", f"{TAU_NOTE}; {LATENCY_NOTE}.", ""]
    lines += [f"- {markdown(note)}" for note in (*_legend(reports), *differences(reports))]
    for name, report in reports.items():
        lines += [f"- {markdown(f'{name}: {note}')}" for note in (*report.notes, *remarks(report))]
    return "\n".join(lines) + "\n"


def speedups_by_batch(reports: dict[str, Report]) -> dict[str, list[tuple[int, float]]]:
    """Curves of speed-up by batch size: description, with the kind of acceptance → (batch, speed-up), two or more.

    A curve is the sweep of one run, or several runs that differ in batch size only.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    for label, report in reports.items():
        points = ((report.sweeps or {}).get("batch") or {}).get("points", [])
        swept = [(point["batch"], point["speedup"]) for point in points if point.get("speedup") is not None]
        if swept:
            curves[_marked(label, report)] = swept
        elif report.speedup is not None:
            name = (
                f"{report.drafter} on {report.target['name']}, {report.tree['label']}, temperature "
                f"{report.temperature:g}, {kind_of_acceptance(report)}, {report.device}"
            )
            curves.setdefault(name, []).append((report.batch_size, report.speedup))
    return {name: sorted(points) for name, points in curves.items() if len({batch for batch, _ in points}) > 1}


def write_comparison(reports: dict[str, Report], directory: Path) -> Path:
    """Write comparison.md and comparison.html, and batches.png where runs form a batch sweep.

    Returns: the path of the Markdown.
    """
    text, curves = comparison_markdown(reports), speedups_by_batch(reports)
    if curves:
        atomic_write(directory / BATCHES, partial(_plot, curves))
        text += f"\n![speed-up by batch]({BATCHES})\n"
    write_text(directory / "comparison.md", text)
    shown = {label: report.published() for label, report in reports.items()}
    values = {label: report.to_json() for label, report in shown.items()}
    write_page(values, directory / PAGE, page_said(shown, differences(reports)))
    return directory / "comparison.md"


def _plot(curves: dict[str, list[tuple[int, float]]], place: Path) -> None:
    from matplotlib.figure import Figure  # the object interface keeps no global state and needs no display

    figure: Any = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=drawn(name, 200))
    axes.axhline(1.0, color="grey", linewidth=0.8)
    batches = sorted({batch for points in curves.values() for batch, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("batch")
    axes.set_ylabel("speed-up (clock)")
    axes.legend(fontsize=7)
    save_figure(figure, place)
