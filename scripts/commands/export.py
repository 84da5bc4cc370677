"""headstart export RECIPE: write the trained head for serving engines."""

from __future__ import annotations

from headstart.commands.common import Json, Overrides, RecipeArgument, speaking


def command(recipe: RecipeArgument, overrides: Overrides = None, json: Json = False) -> None:
    """Write the trained head for serving engines and check what was written."""
    with speaking(json) as talk:
        from headstart.pipeline import Run
        from headstart.recipes.load import load_recipe

        run = Run(load_recipe(recipe, overrides or []), talk)
        with run.steps.lock():
            result = run.export()
        talk.result(result, "\n".join(f"{engine}: {path}" for engine, path in result["exports"].items()))
