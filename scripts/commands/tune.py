"""headstart tune RECIPE, or any head on your own prompts:

headstart tune --head DIR --target T --data FILE.jsonl ['tune.batch_sizes=[1,8,32]' …]
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.commands import common
from headstart.commands.evaluate import locate_head, one_or_all
from headstart.console import Console

if TYPE_CHECKING:
    from headstart.heads.formats.calibration import Calibration


def command(
    arguments: common.OptionalRecipe = None,
    head: common.HeadOption = None,
    target: common.TargetOption = None,
    data: common.DataOption = None,
    out: Annotated[str | None, typer.Option("--out", help="Directory for tune.json and tune.md.")] = None,
    write: Annotated[
        bool, typer.Option("--write/--no-write", help="Write the choice into the head's headstart.json.")
    ] = True,
    json: common.Json = False,
) -> None:
    """Find the fastest draft tree for each batch size.

    The answer may be that plain decoding is faster. The speed-up of every tree is predicted from costs measured on this
    device and from acceptance on your prompts. The best tree is then decoded, and its measured speed-up stands beside
    the predicted one. For heads that draft static trees, trees are calibrated on your prompts, and the published tree
    is measured beside the best of them. The scheduler (`eval.scheduler`) is measured as well. The choice is written
    into the head's headstart.json, where `headstart eval --head` finds it on the same card.
    """
    with common.command_body(json, "tune") as console:
        from headstart.heads.errors import ConfigError

        recipe, words = common.split_recipe(arguments)
        if recipe is None and target is None:
            raise ConfigError(
                "tune: give a RECIPE, or --target T --data FILE.jsonl with --head DIR; see headstart tune --help"
            )
        _tune(recipe, words, head, target, data, out, write, console)


def _tune(
    recipe: str | None,
    words: list[str],
    head: str | None,
    target: str | None,
    data: list[str] | None,
    out: str | None,
    write: bool,
    console: Console,
) -> None:
    from headstart.ahead import ask_tuning
    from headstart.directory_lock import locked
    from headstart.eval.tuning.tune import tune
    from headstart.eval.tuning.tune_report import tuning_table, tuning_text, write_tuning
    from headstart.heads.published import published
    from headstart.recipes.environment import names_of
    from headstart.recipes.load import load_evaluation
    from headstart.saved_heads import bound_head, target_of_head, trained_otherwise
    from headstart.targets import loaded_target

    settings = load_evaluation(recipe, words, {"target.name": target, "eval.data": one_or_all(data)})
    if recipe is not None and head is None and settings.eval.drafter == "auto":
        run = common.open_run(recipe, words, console)
        head, out = str(run.head_dir), out or str(run.dir / "tune")
        settings.eval.data = settings.eval.data or str(run.held_out_path)
    place, label = locate_head(head, settings)
    folder = Path(out) if out else Path("runs") / "tune" / label
    with locked(folder, "--out"):
        config = target_of_head(place, settings.target)
        ask_tuning(config, place, settings.eval, settings.tune)
        loaded = loaded_target(config, console)
        drafting = bound_head(place, loaded) if place is not None else None
        if warning := trained_otherwise(place, loaded):
            console.say(warning)
        with console.progress("tune", "steps") as advance:
            tuning = tune(loaded, drafting, settings.eval, settings.tune, advance)
        common.keep_earlier(folder, "tune", ("tune.json", "tune.md"), console)
        names = names_of(settings.environment)
        path = write_tuning(tuning, folder, {"head": head}, console.say, names)
        if write and place is not None:
            _keep(place, published(tuning.entry(), names), tuning.calibration, console)
    console.result({**tuning.to_json(), "head": head, "report": str(path)}, lambda: tuning_table(tuning))
    if not console.as_json:
        console.result(None, lambda: tuning_text(tuning))
        console.result(None, f"report: {folder / 'tune.md'} (and tune.json)")
        common.say_verdict(tuning.verdict, console)


def _keep(place: Path, entry: dict[str, Any], calibration: Calibration | None, console: Console) -> None:
    """Write the choice into the head's sidecar, beside the choices for other cards, and the calibration."""
    from headstart.heads.errors import FormatError
    from headstart.heads.formats.calibration import save_calibration
    from headstart.heads.formats.sidecar import annotate, notes

    try:
        annotate(place, {"tuned": {**notes(place).get("tuned", {}), entry["device"]: entry}})
        if calibration is not None:
            save_calibration(calibration, place)
    except FormatError as error:
        console.say(f"not kept with the head: {error}; give the overrides above to `headstart eval`")
        return
    console.say(f"kept in {place / 'headstart.json'}: `headstart eval --head` uses it on this card")
