"""headstart distill RECIPE: the target answers the recipe's prompts."""

from __future__ import annotations

from headstart.commands.common import Json, Overrides, RecipeArgument, command_body


def command(recipe: RecipeArgument, overrides: Overrides = None, json: Json = False) -> None:
    """Let the target answer the recipe's prompts (data.distill.prompts). A stopped run continues."""
    with command_body(json, "distill") as console:
        from headstart.heads.errors import ConfigError
        from headstart.pipeline.distill import distill
        from headstart.pipeline.run import Run
        from headstart.recipes.load import load_recipe

        # a head is trained on the answers: ask first what training would refuse
        run = Run(load_recipe(recipe, overrides or []), console, ahead=("train",))
        with run.lock():
            result = distill(run)
            if result is None:
                raise ConfigError(
                    f"{recipe}: data.distill.prompts is empty: set data.distill.prompts=[{{path: prompts.jsonl}}]"
                )
            run.save_recipe()
        console.result(result, f"{result['answers']} answers to {result['prompts']} prompts in {result['path']}")
