"""The report as one HTML page: no network, no other file, no script that it could not do without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.eval.measuring.page import about, measured, told, trained
from headstart.eval.measuring.page.figures import drawing, svg_of
from headstart.eval.measuring.page.panel import Panel, Plot, Runs, several
from headstart.eval.measuring.verdict import shown_title
from headstart.heads.escape import plain
from headstart.heads.files import write_text
from headstart.heads.formats import flags

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Said:
    """Sentences that the caller adds, by the label of the run.

    Attributes:
        titles: one line about each run.
        remarks: what goes with its numbers, notes included.
        differences: why the runs cannot be compared.
    """

    titles: Mapping[str, str] = field(default_factory=dict)
    remarks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    differences: Sequence[str] = ()


def panels(runs: Runs) -> list[Panel]:
    """The panels of tables and plots before the samples; their numbers are read, nothing is drawn.

    Raises: KeyError, TypeError or ValueError for a report with values that no evaluation writes.
    """
    return [
        measured.by_task(runs),
        measured.by_position(runs),
        measured.cycle(runs),
        measured.sweep(runs, "batch"),
        measured.sweep(runs, "context"),
        measured.chains(runs),
        measured.latency(runs),
        trained.training(runs),
    ]


def contents(runs: Runs, said: Said) -> dict[str, Any]:
    """What the template shows, without the drawings. Raises: as `panels`."""
    heads = []
    for label, report in runs.items():
        flag = flags.flag_of(report)
        heads.append({
            "label": plain(label) if several(runs) else None,
            "title": plain(said.titles.get(label, "")),
            "flag": None if flag is None else flags.MEANINGS[flag],
            "numbers": measured.headline(report),
            "verdict": _verdict(report.get("verdict")),
            "remarks": [plain(line) for line in said.remarks.get(label, ())],
            "divergences": about.divergences(report),
        })  # fmt: skip
    return {
        "title": about.title_of(runs),
        "runs": heads,
        "differences": [plain(line) for line in said.differences],
        "panels": panels(runs),
        "samples": told.samples(runs),
        "samples_say": told.samples_say(runs),
        "failures": told.failures(runs),
        "no_samples": told.ABSENT,
        "later": [trained.data(runs), about.measured_how(runs)],
        "recipes": about.recipes(runs),
    }


def _verdict(verdict: dict[str, Any] | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    kind = {True: "pays", False: "loses", None: "open"}[verdict["pays"]]
    title = plain(shown_title(verdict))
    lists = {name: [plain(str(line)) for line in verdict[name]] for name in ("says", "next")}
    return {"kind": kind, "title": f"{title[0].upper()}{title[1:]}", **lists}


def render_page(runs: Runs, said: Said | None = None) -> str:
    """The page of one run, or of several side by side.

    Args: runs: published reports (`heads/published.py`).
    """
    shown = contents(runs, said or Said())
    drawings = {}
    with drawing():
        for panel in shown["panels"]:
            for number, item in enumerate(panel.items):
                if isinstance(item, Plot):
                    name = f"{panel.name}-{number}"
                    drawings[name] = svg_of(item.draw(), name)
    return environment().get_template("page.html.jinja").render(**shown, drawings=drawings)


@cache
def environment() -> Environment:
    """Of every page's template. All text is escaped; `css` and `js` are the style sheet and the script."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # the style sheet and the script are ours, the drawings are matplotlib's, which escapes names
    made.globals |= {name: (HERE / f"page.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    return made


def write_page(runs: Runs, place: Path, said: Said | None = None) -> Path:
    """Write the page (atomically); returns its path."""
    write_text(place, render_page(runs, said))
    return place
