"""Whether drafting pays: the verdict on what was measured, in sentences, and what to do next where it does not pay.

All functions are pure: they read the JSON of a report, and numbers of the training.

Drafting *pays* where the lower end of the speed-up's 95 % interval is above 1, and does not where the upper end is
below 1. Where the interval holds 1 it cannot be told yet. A speed-up on a CPU says nothing about a card that serves.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from headstart.data.own_choice import FOREIGN, GREEDY
from headstart.eval.measuring.wording import listed

#: plain steps that a cycle took with a chain of 3 at batch 1, Llama-3.1-8B sizes, one H100 (docs/measuring.md): 7.0 ms
#: / 5.6 ms
USUAL_CYCLE = 1.25
USUAL_DRAFT = 3
#: relative change of accepted drafts between two thirds of a training that counts as a change
CHANGE = 0.03
#: share of the accepted drafts in training below which those on held-out conversations say that it learnt by heart
BY_HEART = 0.7
#: fewest records in which a trend is looked for
RECORDS = 6
#: times as many prompts as were measured, beyond which more of them are not advised
MOST_TIMES = 100
#: `eval.max_new_tokens` that is advised where answers were cut: its default
WHOLE_TOKENS = 256
#: characters of a terminal's line
WIDTH = 80

TITLES = {True: "drafting pays", False: "drafting does not pay", None: "it cannot be told whether drafting pays"}


@dataclass(frozen=True)
class Training:
    """What is known about the training of a head.

    Attributes:
        walked: walked accepted lengths (τ) in the order of training.
        held_out: whether they are of held-out conversations; else of the training data.
        own_share: share of the answer tokens that are the target's own greedy choice; None = not known.
        validated: the last one along held-out conversations; None = not measured.
    """

    walked: list[float] = field(default_factory=list)
    held_out: bool = False
    own_share: float | None = None
    validated: float | None = None


@dataclass(frozen=True)
class Verdict:
    """Attributes:
        pays: None: it cannot be told.
        title: the verdict in a few words; with batch sizes where it differs among those that were measured.
        says: sentences on what was measured. next: sentences on what to do.
        tokens: length of the chain that was fastest on this card; None where no chain gained, or on a CPU.
        speedup, speedup_ci95: of the draft that was evaluated, or the best that was tuned.
        batch_size: at which that was measured.
    """

    pays: bool | None
    says: list[str]
    next: list[str]
    tokens: int | None = None
    speedup: float | None = None
    speedup_ci95: list[float] | None = None
    batch_size: int | None = None
    title: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def judge(interval: Sequence[float] | None) -> bool | None:
    """Whether a speed-up with this 95 % interval pays; None where that cannot be told."""
    if interval is None or interval[0] <= 1 <= interval[1]:
        return None
    return interval[0] > 1


def interval_of(numbers: dict[str, Any], speedup: float | None) -> list[float] | None:
    """The 95 % interval of a speed-up: its own, or else τ's carried over, as a cycle takes as long whatever it accepts.

    Args: numbers: `tau`, `tau_ci95` and, at batch 1 only, `speedup_ci95`.
    """
    if (own := numbers.get("speedup_ci95")) is not None:
        return list(own)
    tau, interval = numbers.get("tau"), numbers.get("tau_ci95")
    if speedup is None or not tau or interval is None:
        return None
    return [speedup * end / tau for end in interval]


def more_prompts(prompts: int, speedup: float, interval: Sequence[float]) -> int | None:
    """Prompts to add until the interval leaves 1 out, if the speed-up stays; None where no sensible number would do.

    The width of an interval falls with the square root of the number of prompts.
    """
    gap = abs(speedup - 1)
    reach = speedup - interval[0] if speedup > 1 else interval[1] - speedup
    if gap == 0 or (reach / gap) ** 2 > MOST_TIMES:
        return None
    return max(1, math.ceil(prompts * (reach / gap) ** 2) - prompts)


def verdict_of_report(report: dict[str, Any], training: Training | None = None) -> Verdict:
    """The verdict on an evaluation. Args: report: `Report.to_json`. training: of its head, where it is known."""
    training, speedup = training or Training(), report.get("speedup")
    if report.get("synthetic") is not None:
        return Verdict(None, [_synthetic(report)], ["Train a head and measure it: `headstart run RECIPE`."])
    if report.get("engine") is not None:
        return _of_server(report)
    if report["drafter"] == "plain":
        return Verdict(None, ["Nothing drafted: plain decoding was measured."], ["Give a head: --head DIR."])
    cut = [*_lossy(report), *_cut(report)]
    if report.get("device_type") == "cpu":
        pays, says = _on_cpu(report)
        return Verdict(pays, [*says, *cut], ["Measure it on the card that will serve.", *_train_more(training, report)])
    if speedup is None:
        said = "Plain decoding was not measured, so there is no speed-up."
        return Verdict(None, [said, *cut], ["Measure both ways: eval.baseline=true."])
    interval = interval_of(report, speedup)
    pays, batch = judge(interval), report["batch_size"]
    says = [_measured(report, speedup, interval, pays), *_chains(report), *_batches(report), *cut]
    advice = _pays_next(report) if pays else _next(report, speedup, interval, pays, training)
    # a sweep may measure the report's batch size on fewer prompts: the report's own verdict counts
    others = [(size, found) for size, found in _judged(report) if size != batch]
    title = title_of(pays, [*others, (batch, pays)])
    return Verdict(pays, says, advice, _tokens(report, pays), speedup, interval, batch, title)


def _synthetic(report: dict[str, Any]) -> str:
    speedup = report.get("speedup")
    gain = "" if speedup is None else f": at batch {report['batch_size']} decoding would be {speedup:.2f}× as fast"
    return f"Acceptance was set, not measured. This says what a head with τ {report['tau']:.2f} would gain{gain}."


def _of_server(report: dict[str, Any]) -> Verdict:
    said = f"The server's counters say τ {_tau(report)}; they hold no speed of plain decoding to compare with."
    return Verdict(None, [said], ["Measure the same prompts on the server without speculation, and compare tokens/s."])


def _tau(report: dict[str, Any]) -> str:
    interval = report.get("tau_ci95")
    return f"{report['tau']:.2f}" + ("" if interval is None else f" (95 %: {interval[0]:.2f}–{interval[1]:.2f})")


def _on_cpu(report: dict[str, Any]) -> tuple[bool | None, list[str]]:
    """A CPU's verdict goes by τ alone: whether a card gains depends on what a cycle takes there."""
    speedup, interval = report.get("speedup"), report.get("tau_ci95")
    shown = "" if speedup is None else f" ({speedup:.2f}×)"
    first = f"The speed-up on a CPU{shown} says nothing about a card that serves; only τ carries over to it."
    if not report["forwards"] or not report["per_position_acceptance"]:
        return None, [first, "Nothing was drafted here, so τ says nothing about a card either."]
    if report["tau"] <= 1 and (interval is None or interval[1] <= 1):
        none = "No draft was accepted (τ 1.00)"
        if report.get("scheduler") is not None:
            return None, [first, f"{none}, but the scheduler drafts less on a CPU than on a card."]
        if interval is None:
            return None, [first, f"{none}. One prompt has no interval, so more prompts must show whether that stays."]
        return False, [first, f"{none}: no card gains on such prompts."]
    says = (
        f"τ is {_tau(report)}: a card gains where a cycle takes less time than that many plain steps. At Llama-3.1-8B "
        f"sizes on an H100 at batch 1 a cycle with a chain of {USUAL_DRAFT} took {USUAL_CYCLE} plain steps, "
    )
    if interval is None or interval[0] <= USUAL_CYCLE <= interval[1]:
        said = "which is not told apart from this τ"
    else:
        said = f"which this τ {'exceeds' if interval[0] > USUAL_CYCLE else 'does not reach'}"
    tree = report["tree"]
    longer = "" if tree.get("kind") == "chain" and (tree.get("depth") or 0) <= USUAL_DRAFT else (
        f"; with {draft_text(tree, tree['label'])}, as here, it takes longer"
    )
    return None, [first, f"{says}{said}{longer}."]


