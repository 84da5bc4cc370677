"""`headstart train RECIPE --plan`: a recipe turned into the numbers that train/plan.py counts with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from headstart.data.packing import plan_packs
from headstart.data.sources import read_prompts
from headstart.heads.base import build_head
from headstart.heads.errors import ConfigError, HeadstartError
from headstart.heads.target import DTYPES
from headstart.light import light_target
from headstart.pipeline import Run
from headstart.recipes.schema import Recipe
from headstart.talk import Talk
from headstart.train.flops import matmul_flops
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


@dataclass
class Launch:
    """What a plan needs to know and no recipe says.

    Attributes:
        gpus, nodes: ranks of one machine, machines.
        gpu_memory_gib: of one card; None asks the cards of this machine.
        tokens_per_s: of the whole launch, measured (`python -m headstart.bench_scaling`); None estimates it.
        tflops: of one card in large bfloat16 matrix products; None measures this machine's, or assumes an H100's.
        samples, mean_tokens: of the training data, instead of reading it.
    """

    gpus: int
    nodes: int = 1
    gpu_memory_gib: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    samples: int | None = None
    mean_tokens: float | None = None


def plan_recipe(recipe: Recipe, launch: Launch, talk: Talk) -> Plan:
    """Plan without loading the target or its weights.

    Raises: what train.plan.require_fit raises, after showing the plan.
    """
    target = light_target(recipe.target)
    half = recipe.target.dtype in ("auto", "bfloat16", "float16")
    target.model.to(torch.bfloat16 if recipe.target.dtype == "auto" else DTYPES[recipe.target.dtype])
    target.embed_VD = target.model.get_input_embeddings().weight
    with torch.device("meta"):
        head = build_head(recipe.head, target.dims)
    lengths, supervised, notes = data_of(recipe, launch, talk, target)
    packs = len(plan_packs(lengths, recipe.data.pack_tokens, recipe.seed)) if lengths else 0
    parallel = recipe.train.parallel
    if parallel == "auto":
        parallel = "replicated"
        notes.append("train.parallel=auto: planned as replicated; add train.parallel=fsdp2 for that launch")
    layout = Layout(
        ranks=launch.gpus * launch.nodes,
        ranks_per_node=launch.gpus,
        parallel=parallel,
        target_parallel=recipe.target.parallel,
        shard_ranks=recipe.target.shard_ranks,
        pack_tokens=recipe.data.pack_tokens,
        accumulation=recipe.train.accumulation,
        supervised=supervised,
        half=half and recipe.train.mixed_precision != "no",
        activation_checkpointing=recipe.train.activation_checkpointing,
        features=recipe.data.features,
    )
    if recipe.train.accumulation < layout.ranks:
        notes.append(
            f"train.accumulation={recipe.train.accumulation} gives {layout.ranks - recipe.train.accumulation} of "
            f"{layout.ranks} ranks no pack: set train.accumulation={layout.ranks} or a multiple"
        )
    device = local_device_bytes() if launch.gpu_memory_gib is None else int(launch.gpu_memory_gib * GIB)
    if device is None:
        notes.append("no GPU here: whether it fits is not checked; give --gpu-memory GIB")
    rate = launch.tokens_per_s
    if rate is None:
        flops, whose = card_flops(launch)
        rate = expected_rate(target, head, layout, flops)
        notes.append(
            f"hours: estimated, {rate:,.0f} tokens/s at {UTILISATION:.0%} of {flops / 1e12:.0f} TFLOP/s a card "
            f"({whose}); measure with `python -m headstart.bench_scaling`, then give --tokens-per-s"
        )
    plan = make_plan(target, head, recipe.train, layout, packs, sum(lengths), rate, device, notes)
    try:
        require_fit(plan, target, head, Path(recipe.run_dir))
    except HeadstartError:
        talk.result(plan.to_json(), render(plan))
        raise
    return plan


def card_flops(launch: Launch) -> tuple[float, str]:
    """(FLOP/s of one card, where that comes from)."""
    if launch.tflops is not None:
        return launch.tflops * 1e12, "as stated"
    if torch.cuda.is_available():
        return matmul_flops(torch.device("cuda"), torch.bfloat16), "measured"
    return CARD_FLOPS, "an H100; --tflops states another"


def data_of(recipe: Recipe, launch: Launch, talk: Talk, target: Any) -> tuple[Sequence[int], float, list[str]]:
    """(tokens of every training sample, part of them supervised, what was assumed)."""
    if launch.samples is not None:
        mean = launch.mean_tokens or recipe.data.max_length
        note = f"data: {launch.samples} samples of {mean:g} tokens as stated, all supervised"
        return [round(mean)] * launch.samples, 1.0, [note]
    run = Run(recipe, talk, target)
    if recipe.data.distill.prompts and not run.distilled_path.is_file():
        try:
            prompts = len(read_prompts(recipe.data.distill.prompts))
        except HeadstartError as error:
            raise ConfigError(
                f"plan: the prompts cannot be read here ({error}): state the data with --samples N --mean-tokens T"
            ) from error
        most = recipe.data.max_length
        note = (
            f"data: {prompts} prompts not answered yet, planned as samples of {most} tokens (the most), all supervised"
        )
        return [most] * prompts, 1.0, [note]
    samples = run.trained_samples(run.prepare())
    rows = sum(len(sample) for sample in samples)
    supervised = sum(int((sample.turn_ids >= 0).sum()) for sample in samples)
    return [len(sample) for sample in samples], supervised / max(rows, 1), []


def render(plan: Plan) -> Group:
    """The plan for a person."""
    table = Table(show_header=True, title=f"{plan.layout.ranks} ranks, memory of one")
    table.add_column("component")
    table.add_column("GiB", justify="right")
    for name, size in plan.memory.items():
        table.add_row(name, f"{size / GIB:.2f}")
    card = "" if plan.device_bytes is None else f" of {plan.device_bytes / GIB:.1f}"
    table.add_row("peak (target and head activations do not overlap)", f"{plan.peak / GIB:.2f}{card}", style="bold")
    steps = "until the clock ends it" if plan.steps is None else f"{plan.steps} steps"
    hours = "hours unknown" if plan.hours is None else f"{plan.hours:.2g} h"
    disk = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.disk.items())
    lines = [
        f"{steps} of {plan.tokens_per_step:.0f} tokens; {hours}",
        f"disk: {sum(plan.disk.values()) / GIB:.1f} GiB ({disk})",
        f"host memory for checkpoints: {plan.host / GIB:.1f} GiB",
        *(f"note: {note}" for note in plan.notes),
    ]
    return Group(table, *(Text(line) for line in lines))
