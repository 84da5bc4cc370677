"""headstart train RECIPE: train the head on this process; several GPUs: accelerate launch -m headstart.train RECIPE."""

from __future__ import annotations

from headstart.commands.common import Json, Overrides, RecipeArgument, speaking


def command(recipe: RecipeArgument, overrides: Overrides = None, json: Json = False) -> None:
    """Train the head (after distilling and storing features where the recipe asks for it); resumable."""
    with speaking(json) as talk:
        from headstart.pipeline import Run
        from headstart.recipes.load import load_recipe

        run = Run(load_recipe(recipe, overrides or []), talk)
        with run.steps.lock():
            run.save_recipe()
            run.distill()
            result = run.train()
        talk.result(
            result, f"trained {result['step']} steps in {result['seconds']:.0f} s; the head is in {result['head']}"
        )