def range_text(interval: Sequence[float] | None, carried: bool) -> str:
    if interval is None:
        return ""
    return f" (95 %{', by the interval of τ' if carried else ''}: {interval[0]:.2f}–{interval[1]:.2f})"


def _measured(report: dict[str, Any], speedup: float, interval: Sequence[float] | None, pays: bool | None) -> str:
    where = f"on {report['device']} at batch {report['batch_size']}"
    if pays is not None:
        start = f"It {'pays' if pays else 'does not pay'} {where}"
    elif interval is None:
        start = f"One prompt has no interval, so it cannot be told {where}"
    else:
        start = f"It cannot be told yet {where}, because the interval holds 1"
    found = f"{speedup:.2f}× plain decoding{range_text(interval, report.get('speedup_ci95') is None)}"
    return f"{start}: {found} with {draft_text(report['tree'], report['tree']['label'])}."


def draft_text(tree: dict[str, Any], label: str) -> str:
    """What is drafted, in words. Args: label: its name in tables, such as `chain3`."""
    return f"a chain of {tree['depth']}" if label == f"chain{tree.get('depth')}" else label


def _chains(report: dict[str, Any]) -> list[str]:
    """Speed-ups by length of the chain, where shorter ones were measured."""
    found = report.get("chain_speedups")
    if not found:
        return []
    by_length = sorted((int(length), gain) for length, gain in found.items())
    listed = ", ".join(f"{length}: {gain:.2f}×" for length, gain in by_length)
    best = _best_chain(report)
    return [f"By length of the chain ({listed}), {'no length gains' if best is None else f'{best} is the fastest'}."]


