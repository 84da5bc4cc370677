"""headstart eval RECIPE, or any head on your own prompts:

headstart eval --head DIR --target T --data FILE.jsonl [eval.tree.depth=3 …]
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headstart.commands.common import Json, speaking
from headstart.talk import Talk


def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe (not needed with --target), then overrides."),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option("--head", help="Directory of a head, ours or an engine's; or user/name[@revision] on the Hub."),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Registered name, directory or Hub id of the target.")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", help="JSONL of prompts to measure on.")] = None,
    out: Annotated[str | None, typer.Option("--out", help="Directory for the report (without a recipe).")] = None,
    json: Json = False,
) -> None:
    """Measure acceptance and speed: the recipe's trained head, or --head on --data.

    Without --head, `--target T --data FILE eval.drafter=ngram` measures the drafter that needs no training.
    """
    with speaking(json) as talk:
        from headstart.eval.report import Report, render_table
        from headstart.heads.errors import ConfigError

        words = list(arguments or [])
        recipe = words.pop(0) if words and "=" not in words[0] else None
        if recipe is None and (target is None or data is None):
            raise ConfigError(
                "eval: give a RECIPE, or --target T --data FILE.jsonl with --head DIR; see headstart eval --help"
            )
        if recipe is not None and head is None and target is None and out is None:
            directory = _of_recipe(recipe, words, data, talk)
        else:
            directory = _of_head(recipe, words, head, target, data, out, talk)
        report = Report.read(directory)
        talk.result({**report.to_json(), "report": str(directory / "report.json")}, render_table(report))
        if not json:
            talk.result(None, f"report: {directory / 'report.md'} (and report.json)")


def _of_recipe(recipe: str, overrides: list[str], data: str | None, talk: Talk) -> Path:
    from headstart.pipeline import Run
    from headstart.recipes.load import load_recipe

    if data is not None:
        overrides = [*overrides, f"eval.data={data}"]
    run = Run(load_recipe(recipe, overrides), talk)
    with run.steps.lock():
        run.eval()
    return run.dir


def _of_head(
    recipe: str | None,
    overrides: list[str],
    head: str | None,
    target: str | None,
    data: str | None,
    out: str | None,
    talk: Talk,
) -> Path:
    from headstart.heads.errors import ConfigError
    from headstart.heads.target import Target
    from headstart.measure import measure
    from headstart.pipeline import bound_head
    from headstart.recipes.load import load_evaluation

    settings = load_evaluation(recipe, overrides, {"target.name": target, "eval.data": data})
    if settings.eval.data is None:
        raise ConfigError("eval.data is not set: give --data FILE.jsonl")
    if not Path(settings.eval.data).is_file():
        raise ConfigError(f"eval.data: {settings.eval.data}: no such file")
    place_of_head = find_head(head) if head is not None else None
    talk.say(f"loading target {settings.target.name} …")
    loaded = Target.load(settings.target)
    drafted = bound_head(place_of_head, loaded) if place_of_head is not None else None
    info: dict[str, Any] | None = {"path": head} if head is not None else None
    report = measure(loaded, drafted, settings.eval, talk, head_info=info)
    label = head.rstrip("/").split("/")[-1] if head is not None else settings.eval.drafter
    place = Path(out) if out else Path("runs") / "eval" / f"{label}-{Path(settings.eval.data).stem}"
    report.write(place)
    return place


def find_head(head: str) -> Path:
    """Directory of a head given as a path, or as `user/name[@revision]` on the Hub.

    Raises: FormatError when it is neither; ConfigError when the Hub cannot give it.
    """
    from headstart.heads.errors import ConfigError, FormatError
    from headstart.heads.fetch import hub_refusal
    from headstart.heads.formats import fetch_head

    if Path(head).is_dir():
        return Path(head)
    if head.count("/") != 1 or head.startswith((".", "/", "~")):
        raise FormatError(f"--head {head}: no such directory; expected one with config.json and weights")
    refusal = hub_refusal()
    if refusal is not None and "HF_HUB_OFFLINE" not in refusal:
        raise ConfigError(f"--head {head}: no such directory, and {refusal}; give a local directory")
    return fetch_head(head)
