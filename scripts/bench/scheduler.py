"""What the scheduler gains: plain decoding, fixed drafts and scheduled drafts, measured side by side by the clock.

    python -m headstart.bench.scheduler --target smollm2-135m-instruct --head DIR --data spec_bench.jsonl \\
        --batch 1 8 32 64 --fixed chain1 chain3 chain5 --scheduled chain7 --out docs/results/scheduler.json
    python -m headstart.bench.scheduler --preset llama-3.1-8b --tau 2.95 --levels 5 --batch 1 8 32 --out …
    python -m headstart.bench.scheduler --target … --head DIR --data … --calibrate-prompts 256 --batch --record FILE
    python -m headstart.bench.scheduler --preset llama-3.1-8b --replay FILE --batch 1 8 32 --out …

The first form decodes the first turns of questions, as many of each task, with a trained head. The second form runs a
preset with random weights and synthetic acceptance, on contexts of random tokens: one rate per level, the same in all
rows. The third form records what a trained head's drafts say of themselves and how probable their acceptance is, on
questions that are not timed; without a batch size it measures nothing else. The fourth form runs a preset whose drafts
are accepted as the recorded ones were: some rows' drafts are then surer than others' (replay.py).

A place whose answer ended takes the next context at once (continuous batching). Every way of decoding warms up first,
which captures its cycles. Then the ways take turns, and the median of each counts. Drafts are named chain5,
dynamic:k4:d5:n16, ddtree:n16 or static:n16: n verified nodes, the root included, d levels (default: the head's), k
children per node.

Rows: see side_by_side.Row. New ones take the place of those with the same head, target, batch, temperature, scheduler,
tree and acceptance.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from headstart.bench.presets import PRESETS, random_target, refuse_ranks
from headstart.bench.recordings import Recording, read_recording, record_cycles, write_recording
from headstart.bench.side_by_side import Bench, Row, parse_tree
from headstart.bench.timing import Clock, add_rows
from headstart.data.prompts import Prompt
from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.decode import QUEUED
from headstart.eval.decoding.session import Decoder
from headstart.eval.kernels.launch import wake_compiler
from headstart.eval.measuring.contexts import first_contexts
from headstart.eval.measuring.metrics import expected_tau
from headstart.eval.prompts import data_label, load_prompts
from headstart.eval.tuning.recording import calibrate_drafter, task_after_task
from headstart.heads.base import Head
from headstart.heads.errors import ConfigError, DataError
from headstart.heads.families import FAMILIES
from headstart.heads.formats.calibration import mean_error
from headstart.heads.provenance import command_line, provenance
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import Target, TargetConfig
from headstart.saved_heads import SYNTHETIC, bound_head, find_head, target_of_head, untrained_head

#: rows that are decoded together where the calibration is fitted
CALIBRATED_ROWS = 32
#: fields by which a new row takes the place of an earlier one
KEY = ("head", "target", "batch", "temperature", "scheduler", "tree", "acceptance")


def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def constant_rate(tau: float, levels: int) -> float:
    """The rate that gives a chain of `levels` drafts this τ, if every level has it: τ = 1 + r + r² + … + r^levels.

    >>> round(constant_rate(2.75, 2), 3)
    0.914

    Raises: ConfigError for a τ that no rate gives.
    """
    if not 1 <= tau <= levels + 1:
        raise ConfigError(f"--tau: found {tau:g}, a chain of {levels} gives from 1 to {levels + 1}: change --levels")
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if expected_tau([rate] * levels) < tau else (low, rate)
    return (low + high) / 2


def by_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of every task, then the second of each, and so on."""
    tasks = dict.fromkeys(prompt.task for prompt in prompts)
    members = ([prompt for prompt in prompts if prompt.task == task] for task in tasks)
    return [prompt for turn in zip_longest(*members) for prompt in turn if prompt is not None]


def count_of(batch: int, least: int, most: int | None) -> int:
    """Contexts decoded per run. Args: least: --least, at small batches. most: --prompts, at large ones.

    >>> [count_of(batch, 16, 128) for batch in (1, 8, 32, 64, 256)]
    [16, 32, 128, 128, 256]
    """
    wished = max(least, QUEUED * batch)
    return max(batch, wished if most is None else min(most, wished))


def counts(arguments: argparse.Namespace) -> dict[int, int]:
    """Batch size → contexts decoded per run."""
    return {batch: count_of(batch, arguments.least, arguments.prompts) for batch in arguments.batch}


def deepest(arguments: argparse.Namespace, head: Head) -> int:
    """Levels of the deepest draft that is asked for."""
    return max(parse_tree(label, head.depth).depth for label in (*arguments.fixed, *arguments.scheduled))


def config_of(arguments: argparse.Namespace, device: torch.device, rates: list[float] | None = None) -> EvalConfig:
    """How the target decodes. On a GPU nothing but its fused form will do: another's times would say nothing."""
    return EvalConfig(
        max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature, synthetic_acceptance=rates,
        engine="fused" if device.type == "cuda" else "auto",
    )  # fmt: skip


