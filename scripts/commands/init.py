"""headstart init: writes a recipe for a target, own data and a card, with a comment for every key."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headstart.commands.common import Json, TargetOption, command_body, wrapped, write_new
from headstart.console import Console

if TYPE_CHECKING:
    from headstart.hardware import Hardware
    from headstart.initial import Candidate, Fitted, Found

T = TypeVar("T")
#: the target that runs on any machine
TARGET = "smollm2-135m-instruct"


def command(
    target: TargetOption = None,
    data: Annotated[
        str | None, typer.Option("--data", help="File, folder or pattern of conversations or prompts; a Hub dataset.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="H100, 24GB, 2xH100, none … (default: what this machine has).")
    ] = None,
    head: Annotated[str | None, typer.Option("--head", help="Head (default: what most engines serve).")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="File of the recipe.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Take the defaults and ask nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a FILE that is there.")] = False,
    json: Json = False,
) -> None:
    """Write a recipe for your target, data and card.

    Reads the data, looks at the target's config (not its weights), picks a head that engines serve, and plans what
    fits. On a terminal it asks for what is not given.
    """
    with command_body(json, libraries=True) as console:
        asker = Asker(console, asks=sys.stdin.isatty() and not yes and not json)
        value = make(asker, {"target": target, "data": data, "gpu": gpu, "head": head}, out, force)
        console.result(value, lambda: "\n".join(value["next"]))


class Asker:
    """Takes answers from options, or asks on a terminal until an answer can be used."""

    def __init__(self, console: Console, asks: bool):
        self.console, self.asks = console, asks

    def get(self, question: str, option: str, given: str | None, default: str | None, read: Callable[[str], T]) -> T:
        """What `read` makes of the answer. Args: default: None = it must be given.

        Raises: ConfigError where nothing was given and nobody can be asked; what `read` raises for an option's value.
        """
        from headstart.heads.errors import ConfigError, HeadstartError

        if given is not None:
            return read(given)
        if not self.asks:
            if default is None:
                raise ConfigError(f"{option}: not given, and there is no terminal to ask: add {option} …")
            return read(default)
        while True:
            with self.console.screen.hold():
                answer = typer.prompt(question, default=default, err=True)
            try:
                return read(answer.strip())
            except HeadstartError as error:
                self.console.say(f"{error}", style="red")


def make(asker: Asker, given: dict[str, str | None], out: Path | None, force: bool) -> dict[str, Any]:
    """Find out, choose, plan and write. Returns what `--json` prints."""
    from headstart.hardware import hardware_of
    from headstart.heads.targets.load import weightless_target
    from headstart.heads.targets.target import TargetConfig
    from headstart.initial import basic_settings, candidates, fitted, look_at

    say = asker.console.say
    if out is not None:
        require_free(out, force)
    name = asker.get("Target (registered name, directory or Hub id)", "--target", given["target"], TARGET, str)
    with asker.console.phase("reading the target's config"):
        target = weightless_target(TargetConfig(name=name))
    dims = target.dims
    say(f"target: {dims.model_type}, {dims.num_layers} layers, hidden {dims.hidden_size}; read without weights")
    found: Found = asker.get("Data (file of conversations or prompts)", "--data", given["data"], None, look_at)
    for line in (found.describe(), *found.notes):
        say(f"data: {line}")
    hardware: Hardware = asker.get(
        "GPU (H100, 24GB, 2xL40S, none; 'this' is this machine's)", "--gpu", given["gpu"], "this",
        lambda text: hardware_of(None if text == "this" else text),
    )  # fmt: skip
    say(f"hardware: {hardware.title}, {hardware.gib:.1f} GiB{' each' if hardware.gpus > 1 else ''}")
    own = f"{_stem(found)}.yaml"
    place = out or asker.get("Recipe file", "--out", None, own, lambda text: _free(Path(text), force))
    basics = basic_settings(name, found, hardware, place.name.removesuffix(".yaml"))
    with asker.console.phase("comparing heads"):
        able, refused = candidates(basics, target)
    if asker.asks and given["head"] is None:
        for each in able:
            say(wrapped(f"  {each.family:<8} {engines_in_words(each.engines)}", 11))
    chosen: Candidate = asker.get(
        "Head", "--head", given["head"], able[0].family, lambda text: pick(text, able, refused)
    )
    say(f"head: {chosen.family}: {engines_in_words(chosen.engines)}")
    tried = [chosen] if given["head"] or asker.asks else able
    with asker.console.phase("planning what fits"):
        chosen, made = first_that_fits(tried, lambda each: fitted(each, basics, found, target, hardware), say)
    text = recipe_text(made, chosen, found, hardware, place)
    check_text(text, place, made.settings)
    write_new(place, text, force)
    plan = made.plan
    say(f"written: {place} (memory: {plan.peak / 2**30:.1f} of {hardware.gib:.1f} GiB planned)")
    return {
        "recipe": str(place), "head": chosen.family, "engines": chosen.engines, "inherit": chosen.base,
        "conversations": found.count, "answered": found.answered, "layouts": found.layouts,
        "peak_gib": plan.peak / 2**30, "device_gib": hardware.gib, "settings": made.settings,
        "next": next_commands(place, hardware, made),
    }  # fmt: skip


def first_that_fits(
    tried: list[Candidate], fit: Callable[[Candidate], Fitted], say: Callable[[str], None]
) -> tuple[Candidate, Fitted]:
    """The first of these heads that fits. Raises: ConfigError of the first one where none does."""
    from headstart.heads.errors import ConfigError, first_line

    refusals: list[ConfigError] = []
    for each in tried:
        try:
            made = fit(each)
        except ConfigError as error:
            refusals.append(error)
            say(f"{each.family}: {first_line(error)}")
            continue
        if refusals:
            say(f"head: {each.family} instead, which fits: {engines_in_words(each.engines)}")
        return each, made
    why = str(refusals[0]).rstrip(".")
    raise ConfigError(
        f"--gpu: nothing fits. {why}. Or take a smaller --target, a larger card, or several: --gpu 8xH100"
    )


def _stem(found: Found) -> str:
    source = str(found.config.path or found.config.dataset)
    stem = source.rstrip("/").replace("workload:", "").split("/")[-1].split(".")[0]
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem).strip("-") or "recipe"


def _free(place: Path, force: bool) -> Path:
    require_free(place, force)
    return place


def require_free(place: Path, force: bool) -> None:
    """Raises: StorageError where something is there already, before any work is done."""
    from headstart.heads.errors import StorageError

    if place.is_dir() or (place.exists() and not force):
        what = "is a folder: give the name of a file" if place.is_dir() else "exists: give another name, or --force"
        raise StorageError(f"--out: {place} {what}")


def pick(text: str, able: list[Candidate], refused: dict[str, str]) -> Candidate:
    """The head of this name. Raises: ConfigError that says why not, or which there are."""
    from headstart.heads.errors import ConfigError

    if text in refused:
        raise ConfigError(f"--head: {text} cannot be trained for this target: {refused[text]}")
    named = [each for each in able if each.family == text]
    if not named:
        raise ConfigError(f"--head: found {text!r}, expected one of {', '.join(each.family for each in able)}")
    return named[0]


def engines_in_words(engines: list[str]) -> str:
    from headstart.heads.formats.engines import FORMATS

    names = [FORMATS[key].name for key in engines]
    return f"loaded by {', '.join(names)}" if names else "no engine loads it; headstart eval and tune run it"


def recipe_text(made: Fitted, chosen: Candidate, found: Found, hardware: Hardware, place: Path) -> str:
    """The recipe file: what was found out, and every key with its comment."""
    from headstart.recipes.writing import commented

    plan, commands = made.plan, next_commands(place, hardware, made)
    each = " on each" if hardware.gpus > 1 else ""
    epoch = f"{made.shape.tokens:,} tokens an epoch" if found.answered else f"{made.shape.tokens:,} tokens at most"
    about = [
        f"{chosen.family} for {made.settings['target.name']} on {hardware.title}, written by `headstart init`.",
        *(f"  {command}" for command in commands),
        f"Head: {engines_in_words(chosen.engines)}.",
        f"Data: {found.describe()}; {epoch}.",
        f"Memory: {plan.peak / 2**30:.1f} of {hardware.gib:.1f} GiB planned{each}.",
        "All keys with their meaning: headstart recipe --keys. Values in force: the recipe.yaml of the run's folder.",
    ]
    return commented(made.settings, "\n".join(about), chosen.family, chosen.base)


def next_commands(place: Path, hardware: Hardware, made: Fitted) -> list[str]:
    """The two commands to go on with."""
    import shlex

    file = shlex.quote(str(place))
    cards = f" --gpus {hardware.gpus} --gpu-memory {hardware.gib:.1f}" if hardware.gpus else ""
    plan = f"headstart plan {file}{cards}"
    if hardware.gpus <= 1:
        return [plan, f"headstart run {file}"]
    sharded = "fsdp2" in (made.settings.get("target.parallel"), made.settings.get("train.parallel"))
    kind = "fsdp2" if sharded else "ddp-2"
    start = f"accelerate launch --config_file $(headstart launch {kind}) --num_processes {hardware.gpus}"
    return [plan, f"{start} -m headstart.train {file}"]


def check_text(text: str, place: Path, settings: dict[str, Any]) -> None:
    """Load the recipe as a user would, from a file beside which nothing else is. Raises: ConfigError."""
    from tempfile import TemporaryDirectory

    from headstart.heads.errors import ConfigError
    from headstart.recipes.load import load_recipe, to_dict

    with TemporaryDirectory() as folder:
        file = Path(folder) / place.name
        file.write_text(text, encoding="utf-8")
        loaded = to_dict(load_recipe(file))
    for key, value in settings.items():
        node: Any = loaded
        for part in key.split("."):
            node = node[part]
        if node != value and not isinstance(value, list):
            raise ConfigError(f"{key}: the recipe reads {node!r}, expected {value!r}")
