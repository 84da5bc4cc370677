"""headstart train RECIPE: train the head on this process; several GPUs: accelerate launch -m headstart.train RECIPE."""

from __future__ import annotations

from typing import Annotated

import typer

from headstart.commands.common import Json, Overrides, RecipeArgument, command_body
from headstart.commands.plan import show_plan

#: an option that belongs to --plan: the help of `headstart plan` explains it
OF_PLAN = typer.Option(hidden=True)
#: what those options are where nobody gives them; the others are None
UNSTATED = {"gpus": 0, "nodes": 1}


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    json: Json = False,
    plan: Annotated[bool, typer.Option("--plan", help="The same as `headstart plan`, with its options.")] = False,
    gpus: Annotated[int, OF_PLAN] = UNSTATED["gpus"],
    nodes: Annotated[int, OF_PLAN] = UNSTATED["nodes"],
    gpu_memory: Annotated[float | None, OF_PLAN] = None,
    tokens_per_s: Annotated[float | None, OF_PLAN] = None,
    tflops: Annotated[float | None, OF_PLAN] = None,
    samples: Annotated[int | None, OF_PLAN] = None,
    mean_tokens: Annotated[float | None, OF_PLAN] = None,
) -> None:
    """Train the head; distil and store features first where the recipe asks for it. A stopped run continues."""
    stated = {
        "gpus": gpus,
        "nodes": nodes,
        "gpu-memory": gpu_memory,
        "tokens-per-s": tokens_per_s,
        "tflops": tflops,
        "samples": samples,
        "mean-tokens": mean_tokens,
    }
    with command_body(json, None if plan else "train") as console:
        if plan:
            show_plan(recipe, overrides or [], tuple(stated.values()), console)
            return
        if given := [f"--{name}" for name, value in stated.items() if value != UNSTATED.get(name)]:
            from headstart.heads.errors import ConfigError
            from headstart.train.launching.rendezvous import REMEDY

            raise ConfigError(f"{', '.join(given)}: found in `headstart train`, expected in `headstart plan`. {REMEDY}")
        from headstart.pipeline.distill import distill
        from headstart.pipeline.run import Run
        from headstart.pipeline.train import train
        from headstart.recipes.load import load_recipe

        run = Run(load_recipe(recipe, overrides or []), console, ahead=("train",))
        with run.lock():
            distill(run)
            result = train(run)
            run.save_recipe()
        console.result(
            result, f"trained {result['step']} steps in {result['seconds']:.0f} s; the head is in {result['head']}"
        )