def names_of(
    arguments: argparse.Namespace, head: Head, target: Target, data: str, rates: list[float] | None = None,
    replay: Recording | None = None,
) -> dict[str, Any]:
    """The fields of Row that all rows of a command share."""
    origin = provenance(target.device)
    return {
        "head": arguments.name or head.family, "target": arguments.preset or arguments.target,
        "ece_before": replay and replay.ece_before, "ece_after": replay and replay.ece_after,
        "card": origin["device"], "command": command_line(), "git_revision": origin["git_revision"],
        "versions": origin["versions"], "dtype": str(target.dtype).removeprefix("torch."), "data": data,
        "acceptance": "measured" if rates is None else "synthetic" if replay is None else "replayed", "rates": rates,
    }  # fmt: skip


#: takes a number of contexts
Contexts = Callable[[int], list[list[int]]]


def repeated(contexts: list[list[int]]) -> Contexts:
    """The first of them, and from the first again where more are asked for."""
    return lambda count: [contexts[n % len(contexts)] for n in range(count)]


def of_head(arguments: argparse.Namespace, clock: Clock) -> tuple[Bench, Contexts]:
    """A saved head on questions of a file."""
    place = find_head(arguments.head)
    wake_compiler()
    target = load_target(target_of_head(place, TargetConfig(name=arguments.target)))
    clock.mark("target")
    head, data = bound_head(place, target), data_label(arguments.data)
    names = names_of(arguments, head, target, data)
    bench = Bench(Decoder(target, config_of(arguments, target.device)), head, names, arguments.repeats)
    clock.mark("head")
    timed, others = questions(arguments, bench)
    clock.mark("questions")
    names["ece_before"], names["ece_after"] = errors_of(bench, others, deepest(arguments, head), arguments.record)
    clock.mark("calibration")
    return bench, repeated(timed)


def questions(arguments: argparse.Namespace, bench: Bench) -> tuple[list[list[int]], list[list[int]]]:
    """Contexts to time and contexts to calibrate on, none of which are in both, of all tasks alike.

    Those to calibrate on stand task after task.
    """
    target = bench.decoder.target
    prompts = by_turns(load_prompts(arguments.data, max_turns=1))
    taken, rendered, notes = first_contexts(prompts, target, bench.decoder.config)
    asked = zip(taken, rendered, strict=True)
    fitting = [(prompt.task, context) for prompt, context in asked if len(context) + bench.tokens <= target.positions]
    tasks, contexts = [task for task, _ in fitting], [context for _, context in fitting]
    if not contexts:
        raise DataError(f"--data {arguments.data}: no question leaves room for --max-new-tokens {bench.tokens}")
    held = min(arguments.calibrate_prompts, len(contexts) - 1)
    place = len(contexts) - held
    timed, others = contexts[: min(place, max(counts(arguments).values(), default=0))], contexts[place:]
    for note in (*notes, f"{len(timed)} questions to time, {len(others)} others to calibrate on"):
        print(note, flush=True)
    return timed, task_after_task(others, tasks[place:])


def errors_of(
    bench: Bench, contexts: list[list[int]], depth: int, record: Path | None
) -> tuple[float | None, float | None]:
    """ECE of the head's chain before and after its calibration; None where there is none, and the reason is printed.

    Args:
        contexts: task after task. Every other one is fitted on, those between are measured on.
        depth: of the chain.
        record: a file for its cycles, which are then a must.
    """
    if not contexts and record is None:
        return None, None
    try:
        drafter = bench.drafter(TreeConfig("chain", depth))
        if record is None:
            found = calibrate_drafter(bench.decoder, drafter, contexts, bench.names["data"], rows=CALIBRATED_ROWS)
        else:
            recording, found = record_cycles(bench.decoder, drafter, contexts, bench.names, CALIBRATED_ROWS)
            write_recording(record, recording)
            print(f"{record}: {recording}", flush=True)
    except (ConfigError, DataError) as error:
        if record is not None:
            raise
        print(f"not calibrated: {error}", flush=True)
        return None, None
    finally:
        # captured cycles keep their drafters in memory
        bench.decoder.graphs.clear()
    before, after = mean_error(found.reliability_before), mean_error(found.reliability_after)
    by_position = [f"{x:.1%} → {y:.1%}" for x, y in zip(found.ece_before, found.ece_after, strict=True)]
    print(f"ECE {before:.2%} → {after:.2%} ({found.kind} of {found.source}, {found.num_samples} cycles)", flush=True)
    print(f"  by position: {', '.join(by_position)}", flush=True)
    return before, after


