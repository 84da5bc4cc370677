"""headstart export RECIPE

headstart export --head DIR --target T [--out DIR] ['export.engines=[sglang]' …]    any head, for another engine
headstart export --check DIR [--target T]                                           which engines load a directory
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headstart.commands.common import Json, command_body, folder_name, open_run, split_recipe
from headstart.console import Console


def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="A recipe (not needed with --head and --target, nor with --check), then overrides.",
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            help="Export this head: a directory, ours or published; or user/name[@revision] on the Hub.",
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            "--check",
            metavar="DIR",
            help="Only say which engines load this directory (exit code 1: none does, or one loads it wrongly).",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="T",
            help="The head's target. With --check: compare sizes, rope and layer ids with it.",
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", help="With --head: where to write (default: runs/export/NAME).")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Export although a check failed; the export records it (export.force=true).")
    ] = False,
    push: Annotated[
        str | None, typer.Option("--push-to-hub", metavar="USER/NAME", help="Upload the export with a model card.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a head for serving engines and check the result.

    With a RECIPE, its trained head is exported; with --head and --target, any head.
    """
    with command_body(json, None if check else "export", libraries=True) as console:
        from headstart.heads.errors import ConfigError

        if check is not None:
            _check(check, target, console)
            return
        recipe, words = split_recipe(arguments)
        words += [f"export.push_to_hub={push}"] if push else []
        words += ["export.force=true"] if force else []
        if head is not None:
            result = _of_head(recipe, words, head, target, out, console)
        elif recipe is None:
            raise ConfigError(
                "export: give a RECIPE, --head DIR with --target T, or --check DIR; see headstart export --help"
            )
        elif target is not None or out is not None:
            raise ConfigError(
                "export: --target goes with --check or --head, --out with --head; a recipe names its own "
                "(target.name=…, run_dir=…)"
            )
        else:
            result = _of_recipe(recipe, words, console)
        lines = [f"{engine}: {path}" for engine, path in result["exports"].items()]
        console.result(result, "\n".join([*lines, *([f"on the Hub: {result['url']}"] if "url" in result else [])]))


def _of_recipe(recipe: str, overrides: list[str], console: Console) -> dict[str, Any]:
    from headstart.pipeline.export import export

    run = open_run(recipe, overrides, console, ("export",))
    with run.lock():
        return export(run)


def _of_head(
    recipe: str | None, overrides: list[str], head: str, target: str | None, out: str | None, console: Console
) -> dict[str, Any]:
    from headstart.ahead import ask_exporting
    from headstart.directory_lock import locked
    from headstart.exporting import check_out, write_exports
    from headstart.heads.errors import ConfigError
    from headstart.heads.formats import check_export, push_export
    from headstart.heads.formats.sidecar import notes
    from headstart.heads.targets.tuned import adapter_of_head
    from headstart.quality_guard import require_quality
    from headstart.recipes.environment import names_of
    from headstart.recipes.load import load_exporting
    from headstart.saved_heads import find_head, target_of_head, trained_otherwise
    from headstart.targets import loaded_target

    if recipe is None and target is None:
        raise ConfigError("export --head: give the head's target as well: --target T")
    settings = load_exporting(recipe, overrides, {"target.name": target})
    given = find_head(head)
    side = notes(given)
    check_export(settings.export, side.get("type"))
    if adapter_of_head(given) is not None:
        require_quality(side.get("quality"), settings.export.force)
    place = Path(out) if out else Path("runs") / "export" / folder_name(head)
    check_out(given, place)
    with locked(place, "--out"):
        names = names_of(settings.environment)
        config = target_of_head(given, settings.target)
        ask_exporting(config, given, settings.export)
        loaded = loaded_target(config, console)
        if warning := trained_otherwise(given, loaded):
            console.say(warning)
        result = write_exports(
            given, loaded, settings.export, place, console, side.get("recipe"), names, exported_from=head
        )
        if settings.export.push_to_hub is not None:
            result["url"] = push_export(place, settings.export, environment=names)
    return result


def _check(directory: str, target: str | None, console: Console) -> None:
    from headstart.heads.errors import FormatError
    from headstart.heads.formats import check_directory
    from headstart.heads.targets.load import target_dims

    if not Path(directory).is_dir():
        raise FormatError(f"--check {directory}: no such directory; expected one with config.json and weights")
    inside = next((place for name in ("export", "head") if (place := Path(directory) / name).is_dir()), None)
    if inside is not None and not (Path(directory) / "config.json").is_file():
        raise FormatError(f"--check {directory}: found a run's directory; look at {inside}")
    report = check_directory(Path(directory), target_dims(target) if target is not None else None)
    console.result(report.to_json(), report.render())
    if report.wrong or not report.served:
        raise typer.Exit(1)
