"""Speed-up by batch size and by context length, and the batch sizes at which drafting gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain as joined
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from headstart.eval.config import EvalConfig
from headstart.eval.decoding.decode import QUEUED, Cycle
from headstart.eval.decoding.scheduler import KEEP_ALL, Scheduler
from headstart.eval.drafters import Drafter
from headstart.eval.measuring.metrics import Timed, acceptance, bootstrap_tau, speedup
from headstart.heads.errors import ConfigError
from headstart.heads.targets.target import Target

if TYPE_CHECKING:
    from headstart.eval.decoding.session import Decoder

T = TypeVar("T")
CONTEXT_NOTE = "contexts are made by repeating each prompt's own tokens (or keeping the last of them)"


def queued(config: EvalConfig, rows: int) -> int:
    """Contexts that are decoded in one go, `rows` at a time. A single row is timed prompt by prompt."""
    return rows * QUEUED if config.refill and rows > 1 else rows


def sweep_points(config: EvalConfig) -> int:
    return len(config.batch_sizes) + len(config.context_lengths)


def check_contexts(lengths: Sequence[int], config: EvalConfig, target: Target, field: str) -> None:
    """Raises ConfigError naming `field` when a context and its answer go beyond the target's positions."""
    limit, longest = target.positions, max(lengths, default=0)
    if longest and longest + config.max_new_tokens > limit:
        raise ConfigError(
            f"{field}: found {longest} with eval.max_new_tokens={config.max_new_tokens}, the target has "
            f"{limit} positions: give at most {limit - config.max_new_tokens}"
        )


