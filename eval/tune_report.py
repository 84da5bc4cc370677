"""What a tuning found, for people: terminal table, Markdown, and the overrides that use it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from headstart.eval.config import TreeConfig
from headstart.eval.report import number
from headstart.eval.tune import AGREEMENT, Choice, Tuning, tree_name
from headstart.heads.files import atomic_write, write_json, write_text
from headstart.heads.formats.plots import new_figure, save_figure

PLOT = "tune.png"

COLUMNS = (
    "batch", "plain ms", "best tree", "τ", "cycle ms", "predicted", "measured", "measured τ", "do", "best chain",
)  # fmt: skip


def overrides(tree: TreeConfig) -> str:
    """`eval.tree.*` words that give this tree on the command line."""
    default = TreeConfig()
    changed = [f.name for f in fields(TreeConfig) if getattr(tree, f.name) != getattr(default, f.name)]
    words = []
    for name in changed:
        value = getattr(tree, name)
        text = json.dumps(value).replace(" ", "") if isinstance(value, list) else str(value)
        words.append(f"eval.tree.{name}={text}")
    return shlex.join(words)


def _cells(choice: Choice) -> tuple[str, ...]:
    chain = choice.best_chain
    return (
        str(choice.costs.batch), number(choice.costs.plain_s * 1e3), tree_name(choice.best.tree),
        number(choice.best.tau), number(choice.costs.cycle_s(choice.best.tree) * 1e3),
        number(choice.best.speedup, 2, "×"), number(choice.measured_speedup, 2, "×") + ("" if choice.agrees else " !"),
        number(choice.measured["tau"]), "speculate" if choice.speculate else "decode plainly",
        "–" if chain is None else f"{chain.tree.depth} ({chain.speedup:.2f}×)",
    )  # fmt: skip


def _title(tuning: Tuning) -> str:
    return (
        f"{tuning.drafter} on {tuning.target['name']} · temperature {tuning.temperature:g} · {tuning.dtype} · "
        f"context {tuning.context} · {tuning.device}"
    )


def _remarks(tuning: Tuning) -> list[str]:
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
    for choice in tuning.choices:
        if choice.speculate:
            lines.append(f"batch {choice.costs.batch}: {overrides(choice.best.tree)}")
    return lines


def tuning_table(tuning: Tuning) -> Table:
    table = Table(title=_title(tuning), title_justify="left")
    for n, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if n in (2, 8) else "right")
    for choice in tuning.choices:
        table.add_row(*_cells(choice))
    return table


def tuning_text(tuning: Tuning) -> str:
    """What is said under the table."""
    return "\n".join(_remarks(tuning))


def tuning_markdown(tuning: Tuning) -> str:
    lines = [f"# Tuning of {tuning.drafter} on {tuning.target['name']}", "", _title(tuning), ""]
    lines += [_row(COLUMNS), _row(("---",) * len(COLUMNS)), *(_row(_cells(choice)) for choice in tuning.choices), ""]
    lines += [f"- {remark}" for remark in _remarks(tuning)]
    lines += [f"- data: {tuning.data['path']}, {tuning.prompts} prompts", ""]
    lines += ["## Costs in ms", ""]
    for choice in tuning.choices:
        costs = choice.costs.to_json()
        lines += [f"Batch {costs['batch']}, context {costs['context']}: plain {costs['plain_ms']:.3f}", ""]
        lines += [_row(("part", "of", "size: ms")), _row(("---",) * 3)]
        for part, size in (("verify", "tokens"), ("draft", "levels"), ("rest", "nodes")):
            for name, points in costs[f"{part}_ms"].items():
                shown = ", ".join(f"{n}: {ms:.3f}" for n, ms in points.items())
                lines.append(_row((f"{part} ({size})", name, shown)))
        lines.append("")
    lines += ["## τ of every tree on these prompts", "", _row(("tree", "τ")), _row(("---", "---"))]
    ordered = sorted(tuning.taus.items(), key=lambda item: -item[1])
    lines += [_row((name, number(tau))) for name, tau in ordered]
    return "\n".join(lines) + "\n"


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def write_tuning(
    tuning: Tuning, directory: Path, more: dict[str, Any] | None = None, say: Callable[[str], None] = print
) -> Path:
    """Write tune.json, then tune.md and its plot, whose failure is told to `say`; returns the path of tune.json."""
    place = directory / "tune.json"
    write_json(place, {**tuning.to_json(), **(more or {})})
    try:
        atomic_write(directory / PLOT, partial(_plot, tuning))
        write_text(directory / "tune.md", f"{tuning_markdown(tuning)}\n![speed-up by batch]({PLOT})\n")
    except Exception as error:  # noqa: BLE001 - whatever drawing meets, what was found is saved
        cause = f"{type(error).__name__}: {error}"
        say(f"WARNING: {place} holds what was found, but tune.md could not be written ({cause})")
    return place


def _plot(tuning: Tuning, place: Path) -> None:
    """Predicted and measured speed-up of every batch size's best tree, and of its best chain."""
    figure, axes = new_figure(6, 3.6)
    batches = [choice.costs.batch for choice in tuning.choices]
    for label, values in (
        ("predicted", [choice.best.speedup for choice in tuning.choices]),
        ("measured", [choice.measured_speedup for choice in tuning.choices]),
        ("best chain, predicted", [c.best_chain.speedup if c.best_chain else None for c in tuning.choices]),
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