def _best_chain(report: dict[str, Any]) -> int | None:
    """The fastest length that was measured, if it gains."""
    found = {int(length): float(gain) for length, gain in (report.get("chain_speedups") or {}).items()}
    best = max(found, key=lambda length: found[length], default=None)
    return best if best is not None and found[best] > 1 else None


def _tokens(report: dict[str, Any], pays: bool | None) -> int | None:
    """Length of the fastest chain; of the evaluated one where no others were measured and it does not lose."""
    if report.get("chain_speedups"):
        return _best_chain(report)
    fixed = report["tree"].get("kind") == "chain" and report.get("scheduler") is None
    return report["tree"].get("depth") if fixed and pays is not False else None


def _batches(report: dict[str, Any]) -> list[str]:
    """At which batch sizes it pays, where a sweep measured several."""
    judged = _judged(report)
    return [] if not judged else [grouped(judged)]


def _judged(report: dict[str, Any]) -> list[tuple[int, bool | None]]:
    """(batch size, whether it pays) of a report's sweep."""
    return [(batch, judge(interval)) for batch, _, interval in _by_batch(report)]


def _by_batch(report: dict[str, Any]) -> list[tuple[int, float, list[float] | None]]:
    """(batch size, speed-up, interval) of a report's sweep."""
    points = ((report.get("sweeps") or {}).get("batch") or {}).get("points") or []
    timed = [point for point in points if point.get("speedup") is not None]
    return [(point["batch"], point["speedup"], interval_of(point, point["speedup"])) for point in timed]


def grouped(judged: list[tuple[int, bool | None]]) -> str:
    """`By batch size: it pays at 1 and 4; does not pay at 64.`"""
    words = {True: "pays at", False: "does not pay at", None: "cannot be told at"}
    parts = []
    for pays, said in words.items():
        if found := sizes(judged, pays):
            parts.append(f"{said} {found}")
    return f"By batch size: it {'; '.join(parts)}."


def sizes(judged: Sequence[tuple[int, bool | None]], pays: bool | None) -> str:
    """Batch sizes of which this was judged: `1, 4 and 8`."""
    return listed([str(batch) for batch in sorted({batch for batch, found in judged if found is pays})])


