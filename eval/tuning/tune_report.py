"""The result of a tuning, for people: a table for the terminal, Markdown, and the overrides that apply it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from headstart.eval.measuring.verdict import markdown_of
from headstart.eval.measuring.wording import number
from headstart.eval.tuning.choice import AGREEMENT, Choice, Tuning, overrides, tree_name
from headstart.eval.tuning.costs import node_count
from headstart.heads.counting import counted
from headstart.heads.escape import code, line, markdown, table
from headstart.heads.files import atomic_write, write_json, write_text
from headstart.heads.formats.plots import draw_reliability, new_figure, save_figure
from headstart.heads.published import published

PLOT = "tune.png"

COLUMNS = (
    "batch", "plain ms", "best tree", "τ", "cycle ms", "predicted", "measured", "measured τ", "scheduled", "do",
    "best chain", "launch",
)  # fmt: skip
#: of the table that shows calibrated trees beside the published one
STATIC_COLUMNS = ("batch", "static tree", "nodes", "levels", "τ", "measured τ", "predicted", "measured", "kept")
STATIC_TITLE = "Calibrated static trees beside the published one"
IN_SAMPLE = (
    "They were measured on the prompts that the trees were calibrated on. `headstart eval` measures them on others. "
    "The paths of every tree are in tune.json."
)
RANK_NOTE = (
    "The share of a head's positions at which the target's token was among the head's first candidates. Every head has "
    "its own number of positions."
)
ESTIMATE_NOTE = (
    "τ recorded: of the recorded cycles. By path: from counts of each path, drawn to what the heads say in general. "
    "This estimate builds the trees. By head: from the product of the heads' rank accuracies, as if the heads were "
    "right independently of each other."
)
CALIBRATION_NOTE = (
    "How far the probability that the first k drafts are all accepted, as the draft says it, lies from the share that "
    "was (expected calibration error, bins of equal width). Fitted on every other prompt of each task, measured on the "
    "others. Engines read temperatures alone; the last column is theirs."
)
SCHEDULED_NOTE = (
    "scheduled = measured with the scheduler, which drafts up to the largest tree of the best one's kind; in brackets "
    "against the best tree as measured"
)
LAUNCH_NOTE = (
    "launch = tokens to launch an engine with, which drafts chains; `headstart export` writes them by batch size"
)
#: ranks in the table of rank accuracies
SHOWN_RANKS = 5


def _cells(choice: Choice) -> tuple[str, ...]:
    chain = choice.best_chain
    return (
        str(choice.costs.batch), number(choice.costs.plain_s * 1e3), tree_name(choice.best.tree),
        number(choice.best.tau), number(choice.costs.cycle_s(choice.best.tree) * 1e3),
        number(choice.best.speedup, 2, "×"), number(choice.measured_speedup, 2, "×") + ("" if choice.agrees else " !"),
        number(choice.measured["tau"]), _scheduled(choice), "speculate" if choice.speculate else "decode plainly",
        "–" if chain is None else f"{chain.tree.depth} ({chain.speedup:.2f}×)",
        str(choice.launched) if choice.launched else "plain",
    )  # fmt: skip


def _scheduled(choice: Choice) -> str:
    """`1.42× (1.08)`: the speed-up with the scheduler, and against the best fixed draft."""
    found = choice.scheduled
    return "–" if found is None else f"{found.measured_speedup:.2f}× ({found.against_fixed:.2f})"


def _static_rows(tuning: Tuning) -> list[tuple[str, ...]]:
    """Two rows per batch size: the best calibrated tree and the published one."""
    rows: list[tuple[str, ...]] = []
    for choice in tuning.choices:
        for trial in filter(None, (choice.calibrated, choice.published)):
            tree = trial.prediction.tree
            rows.append((
                str(choice.costs.batch), tree_name(tree), str(node_count(tree)), str(tree.depth),
                number(trial.prediction.tau), number(trial.measured["tau"]), number(trial.prediction.speedup, 2, "×"),
                number(trial.measured_speedup, 2, "×") + ("" if trial.agrees else " !"),
                "kept" if trial.prediction.tree == choice.best.tree else "",
            ))  # fmt: skip
    return rows


def _title(tuning: Tuning) -> str:
    return (
        f"{tuning.drafter} on {tuning.target['name']} · temperature {tuning.temperature:g} · {tuning.dtype} · "
        f"context {tuning.context} · {tuning.device}"
    )


def _remarks(tuning: Tuning, text: Callable[[str], str] = str, command: Callable[[str], str] = str) -> list[str]:
    """The sentences under the table. `text` and `command` escape a sentence and a command for the document."""
    lines = [
        "predicted = τ · plain ÷ (draft + verify + rest); measured in the decode loop on the same prompts, per row "
        "while it decodes"
    ]
    for choice in tuning.choices:
        if not choice.agrees:
            lines.append(
                f"! at batch {choice.costs.batch} prediction and measurement differ by more than {AGREEMENT:.0%}: "
                "trust the measured one"
            )
        if (other := choice.passed_over) is not None:
            kept, passed = (number(speedup, 2, "×") for speedup in (choice.measured_speedup, other.measured_speedup))
            lines.append(
                f"batch {choice.costs.batch}: {tree_name(choice.best.tree)} is kept, measured {kept}; "
                f"{tree_name(other.prediction.tree)}, the best by prediction, measured {passed}"
            )
    if any(choice.scheduled for choice in tuning.choices):
        lines.append(SCHEDULED_NOTE)
    lines.append(LAUNCH_NOTE)
    lines += tuning.notes
    uses = []
    for choice in tuning.choices:
        if choice.speculate:
            uses.append(f"batch {choice.costs.batch}: {command(overrides(choice.best.tree))}")
        if (found := choice.scheduled) is not None and found.measured_speedup > max(1, choice.measured_speedup):
            uses.append(f"batch {choice.costs.batch}, faster: {command(found.overrides)}")
    return [*map(text, lines), *uses]


def tuning_table(tuning: Tuning) -> Group:
    """The choice at every batch size, and where static trees are drafted, calibrated ones beside the published one."""
    static = _static_rows(tuning)
    return Group(
        _shown(_title(tuning), COLUMNS, list(map(_cells, tuning.choices)), (2, 9)),
        *([_shown(STATIC_TITLE, STATIC_COLUMNS, static, (1, 8))] if static else []),
    )


def _shown(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], left: tuple[int, ...]) -> Table:
    """A table for the terminal. Args: left: columns that are aligned to the left."""
    shown = Table(title=Text(line(title)), title_justify="left")
    for n, column in enumerate(columns):
        shown.add_column(column, justify="left" if n in left else "right")
    for row in rows:
        shown.add_row(*(Text(line(cell)) for cell in row))
    return shown


def tuning_text(tuning: Tuning) -> str:
    """The sentences under the table, for the terminal."""
    return "\n".join(_remarks(tuning))


def tuning_markdown(tuning: Tuning) -> str:
    """The text of tune.md, without its plot."""
    heading = markdown(f"Tuning of {tuning.drafter} on {tuning.target['name']}")
    lines = [f"# {heading}", "", *markdown_of(tuning.verdict, markdown), markdown(_title(tuning)), ""]
    lines += [*table(COLUMNS, [_cells(choice) for choice in tuning.choices]), ""]
    lines += [f"- {remark}" for remark in _remarks(tuning, markdown, code)]
    lines += [f"- data: {markdown(tuning.data['path'])}, {counted(tuning.prompts, 'prompts')}", ""]
    lines += _static_markdown(tuning)
    lines += _calibration_markdown(tuning)
    lines += ["## Costs in ms", ""]
    for choice in tuning.choices:
        costs = choice.costs.to_json()
        lines += [f"Batch {costs['batch']}, context {costs['context']}: plain {costs['plain_ms']:.3f}", ""]
        rows = []
        for part, size_of_part in (("verify", "tokens"), ("draft", "levels"), ("rest", "nodes")):
            for name, points in costs[f"{part}_ms"].items():
                size = "nodes" if (part, name) == ("draft", "static") else size_of_part
                shown = ", ".join(f"{n}: {ms:.3f}" for n, ms in points.items())
                rows.append((f"{part} ({size})", name, shown))
        lines += [*table(("part", "of", "size: ms"), rows), ""]
    ordered = sorted(tuning.taus.items(), key=lambda item: -item[1])
    lines += ["## τ of every tree on these prompts", ""]
    lines += table(("tree", "τ"), [(name, number(tau)) for name, tau in ordered])
    return "\n".join(lines) + "\n"


def _calibration_markdown(tuning: Tuning) -> list[str]:
    """The errors of the longest chain's calibration at every position."""
    found = tuning.calibration
    if found is None:
        return []
    columns = [("temperature", found.temperatures)] if found.temperatures else []
    if found.biases:
        columns.insert(0, ("bias", found.biases))
    errors = [("error before", found.ece_before), ("error after", found.ece_after)]
    if found.ece_of_temperatures:
        errors.append(("with temperatures", found.ece_of_temperatures))
    values = [[number(value, 3) for value in column] for _, column in columns]
    values += [[f"{error:.1%}" for error in column] for _, column in errors]
    rows = list(zip(map(str, range(1, found.positions + 1)), *values, strict=True))
    slope = "" if found.slope is None else f", slope {found.slope:.3f}"
    return [
        "## Calibration", "", CALIBRATION_NOTE, "",
        markdown(f"{found.kind} of {found.source}{slope}; measured on {counted(found.num_samples, 'cycles')}"), "",
        *table(("position", *(name for name, _ in (*columns, *errors))), rows), "",
    ]  # fmt: skip


