"""Plots of a report: acceptance by position, τ and speed-up by task, batch and context, parts of a cycle."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from headstart.heads.escape import line
from headstart.heads.files import atomic_write
from headstart.heads.formats.calibration import Calibration, mean_error
from headstart.heads.formats.flags import TITLES, flag_of

ACCEPTANCE, TASKS, CYCLE = "acceptance.png", "tasks.png", "cycle.png"
RELIABILITY = "reliability.png"
BATCHES, CONTEXTS = "speedup_by_batch.png", "speedup_by_context.png"
#: most tasks of a plot: those with most prompts
SHOWN = 12
#: characters of a name in a plot
LABEL = 40


def draw_plots(report: dict[str, Any], directory: Path) -> list[str]:
    """Write the plots that a report has numbers for; returns their file names.

    Each shows its values, their 95 % intervals where these are known, and whose they are; LOSSY or SYNTHETIC stands in
    the titles. What would be a single bar or point is not drawn.

    Args:
        report: report.json as parsed.
    """
    written, flag = [], flag_of(report)
    for name, figure in (
        (ACCEPTANCE, _acceptance(report)),
        (TASKS, _tasks(report)),
        (CYCLE, _cycle(report)),
        (BATCHES, _sweep(report, "batch")),
        (CONTEXTS, _sweep(report, "context")),
    ):
        if figure is None:
            continue
        if flag is not None:
            axes = figure.axes[0]
            # on a line of its own, because titles fill the narrowest figure
            axes.set_title(f"{TITLES[flag]}\n{axes.get_title()}")
        if name_of_run := _whose(report):
            figure.suptitle(name_of_run, fontsize="small")
        atomic_write(directory / name, partial(save_figure, figure))
        written.append(name)
    return written


def draw_reliability(calibration: Calibration, directory: Path) -> str | None:
    """Write the reliability diagram of a calibration; returns its file name, None without points to draw."""
    figure = _reliability(calibration)
    if figure is None:
        return None
    atomic_write(directory / RELIABILITY, partial(save_figure, figure))
    return RELIABILITY


def first_plot_note() -> str | None:
    """A note that the first plot takes long; None if this machine has drawn one before."""
    import matplotlib

    if any(Path(matplotlib.get_cachedir()).glob("fontlist-*.json")):
        return None
    return "drawing the plots: matplotlib first lists this machine's fonts, which may take ten seconds, once"


def save_figure(figure: Any, place: Path) -> None:
    """Write a figure as PNG."""
    # without matplotlib's version, so that the same report gives the same file
    figure.savefig(place, format="png", metadata={"Software": None})


def drawn(text: str, most: int = LABEL) -> str:
    """A name as matplotlib shows it: one line of at most `most` characters in which nothing begins a formula."""
    shown = line(text)
    shown = shown if len(shown) <= most else shown[: most - 1] + "…"
    # a label that begins with an underscore is left out of legends
    return (" " if shown.startswith("_") else "") + shown.replace("$", r"\$")


def _whose(report: dict[str, Any]) -> str:
    """The head's name, its target and what it drafts, as far as the report says."""
    head, target = report.get("head") or {}, (report.get("target") or {}).get("name")
    drafter = report.get("drafter") or head.get("type")
    words = [*([str(drafter)] if drafter else []), *([f"on {target}"] if target else [])]
    label = (report.get("tree") or {}).get("label")
    return drawn(" ".join(words) + (f", {label}" if label else ""), 64) if words else ""


def _ends(value: float | None, interval: list[float] | None) -> tuple[float, float]:
    """How far the ends of an interval lie below and above its value; nowhere without one."""
    if value is None or interval is None:
        return 0.0, 0.0
    return max(value - interval[0], 0.0), max(interval[1] - value, 0.0)