def title_of(pays: bool | None, judged: Sequence[tuple[int, bool | None]]) -> str:
    """The title, which names batch sizes where not all of them are judged alike.

    Args: pays: of the whole. judged: (batch size, whether it pays) of all that were measured.

    >>> title_of(True, [(1, True), (4, True), (64, False)])
    'drafting pays at batch 1 and 4'
    >>> title_of(False, [(1, False), (4, True)])
    'drafting does not pay at batch 1, but it pays at batch 4'
    """
    if len({found for _, found in judged}) < 2:
        return TITLES[pays]
    gains = sizes(judged, True)
    but = f", but it pays at batch {gains}" if gains and pays is not True else ""
    return f"{TITLES[pays]} at batch {sizes(judged, pays)}{but}"


def _lossy(report: dict[str, Any]) -> list[str]:
    if report.get("lossless", True):
        return []
    return ["Acceptance was LOSSY: the answers are not the target's own, and a lossless run accepts less."]


def _cut(report: dict[str, Any]) -> list[str]:
    cut, limit = report.get("cut"), report["max_new_tokens"]
    if not cut or not cut["cut"]:
        return []
    many = "The answer was" if cut["answers"] == 1 else f"{cut['cut']} of {cut['answers']} answers {_were(cut['cut'])}"
    if (measured := report.get("longer")) is not None:
        again = measured["cut"]
        left = f"{again} of {measured['answers']} {_were(again)} cut again" if again else "none was cut"
        return [f"{many} cut at {limit} tokens; with up to {measured['max_new_tokens']} tokens ({left}) τ is "
                f"{_tau(measured)}."]  # fmt: skip
    longer = WHOLE_TOKENS if limit < WHOLE_TOKENS else 2 * limit
    return [
        f"{many} cut at {limit} tokens; what whole answers give was not measured: eval.max_new_tokens={longer} "
        "measures longer ones."
    ]


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _pays_next(report: dict[str, Any]) -> list[str]:
    best, tree = _best_chain(report), report["tree"]
    if best is not None and best != tree.get("depth"):
        return [f"Draft a chain of {best}, which is faster: eval.tree.depth={best}."]
    return [] if _by_batch(report) else ["To find the best draft for each batch size, run `headstart tune`."]


def _next(
    report: dict[str, Any],
    speedup: float,
    interval: Sequence[float] | None,
    pays: bool | None,
    training: Training,
) -> list[str]:
    advice = []
    if interval is None:
        advice.append("Give more prompts: an interval needs two or more.")
    elif pays is None:
        more = more_prompts(report["prompts"], speedup, interval)
        if more is None:
            advice.append("More prompts will hardly tell: it is about as fast as plain decoding.")
        else:
            advice.append(f"About {more} more prompts like these would tell, if the speed-up stays what it is.")
    advice += [*_otherdraft_text(report, speedup), *_other_batch(report), *_train_more(training, report)]
    if advice or report.get("head") is None:  # prompt lookup has no head to train
        return advice or ["Train a head: `headstart run RECIPE`."]
    return ["Train on more conversations like those that you serve."]


def _otherdraft_text(report: dict[str, Any], speedup: float) -> list[str]:
    """A shorter chain or a smaller head, where a level costs more than it brings.

    A cycle takes τ ÷ speed-up plain steps, one of which verifying the root alone would take. The levels share the rest.
    """
    best, tree = _best_chain(report), report["tree"]
    if best is not None and best != tree.get("depth"):
        return [f"Draft a chain of {best}, which gained: eval.tree.depth={best}."]
    rates, depth = report["per_position_acceptance"], tree.get("depth")
    if tree.get("kind") != "chain" or report.get("scheduler") is not None or not rates or not depth:
        return []
    cost = (report["tau"] / speedup - 1) / depth
    kept = next((n for n, rate in enumerate(rates) if rate < cost), len(rates))
    if kept == len(rates):
        return []
    accepted = f"position {kept + 1} is accepted in {rates[kept]:.0%} of the cycles"
    said = f"{accepted}, and a level costs {cost:.2f} plain steps on average"
    if report.get("head") is None:
        return [f"Draft a shorter chain: {said}; try eval.tree.depth={kept}."] if kept else []
    if kept == 0:
        return [f"Train a smaller head (fewer layers or a smaller head.draft_vocab_size): {said}."]
    return [f"Draft a shorter chain, or train a smaller head: {said}; try eval.tree.depth={kept}."]


