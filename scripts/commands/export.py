"""headstart export RECIPE, or a second opinion on any head directory: headstart export --check DIR"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headstart.commands.common import Json, speaking
from headstart.talk import Talk


def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe (not needed with --check), then overrides."),
    ] = None,
    check: Annotated[
        str | None, typer.Option("--check", metavar="DIR", help="Write nothing: say which engines load this directory.")
    ] = None,
    json: Json = False,
) -> None:
    """Write the trained head for serving engines and check what was written."""
    with speaking(json) as talk:
        from headstart.heads.errors import ConfigError

        if check is not None:
            _check(check, talk)
            return
        if not arguments:
            raise ConfigError("export: give a RECIPE, or --check DIR; see headstart export --help")
        from headstart.pipeline import Run
        from headstart.recipes.load import load_recipe

        run = Run(load_recipe(arguments[0], arguments[1:]), talk)
        with run.steps.lock():
            result = run.export()
        talk.result(result, "\n".join(f"{engine}: {path}" for engine, path in result["exports"].items()))


def _check(directory: str, talk: Talk) -> None:
    from headstart.heads.errors import FormatError
    from headstart.heads.formats import check_directory

    if not Path(directory).is_dir():
        raise FormatError(f"--check {directory}: no such directory; expected one with config.json and weights")
    report = check_directory(Path(directory))
    talk.result(report.to_json(), report.render())
    if report.wrong:
        raise typer.Exit(1)
