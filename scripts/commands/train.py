"""headstart train RECIPE: train the head on this process; several GPUs: accelerate launch -m headstart.train RECIPE."""

from __future__ import annotations

from typing import Annotated

import typer

from headstart.commands.common import Json, Overrides, RecipeArgument, speaking


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    json: Json = False,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Only say what it takes (memory, steps, hours, disk); refuse what cannot fit."),
    ] = False,
    gpus: Annotated[int, typer.Option(help="--plan: GPUs of one machine (0: those of this one).")] = 0,
    nodes: Annotated[int, typer.Option(help="--plan: machines.")] = 1,
    gpu_memory: Annotated[
        float | None, typer.Option(help="--plan: GiB of one card (default: ask this machine).")
    ] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option(help="--plan: tokens/s of the whole launch, measured (default: estimated).")
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="--plan: TFLOP/s of one card (default: measured here, else an H100's).")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="--plan: training samples, instead of reading the data.")] = None,
    mean_tokens: Annotated[float | None, typer.Option(help="--plan: tokens of a sample, with --samples.")] = None,
) -> None:
    """Train the head (after distilling and storing features where the recipe asks for it); resumable."""
    with speaking(json, None if plan else "train") as console:
        from headstart.recipes.load import load_recipe

        settings = load_recipe(recipe, overrides or [])
        if plan:
            import torch

            from headstart.plan import Launch, plan_recipe, render

            count = gpus or torch.cuda.device_count() or 1
            launch = Launch(count, nodes, gpu_memory, tokens_per_s, tflops, samples, mean_tokens)
            planned = plan_recipe(settings, launch, console)
            console.result(planned.to_json(), render(planned))
            return
        stated = {
            "gpus": gpus or None,
            "nodes": nodes if nodes != 1 else None,
            "gpu-memory": gpu_memory,
            "tokens-per-s": tokens_per_s,
            "tflops": tflops,
            "samples": samples,
            "mean-tokens": mean_tokens,
        }
        if given := [f"--{name}" for name, value in stated.items() if value is not None]:
            from headstart.heads.errors import ConfigError
            from headstart.train.sharing.distributed import REMEDY

            raise ConfigError(f"{', '.join(given)}: found without --plan, whose options they are. {REMEDY}")
        from headstart.pipeline.run import Run

        run = Run(settings, console, ahead=("train",))
        with run.steps.lock():
            run.distill()
            result = run.train()
            run.save_recipe()
        console.result(
            result, f"trained {result['step']} steps in {result['seconds']:.0f} s; the head is in {result['head']}"
        )