def fit(context: list[int], length: int) -> list[int]:
    """`length` tokens that end as `context` does: its last ones, with the whole of it repeated before them.

    >>> fit([1, 2, 3], 5)
    [2, 3, 1, 2, 3]
    """
    return (context * -(-length // len(context)))[-length:]


def spread(values: Sequence[T], most: int) -> list[T]:
    """At most `most` of the values, evenly by place, the first and the last among them.

    >>> spread([1, 2, 3, 4, 5, 6, 7], 4)
    [1, 3, 5, 7]
    """
    if len(values) <= most or most < 2:
        return list(values[:most])
    return [values[round(n * (len(values) - 1) / (most - 1))] for n in range(most)]


def row_batches(contexts: list[list[int]], least: int, batch: int) -> list[list[list[int]]]:
    """Whole batches of at least `least` rows: the contexts, evenly chosen from or repeated.

    >>> row_batches([[1], [2], [3]], 3, 2)
    [[[1], [2]], [[3], [1]]]
    """
    count = -(-least // batch) * batch
    chosen = spread(contexts, count)
    return [[chosen[n % len(chosen)] for n in range(start, start + batch)] for start in range(0, count, batch)]


def sweep(
    decoder: Decoder,
    drafter: Drafter | None,
    config: EvalConfig,
    contexts: list[list[int]],
    progress: Callable[[str], None],
    scheduler: Scheduler = KEEP_ALL,
) -> dict[str, Any]:
    """Time `eval.batch_sizes` and `eval.context_lengths`.

    Args:
        contexts: the prompts' first contexts.
        progress: called with what is timed next, once per point.
        scheduler: of the drafts.
    Returns: the report's `sweeps`: {"batch": {"points", "gain_ends", "says"}, "context": {"points", "note"}}; a sweep
        that was not asked for is left out. A point whose batch does not fit into memory ends its sweep.
    """
    sweeps: dict[str, Any] = {}
    for name, values in (("batch", config.batch_sizes), ("context", config.context_lengths)):
        points = []
        for value in sorted(values):
            progress(f"{name} {value}")
            batch = value if name == "batch" else config.batch_size
            given = contexts if name == "batch" else [fit(context, value) for context in contexts]
            try:
                points.append({name: value, **measure_point(decoder, drafter, config, given, batch, scheduler)})
            except torch.OutOfMemoryError:
                decoder.drop_buffers()
                points.append({name: value, "out_of_memory": True})
                break
        if points:
            sweeps[name] = {"points": points}
    if "batch" in sweeps and drafter is not None:
        sweeps["batch"] |= gain_ends(sweeps["batch"]["points"])
    if "context" in sweeps:
        sweeps["context"]["note"] = CONTEXT_NOTE
    return sweeps


def measure_point(
    decoder: Decoder,
    drafter: Drafter | None,
    config: EvalConfig,
    contexts: list[list[int]],
    batch: int,
    scheduler: Scheduler = KEEP_ALL,
) -> dict[str, Any]:
    """Decode the same rows plainly and speculatively: at least `eval.sweep_prompts` of them, `batch` at a time.

    `speedup` is by the clock, places that stay empty included. `row_speedup` is by the time that rows spent decoding,
    as on a server where no place is ever empty. `tau_ci95` is over distinct contexts drawn with replacement.

    Args: scheduler: of the drafts.
    """
    batches = row_batches(contexts, max(queued(config, batch), config.sweep_prompts), batch)
    count = len(batches) * batch
    if queued(config, batch) > batch:
        batches = [list(joined.from_iterable(batches))]
    point: dict[str, Any] = {"rows": count, "prompts": min(len(contexts), count)}
    rates: dict[str, float | None] = {}
    row_rates: dict[str, float | None] = {}
    for way, name in ((None, "baseline"), (drafter, "speculative")):
        if name == "speculative" and way is None:
            continue
        chooser = KEEP_ALL if way is None else scheduler
        if config.warmup_tokens > 0:
            decoder.run(batches[0], way, config.warmup_tokens, config.seed, rows=batch, scheduler=chooser)
        timed, answers = Timed(), []
        for number, some in enumerate(batches):
            limits, seed = decoder.limits(some), config.seed + number * batch
            decoded = decoder.run(some, way, limits, seed, rows=batch, scheduler=chooser)
            timed.add(decoded)
            answers += decoded.answers
        rates[name], row_rates[name] = timed.tokens_per_s, timed.row_tokens_per_s
        point |= {f"{name}_tokens_per_s": timed.tokens_per_s, f"{name}_latency": timed.latency()}
        point[f"{name}_active_rows"] = timed.active_rows
        if way is not None:
            point["tau"] = acceptance(joined.from_iterable(answer.cycles for answer in answers)).tau
            by_context: dict[tuple[int, ...], list[Cycle]] = {}
            for context, answer in zip(joined.from_iterable(batches), answers, strict=True):
                by_context.setdefault(tuple(context), []).extend(answer.cycles)  # a repeated one tells nothing new
            point["tau_ci95"] = bootstrap_tau(list(by_context.values()), config.seed)
    for key, measured in (("speedup", rates), ("row_speedup", row_rates)):
        point[key] = speedup(measured.get("speculative"), measured["baseline"])
    return point


def gain_ends(points: list[dict[str, Any]]) -> dict[str, Any]:
    """{"gain_ends": measured batch from which on none gains, or None, "says": where it gains, in words}."""
    measured = [(point["batch"], point["speedup"]) for point in points if point.get("speedup") is not None]
    gains = [speedup > 1 for _, speedup in measured]
    lost = next((n for n in range(len(gains)) if not any(gains[n:])), None)
    if not measured:
        says = "no speed-up was measured"
    elif all(gains):
        says = f"drafting gains at every batch measured ({measured[-1][1]:.2f}× at {measured[-1][0]})"
    elif lost == 0:
        says = f"drafting gains nothing from batch {measured[0][0]} on ({measured[0][1]:.2f}×)"
    elif lost is not None and all(gains[:lost]):
        (before, gain), (batch, loss) = measured[lost - 1], measured[lost]
        says = f"the gain ends at batch {batch} ({loss:.2f}×); batch {before} still gains ({gain:.2f}×)"
    else:
        kept, rest = (
            ", ".join(f"{batch} ({speedup:.2f}×)" for (batch, speedup), gained in zip(measured, gains, strict=True)
                      if gained is wanted)
            for wanted in (True, False)
        )  # fmt: skip
        says = f"drafting gains at batch {kept}; it does not at {rest}"
    return {"gain_ends": None if lost is None else measured[lost][0], "says": says}