def _static_markdown(tuning: Tuning) -> list[str]:
    """Static trees: calibrated ones beside the published one, ranks of the heads, and τ by size."""
    if not tuning.static_trees:
        return []
    ranks = ("head", "positions", *(f"top-{rank}" for rank in range(1, SHOWN_RANKS + 1)))
    heads = [
        (str(head["head"]), str(head["positions"]), *(number(share, 3) for share in head["top"][:SHOWN_RANKS]))
        for head in tuning.rank_accuracy
    ]
    sizes = ("tree", "nodes", "levels", "τ recorded", "τ by path", "τ by head")
    trees = [
        (tree["name"], *(str(tree[size]) for size in ("nodes", "levels")),
         *(number(tree[way]) for way in ("tau", "by_path", "by_head")))
        for tree in tuning.static_trees
    ]  # fmt: skip
    return [
        f"## {STATIC_TITLE}", "", *table(STATIC_COLUMNS, _static_rows(tuning)), "", IN_SAMPLE, "",
        "## Rank accuracy of the heads", "", RANK_NOTE, "", *table(ranks, heads), "",
        "## τ of static trees by size", "", *table(sizes, trees), "", ESTIMATE_NOTE, "",
    ]  # fmt: skip


def write_tuning(
    tuning: Tuning,
    directory: Path,
    more: dict[str, Any] | None = None,
    say: Callable[[str], None] = print,
    environment: Iterable[str] = (),
) -> Path:
    """Write tune.json, then tune.md with its plot. A failure of the latter is a warning through `say`.

    The files are made to be published: heads/published.py takes private facts out of them.

    Args: environment: names of the environment variables that the settings read.
    Returns: the path of tune.json.
    """
    names = list(environment)
    place = directory / "tune.json"
    write_json(place, published({**tuning.to_json(), **(more or {})}, names))
    facts = published({"target": tuning.target, "data": tuning.data}, names)
    shown = replace(tuning, target=facts["target"], data=facts["data"])
    try:
        atomic_write(directory / PLOT, partial(_plot, tuning))
        diagram = None if tuning.calibration is None else draw_reliability(tuning.calibration, directory)
        more_plots = "" if diagram is None else f"\n![reliability diagram]({diagram})\n"
        write_text(directory / "tune.md", f"{tuning_markdown(shown)}\n![speed-up by batch]({PLOT})\n{more_plots}")
    except Exception as error:  # noqa: BLE001 - the result is saved, whatever drawing meets
        cause = f"{type(error).__name__}: {error}"
        say(f"WARNING: {place} holds the result, but tune.md could not be written ({cause})")
    return place


def _plot(tuning: Tuning, place: Path) -> None:
    """Predicted and measured speed-up of every batch size's best tree, with the scheduler, and of its best chain."""
    figure, axes = new_figure(6, 3.6)
    batches = [choice.costs.batch for choice in tuning.choices]
    for label, values in (
        ("predicted", [choice.best.speedup for choice in tuning.choices]),
        ("measured", [choice.measured_speedup for choice in tuning.choices]),
        ("scheduled, measured", [c.scheduled.measured_speedup if c.scheduled else None for c in tuning.choices]),
        ("best chain, predicted", [c.best_chain.speedup if c.best_chain else None for c in tuning.choices]),
        ("published tree, measured", [c.published.measured_speedup if c.published else None for c in tuning.choices]),
    ):
        if None not in values:
            axes.plot(batches, values, marker="o", linestyle="-" if label == "measured" else "--", label=label)
    for choice in tuning.choices:
        axes.annotate(tree_name(choice.best.tree), (choice.costs.batch, choice.measured_speedup), fontsize=6)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set(xlabel="batch", ylabel="speed-up", title="Speed-up of the tuned tree (plain decoding = 1)")
    axes.legend(fontsize="small")
    save_figure(figure, place)