def _mark(axes: Any, x: float, y: float, shown: str, above: float = 5) -> None:
    """Write a value above its place. Args: above: points of distance."""
    axes.annotate(shown, (x, y), (0, above), textcoords="offset points", ha="center", fontsize="x-small")


def _sections(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    named = ((drawn(name), row) for name, row in (report.get("tasks") or {}).items())
    tasks = sorted(named, key=lambda item: (-item[1]["prompts"], item[0]))[:SHOWN]
    return [("all", report), *sorted(tasks)] if len(tasks) > 1 else [("all", report)]


def new_figure(width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    """A figure (inches) and its axes, or the list of them."""
    from matplotlib.figure import Figure  # the object interface keeps no global state and needs no display

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    grid = figure.subplots(rows, squeeze=False)[:, 0]
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    return figure, grid[0] if rows == 1 else grid


def _acceptance(report: dict[str, Any]) -> Any | None:
    sections = [(name, row["per_position_acceptance"]) for name, row in _sections(report)]
    sections = [(name, rates) for name, rates in sections if rates]
    if max((len(rates) for _, rates in sections), default=0) < 2:
        return None
    figure, axes = new_figure(6, 3.6)
    for name, rates in sections:
        strong = name == "all"
        style: dict[str, Any] = {"linewidth": 2.4, "color": "black", "zorder": 3} if strong else {"alpha": 0.8}
        axes.plot(range(1, len(rates) + 1), rates, marker="o", label=name, **style)
        for position, rate in enumerate(rates if strong else (), start=1):
            _mark(axes, position, rate, f"{rate:.2f}")
    axes.set(xlabel="position in the draft", ylabel="accepted ÷ drafts", ylim=(0, 1.05))
    axes.set_xticks(range(1, max(len(rates) for _, rates in sections) + 1))
    axes.set_title("Acceptance by position")
    if len(sections) > 1:
        axes.legend(fontsize="small", ncols=2)
    return figure


def _tasks(report: dict[str, Any]) -> Any | None:
    sections = _sections(report)
    names = [name for name, _ in sections]
    figure, axes = new_figure(max(4.4, 0.8 * len(names) + 2), 3.6)
    places = range(len(names))
    speedups = [row.get("speedup") for _, row in sections]
    measured = any(value is not None for value in speedups)
    if len(sections) == 1 and not measured:
        return None
    width = 0.38 if measured else 0.6
    taus = [row["tau"] for _, row in sections]
    bars = [("τ", -width / 2 * measured, taus, "tau_ci95")]
    bars += [("speed-up (clock)", width / 2, speedups, "speedup_ci95")] if measured else []
    for label, shift, values, interval in bars:
        below, above = zip(*(_ends(v, row.get(interval)) for v, (_, row) in zip(values, sections, strict=True)),
                           strict=True)  # fmt: skip
        heights, at = [value or 0 for value in values], [x + shift for x in places]
        axes.bar(at, heights, width, label=label, yerr=(below, above), ecolor="0.25", error_kw={"linewidth": 1})
        for x, value, up in zip(at, values, above, strict=True):
            if value is not None:
                _mark(axes, x, value + up, f"{value:.2f}", above=2)
    axes.margins(y=0.25 if measured else 0.15)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(
        list(places), names, rotation=30 if len(names) > 3 else 0, ha="right" if len(names) > 3 else "center"
    )
    axes.set_title("τ and speed-up by task (plain decoding = 1)" if measured else "τ by task (plain decoding = 1)")
    axes.legend(fontsize="small", loc="upper left", ncols=2)
    return figure


def _cycle(report: dict[str, Any]) -> Any | None:
    """The parts of a cycle's time, per cycle and per committed token, beside the time of a token decoded plainly."""
    parts, rate = report.get("cycle"), report.get("baseline_tokens_per_s")
    if not parts:
        return None
    batch, tau = report["batch_size"], report["tau"]
    figure, axes = new_figure(6, 2.6)
    for y, share in ((1, 1.0), (0, 1 / tau)):
        left = 0.0
        for name, color in (("draft", "tab:orange"), ("verify", "tab:blue"), ("rest", "tab:gray")):
            width = parts[f"{name}_ms"] * share
            axes.barh(y, width, left=left, color=color, label=name if y else None)
            left += width
        _beside(axes, left, y)
    names = ["per token", "per cycle"]
    if rate and batch == 1:
        axes.barh(-1, 1e3 / rate, color="black", alpha=0.6)
        _beside(axes, 1e3 / rate, -1)
        names.insert(0, "plain token")
    axes.set_yticks(range(2 - len(names), 2), names)
    axes.set(xlabel=f"ms, batch {batch}", title=f"Parts of a cycle (τ {tau:.2f})")
    axes.grid(axis="x", alpha=0.3)
    axes.margins(x=0.12)
    axes.legend(fontsize="small")
    return figure


def _beside(axes: Any, x: float, y: float) -> None:
    """Write the milliseconds of a bar behind its end."""
    axes.annotate(f"{x:.2f}", (x, y), (4, 0), textcoords="offset points", va="center", fontsize="x-small")


def _carried(point: dict[str, Any]) -> list[float] | None:
    """τ's interval as one of the speed-up: a cycle takes as long whatever it accepts."""
    tau, interval = point.get("tau"), point.get("tau_ci95")
    return [point["speedup"] * end / tau for end in interval] if tau and interval else None


def _sweep(report: dict[str, Any], name: str) -> Any | None:
    """Speed-up over batch sizes or context lengths; below it, tokens per second of plain and speculative decoding."""
    points = ((report.get("sweeps") or {}).get(name) or {}).get("points") or []
    points = [point for point in points if point.get("speedup") is not None]
    if len(points) < 2:
        return None
    values = [point[name] for point in points]
    figure, (above, below) = new_figure(6, 5.2, rows=2)
    gains = [point["speedup"] for point in points]
    low, high = zip(*(_ends(point["speedup"], _carried(point)) for point in points), strict=True)
    above.errorbar(values, gains, yerr=(low, high), marker="o", color="black", capsize=3)
    for value, gain, up in zip(values, gains, high, strict=True):
        _mark(above, value, gain + up, f"{gain:.2f}")
    above.margins(y=0.2)
    above.axhline(1, color="black", linewidth=0.8, linestyle="--")
    above.set(ylabel="speed-up (clock)", title=f"Speed-up by {name} (plain decoding = 1)")
    above.set_ylim(bottom=0)
    for key, label in (("baseline_tokens_per_s", "plain"), ("speculative_tokens_per_s", "speculative")):
        below.plot(values, [point[key] for point in points], marker="o", label=label)
    below.set(ylabel="tokens/s", xlabel=name if name == "batch" else "context in tokens", yscale="log")
    below.legend(fontsize="small")
    for axes in (above, below):
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [str(value) for value in values])
        axes.minorticks_off()
    return figure


def _reliability(calibration: Calibration) -> Any | None:
    """What the drafts said against what was accepted, before and after; the area of a point is its share of samples."""
    before, after = calibration.reliability_before, calibration.reliability_after
    if not before or not after:
        return None
    figure, axes = new_figure(4.6, 4.6)
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--")
    for name, points, color in (("before", before, "tab:orange"), ("after", after, "tab:blue")):
        said, was, count = zip(*points, strict=True)
        label = f"{name}, error {mean_error(points):.1%}"
        axes.plot(said, was, color=color, label=label)
        axes.scatter(said, was, s=[400 * n / sum(count) + 4 for n in count], color=color, alpha=0.6)
    axes.set(xlabel="probability that a draft and all before it are accepted", ylabel="share that was accepted")
    axes.set(xlim=(0, 1), ylim=(0, 1), title=f"Calibration by {calibration.kind}")
    axes.legend(fontsize="small")
    return figure
