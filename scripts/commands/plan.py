"""headstart plan RECIPE: what training will do and cost, before any work starts."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headstart.commands.common import Json, Overrides, RecipeArgument, command_body
from headstart.console import Console

#: the options that describe a launch: fields of plan.Launch
LAUNCH = ("gpus", "nodes", "gpu_memory", "tokens_per_s", "tflops", "samples", "mean_tokens")


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(help="GPUs of one machine (0: those of this one).")] = 0,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    gpu_memory: Annotated[float | None, typer.Option(help="GiB of one card (default: ask this machine).")] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option(help="Tokens/s of the whole launch, measured (default: estimated).")
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="TFLOP/s of one card (default: measured here, else an H100's).")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Training samples, instead of reading the data.")] = None,
    mean_tokens: Annotated[float | None, typer.Option(help="Mean tokens of a sample, with --samples.")] = None,
    json: Json = False,
) -> None:
    """Say what training takes: memory, steps, hours, disk.

    Refuses what cannot work or fit. Loads no weights.
    """
    stated = dict(zip(LAUNCH, (gpus, nodes, gpu_memory, tokens_per_s, tflops, samples, mean_tokens), strict=True))
    with command_body(json, libraries=True) as console:
        show_plan(recipe, overrides, stated, console)


def show_plan(recipe: str, overrides: list[str] | None, stated: dict[str, Any], console: Console) -> None:
    """Plan the recipe and print the plan. `stated`: fields of `Launch`, None where the option was not given."""
    from headstart.plan import Launch, plan_recipe, render
    from headstart.recipes.load import load_recipe

    given = {name: value for name, value in stated.items() if value is not None}
    plan = plan_recipe(load_recipe(recipe, overrides or []), Launch(**given), console)
    console.result(plan.to_json(), render(plan))
