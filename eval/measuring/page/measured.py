"""Panels of what an evaluation measured: by task, by position, by batch and context, the parts of a cycle, latency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from headstart.eval.measuring.page.figures import Curves, Marks, lines, marks, stacked
from headstart.eval.measuring.page.panel import (
    Cell,
    Panel,
    Plot,
    Runs,
    Table,
    count,
    interval,
    num,
    run_cells,
    run_columns,
    several,
    text,
)
from headstart.eval.measuring.verdict import interval_of
from headstart.eval.measuring.wording import identical_text, number

#: most tasks of a plot: those with most prompts. The table has them all.
TASKS = 12
#: most tasks whose acceptance by position is a curve of its own
TASK_CURVES = 5
WAYS = {"baseline": "plain", "speculative": "drafting"}


def sections(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(task, numbers) of every task, by name, and of all prompts last."""
    tasks = sorted((report.get("tasks") or {}).items())
    return [*(tasks if len(tasks) > 1 else []), ("all", report)]


def every_section(runs: Runs) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(task, run, numbers): the runs of a task stand together, all prompts last."""
    names = sorted({name for report in runs.values() for name, _ in sections(report)} - {"all"})
    for name in [*names, "all"]:
        for label, report in runs.items():
            if (found := dict(sections(report)).get(name)) is not None:
                yield name, label, found


def by_task(runs: Runs) -> Panel:
    rows, found = [], list(every_section(runs))
    for name, label, numbers in found:
        identity = numbers.get("identity") or numbers.get("greedy_identity")
        rows.append([
            text(name), *([text(label)] if several(runs) else []), count(numbers["prompts"]), num(numbers["tau"]),
            interval(numbers["tau_ci95"]), num(numbers.get("speedup"), 2, "×"), interval(numbers.get("speedup_ci95")),
            num(numbers["baseline_tokens_per_s"], 1), num(numbers["tokens_per_s"], 1), Cell(identical_text(identity)),
        ])  # fmt: skip
    columns = [
        "task", *(["run"] if several(runs) else []), "prompts", "τ", "95 % of τ", "speed-up", "95 % of speed-up",
        "plain tokens/s", "drafting tokens/s", "identical answers",
    ]  # fmt: skip
    says = [
        "τ is the accepted length: tokens that a forward of the target gives, 1 without drafts. The speed-up is by the "
        "clock, against plain decoding in the same loop. Intervals come from drawing the prompts "
        "again: 95 % of the draws give a value inside.",
    ]
    if len(found) == 1:
        says.append("All prompts are of one task.")
    table = Table("τ, speed-up and tokens/s by task", columns, rows)
    return Panel("tasks", "Accepted length and speed-up", says, [*_task_plots(runs), table])


def _task_plots(runs: Runs) -> list[Plot]:
    largest = sorted(
        {name: numbers["prompts"] for name, _, numbers in every_section(runs) if name != "all"}.items(),
        key=lambda item: (-item[1], item[0]),
    )[:TASKS]
    names = [*sorted(name for name, _ in largest), "all"]
    if len(names) * len(runs) < 2:
        return []
    tau: Marks = {}
    speedup: Marks = {}
    for name in names:
        per_run = [dict(sections(report)).get(name) for report in runs.values()]
        tau[name] = [(float(n["tau"]), n["tau_ci95"]) if n else None for n in per_run]
        speedup[name] = [
            (float(n["speedup"]), n.get("speedup_ci95")) if n and n.get("speedup") is not None else None
            for n in per_run
        ]
    timed = any(found for row in speedup.values() for found in row)
    sides = [("τ", tau), *([("speed-up (×)", speedup)] if timed else [])]
    said = f"τ{' and speed-up' if timed else ''} with 95 % intervals for {len(names) - 1} tasks and for all prompts"
    plot = Plot("With 95 % intervals; the dotted line is plain decoding", f"{said}. The table below holds the "
                "numbers.", partial(marks, sides, list(runs)))  # fmt: skip
    return [plot]


def by_position(runs: Runs) -> Panel:
    title = "Acceptance by position"
    found = [(n, label, numbers) for n, label, numbers in every_section(runs) if numbers["per_position_acceptance"]]
    if not found:
        return Panel("positions", title, absent="Nothing was drafted, so there are no positions.")
    deepest = max(len(numbers["per_position_acceptance"]) for _, _, numbers in found)
    rows = []
    for name, label, numbers in found:
        for key, kind in (("acceptance", "of all drafts"), ("conditional", "if accepted before")):
            rates = numbers[f"per_position_{key}"]
            cells = [num(rate, 3) for rate in rates] + [Cell("–")] * (deepest - len(rates))
            rows.append([text(name), *([text(label)] if several(runs) else []), Cell(kind), *cells])
    positions = [f"position {n + 1}" for n in range(deepest)]
    columns = ["task", *(["run"] if several(runs) else []), "share", *positions]
    table = Table("Share of drafts that were accepted, by position in the draft", columns, rows)
    curves: Curves = {}
    wanted = {"all"} if several(runs) else {"all", *_largest(next(iter(runs.values())))}
    for name, label, numbers in sorted(found, key=lambda item: item[0] != "all"):  # the strongest curve is the first
        if name in wanted:
            rates = numbers["per_position_acceptance"]
            curves[label if several(runs) else name] = [(n + 1.0, float(rate)) for n, rate in enumerate(rates)]
    says = [
        "A draft counts as accepted up to a position if the target would have written the same tokens up to there. "
        "Where the curve falls steeply, longer drafts bring little.",
    ]
    plots = []
    if deepest > 1:
        first, last = (f"{float(found[-1][2]['per_position_acceptance'][n]):.2f}" for n in (0, -1))
        said = f"Acceptance falls from {first} at position 1 to {last} at the last one ({len(curves)} curves)."
        draw = partial(lines, curves, "position in the draft", "accepted", top=1.0)
        plots = [Plot("Accepted share by position", said, draw)]
    return Panel("positions", title, says, [*plots, table])


def _largest(report: dict[str, Any]) -> list[str]:
    tasks = [(name, numbers) for name, numbers in sections(report) if name != "all"]
    return [name for name, _ in sorted(tasks, key=lambda item: (-item[1]["prompts"], item[0]))[:TASK_CURVES]]


def cycle(runs: Runs) -> Panel:
    title = "Where a cycle's time goes"
    measured = {label: report for label, report in runs.items() if report.get("cycle")}
    if not measured:
        return Panel("cycle", title, absent="The parts of a cycle were not timed: eval.cycle_parts is off, or no head "
                     "drafted on the device.")  # fmt: skip
    rows, bars = [], {}
    for label, report in measured.items():
        parts = {name: float(report["cycle"][f"{name}_ms"]) for name in ("draft", "verify", "rest")}
        whole, batch = sum(parts.values()), int(report["batch_size"])
        per_token = whole / (float(report["tau"]) * batch)
        rate = report["baseline_tokens_per_s"]
        plain = 1e3 / float(rate) if rate else None
        named = f"{label}, " if several(runs) else ""
        bars[f"{named}a cycle"] = parts
        rows.append(run_cells(
            runs, label, count(batch), *(num(ms) for ms in parts.values()), num(whole), num(per_token), num(plain)
        ))  # fmt: skip
        if batch == 1:
            bars[f"{named}per token"] = {name: ms / float(report["tau"]) for name, ms in parts.items()}
            bars |= {f"{named}plain token": {"plain decoding": plain}} if plain else {}
    columns = run_columns(runs, "batch", "draft ms", "verify ms", "rest ms", "cycle ms", "per token ms",
                          "plain token ms")  # fmt: skip
    says = [
        "A cycle drafts, lets the target verify the drafts in one forward, and then accepts: the rest moves keys and "
        "values into place and hands features to the head. Drafting pays where a cycle takes less time than the "
        "plain tokens that it replaces.",
    ]
    said = "; ".join(f"{name}: {sum(parts.values()):.2f} ms" for name, parts in bars.items())
    if any(int(report["batch_size"]) > 1 for report in measured.values()):
        says.append("Times per token divide the cycle by all tokens of the batch.")
    plot = Plot("Milliseconds", said + ".", partial(stacked, bars, "ms"))
    table = Table("Milliseconds of the parts of a cycle", columns, rows)
    # headers of rows must differ: without a run, the batch is the first cell
    return Panel("cycle", title, says, [plot, table])


def sweep(runs: Runs, name: str) -> Panel:
    """Speed-up by "batch" or "context"."""
    anchor, title = f"by-{name}", f"Speed-up by {'batch size' if name == 'batch' else 'context length'}"
    points = {label: ((r.get("sweeps") or {}).get(name) or {}).get("points") or [] for label, r in runs.items()}
    setting = "eval.batch_sizes=[1,4,16]" if name == "batch" else "eval.context_lengths=[512,4096]"
    if not any(points.values()):
        return Panel(anchor, title, absent=f"Not measured. Ask for it: {setting}.")
    rows = []
    gains: Curves = {}
    rates: Curves = {}
    ends: dict[str, list[Sequence[float] | None]] = {}
    for label, some in points.items():
        for point in some:
            if point.get("out_of_memory"):
                rows.append(run_cells(runs, label, count(point[name]), Cell("out of memory"), *[Cell("–")] * 7))
                continue
            gain = point.get("speedup")
            rows.append(run_cells(
                runs, label, count(point[name]), num(gain, 2, "×"), interval(interval_of(point, gain)),
                num(point.get("row_speedup"), 2, "×"), num(point.get("tau")),
                *(num(point.get(f"{way}_tokens_per_s"), 1) for way in WAYS),
                count(point.get("rows")), count(point.get("prompts")),
            ))  # fmt: skip
            if gain is not None:
                key = label if several(runs) else "speed-up"
                gains.setdefault(key, []).append((float(point[name]), float(gain)))
                ends.setdefault(key, []).append(interval_of(point, gain))
            for way, said in WAYS.items():
                if (rate := point.get(f"{way}_tokens_per_s")) is not None:
                    key = f"{label}, {said}" if several(runs) else said
                    rates.setdefault(key, []).append((float(point[name]), float(rate)))
    columns = run_columns(runs, name, "speed-up", "95 %, by that of τ", "by row time", "τ", "plain tokens/s",
                          "drafting tokens/s", "rows", "prompts")  # fmt: skip
    axis = "batch size" if name == "batch" else "context in tokens"
    plots = []
    if max(map(len, gains.values()), default=0) > 1:
        moves = [f"{values[0][1]:.2f}× at {values[0][0]:g} to {values[-1][1]:.2f}× at {values[-1][0]:g}"
                for values in gains.values()]  # fmt: skip
        title_of = "Speed-up with 95 % intervals; the dotted line is plain decoding"
        draw = partial(lines, gains, axis, "speed-up (×)", one=True, by_two=True, ends=ends)
        plots.append(Plot(title_of, f"From {'; '.join(moves)}.", draw))
    if max(map(len, rates.values()), default=0) > 1:
        plots.append(Plot("Tokens/s", "Tokens per second of plain decoding and of drafting; see the table.",
                          partial(lines, rates, axis, "tokens/s", by_two=True)))  # fmt: skip
    says = [
        "The speed-up is by the clock, places of the batch that stay empty included; by row time it is as on a server "
        "where no place stays empty."
    ]
    for report in runs.values():
        found = (report.get("sweeps") or {}).get(name) or {}
        says += [f"{s[0].upper()}{s[1:]}." for key in ("says", "note") if (s := found.get(key)) and not several(runs)]
    return Panel(anchor, title, says, [*plots, Table(title, columns, rows)])


def chains(runs: Runs) -> Panel:
    title = "Speed-up by length of the chain"
    found = {label: report["chain_speedups"] for label, report in runs.items() if report.get("chain_speedups")}
    if not found:
        return Panel("chains", title, absent="Shorter chains were not timed. headstart tune looks for the best draft; "
                     "shorter_chains: true in a recipe times them with the evaluation.")  # fmt: skip
    rows, curves = [], {}
    for label, gains in found.items():
        by_length = sorted((int(length), float(gain)) for length, gain in gains.items())
        curves[label if several(runs) else "speed-up"] = [(float(n), gain) for n, gain in by_length]
        rows += [run_cells(runs, label, count(n), num(gain, 2, "×")) for n, gain in by_length]
    table = Table("Speed-up by length of the chain", run_columns(runs, "drafted tokens", "speed-up"), rows)
    said = "; ".join(f"{n:g}: {gain:.2f}×" for values in curves.values() for n, gain in values)
    plot = Plot("Speed-up; the dotted line is plain decoding", said + ".",
                partial(lines, curves, "drafted tokens", "speed-up (×)", one=True))  # fmt: skip
    more = max(map(len, curves.values())) > 1
    return Panel("chains", title, [], [*([plot] if more else []), table])


def latency(runs: Runs) -> Panel:
    title = "Latency"
    measured = {label: report for label, report in runs.items() if report.get("latency")}
    if not measured:
        return Panel("latency", title, absent="Latencies were not measured.")
    rows = []
    for label, report in measured.items():
        for way, said in WAYS.items():
            if (found := report["latency"].get(way)) is None:
                continue
            values = [found.get(f"{what}_p{p}_ms") for what in ("first_token", "token") for p in (50, 95)]
            rows.append([Cell(said), *([text(label)] if several(runs) else []), *(num(value) for value in values)])
    columns = ["way", *(["run"] if several(runs) else []), "first token, median", "first token, 95th percentile",
               "per later token, median", "per later token, 95th percentile"]  # fmt: skip
    batches = sorted({int(report["batch_size"]) for report in measured.values()})
    says = [
        f"Batch {' and '.join(map(str, batches))}. The first token comes from prefill; prompts of a batch that begin "
        "together wait for each other. A later token takes its cycle's time divided by the cycle's tokens."
    ]
    return Panel("latency", title, says, [Table("Milliseconds", columns, rows)])


def headline(report: dict[str, Any]) -> list[tuple[str, Cell, str]]:
    """(what, value, more) of a run's first numbers."""
    tau, gain = report["tau_ci95"], report.get("speedup_ci95")
    shown = [("accepted length τ", num(report["tau"]), "" if tau is None else f"95 %: {interval(tau).text}")]
    if report.get("speedup") is not None:
        more = "by the clock" if gain is None else f"95 %: {interval(gain).text}"
        shown.append(("speed-up", num(report["speedup"], 2, "×"), more))
    if report["tokens_per_s"] is not None:
        plain = report["baseline_tokens_per_s"]
        more = "" if plain is None else f"plain: {number(float(plain), 1)}"
        shown.append(("tokens/s", num(report["tokens_per_s"], 1), more))
    elif report["baseline_tokens_per_s"] is not None:
        shown.append(("tokens/s", num(report["baseline_tokens_per_s"], 1), "plain decoding"))
    if (identity := report.get("greedy_identity")) is not None:
        shown.append(("identical answers", Cell(identical_text(identity)), "with plain decoding, greedy"))
    return shown
