"""Draws the figures of the README and of docs/maths.md, from docs/results and from the code that they explain.

    python docs/figures/draw.py          writes docs/figures/*.svg anew

`FIGURES` names them. tests/test_docs_figures.py compares the files with what this draws.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from headstart.eval.measuring.metrics import expected_tau
from headstart.eval.tree import ancestor_mask, with_root
from headstart.heads.positions import drafted_depths, supervised_depths

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
BLUE, ORANGE, GREEN, GREY, PALE = "#1f6fb2", "#d9822b", "#3a9a5b", "#8a9199", "#e8ebee"
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "headstart", "font.family": "sans-serif", "font.size": 10,
    "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white",
}  # fmt: skip
#: head of scheduler.json → its name
HEADS = {"eagle3": "EAGLE-3", "dspark": "DSpark", "medusa": "Medusa-1"}


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return rows


def best_fixed(head: str, batch: int) -> dict[str, Any]:
    """The row of scheduler.json with the fastest fixed draft of a head trained on SmolLM2."""
    found = [
        row
        for row in rows_of("scheduler")
        if (row["head"], row["batch"], row["target"], row["scheduler"]) == (head, batch, "smollm2-135m-instruct", "off")
    ]
    return max(found, key=lambda row: row["speedup"])


def spec_bench_tau(head: str) -> dict[str, Any]:
    """The newest row of smollm2.json: all of Spec-Bench at temperature 0, the tree of 60 or the static tree."""
    *_, found = (
        row
        for row in rows_of("smollm2")
        if (row["head"], row["eval_set"], row["temperature"], row["prompts"]) == (head, "spec_bench", 0.0, 480)
        and row["tree"] != "chain7"
    )
    return found


def draft_in_words(tree: str) -> str:
    """chain3 → chain of 3; dynamic:k4:d4:n10 → tree of 10."""
    return f"chain of {tree[5:]}" if tree.startswith("chain") else f"tree of {tree.rsplit('n', 1)[1]}"


def draw_results() -> Figure:
    """What the README shows: speed-up by batch, and the accepted length."""
    figure = Figure(figsize=(9.6, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    batches = (1, 8, 32, 64)
    for n, (head, colour) in enumerate(zip(HEADS, (BLUE, ORANGE, GREY), strict=True)):
        found = [best_fixed(head, batch) for batch in batches]
        place = [i + 0.27 * (n - 1) for i in range(len(batches))]
        left.bar(place, [row["speedup"] for row in found], 0.25, color=colour, label=HEADS[head])
        for x, row in zip(place, found, strict=True):
            left.text(x, row["speedup"] + 0.02, f"{row['speedup']:.2f}", ha="center", fontsize=8.5)
            draft = draft_in_words(row["tree"])
            left.text(x, 0.05, draft, ha="center", va="bottom", rotation=90, color="white", fontsize=8)
    left.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    left.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    left.set_ylim(0, 1.9)
    left.set_title("Speed-up over plain decoding, best fixed draft", loc="left", fontsize=10.5)
    left.legend(ncols=3, frameon=False, loc="upper left")
    heads = {"eagle3": ("EAGLE-3", BLUE), "eagle": ("EAGLE-1", GREEN), "medusa_own": ("Medusa-1", GREY)}
    for n, (head, (_, colour)) in enumerate(heads.items()):
        row = spec_bench_tau(head)
        low, high = row["tau_ci95"]
        error = [[row["tau"] - low], [high - row["tau"]]]
        right.bar(n, row["tau"], 0.6, color=colour, yerr=error, ecolor="black", capsize=3)
        right.text(n, row["tau"] + 0.2, f"{row['tau']:.2f}", ha="center", fontsize=8.5)
    right.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    right.set_xticks(range(len(heads)), [name for name, _ in heads.values()])
    right.set_ylim(0, 4.4)
    right.set_title("Accepted length τ, trees of 60", loc="left", fontsize=10.5)
    return figure


def grid(axes: Axes, rows: list[str], columns: int, cells: Callable[[int, int], tuple[str, str]], width: float = 0.9):
    """A table of cells: (text, colour) of each."""
    for r, name in enumerate(rows):
        axes.text(-0.3, -r, name, ha="right", va="center")
        for c in range(columns):
            text, colour = cells(r, c)
            axes.add_patch(Rectangle((c, -r - 0.4), width, 0.8, facecolor=colour, edgecolor="white"))
            axes.text(c + width / 2, -r, text, ha="center", va="center", fontsize=9)
    axes.set_xlim(-0.5, columns)
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    axes.axis("off")


#: the worked example of heads/positions.py
TOKENS = (".", ".", "A0", "A1", "A2", ".", ".", "B0", "B1")
TURNS = (-1, -1, 0, 0, 0, -1, -1, 1, 1)
DEPTH = 3


def draw_positions() -> Figure:
    """Which rows train at which depth."""
    turn_R, doc_R = torch.tensor(TURNS), torch.zeros(len(TURNS), dtype=torch.int64)
    depths, drafted = supervised_depths(turn_R, doc_R, DEPTH).tolist(), drafted_depths(turn_R, doc_R, DEPTH).tolist()
    names = ["row t", "token", "depth 1 learns", "depth 2 learns", "depth 3 learns", "label of so many rows"]

    def cell(r: int, c: int) -> tuple[str, str]:
        if r == 0:
            return str(c), "white"
        if r == 1:
            return TOKENS[c], PALE if TURNS[c] < 0 else (BLUE if TURNS[c] == 0 else GREEN) + "55"
        if r == 5:
            return str(drafted[c]), "white"
        depth = r - 1
        return (TOKENS[c + 1 + depth], ORANGE + "66") if depths[c] >= depth else ("", PALE)

    figure = Figure(figsize=(7.6, 2.6), layout="constrained")
    axes = figure.subplots()
    grid(axes, names, len(TOKENS), cell)
    axes.set_xlim(-2.6, len(TOKENS))
    return figure


def draw_rollout() -> Figure:
    """What the row p = 4 of step 3 attends to in training-time test."""
    rows, anchor, step = 7, 4, 3
    names = [f"step {s}" for s in range(1, step + 1)]

    def cell(r: int, c: int) -> tuple[str, str]:
        if r == 0:
            return f"k{c}", BLUE + "66" if c <= anchor else PALE
        return ("own", ORANGE + "88") if c == anchor else ("", PALE)

    figure = Figure(figsize=(6.4, 1.9), layout="constrained")
    axes = figure.subplots()
    grid(axes, names, rows, cell)
    axes.set_xlim(-1.4, rows)
    axes.set_title(f"Row {anchor} at step {step}: which keys it sees", loc="left", fontsize=10.5)
    return figure


#: a tree of six nodes: parent of each, -1 = the root
PARENTS, WORDS = (-1, -1, 0, 0, 1, 2), ("the", "a", "cat", "dog", "cow", "sat")


def draw_tree() -> Figure:
    """A draft tree, and which rows of the verification see which."""
    parent_BN = torch.tensor([PARENTS])
    mask = with_root(ancestor_mask(parent_BN, 3))[0]
    figure = Figure(figsize=(8.4, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    place = {-1: (0.0, 0.0), 0: (1, 0.8), 1: (1, -1.0), 2: (2, 1.4), 3: (2, 0.3), 4: (2, -1.0), 5: (3, 1.4)}
    for node, parent in enumerate(PARENTS):
        (x0, y0), (x1, y1) = place[parent], place[node]
        left.plot([x0, x1], [y0, y1], color=BLUE if node in (0, 2) else GREY, linewidth=2.4 if node in (0, 2) else 1)
    for node, (x, y) in place.items():
        colour = BLUE if node in (-1, 0, 2) else "white"
        left.scatter([x], [y], s=520, color=colour, edgecolors=GREY, zorder=3)
        left.text(x, y, "root" if node < 0 else WORDS[node], ha="center", va="center", fontsize=8.5, zorder=4,
                  color="white" if colour == BLUE else "black")  # fmt: skip
    left.set_title("A tree; the accepted path is blue", loc="left", fontsize=10.5)
    left.set_xlim(-0.5, 3.5)
    left.set_ylim(-1.6, 2.0)
    left.axis("off")
    names = ["root", *WORDS]
    grid(right, names, len(names), lambda r, c: ("" if mask[r, c] else "", BLUE + "88" if mask[r, c] else PALE))
    for c, name in enumerate(names):
        right.text(c + 0.45, 0.6, name, ha="center", va="bottom", fontsize=8.5)
    right.set_ylim(-len(names) + 0.4, 1.3)
    right.set_xlim(-1.2, len(names))
    right.set_title("Row sees column, beside the whole context", loc="left", fontsize=10.5)
    return figure


def draw_block() -> Figure:
    """The two layouts of a block of five slots."""
    names = ["slot", "input", "rope position", "fill in drafts", "anchor first drafts"]
    inputs = ("x_{t+1}", "mask", "mask", "mask", "mask")

    def cell(r: int, c: int) -> tuple[str, str]:
        if r == 0:
            return str(c), "white"
        if r == 1:
            return (f"${inputs[c]}$" if c == 0 else inputs[c]), BLUE + "55" if c == 0 else PALE
        if r == 2:
            return f"t + {c + 1}", "white"
        if r == 3:
            return ("–", "white") if c == 0 else (f"$x_{{t+{c + 1}}}$", ORANGE + "66")
        return f"$x_{{t+{c + 2}}}$", ORANGE + "66"

    figure = Figure(figsize=(6.8, 2.2), layout="constrained")
    axes = figure.subplots()
    grid(axes, names, 5, cell)
    axes.set_xlim(-1.8, 5)
    return figure


def draw_expected() -> Figure:
    """τ of a chain, by its length, where every draft is accepted at one rate."""
    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    axes = figure.subplots()
    lengths = list(range(0, 9))
    for rate, colour in ((0.9, BLUE), (0.8, GREEN), (0.7, ORANGE), (0.5, GREY)):
        taus = [expected_tau([rate] * length) for length in lengths]
        axes.plot(lengths, taus, color=colour, marker="o", markersize=3.5)
        axes.text(8.15, taus[-1], f"α = {rate}: {taus[-1]:.2f}", va="center", color=colour)
    axes.set_xlim(0, 10.4)
    axes.set_ylim(1, 6.6)
    axes.set_xticks(lengths)
    axes.set_xlabel("drafts K of a chain")
    axes.set_ylabel("τ")
    return figure


#: target and draft distribution of the figure of acceptance
P, Q = (0.45, 0.30, 0.15, 0.10), (0.25, 0.50, 0.20, 0.05)


def draw_overlap() -> Figure:
    """p, q, and what speculative sampling accepts of a draft from q."""
    figure = Figure(figsize=(6.8, 2.8), layout="constrained")
    axes = figure.subplots()
    both = [min(p, q) for p, q in zip(P, Q, strict=True)]
    for v in range(len(P)):
        axes.bar(v - 0.2, P[v], 0.36, color=BLUE + "55", edgecolor=BLUE, label="p, the target" if v == 0 else None)
        axes.bar(v + 0.2, Q[v], 0.36, color=ORANGE + "55", edgecolor=ORANGE, label="q, the draft" if v == 0 else None)
        for x in (v - 0.2, v + 0.2):
            axes.bar(x, both[v], 0.36, color=GREY + "66", label="min(p, q)" if (v, x) == (0, -0.2) else None)
    axes.set_xticks(range(len(P)), [f"token {v}" for v in range(len(P))])
    title = f"A draft from q is accepted with probability Σ min(p, q) = {sum(both):.2f}"
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.legend(frameon=False)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "results": draw_results,
    "positions": draw_positions,
    "rollout": draw_rollout,
    "tree": draw_tree,
    "block": draw_block,
    "expected": draw_expected,
    "overlap": draw_overlap,
}


def svg_of(name: str) -> str:
    """The text of a figure's file."""
    with matplotlib.rc_context(STYLE):
        text = StringIO()
        FIGURES[name]().savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


if __name__ == "__main__":
    for each in FIGURES:
        (HERE / f"{each}.svg").write_text(svg_of(each), encoding="utf-8")
        print(HERE / f"{each}.svg")
