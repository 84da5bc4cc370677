"""`headstart plan RECIPE`: reads from a recipe what train/plan.py needs for its estimate, and shows the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from headstart import auto
from headstart.console import Console
from headstart.data.choosing.asked import read_prompts
from headstart.data.packing import POOL, make_packs
from headstart.fit import in_dtype, run_layout
from headstart.heads.base import Head
from headstart.heads.counting import counted
from headstart.heads.errors import ConfigError, DataError, HeadstartError, first_line
from headstart.heads.targets.load import resolve_device, weightless_target
from headstart.pipeline.data import counted_samples
from headstart.pipeline.run import Run, dated_target
from headstart.recipes.schema import Recipe
from headstart.refusals import planned_training, refuse_ahead
from headstart.scaling_line import more_data, packaged_lines
from headstart.train.flops import matmul_flops
from headstart.train.launching.setup import check_layout
from headstart.train.plan import (
    CARD_FLOPS,
    GIB,
    UTILISATION,
    Layout,
    Plan,
    expected_rate,
    local_device_bytes,
    make_plan,
    require_fit,
)
from headstart.train.stream import idle_note


@dataclass
class Launch:
    """The launch to plan for. A recipe does not describe it; the options of `headstart plan` do.

    Attributes:
        gpus: GPUs of one machine; 0 = this machine's, or its processor where there is none.
        nodes: number of machines.
        gpu_memory: GiB of one card; None asks the cards of this machine.
        tokens_per_s: of the whole launch, as `python -m headstart.bench.scaling` measures it; None estimates it.
        tflops: of one card in large bfloat16 matrix products; None measures this machine's, or assumes an H100's.
        samples: number of training samples; None reads the data.
        mean_tokens: mean length of these samples; None takes data.max_length.
    """

    gpus: int = 0
    nodes: int = 1
    gpu_memory: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    samples: int | None = None
    mean_tokens: float | None = None

    def device(self, recipe: Recipe) -> torch.device:
        """What computes: the CPU where the recipe says so, GPUs where the options speak of any, else what is here.

        With a recipe for the CPU, `gpu_memory` is the memory of the machine.
        """
        if recipe.target.device == "cpu":
            return torch.device("cpu")
        of_gpus = (self.gpus, self.gpu_memory, self.tflops) != (0, None, None) or self.nodes > 1
        return torch.device("cuda") if of_gpus else resolve_device(recipe.target.device)

    def check(self, longest: int) -> None:
        """Raise ConfigError naming the first option whose value cannot be; `longest`: data.max_length."""
        for name in ("gpus", "nodes", "samples"):
            if (count := getattr(self, name)) is not None and count < (name != "gpus"):
                raise ConfigError(f"--{name}: found {count}, expected a whole number of 1 or more")
        for name in ("gpu_memory", "tokens_per_s", "tflops", "mean_tokens"):
            value = getattr(self, name)
            if value is not None and not (value > 1e-6 and math.isfinite(value)):
                raise ConfigError(f"--{name.replace('_', '-')}: found {value}, expected a number above 0")
        if self.mean_tokens is not None and self.samples is None:
            raise ConfigError(f"--mean-tokens: found {self.mean_tokens:g} without --samples, expected both or neither")
        if self.mean_tokens is not None and not 1 <= self.mean_tokens <= longest:
            raise ConfigError(f"--mean-tokens: found {self.mean_tokens:g}, expected 1 to data.max_length={longest}")


@dataclass
class DataShape:
    """Training data as a plan counts it.

    Attributes:
        packs, tokens: numbers of one epoch.
        supervised: share of the tokens that are supervised.
        notes: what was assumed.
        known: whether the tokens were counted or stated. Those of prompts that wait for answers are an upper bound.
        samples: number of samples; 0 = unknown.
    """

    packs: int
    tokens: int
    supervised: float = 1.0
    notes: list[str] = field(default_factory=list)
    known: bool = True
    samples: int = 0

    @classmethod
    def equal(cls, samples: int, length: float, pack_tokens: int, note: str) -> DataShape:
        """The shape of `samples` samples of the same length, all supervised, packed as make_packs does."""
        each = max(int(pack_tokens // length), 1)
        full, rest = divmod(samples, POOL)
        packs = full * -(-POOL // each) - (-rest // each)
        return cls(packs, round(samples * length), notes=[note], samples=samples)

    def beside(self, other: DataShape) -> DataShape:
        """The shape of both together."""
        tokens = self.tokens + other.tokens
        supervised = (self.supervised * self.tokens + other.supervised * other.tokens) / max(tokens, 1)
        known = self.known and other.known
        notes, samples = [*self.notes, *other.notes], self.samples + other.samples
        return DataShape(self.packs + other.packs, tokens, supervised, notes, known, samples)


def plan_recipe(recipe: Recipe, launch: Launch, console: Console, run: Run | None = None) -> Plan:
    """Plan without loading the target's weights.

    Args: run: of this recipe, if its data was read already.
    Raises: ConfigError when training would refuse such a launch; what train.plan.require_fit raises where it cannot
    fit, after the plan was shown.
    """
    launch.check(recipe.data.max_length)
    device = launch.device(recipe)
    cards = launch.gpus or (torch.cuda.device_count() if device.type == "cuda" else 0) or 1
    node_ranks = 1 if recipe.target.parallel == "device_map" else cards
    ranks = node_ranks * launch.nodes
    check_layout(recipe.train.parallel, recipe.train, recipe.target, ranks, node_ranks)
    target = weightless_target(dated_target(recipe))
    refuse_ahead(recipe, target)
    in_dtype(target, recipe, device)
    most = None if launch.gpu_memory is None else int(launch.gpu_memory * GIB)
    if most is None and (device.type == "cpu" or torch.cuda.is_available()):
        most = local_device_bytes(device)
    chosen, notes = None, []
    if auto.is_auto(recipe):
        chosen = auto.kept(recipe) or auto.choose(recipe, target, device, most, ranks, node_ranks, cards)
        recipe = chosen.into(recipe)
        notes.append(chosen.describe())
    head, data = planned_training(recipe, target), data_of(run or Run(recipe, console, target), launch)
    notes += [*data.notes, *(f"target: {note}" for note in target.notes)]
    layout = run_layout(
        recipe, device, ranks, node_ranks, cards, data.supervised, data.tokens if data.known else 0
    )  # fmt: skip
    if recipe.data.features == "auto":
        layout = replace(layout, features=auto.features_within(recipe, target, head, layout, most))
        notes.append(f"auto: data.features={layout.features}")
    if recipe.train.parallel == "auto" and layout.ranks > 1 and head.shardable:
        notes.append("train.parallel=auto counts as replicated; to plan for FSDP2, add train.parallel=fsdp2")
    if recipe.joint.enabled:
        notes.append(
            "joint training: head activations include what the second stage keeps of the target; hours are the mean of "
            "both stages"
        )
    if (share := recipe.head.vocabulary_share) is not None:
        notes.append(
            f"head.draft_vocab_size={share:g} is a share of the target's choices: the data decides the size, which is "
            f"known when training begins; planned with the most it can be, {head.draft_vocab_size:,} tokens"
        )
    if note := drawn_note(head, layout):
        notes.append(note)
    if note := idle_note(recipe.train.accumulation, layout.ranks):
        notes.append(note)
    if most is None:
        notes.append("there is no GPU here, so whether it fits is not checked: give --gpu-memory GIB")
    if not data.known and layout.features == "memory":
        notes.append("features are held in memory, and their size is known when the prompts are answered: not counted")
    if layout.host:
        notes.append(
            "planned for the processor of this machine; --gpus and --gpu-memory plan for GPUs. Other programs' needs, "
            "and more questions at a time than the defaults, are not counted"
        )
    rate = launch.tokens_per_s
    if rate is None:
        flops, source = card_flops(launch, device)
        rate = expected_rate(target, head, layout, flops)
        speed = f"{flops / 1e12:.0f}" if flops > 1e13 else f"{flops / 1e12:.2f}"
        notes.append(
            f"hours: estimated from {rate:,.0f} tokens/s, which is {UTILISATION:.0%} of {speed} TFLOP/s per "
            f"{'processor' if layout.host else 'card'} ({source}); `python -m headstart.bench.scaling` measures the "
            "rate, --tokens-per-s states it"
        )
    if note := more_data(recipe.head.type, recipe.target.name, data.samples, packaged_lines()):
        notes.append(note)
    plan = make_plan(target, head, recipe.train, layout, data.packs, data.tokens, rate, most, notes)
    try:
        require_fit(plan, target, head, Path(recipe.run_dir))
    except HeadstartError as error:
        if chosen is not None and isinstance(error, ConfigError):
            error = ConfigError(chosen.explain(str(error), recipe))
        error.details = {"plan": plan.to_json()}
        if not console.as_json:
            console.result(None, render(plan))
        raise error from None
    return plan


def drawn_note(head: Head, layout: Layout) -> str | None:
    """How many supervised rows of a pack a step trains; None where it takes all."""
    supervised = layout.pack_tokens * layout.supervised
    drawn = head.chosen_anchors(layout.pack_tokens, supervised)
    if drawn >= supervised:
        return None
    return f"a step trains the head at {drawn:.0f} of a pack's {supervised:.0f} supervised rows, drawn anew every time"


def card_flops(launch: Launch, device: torch.device) -> tuple[float, str]:
    """(FLOP/s of one card or of the processor, where the number comes from)."""
    if launch.tflops is not None:
        return launch.tflops * 1e12, "as stated"
    if device.type == "cpu":
        return matmul_flops(device, torch.float32, size=1024, runs=3), "measured"
    if torch.cuda.is_available():
        return matmul_flops(torch.device("cuda"), torch.bfloat16), "measured"
    return CARD_FLOPS, "an H100's; --tflops states another card's"


def data_of(run: Run, launch: Launch) -> DataShape:
    """The training data: as the options state it, or read from the recipe's sources."""
    data, most, times = run.recipe.data, run.recipe.data.max_length, 1 + run.recipe.data.resampled_copies
    if launch.samples is not None:
        mean = launch.mean_tokens or most
        note = f"data: {counted(launch.samples, 'samples')} of {mean:g} tokens as stated, all supervised"
        return replace(DataShape.equal(launch.samples * times, mean, data.pack_size, note), samples=launch.samples)
    if data.distill.asks and not run.distilled_path.is_file():
        try:
            prompts = sum(prompt.media is None for prompt in read_prompts(data.distill.prompts, seed=run.recipe.seed))
        except HeadstartError as error:
            raise DataError(
                f"plan: the prompts cannot be read here ({error}). To plan without them, state the data with "
                "--samples N --mean-tokens T"
            ) from error
        prompts += data.distill.written
        writes = f" ({data.distill.written} of them are still to be written)" if data.distill.written else ""
        each = data.distill.samples_per_prompt
        asked = "each" if each == 1 else f"each of the {each} answers to one (data.distill.samples_per_prompt)"
        note = (
            f"data: {counted(prompts, 'prompts')} not answered yet{writes}; {asked} counts as a sample of "
            f"data.max_length={most} tokens, all supervised"
        )
        planned = DataShape.equal(prompts * each * times, most, data.pack_size, note)
        planned = replace(planned, samples=prompts * each, known=False)
        return planned.beside(_read(run.without_prompts())) if data.sources else planned
    return _read(run)


