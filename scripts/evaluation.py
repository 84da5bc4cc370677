"""Evaluating a head in a command: shows progress and warnings, and adds notes that say what the numbers mean."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from headstart.console import Console
from headstart.data.own_choice import ENOUGH_TOKENS
from headstart.eval.config import EvalConfig
from headstart.eval.measuring.benchmark import evaluate
from headstart.eval.measuring.report import Report
from headstart.eval.measuring.verdict import RECORDS, Training, verdict_of_report
from headstart.eval.prompts import eval_sources
from headstart.heads.base import Head
from headstart.heads.errors import DataError
from headstart.heads.files import read_json
from headstart.heads.formats.sidecar import notes
from headstart.heads.published_names import OWN_DATA, name_of_data, numbered
from headstart.heads.targets.target import Target
from headstart.quality_guard import summary
from headstart.saved_heads import trained_otherwise
from headstart.training_record import measured_on_training, run_of, training_record

#: what a report says of prompts that the head's own run trained on
TRAINED = (
    "the head was trained on the file of these prompts, so τ may be higher here than on others; "
    "data/held_out.jsonl of its run has prompts that did not train"
)
#: what takes long before the first answer on a GPU
FIRST = "the first one compiles kernels and captures cycles:"
#: most prompts that are decoded together to measure τ on longer answers
LONGER_BATCH = 16
#: what a report says of an untrained head, whose weights are random
UNTRAINED: dict[str, Any] = {"path": None, "untrained": True}


def measure(
    target: Target,
    head: Head | None,
    config: EvalConfig,
    console: Console,
    recipe: dict[str, Any] | None = None,
    head_info: dict[str, Any] | None = None,
    shorter_chains: bool = False,
    place: Path | None = None,
    longer_answers: int | None = None,
) -> Report:
    """`eval.measuring.benchmark.evaluate`, with its progress shown and notes on the head added.

    Args:
        shorter_chains: also time every shorter chain against the same baseline; a note names the fastest. Not with a
            scheduler, which chooses among them.
        longer_answers: tokens of longer answers on which τ is measured too, where some were cut.
        place: directory of the head. A head that was trained on another target gets a warning and a note.
    """
    warning = trained_otherwise(place, target)
    if warning is not None:
        console.say(warning)
    first = FIRST if target.device.type == "cuda" else None
    with console.progress("eval", "prompts", notes=True, first=first) as advance:
        report = evaluate(target, head, config, recipe=recipe, head_info=head_info, progress=advance)
    report.notes += [warning] if warning is not None else []
    if measured_on_training(place, [str(source.path) for source in eval_sources(config.data) if source.path]):
        console.say(f"WARNING: {TRAINED}")
        report.notes.append(TRAINED)
    if place is not None and (cost := notes(place).get("quality")):
        report.notes.append(f"the head drafts for a tuned target: {summary(cost)}")
    if head_info == UNTRAINED:
        report.notes.append(
            "an untrained head drafted: its weights are random, its acceptance was set, its speed is real"
        )
    chains = config.tree.kind == "chain" and config.tree.depth > 1 and not config.scheduler
    if shorter_chains and chains and report.baseline_tokens_per_s:
        report.chain_speedups = _time_shorter_chains(report, target, head, config, console)
        report.notes.append(_compared_chains(report.chain_speedups))
    if longer_answers is not None and report.cut and report.cut["cut"]:
        report.longer = _on_longer_answers(longer_answers, target, head, config, console)
    report.training = training_record(place)
    report.verdict = verdict_of_report(report.to_json(), training_of(place)).to_json()
    return report


def training_of(head: Path | None) -> Training:
    """What the run that made a head recorded of its training; nothing where the head does not lie in a run."""
    run = run_of(head)
    if run is None:
        return Training()
    walked: dict[str, list[float]] = {"valid/walked_tau": [], "train/walked_tau": []}
    with suppress(OSError, DataError, ValueError, TypeError):  # it is advice: a damaged file gives none
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            for name, values in walked.items():
                values += [float(record[name])] if record.get(name) is not None else []
    share = None
    with suppress(OSError, DataError, KeyError, TypeError, ValueError):
        own = read_json(run / "data" / "report.json")["statistics"]["own_choice"]
        share = float(own["share"]) if own["tokens"] >= ENOUGH_TOKENS else None
    validated = walked["valid/walked_tau"]
    held_out = len(validated) >= RECORDS
    last = validated[-1] if validated else None
    return Training(validated if held_out else walked["train/walked_tau"], held_out, share, last)


def _time_shorter_chains(
    report: Report, target: Target, head: Head | None, config: EvalConfig, console: Console
) -> dict[str, float]:
    """Time every shorter chain. Returns: length → speed-up, of all lengths up to the evaluated one."""
    rates, baseline = {config.tree.depth: report.tokens_per_s or 0.0}, report.baseline_tokens_per_s or 0.0
    once = replace(
        config, baseline=False, batch_sizes=[], context_lengths=[], generate_baseline=False, cycle_parts=False,
        samples=0,
    )
    for depth in range(config.tree.depth - 1, 0, -1):
        shorter = replace(once, tree=replace(config.tree, depth=depth))
        with console.progress(f"eval (chain of {depth})", "prompts", notes=True) as advance:
            rates[depth] = evaluate(target, head, shorter, progress=advance).tokens_per_s or 0.0
    return {str(depth): rate / baseline for depth, rate in sorted(rates.items())}


def _on_longer_answers(
    tokens: int, target: Target, head: Head | None, config: EvalConfig, console: Console
) -> dict[str, Any]:
    """τ on answers of up to so many tokens. All prompts are decoded together, because no time is measured."""
    longer = replace(
        config, max_new_tokens=tokens, batch_size=LONGER_BATCH, baseline=False, batch_sizes=[], context_lengths=[],
        generate_baseline=False, cycle_parts=False, samples=0,
    )  # fmt: skip
    with console.progress(f"eval (up to {tokens} tokens)", "prompts", notes=True) as advance:
        found = evaluate(target, head, longer, progress=advance)
    return {"max_new_tokens": tokens, "tau": found.tau, "tau_ci95": found.tau_ci95, **(found.cut or {})}


def _compared_chains(speedups: dict[str, float]) -> str:
    """A note with the speed-up of each length and the fastest."""
    best = max(speedups, key=lambda depth: speedups[depth])
    listed = ", ".join(f"{depth}: {speedup:.2f}×" for depth, speedup in speedups.items())
    fastest = f"a chain of {best}" if speedups[best] > 1 else "plain decoding"
    return f"speed-up by chain length here: {listed}; fastest: {fastest}"


def say_own_data(data: Any, console: Console) -> None:
    """Say which file is which: a report numbers the user's own files and does not name them."""
    sources = eval_sources(data) if data is not None else []
    names = numbered([name_of_data(str(source.path)) if source.path else source.name for source in sources])
    own = [f"{name} is {source.path}" for name, source in zip(names, sources, strict=True) if OWN_DATA in name]
    if len(own) > 1:
        console.say(f"in the report {', '.join(own)}")
