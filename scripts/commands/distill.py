"""headstart distill RECIPE: the target answers the recipe's prompts."""

from __future__ import annotations

from headstart.commands.common import Json, Overrides, RecipeArgument, command_body, open_run
from headstart.heads.counting import counted


def command(recipe: RecipeArgument, overrides: Overrides = None, json: Json = False) -> None:
    """Answer the recipe's prompts with the target.

    The prompts are those of data.distill.prompts, and data.distill.written ones that the target writes itself first.
    A stopped run continues. Several GPUs:
    accelerate launch -m headstart.train RECIPE --only-distill.
    """
    with command_body(json, "distill") as console:
        from headstart.heads.errors import ConfigError
        from headstart.pipeline.distill import NO_PROMPTS, distill

        # a head will be trained on the answers, so what training would refuse is refused here
        run = open_run(recipe, overrides, console, ("train",))
        with run.lock():
            result = distill(run)
            if result is None:
                raise ConfigError(f"{recipe}: {NO_PROMPTS}")
            run.save_recipe()
        answers, prompts = counted(result["answers"], "answers"), counted(result["prompts"], "prompts")
        console.result(result, f"{answers} to {prompts} in {result['path']}")
