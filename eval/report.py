"""The report of an evaluation: one JSON (schema 1) from which the terminal table and the Markdown are rendered."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headstart.heads.errors import DataError
from headstart.heads.files import read_json, write_json, write_text
from headstart.heads.formats.plots import draw_plots

SCHEMA = 1


@dataclass
class Section:
    """Numbers of one task, or of everything. τ is methods §0's: tokens committed per target forward after prefill.

    Attributes:
        per_position_acceptance: unconditional, accepted at depth d ÷ number of drafts.
        per_position_conditional: given that all earlier depths were accepted.
        baseline_tokens_per_s, tokens_per_s: decode phase only, plain and speculative, in the same loop.
        identity: {"sequences", "identical"} of speculative against plain, greedy runs with a baseline only.
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
    identity: dict[str, int] | None = None


@dataclass
class Report:
    """Everything an evaluation found, and what it was made from."""

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
    prompts: int
    forwards: int
    tokens: int
    tau: float
    tau_ci95: list[float] | None
    per_position_acceptance: list[float]
    per_position_conditional: list[float | None]
    baseline_tokens_per_s: float | None
    tokens_per_s: float | None
    speedup: float | None
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
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any], where: str = "report") -> Report:
        """Raises DataError when the schema is another or a field is missing."""
        if value.get("schema") != SCHEMA:
            raise DataError(f"{where}: schema: found {value.get('schema')!r}, expected {SCHEMA}")
        known = {f.name for f in fields(cls)}
        value = {"engine": None, "synthetic": None, **value}  # reports of the first release do not say
        missing = sorted(known - set(value))
        if missing:
            raise DataError(f"{where}: fields missing: {missing}")
        kept = {name: value[name] for name in known}
        kept["tasks"] = {name: Section(**section) for name, section in kept["tasks"].items()}
        return cls(**kept)

    @classmethod
    def read(cls, directory: Path | str) -> Report:
        path = Path(directory) / "report.json"
        return cls.from_json(read_json(path), str(path))

    def write(self, directory: Path | str) -> Path:
        """Write report.json, report.md and its plots (atomically); returns the path of report.json."""
        directory = Path(directory)
        write_json(directory / "report.json", self.to_json())
        directory.mkdir(parents=True, exist_ok=True)
        images = "".join(f"\n![{Path(name).stem}]({name})\n" for name in draw_plots(self.to_json(), directory))
        write_text(directory / "report.md", render_markdown(self) + images)
        return directory / "report.json"

    @property
    def total(self) -> Section:
        identity = self.greedy_identity
        return Section(
            self.prompts,
            self.forwards,
            self.tokens,
            self.tau,
            self.tau_ci95,
            self.per_position_acceptance,
            self.per_position_conditional,
            self.tokens_per_s,
            self.baseline_tokens_per_s,
            self.speedup,
            {k: identity[k] for k in ("sequences", "identical")} if identity else None,
        )


COLUMNS = (
    "task",
    "prompts",
    "τ",
    "95 %",
    "acceptance by position",
    "plain tok/s",
    "spec. tok/s",
    "speed-up",
    "identical",
)


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{suffix}"


def rates_text(values: list[float] | list[float | None]) -> str:
    return " ".join("–" if v is None else f"{v:.3f}".replace("0.", ".", 1) for v in values) or "–"


def interval_text(interval: list[float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}"


def _cells(name: str, section: Section) -> tuple[str, ...]:
    identity = section.identity
    return (
        name,
        str(section.prompts),
        number(section.tau),
        interval_text(section.tau_ci95),
        rates_text(section.per_position_acceptance),
        number(section.baseline_tokens_per_s, 1),
        number(section.tokens_per_s, 1),
        number(section.speedup, 2, "×"),
        "–" if identity is None else f"{identity['identical']}/{identity['sequences']}",
    )


def _sections(report: Report) -> list[tuple[str, Section]]:
    tasks = sorted(report.tasks.items()) if len(report.tasks) > 1 else []
    return [*tasks, ("all", report.total)]


def _title(report: Report) -> str:
    lossless = "lossless" if report.lossless else "LOSSY (typical acceptance)"
    if report.synthetic is not None:
        lossless = "SYNTHETIC acceptance"
    return (
        f"{report.drafter} on {report.target['name']} · {report.tree['label']} · temperature {report.temperature:g} · "
        f"{lossless} · {report.dtype} · batch {report.batch_size} · {report.device}"
    )


def render_table(report: Report) -> Table:
    """Terminal table: one row per task and one for everything."""
    table = Table(title=_title(report), caption="\n".join([TAU_NOTE, *report.notes]), title_justify="left")
    for n, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if n in (0, 4) else "right", no_wrap=n != 4)
    for name, section in _sections(report):
        table.add_row(*_cells(name, section), end_section=name != "all" and name == sorted(report.tasks)[-1])
    return table


TAU_NOTE = "τ = tokens committed per target forward after prefill (plain decoding = 1)"


def print_report(report: Report, console: Console) -> None:
    console.print(render_table(report))


def render_markdown(report: Report) -> str:
    lines = [f"# {report.drafter} on {report.target['name']}", "", _title(report), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cells(name, section)) + " |" for name, section in _sections(report)]
    lines += ["", f"{TAU_NOTE}.", ""]
    lines += [f"Acceptance given all earlier positions: {rates_text(report.per_position_conditional)}.", ""]
    identity = report.greedy_identity
    if identity:
        lines.append(
            f"Greedy identity with plain decoding ({identity['dtype']}): "
            f"{identity['identical']} of {identity['sequences']} sequences."
        )
        for case in identity["divergences"]:
            place = f"turn {case['turn'] + 1}, token {case['position']}"
            lines.append(f"- {case['id']}: first differs at {place}, target's top-2 logit gap {case['gap']:.4g}")
        lines.append("")
    lines += [f"- {note}" for note in report.notes]
    lines += [f"- data: {report.data['path']}, {report.prompts} prompts, at most {report.max_new_tokens} new tokens"]
    lines += [f"- {name}: {number(value, 2)}" for name, value in report.timing.items()]
    lines += [f"- revision {report.git_revision}; " + ", ".join(f"{k} {v}" for k, v in report.versions.items())]
    return "\n".join(lines) + "\n"