def _other_batch(report: dict[str, Any]) -> list[str]:
    """Another batch size where one gains, and the scheduler, which decodes plainly where drafting loses."""
    better = [(gain, batch) for batch, gain, interval in _by_batch(report) if judge(interval)]
    advice = []
    if better:
        gain, batch = max(better)
        advice.append(f"Draft at batch {batch}, where it gains {gain:.2f}×, and decode plainly where it loses.")
    if report["batch_size"] > 1 and report.get("scheduler") is None and report["drafter"] != "ngram":
        advice.append("Let the scheduler draft only what is expected to pay at this batch: eval.scheduler=on.")
    return advice


def _train_more(training: Training, report: dict[str, Any]) -> list[str]:
    """The target's own answers, more steps or more data, by what the training showed."""
    if report.get("head") is None or report["head"].get("untrained"):
        return []
    advice = []
    share = training.own_share
    if share is not None and share < GREEDY:
        doubt = "" if share < FOREIGN else ", unless it sampled these answers"
        advice.append(
            f"Let the target answer the prompts itself (data.distill.prompts){doubt}: {share:.0%} of the answer tokens "
            "are its own greedy choice."
        )
    if len(training.walked) >= RECORDS:
        third = len(training.walked) // 3
        before, last = fmean(training.walked[-2 * third : -third]), fmean(training.walked[-third:])
        whose = "on held-out conversations" if training.held_out else "in training"
        moved = f"the accepted length {whose} went from {before:.2f} to {last:.2f}"
        if not training.held_out and training.validated is not None and training.validated - 1 < BY_HEART * (last - 1):
            advice.append(
                f"Train on more conversations: the accepted length was {last:.2f} in training and "
                f"{training.validated:.2f} on held-out conversations, so it has learnt these by heart."
            )
        elif last - 1 > (1 + CHANGE) * (before - 1):
            advice.append(f"Train longer ({_limits(report)}): {moved} over the last third and still rises.")
        elif training.held_out and last - 1 < (1 - CHANGE) * (before - 1):
            advice.append(f"Train on more conversations: {moved} over the last third, so it has learnt these by heart.")
        else:
            advice.append(f"Train on more conversations: {moved} over the last third and rises no more.")
    return advice


def _limits(report: dict[str, Any]) -> str:
    """The settings that bound the training of the report's recipe."""
    train = (report.get("recipe") or {}).get("train") or {}
    limits = [f"train.{name}" for name in ("steps", "epochs", "max_seconds") if train.get(name)]
    return ", ".join(limits or ["train.epochs"])


def shown_title(verdict: dict[str, Any]) -> str:
    """The title of a verdict; earlier versions wrote none."""
    return str(verdict.get("title") or TITLES[verdict["pays"]])


def lines_of(verdict: dict[str, Any], width: int = WIDTH) -> list[str]:
    """The verdict for a terminal: a title, sentences, and what to do next. Args: verdict: `Verdict.to_json`."""
    lines = textwrap.wrap(f"Verdict: {shown_title(verdict)}", width)
    for sentence in verdict["says"]:
        lines += textwrap.wrap(sentence, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    lines += ["Next:"] if verdict["next"] else []
    for sentence in verdict["next"]:
        lines += textwrap.wrap(sentence, width, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)
    return lines


def markdown_of(verdict: dict[str, Any], text: Callable[[str], str]) -> list[str]:
    """The verdict's lines of a Markdown document. Args: text: escapes a sentence."""
    lines = [f"**Verdict: {text(shown_title(verdict))}.**", "", *(f"- {text(said)}" for said in verdict["says"]), ""]
    if verdict["next"]:
        lines += ["Next:", "", *(f"- {text(said)}" for said in verdict["next"]), ""]
    return lines