def random_head(family: str, target: Target) -> Head:
    """A head with random weights. It drafts 32,000 tokens, or half the target's if that is less."""
    make: Any = FAMILIES[family].config
    vocab = target.dims.vocab_size
    settings = {"draft_vocab_size": min(32000, vocab // 2), "mask_token_id": vocab - 1}
    has = {setting.name for setting in fields(make)}
    return untrained_head(make(**{name: value for name, value in settings.items() if name in has}), target)


def rates_of(arguments: argparse.Namespace, levels: int) -> list[float]:
    """Probability of acceptance at each level: --rates, whose last one also holds for deeper levels, or from --tau."""
    given: list[float] = arguments.rates or [constant_rate(arguments.tau, arguments.levels)]
    return [*given, *[given[-1]] * (levels - len(given))]


def of_preset(arguments: argparse.Namespace, clock: Clock) -> tuple[Bench, Contexts]:
    """A preset with random weights and synthetic or replayed acceptance."""
    replay = replayed(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wake_compiler()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = random_target(PRESETS[arguments.preset][0], device, dtype)
    clock.mark("target")
    head = random_head(arguments.family, target)
    rates = rates_of(arguments, deepest(arguments, head)) if replay is None else replay.mean_rates
    said = ", ".join(f"{rate:.4f}" for rate in rates)
    print(f"rates {said}: τ {expected_tau(rates):.3f} if all levels are drafted", flush=True)
    decoder = Decoder(target, config_of(arguments, device, rates))
    data = "random tokens" if replay is None else f"random tokens, accepted as {replay.head}'s drafts on {replay.data}"
    names = names_of(arguments, head, target, data, rates, replay)
    clock.mark("head")
    noise, count = torch.Generator().manual_seed(0), max(counts(arguments).values(), default=0)
    contexts = torch.randint(3, target.dims.vocab_size, (count, arguments.context), generator=noise).tolist()
    return Bench(decoder, head, names, arguments.repeats, stop=False, replay=replay), repeated(contexts)


def replayed(arguments: argparse.Namespace) -> Recording | None:
    """The recording of --replay. Raises: ConfigError for drafts of which it says nothing."""
    if arguments.replay is None:
        return None
    recording = read_recording(arguments.replay)
    print(f"{arguments.replay}: {recording}", flush=True)
    for label in (*arguments.fixed, *arguments.scheduled):
        tree = parse_tree(label, recording.positions)
        recording.require(label, tree.depth if tree.kind == "chain" else None, arguments.temperature)
    return recording


def bench_all(arguments: argparse.Namespace) -> list[Row]:
    """Rows of all batch sizes. They are written after each, so that what is measured stays."""
    refuse_ranks()
    clock, rows = Clock(), list[Row]()
    bench, contexts = (of_preset if arguments.preset else of_head)(arguments, clock)
    ways = bench.ways(arguments.fixed, arguments.scheduled)
    clock.mark("drafters")
    for batch, count in counts(arguments).items():
        try:
            found = bench.point(ways, contexts(count), batch)
        except torch.OutOfMemoryError:
            print(f"batch {batch} does not fit into memory", flush=True)
            bench.decoder.graphs.clear()
            bench.decoder.drop_buffers()
            continue
        add_rows(arguments.out, found, row_key)
        rows += found
        clock.mark(f"batch {batch}")
        print(f"seconds: {clock}", flush=True)
    return rows


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headstart.bench.scheduler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--target", help="registered name or directory, with --head and --data")
    add("--head", help="directory of a trained head")
    add("--data", help="JSONL file of questions")
    add("--calibrate-prompts", type=int, default=96, help="other questions, for the calibration errors; 0 = none")
    add("--record", type=Path, help="write down the cycles of these other questions, for --replay")
    add("--preset", choices=sorted(PRESETS), help="instead: random weights and synthetic acceptance")
    add("--family", choices=sorted(FAMILIES), default=SYNTHETIC, help="preset: of the head")
    add("--rates", type=float, nargs="+", help="preset: probability of acceptance by level; the last holds on")
    add("--tau", type=float, default=2.95, help="preset, without --rates: τ of a chain of --levels")
    add("--levels", type=int, default=5)
    add("--context", type=int, default=512, help="preset: tokens of a context")
    add("--replay", type=Path, help="preset, in place of --rates and --tau: accept drafts as a file of --record says")
    add("--batch", type=int, nargs="*", default=[1, 8, 32])
    add("--temperature", type=float, default=0.0)
    add("--fixed", nargs="*", default=["chain1", "chain3", "chain5", "chain7"], help="drafts without a scheduler")
    add("--scheduled", nargs="*", default=["chain7"], help="drafts with the scheduler: the largest worth drafting")
    add("--max-new-tokens", type=int, default=128)
    add("--least", type=int, default=16, help="contexts per run at small batches")
    add("--prompts", type=int, help=f"most contexts per run; default: {QUEUED} per row")
    add("--repeats", type=int, default=3, help="measured runs of every way")
    add("--name", help="name of the head in the rows; default: its family")
    add("--out", type=Path, help="put the rows into this JSON list")
    return parser


def main() -> None:
    options = parser()
    arguments = options.parse_args()
    if arguments.preset is None and not (arguments.target and arguments.head and arguments.data):
        options.error("give --preset, or --target, --head and --data")
    if arguments.replay is not None and (arguments.preset is None or arguments.rates):
        options.error("--replay: it says which drafts of a --preset are accepted: give no --rates, and no --head")
    if arguments.record is not None and arguments.preset is not None:
        options.error("--record: a preset has random weights: give --target, --head and --data")
    if not (arguments.fixed or arguments.scheduled):
        options.error("give at least one draft by --fixed or --scheduled")
    bench_all(arguments)


if __name__ == "__main__":
    main()
