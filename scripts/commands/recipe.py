"""headstart recipe [--keys] [WORDS]: which recipes come with Headstart, and what may stand in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headstart.commands.common import Json, about, command_body, wrapped

if TYPE_CHECKING:
    from headstart.recipes.documented import Setting


def command(
    words: Annotated[
        str, typer.Argument(metavar="[WORDS]", help="Only names or keys that begin with this, e.g. head. or train.lr")
    ] = "",
    keys: Annotated[bool, typer.Option("--keys", help="List the keys of a recipe: default and meaning.")] = False,
    json: Json = False,
) -> None:
    """List the recipes that come with Headstart, or every key of a recipe.

    `headstart recipe --keys head.` lists the keys of heads, `--keys data.distill` those of distillation.
    """
    with command_body(json) as console:
        if keys:
            from dataclasses import asdict

            from headstart.recipes.documented import find_settings

            found = find_settings(words)
            console.result([asdict(setting) for setting in found], lambda: "\n".join(map(in_words, found)))
        else:
            recipes = shipped(words)
            console.result(recipes, "\n".join(f"{name}\n{wrapped('    ' + says)}" for name, says in recipes.items()))


def in_words(setting: Setting) -> str:
    """A setting as lines of at most 80 columns."""
    of_heads = f"  [{', '.join(setting.heads)}]" if setting.heads else ""
    first = wrapped(f"{setting.key}: {setting.default}{of_heads}")
    return f"{first}\n{wrapped(f'    ({setting.type}) {setting.meaning}')}"


def shipped(words: str) -> dict[str, str]:
    """Name → what it is for, of the shipped recipes whose names begin with `words`.

    Raises: ConfigError where none does.
    """
    from headstart.heads.errors import ConfigError
    from headstart.recipes.load import shipped_recipes

    paths = {name: path for name, path in shipped_recipes().items() if not name.startswith("_")}
    found = {name: about(path) for name, path in paths.items() if name.startswith(words)}
    if not found:
        raise ConfigError(
            f"{words!r}: no shipped recipe begins with it, expected one of {', '.join(paths)}; --keys lists the keys "
            "of a recipe"
        )
    return found
