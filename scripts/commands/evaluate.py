"""headstart eval RECIPE, or any head on your own prompts:

headstart eval --head DIR --target T --data FILE.jsonl [eval.tree.depth=3 …]
headstart eval --engine vllm --url http://localhost:8000 --data FILE.jsonl [eval.max_new_tokens=128 …]
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.commands import common
from headstart.console import Console

if TYPE_CHECKING:
    from headstart.eval.config import EvalConfig
    from headstart.eval.measuring.report import Report
    from headstart.heads.targets.target import Target
    from headstart.recipes.schema import Evaluation


def command(
    arguments: common.OptionalRecipe = None,
    head: common.HeadOption = None,
    target: common.TargetOption = None,
    data: common.DataOption = None,
    out: Annotated[str | None, typer.Option("--out", help="Directory for the report (without a recipe).")] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="Measure a running server instead, from its metrics: vllm or sglang."),
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Address of that server; OPENAI_API_KEY is sent where it is set.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Name of the model, where the server has several.")
    ] = None,
    json: common.Json = False,
) -> None:
    """Measure accepted length τ and speed-up of a head.

    With a RECIPE, its trained head is measured; with --head, --target and --data, any head. `--target T --data FILE
    eval.drafter=ngram` measures the drafter that needs no training. `eval.synthetic_acceptance=0.8` shows what a head
    would gain if its drafts were accepted at this rate; an untrained head drafts them. With --engine and --url, the
    prompts go to a running server at temperature 0, and τ comes from the server's counters.
    """
    with common.command_body(json, "eval") as console:
        from headstart.eval.measuring.rendering import render_tables
        from headstart.eval.measuring.report import Report
        from headstart.heads.errors import ConfigError

        recipe, words = common.split_recipe(arguments)
        if engine is not None or url is not None:
            directory = _of_server(recipe, words, (engine, url, model or target), head, data, out, console)
        elif model is not None:
            raise ConfigError("--model names a model of a running server: give --engine and --url as well")
        elif recipe is None and (target is None or not (data or any(word.startswith("eval.data=") for word in words))):
            raise ConfigError(
                "eval: give a RECIPE, or --target T --data FILE.jsonl with --head DIR; see headstart eval --help"
            )
        elif recipe is not None and head is None and target is None and out is None:
            directory = _of_recipe(recipe, words, data, console)
        else:
            directory = _of_head(recipe, words, head, target, data, out, console)
        report = Report.read(directory)
        value = {**report.to_json(), "report": str(directory / "report.json")}
        console.result(value, lambda: render_tables(report))
        if not json:
            console.result(None, f"report: {directory / 'report.html'} (and report.md, report.json)")
            common.say_verdict(report.verdict, console)


def _of_recipe(recipe: str, overrides: list[str], data: list[str] | None, console: Console) -> Path:
    from headstart.pipeline.evaluate import evaluate

    run = common.open_run(recipe, overrides, console, ("eval",), {"eval.data": one_or_all(data)})
    with run.lock():
        evaluate(run)
    return run.dir


def _of_head(
    recipe: str | None,
    overrides: list[str],
    head: str | None,
    target: str | None,
    data: list[str] | None,
    out: str | None,
    console: Console,
) -> Path:
    from headstart.ahead import ask_evaluation
    from headstart.directory_lock import locked
    from headstart.evaluation import UNTRAINED, measure
    from headstart.recipes.consent import RUNS_CODE
    from headstart.recipes.load import load_evaluation, load_recipe, to_dict
    from headstart.saved_heads import bound_head, target_of_head, untrained_head
    from headstart.targets import loaded_target

    settings = load_evaluation(recipe, overrides, {"target.name": target, "eval.data": one_or_all(data)})
    place_of_head, label = locate_head(head, settings)
    place = place_of(out) or Path("runs") / "eval" / label
    with locked(place, "--out"):
        of_head = target_of_head(place_of_head, settings.target)
        synthetic = settings.eval.synthetic_acceptance is not None
        random = synthetic and place_of_head is None and settings.eval.drafter == "auto"
        config = None
        if random and recipe is not None:
            agreed = {key: getattr(settings.target, key.removeprefix("target.")) for key in RUNS_CODE}  # ask once
            config = load_recipe(recipe, overrides, agreed).head
        chosen = recipe is not None or any(word.startswith(("eval.tree", "eval.drafter")) for word in overrides)
        ask_evaluation(of_head, place_of_head, settings.eval, random, config)
        loaded = loaded_target(of_head, console)
        drafted = bound_head(place_of_head, loaded) if place_of_head is not None else None
        if place_of_head is not None and not chosen:
            use_tuned(place_of_head, loaded, settings.eval, console)
        info: dict[str, Any] | None = {"path": head} if head is not None else None
        if random:
            drafted, info = untrained_head(config, loaded), UNTRAINED
        report = measure(loaded, drafted, settings.eval, console, to_dict(settings), info, place=place_of_head)
        _write(report, place, settings.eval, console)
    return place


def _of_server(
    recipe: str | None,
    overrides: list[str],
    server: tuple[str | None, str | None, str | None],
    head: str | None,
    data: list[str] | None,
    out: str | None,
    console: Console,
) -> Path:
    from headstart.directory_lock import locked
    from headstart.eval.measuring.verdict import verdict_of_report
    from headstart.eval.servers.served import evaluate_server
    from headstart.heads.errors import ConfigError
    from headstart.recipes.load import load_evaluation, to_dict

    engine, url, model = server
    if engine is None or url is None:
        raise ConfigError("eval: a server needs both --engine (vllm or sglang) and --url http://HOST:PORT")
    # the server has its own target; the schema needs a name all the same
    named = {"target.name": model or "served"} if recipe is None else {}
    settings = load_evaluation(recipe, overrides, {**named, "eval.data": one_or_all(data)})
    info = {"path": head} if head is not None else None
    data_name, place = label_of(settings.eval), place_of(out)
    # without --out, the folder is named after the model, and only the server knows that name
    with locked(place, "--out") if place is not None else nullcontext():
        with console.progress("eval", "prompts", notes=True) as advance:
            key = os.environ.get("OPENAI_API_KEY")
            report = evaluate_server(engine, url, settings.eval, model, key, info, advance)
        shown = to_dict(settings)
        report.recipe = {"seed": shown["seed"], "eval": shown["eval"]}
        report.verdict = verdict_of_report(report.to_json()).to_json()
        if place is not None:
            _write(report, place, settings.eval, console)
            return place
    label = f"{engine}-{report.target['name'].rstrip('/').split('/')[-1]}"[:150]
    place = Path("runs") / "eval" / f"{label}-{data_name}"
    with locked(place, "--out", wait=True):
        _write(report, place, settings.eval, console)
    return place


def place_of(out: str | None) -> Path | None:
    """The folder that --out names. Raises ConfigError for a run's directory: its report is the run's own."""
    from headstart.heads.errors import ConfigError

    if out and (Path(out) / "steps").is_dir():
        raise ConfigError(f"--out {out}: found a run's directory, whose report is its own; choose another")
    return Path(out) if out else None


def _write(report: Report, place: Path, config: EvalConfig, console: Console) -> None:
    """Write the report. An earlier one in the same folder is moved away, not overwritten."""
    from headstart.eval.measuring.rendering import write_report
    from headstart.eval.measuring.report import RENDERED
    from headstart.evaluation import say_own_data

    common.keep_earlier(place, "eval", ("report.json", *RENDERED), console)
    write_report(report, place, console.say)
    say_own_data(config.data, console)


def one_or_all(data: list[str] | None) -> str | list[str] | None:
    """The values of a repeatable option: None, one value, or a list of several."""
    return data[0] if data and len(data) == 1 else data or None


def nearest_tuned(batches: Iterable[str], batch: int) -> str | None:
    """The tuned batch size whose ratio to `batch` is smallest, at most 2; None where there is none.

    Of two with the same ratio, the larger.
    """
    near = [(max(int(size), batch) / min(int(size), batch), -int(size), size) for size in batches]
    return min(near)[2] if near and min(near)[0] <= 2 else None


def use_tuned(head: Path, target: Target, config: EvalConfig, console: Console) -> None:
    """Take the tree that `headstart tune` chose for this head, this card and about this batch size, if there is one.

    With `eval.scheduler` it is the one that the scheduler was measured with.
    """
    from headstart.eval.config import TreeConfig
    from headstart.heads.formats.sidecar import notes
    from headstart.heads.provenance import device_name

    try:
        entry = (notes(head).get("tuned") or {}).get(device_name(target.device)) or {"batches": {}}
        size = nearest_tuned(entry["batches"], config.batch_size)
        if size is None:
            return
        choice = entry["batches"][size]
        scheduled = choice.get("scheduled") if config.scheduler else None
        speculate, chosen = choice["speculate"] or scheduled is not None, scheduled or choice
        tree, label = TreeConfig(**chosen["tree"]), chosen["label"]
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        console.say(f"{head / 'headstart.json'}: what was tuned cannot be read ({error!r}) and is not used")
        return
    where = f"batch {size}" + (f", the nearest to {config.batch_size}" if size != str(config.batch_size) else "")
    if not speculate:
        console.say(f"tuned on this card: plain decoding is faster at {where}; measuring the head anyway")
        return
    config.tree = tree
    console.say(f"tree tuned for this card and {where}: {label} (eval.tree.… overrides it)")


def locate_head(head: str | None, settings: Evaluation) -> tuple[Path | None, str]:
    """(Directory of --head or None, name of a folder for results on these prompts.)

    The target's chat template will show the day that the head was trained with, unless the settings name another.
    """
    from headstart.saved_heads import find_head, trained_date

    prompts = label_of(settings.eval)
    place = find_head(head) if head is not None else None
    settings.target.template_date = settings.target.template_date or trained_date(place)
    return place, f"{common.folder_name(head) if head is not None else settings.eval.drafter}-{prompts}"


def label_of(config: EvalConfig) -> str:
    """What a folder for results on these prompts is called. Reads them, to show mistakes before a target is loaded.

    Raises: ConfigError where none are named, DataError where they cannot be read.
    """
    from headstart.eval.prompts import data_label, eval_prompts

    eval_prompts(config)
    return data_label(config.data)
