"""Commands that start serving engines with a head, and the choices of `headstart tune` that they follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headstart.heads.escape import line, table
from headstart.heads.formats.calibration import calibration_of
from headstart.heads.formats.choices import drafted_tokens, measured_of, tables_of, tuned_batches, tuned_chain
from headstart.heads.formats.engines import FORMATS
from headstart.heads.formats.format import Launch
from headstart.heads.formats.sidecar import served_name
from headstart.heads.rope import positions_with_one_rope
from headstart.heads.targets.tuned import ADAPTER, TUNED_TARGET

#: the kind of tree that no engine serves: where others are the best, engines that draft trees make their own
UNSERVED = "ddtree"


def why_tokens(side: dict[str, Any], text: Callable[[str], str] = str) -> str:
    """A sentence that says where the number of drafted tokens comes from; "" without a tuning.

    Args: text: escapes a name for the document that the sentence goes into.
    """
    chosen, tokens = tuned_chain(side), drafted_tokens(side)
    if chosen is not None:
        tuned = f"chain at batch {chosen.batch} on {text(chosen.device)} (`headstart tune`, "
        tuned += f"{chosen.chain_speedup:.2f}× predicted)"
        if tokens != chosen.chain:
            said = f"{tokens} drafted tokens, as engines draft with this head; the best {tuned} has {chosen.chain}."
        else:
            said = f"{tokens} drafted tokens: the best {tuned}."
        if chosen.kind == UNSERVED:
            said += (
                f" The best tree there, {text(chosen.label)}, measured {chosen.measured:.2f}×, but engines serve no "
                "trees over marginals."
            )
        return said + _by_load(side, chosen.device, text)
    if tuned_batches(side):
        return "`headstart tune` found no batch size at which drafting pays: measure before you deploy it."
    measured = measured_of(side)
    if measured is not None and measured.tokens is not None:
        where = f"at batch {measured.batch} on {text(measured.device)} (`headstart eval`)"
        if tokens == measured.tokens:
            return f"{tokens} drafted tokens: the fastest chain that was measured {where}."
        best = f"{where} a chain of {measured.tokens} was the fastest"
        return f"{tokens} drafted tokens, as engines draft with this head; {best}."
    return ""


def why_doubt(side: dict[str, Any]) -> str | None:
    """What a launch command must not hide: that drafting with this head was measured and no gain was found.

    What `headstart tune` measured goes before what `headstart eval` did. None where it pays or nobody measured it.
    """
    tuned, measured = tuned_batches(side), measured_of(side)
    if tuned:
        lost = not any(choice.speculate for choice in tuned)
        return "headstart tune found no batch size at which drafting pays" if lost else None
    if measured is None or measured.pays:
        return None
    if measured.on_cpu:
        nothing = "no draft was accepted: drafting cannot pay"
        return nothing if measured.pays is False else "measured on a CPU only: measure it on the card that serves"
    found = "" if measured.speedup is None else f": {measured.speedup:.2f}×"
    if measured.interval is not None:
        found += " (95 %: {:.2f}–{:.2f})".format(*measured.interval)
    where = f"on {line(measured.device)} at batch {measured.batch}{found}"
    return f"drafting does not pay {where}" if measured.pays is False else f"it cannot be told whether it pays {where}"


def _by_load(side: dict[str, Any], device: str, text: Callable[[str], str]) -> str:
    """A sentence that says how many tokens to draft at other batch sizes; "" where that is everywhere the same."""
    found = tables_of(side)
    if found is None or found.device != device or len(found.tokens) < 2:
        return ""
    ranges = [f"{first}–{last}: {tokens}" for first, last, tokens in found.tokens[:-1]]
    first, _, tokens = found.tokens[-1]
    said = f" Drafted tokens that pay by batch size: {', '.join(ranges)}, from {first} on: {tokens}."
    return said + (" With 0, decode plainly." if any(not row[2] for row in found.tokens) else "")


def tuned_table(side: dict[str, Any]) -> str:
    """Markdown of every tuned batch size; "" without a tuning."""
    rows = []
    for choice in tuned_batches(side):
        chain = "–" if choice.chain is None else f"{choice.chain} ({choice.chain_speedup:.2f}×)"
        rows.append(
            (
                choice.device, str(choice.batch), choice.label, f"{choice.tau:.2f}", f"{choice.predicted:.2f}×",
                f"{choice.measured:.2f}×", "speculate" if choice.speculate else "decode plainly", chain,
            )
        )  # fmt: skip
    if not rows:
        return ""
    columns = ("card", "batch", "best tree", "τ", "predicted", "measured", "do", "best chain")
    said = (
        "Speed-ups over plain decoding in Headstart's own loop. Of the best trees by prediction, the fastest is kept."
    )
    return "\n".join(["## Tuned trees", "", *table(columns, rows), "", said])


def context_limit(side: dict[str, Any]) -> int | None:
    """Most tokens of a context in the engine; None for as many as the target has positions.

    LongRoPE has short and long factors, and the head was trained with the short ones. An engine that is started with a
    longer context uses the long ones at every position (rope.positions_with_one_rope).
    """
    dims = side.get("dims")
    rope = dims.get("rope_parameters") if isinstance(dims, dict) else None
    try:
        return positions_with_one_rope(rope) if isinstance(rope, dict) else None
    except (KeyError, TypeError, ValueError):
        return None


def launch_commands(
    model: str, side: dict[str, Any], engines: list[str], root: str | None = None, beside: str | None = None
) -> dict[str, str]:
    """Engine key → shell command that serves the target with this head, every word quoted as a shell needs it.

    For a head of a tuned target, the commands serve that target. Engines that cannot are left out.

    Args:
        model: where engines find the head: directory or Hub id.
        root: directory that holds the folders `target` and `adapter` of a tuned target; None: `model`.
        side: headstart.json of the export.
        engines: keys of the engines that load it.
        beside: directory that holds the files that engines read beside the head (formats/beside.py); None: `model`.
    Raises: FormatError for a table or a calibration in headstart.json that no tuning makes.
    """
    target, root = side.get("target") or {}, root or model
    launch = Launch(model, served_name(target) or "TARGET", side["type"], drafted_tokens(side), context_limit(side))
    launch = replace(launch, model_type=str((side.get("dims") or {}).get("model_type") or ""))
    merged, rank = target.get("served_as"), target.get("adapter_rank")
    if merged == TUNED_TARGET:
        launch = replace(launch, target=f"{root}/{TUNED_TARGET}", place=root)
    separate = merged is None and rank is not None
    if separate:
        launch = replace(launch, adapter=f"{root}/{ADAPTER}", rank=int(rank))
    able = [key for key in FORMATS if key in engines and (FORMATS[key].adapters or not separate)]
    tables, calibration = tables_of(side), calibration_of(side)
    launch = replace(launch, per_batch=[] if tables is None else tables.tokens)
    launch = replace(launch, confident=calibration is not None and calibration.source == "confidence")
    commands = {}
    for key in able:
        files = {name: f"{beside or model}/{name}" for name in FORMATS[key].files_beside(side)}
        commands[key] = FORMATS[key].launch(replace(launch, files=files))
    return {key: command for key, command in commands.items() if command is not None}


def commented(engine: str, family: str, command: str, doubt: str | None = None) -> str:
    """A launch command below comments: `why_doubt`, the engine's releases that serve the family, where not all do, and
    what to add for sampling."""
    comments = (doubt, FORMATS[engine].versions_of(family), FORMATS[engine].sampled(family))
    return "\n".join([*(f"# {comment}" for comment in comments if comment is not None), command])
