"""headstart export RECIPE, or a second opinion on any head directory: headstart export --check DIR [--target T]"""

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
        str | None,
        typer.Option(
            "--check",
            metavar="DIR",
            help="Write nothing: say which engines load this directory (exit code 1: none, or one loads it wrongly).",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="T", help="With --check: compare sizes, rope and layer ids with this target."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Export although a check failed; the export records it (export.force=true).")
    ] = False,
    push: Annotated[
        str | None, typer.Option("--push-to-hub", metavar="USER/NAME", help="Upload the export with a model card.")
    ] = None,
    json: Json = False,
) -> None:
    """Write the trained head for serving engines and check what was written."""
    with speaking(json) as talk:
        from headstart.heads.errors import ConfigError

        if check is not None:
            _check(check, target, talk)
            return
        if not arguments:
            raise ConfigError("export: give a RECIPE, or --check DIR; see headstart export --help")
        from headstart.pipeline import Run
        from headstart.recipes.load import load_recipe

        if target is not None:
            raise ConfigError("export --target goes with --check; a recipe names its own (target.name=…)")
        overrides = [*arguments[1:], *([f"export.push_to_hub={push}"] if push else [])]
        overrides += ["export.force=true"] if force else []
        run = Run(load_recipe(arguments[0], overrides), talk)
        with run.steps.lock():
            result = run.export()
        lines = [f"{engine}: {path}" for engine, path in result["exports"].items()]
        talk.result(result, "\n".join([*lines, *([f"on the Hub: {result['url']}"] if "url" in result else [])]))


def _check(directory: str, target: str | None, talk: Talk) -> None:
    from headstart.heads.errors import FormatError
    from headstart.heads.formats import check_directory
    from headstart.heads.target import target_dims

    if not Path(directory).is_dir():
        raise FormatError(f"--check {directory}: no such directory; expected one with config.json and weights")
    report = check_directory(Path(directory), target_dims(target) if target is not None else None)
    talk.result(report.to_json(), report.render())
    if report.wrong or not report.served:
        raise typer.Exit(1)
