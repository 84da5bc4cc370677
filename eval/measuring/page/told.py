"""Samples with every token's author, for the template, and where drafting failed in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headstart.eval.measuring.page.panel import Cell, Runs, Table, count, num, several
from headstart.heads.counting import counted
from headstart.heads.escape import plain

#: rows of the table of what failed
FAILED = 12
ABSENT = (
    "No samples were recorded: nothing drafted, eval.samples=0, acceptance was set, a server was measured, or an "
    "earlier version wrote the report."
)


@dataclass(frozen=True)
class Token:
    """A token of a sample. Attributes: kind: accepted, rejected, later (rejected behind another) or target."""

    kind: str
    text: str
    title: str


@dataclass(frozen=True)
class Shown:
    """A sample as the page shows it. Attributes: title: its summary line."""

    title: str
    prompt: str
    tokens: list[Token]


def samples_say(runs: Runs) -> list[str]:
    """What a reader must know of how the samples were drafted."""
    says = []
    shown = [report for report in runs.values() if report.get("samples")]
    if any(report["tree"].get("kind", "chain") != "chain" for report in shown):
        says.append(
            "Of a draft tree only one path is shown: the accepted one, and behind it the likeliest of those that were "
            "rejected. The other drafts at that place were rejected too."
        )
    if any(report.get("scheduler") is not None for report in shown):
        says.append("Here each cycle drafts all that the scheduler may draft. In what was timed it often drafted less.")
    return says


def visible(piece: str, breaks: bool = True) -> str:
    """A token's text: line ends and what is empty are made visible, control characters too.

    Args: breaks: whether a line end also breaks the line; what was rejected did not.
    """
    return plain(piece).replace("\n", "⏎\n" if breaks else "⏎").replace("\t", "⇥\t") or "␣"


def samples(runs: Runs) -> list[Shown]:
    shown = []
    for label, report in runs.items():
        for number, sample in enumerate(report.get("samples") or [], start=1):
            cycles = sample["cycles"]
            tokens = list(_tokens(sample))
            drafted = sum(token.kind == "accepted" for token in tokens)
            written = drafted + sum(token.kind == "target" for token in tokens)
            named = f"{label}, " if several(runs) else ""
            title = (
                f"{named}sample {number} ({plain(str(sample['task']))}): {drafted} of {counted(written, 'tokens')} "
                f"drafted, {counted(len(cycles), 'cycles')}, τ {float(sample['tau']):.2f}"
            )
            shown.append(Shown(title, plain(str(sample["prompt"])), tokens))
    return shown


def _tokens(sample: dict[str, Any]) -> Iterator[Token]:
    yield Token("target", visible(sample["first"]), "the target's first token, from prefill")
    for number, cycle in enumerate(sample["cycles"], start=1):
        accepted, rejected = cycle["accepted"], cycle["rejected"]
        for place, piece in enumerate(accepted, start=1):
            yield Token("accepted", visible(piece), f"cycle {number}: drafted at position {place} and accepted")
        for place, piece in enumerate(rejected, start=len(accepted) + 1):
            first = place == len(accepted) + 1
            # typical acceptance can refuse a token and then draw it; and two tokens can have one text
            same = piece == cycle["own"]
            other = "the target's own token reads the same" if same else "the target wrote something else"
            why = other if first else "stood behind a rejected draft"
            kind = "rejected" if first else "later"
            title = f"cycle {number}: drafted at position {place} and rejected: {why}"
            yield Token(kind, visible(piece, breaks=False), title)
        if cycle["own"] is not None:
            nothing = "" if cycle["drafted"] else ", nothing was drafted"
            yield Token("target", visible(cycle["own"]), f"cycle {number}: written by the target{nothing}")


def failures(runs: Runs) -> Table | None:
    """Which drafts were rejected most often, and what the target wrote in their place."""
    pairs: Counter[tuple[str, str]] = Counter()
    cycles = 0
    for report in runs.values():
        for sample in report.get("samples") or []:
            for cycle in sample["cycles"]:
                cycles += bool(cycle["drafted"])
                if cycle["rejected"] and cycle["own"] is not None:
                    pairs[visible(cycle["rejected"][0], False), visible(cycle["own"], False)] += 1
    if not pairs:
        return None
    # of equal counts, by text: the page of a report is always the same
    most = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:FAILED]
    rows = [[Cell(f"“{drafted}”"), Cell(f"“{wrote}”"), count(n), num(100 * n / cycles, 1, " %")]
            for (drafted, wrote), n in most]  # fmt: skip
    found = sum(pairs.values())
    caption = f"The most frequent rejections in these samples: {found} of {cycles} cycles with a draft had one"
    return Table(caption, ["drafted", "written by the target", "times", "of the cycles"], rows)
