"""headstart train RECIPE: train the head in this process.

Several GPUs: accelerate launch -m headstart.train RECIPE (see train_on_ranks.py).
"""

from __future__ import annotations

from typing import Annotated

import typer

from headstart.commands.common import Json, Overrides, RecipeArgument, command_body, open_run
from headstart.commands.plan import LAUNCH, show_plan
from headstart.heads.counting import counted

#: an option that goes with --plan; the help of `headstart plan` explains it
OF_PLAN = typer.Option(hidden=True)


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    json: Json = False,
    plan: Annotated[bool, typer.Option("--plan", help="The same as `headstart plan`, with its options.")] = False,
    gpus: Annotated[int | None, OF_PLAN] = None,
    nodes: Annotated[int | None, OF_PLAN] = None,
    gpu_memory: Annotated[float | None, OF_PLAN] = None,
    tokens_per_s: Annotated[float | None, OF_PLAN] = None,
    tflops: Annotated[float | None, OF_PLAN] = None,
    samples: Annotated[int | None, OF_PLAN] = None,
    mean_tokens: Annotated[float | None, OF_PLAN] = None,
) -> None:
    """Train the head in this process.

    Prompts are answered and features stored first, where the recipe asks for it. A stopped run continues. Several GPUs:
    accelerate launch -m headstart.train RECIPE.
    """
    stated = dict(zip(LAUNCH, (gpus, nodes, gpu_memory, tokens_per_s, tflops, samples, mean_tokens), strict=True))
    with command_body(json, None if plan else "train", libraries=True) as console:
        if plan:
            show_plan(recipe, overrides, stated, console)
            return
        if given := [f"--{name.replace('_', '-')}" for name, value in stated.items() if value is not None]:
            from headstart.heads.errors import ConfigError
            from headstart.train.launching.rendezvous import REMEDY

            raise ConfigError(f"{', '.join(given)}: found in `headstart train`, expected in `headstart plan`. {REMEDY}")
        from headstart.pipeline.distill import distill
        from headstart.pipeline.train import train

        run = open_run(recipe, overrides, console, ("train",))
        with run.lock():
            distill(run)
            result = train(run)
            run.save_recipe()
        steps = counted(result["step"], "steps")
        console.result(result, f"trained {steps} in {result['seconds']:.0f} s; the head is in {result['head']}")