def _read(run: Run) -> DataShape:
    samples = counted_samples(run)
    lengths = [len(sample) for sample in samples]
    supervised = sum(int((sample.turn_ids >= 0).sum()) for sample in samples)
    packs = len(make_packs(lengths, run.recipe.data.pack_size, run.recipe.seed)) if lengths else 0
    originals = len(samples) // (1 + run.recipe.data.resampled_copies)
    return DataShape(packs, sum(lengths), supervised / max(sum(lengths), 1), samples=originals)


def render(plan: Plan) -> Group:
    """The plan as a table and lines of text."""
    ranks = plan.layout.ranks
    table = Table(title="memory of the rank" if ranks == 1 else f"memory of each of {ranks} ranks")
    table.add_column("component")
    table.add_column("GiB", justify="right")
    for name, size in plan.memory.items():
        context = "Python and libraries" if plan.layout.host else "driver and libraries"
        table.add_row(context if name == "context" else name, f"{size / GIB:.2f}")
    card = "" if plan.device_bytes is None else f" of {plan.device_bytes / GIB:.1f}{' free' * plan.layout.host}"
    table.add_row("peak (target and head activations do not overlap)", f"{plan.peak / GIB:.2f}{card}", style="bold")
    steps = "as many steps as train.max_seconds allows, each" if plan.steps is None else counted(plan.steps, "steps")
    disk = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.disk.items())
    lines = [
        f"{steps} of {plan.tokens_per_step:.0f} tokens; {hours_of(plan)}",
        f"disk: {sum(plan.disk.values()) / GIB:.1f} GiB ({disk})",
        f"host memory for checkpoints: {plan.host / GIB:.1f} GiB",
        *([] if plan.target is None else [f"target: {plan.target}"]),
        *(f"note: {note}" for note in plan.notes),
    ]
    return Group(table, *(Text(line) for line in lines))


