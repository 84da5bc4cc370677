"""headstart inspect RECIPE: what will be trained on, token by token, and in numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from headstart.commands.common import Json, Overrides, RecipeArgument, command_body

#: samples that are shown where nothing says how many
SAMPLES = 3


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    samples: Annotated[
        int | None,
        typer.Option("--n", "-n", "--samples", help="Samples to show (default: 3, none with --stats).", min=0),
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Show random samples instead of the first ones.")] = False,
    seed: Annotated[int | None, typer.Option(help="Of --random (default: the recipe's seed).", min=0)] = None,
    name: Annotated[str | None, typer.Option("--id", metavar="NAME", help="Show the conversation of this id.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show one token a line with its turn and depths.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print a page of numbers. Runs the target on a few samples.")
    ] = False,
    json: Json = False,
) -> None:
    """Show training samples: which tokens are supervised, and which of them the head learns to draft.

    Also says what was dropped or truncated. Needs no model weights but for --stats.
    """
    with command_body(json, libraries=True) as console:
        from headstart.heads.errors import ConfigError
        from headstart.inspection import Wanted, inspect, opened
        from headstart.inspection_text import text_of

        others = {"--random": random, "--seed": seed is not None, "--n": samples is not None}
        if name is not None and any(others.values()):
            found = ", ".join(option for option, given in others.items() if given)
            raise ConfigError(f"--id: found with {found}, expected --id alone: it shows one conversation")
        if seed is not None and not random:
            raise ConfigError(f"--seed: found {seed} without --random, expected both: it says which random samples")
        count = samples if samples is not None else 0 if stats else SAMPLES
        value, shown = inspect(
            opened(console, recipe, overrides or [], stats), Wanted(count, name, random, seed, stats)
        )
        console.result(value, text_of(value, shown, tokens))