def hours_of(plan: Plan) -> str:
    """The hours of a plan in words."""
    if plan.hours is None:
        return "hours unknown"
    return "under 0.1 h" if plan.hours < 0.1 else f"{plan.hours:.2g} h"


def prediction(run: Run) -> dict[str, Any]:
    """What `headstart plan` says of epochs, steps and hours on the GPUs of this machine, as JSON values.

    Returns: epochs, steps, hours, tokens_per_step, tokens_per_s, summary (in words); `refused` instead, with the
        reason, where the plan refuses the run.
    """
    launch = Launch()
    try:
        plan = plan_recipe(run.recipe, launch, Console(silent=True), run)
    except HeadstartError as error:
        return {"refused": first_line(error), "summary": f"refused: {first_line(error)}"}
    seen = "" if plan.epochs is None else f"{counted(plan.epochs, 'epochs', '.3g')}, "
    steps = "as many steps as the time allows" if plan.steps is None else counted(plan.steps, "steps", ",")
    cards = torch.cuda.device_count()
    card = f"{counted(cards, 'GPUs')} of this machine" if not plan.layout.host else "this machine's processor"
    summary = f"{seen}{steps} of {plan.tokens_per_step:,.0f} tokens, {hours_of(plan)} expected on {card}"
    names = ("epochs", "steps", "hours", "tokens_per_step", "tokens_per_s")
    return {**{name: getattr(plan, name) for name in names}, "summary": summary}
