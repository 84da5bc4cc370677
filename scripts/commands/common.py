"""What the commands share: their arguments, and how an error becomes a message and an exit code.

Commands import torch and transformers inside their functions, so that help, the version and wrong usage are answered at
once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.console import Console
from headstart.heads.quiet import without_bars
from headstart.sigterm import StartupStop, interruptible, terminable

if TYPE_CHECKING:
    from headstart.pipeline.run import Run

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the recipe, e.g. train.lr=1e-4")
]
#: of verbs that also work without a recipe; `split_recipe` takes it apart
OptionalRecipe = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe (not needed with --target), then overrides."),
]
HeadOption = Annotated[
    str | None,
    typer.Option("--head", help="Directory of a head, ours or an engine's; or user/name[@revision] on the Hub."),
]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="Registered name, directory or Hub id of the target.")
]
DataOption = Annotated[
    list[str] | None,
    typer.Option("--data", help="JSONL file of prompts, or a Hub dataset user/name; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON value on stdout.")]


def open_run(
    recipe: str,
    overrides: list[str] | None,
    console: Console,
    ahead: Sequence[str] = (),
    values: dict[str, Any] | None = None,
) -> Run:
    """The run of a recipe. `ahead`: the steps that the command is for; `values`: settings that its options give."""
    from headstart.auto import settled_here
    from headstart.pipeline.run import Run
    from headstart.recipes.load import load_recipe

    with console.screen.hold():  # a person may be asked whether a recipe is trusted
        loaded = load_recipe(recipe, overrides or [], values)
    resolved, settled = settled_here(loaded)
    return Run(resolved, console, ahead=ahead, settled=settled)


def split_recipe(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """(RECIPE or None, overrides) of a command line whose first word may be a recipe."""
    words = list(arguments or [])
    return (words.pop(0) if words and "=" not in words[0] else None), words


def folder_name(head: str) -> str:
    """What a folder for results of this head is called. `head`: a directory, or user/name[@revision]."""
    place = Path(head)
    return (place.resolve().name if place.is_dir() else head.rstrip("/").split("/")[-1]) or "head"


def keep_earlier(place: Path, step: str, names: Sequence[str], console: Console) -> None:
    """Move away the files `names` that an earlier command wrote to `place`, and say where they are now."""
    from headstart.heads.files import set_aside

    kept = set_aside(place, step, [place / name for name in names])
    if kept is not None:
        console.say(f"what an earlier command had written to {place} is kept in {kept}")


def about(path: Path) -> str:
    """What a shipped file is for: the first sentence of the comment at its top."""
    said: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.removeprefix("#").strip()
        if line.startswith("#!"):
            continue
        if not line.startswith("#") or not words or line.startswith("#   "):  # a command to copy
            break
        said.append(words)
    return " ".join(said).split(":   ")[0].split(". ")[0].removesuffix(".")


def wrapped(text: str, indent: int = 4) -> str:
    """`text` in lines of at most 80 columns; all but the first begin with `indent` spaces, or what it begins with."""
    import textwrap

    words = text.lstrip(" ")
    first = " " * (len(text) - len(words))
    return textwrap.fill(words, 80, initial_indent=first, subsequent_indent=" " * indent)


def write_new(place: Path, text: str, force: bool) -> None:
    """Write a file that a user asked for: whole or not at all.

    Raises: StorageError where `place` is a folder, or holds something else and `force` (--force) was not given.
    """
    from headstart.heads.errors import StorageError
    from headstart.heads.files import write_text

    if place.is_dir():
        raise StorageError(f"{place}: is a folder: give the name of a file")
    if os.path.lexists(place) and not force and (not place.is_file() or place.read_bytes() != text.encode()):
        raise StorageError(f"{place}: exists and holds something else: give another name, or --force to replace it")
    write_text(place, text)


@contextmanager
def command_body(as_json: bool, alone: str | None = None, libraries: bool = False) -> Iterator[Console]:
    """What every command runs inside. An error becomes one message and an exit code.

    Args:
        alone: the command's name, where it refuses to run as one of several ranks of a launch.
        libraries: whether the command needs torch and transformers, whose loading takes seconds.
    """
    startup = StartupStop()
    from headstart.heads.errors import HeadstartError, Terminated, explain_memory

    console = Console(as_json)
    try:
        with ExitStack() as inside:
            inside.enter_context(terminable())
            inside.enter_context(interruptible(console.screen.ask))
            inside.enter_context(console.stdout_guard())
            inside.enter_context(console.phase(f"headstart {alone}" if alone else "working", False, drawn=False))
            startup.over()
            if alone is not None or libraries:
                _load_libraries(alone, console)
                inside.enter_context(without_bars(("huggingface_hub", "transformers")))
            yield console
    except KeyboardInterrupt as stop:
        console.say("stopped; what was finished is kept, the same command continues")
        raise typer.Exit(0 if isinstance(stop, Terminated) else 130) from None
    except Exception as error:
        mistake = explain_memory(error) or (_explained(error) if isinstance(error, OSError) else error)
        if not isinstance(mistake, HeadstartError):
            raise
        console.say(f"error: {mistake}", style="red")
        if as_json:
            said = {"type": type(mistake).__name__, "message": str(mistake)}
            console.result({"error": said, **(mistake.details or {})})
        raise typer.Exit(mistake.exit_code) from None


def _load_libraries(command: str | None, console: Console) -> None:
    """What takes seconds before a command can begin. Raises ConfigError where `command` is one of several ranks."""
    with console.phase("loading libraries (PyTorch, transformers)", said=False):
        from headstart.train.launching.rendezvous import refuse_ranks

        if command is not None:
            refuse_ranks(command)
        import headstart.pipeline.export
        import headstart.pipeline.train  # noqa: F401


def _explained(error: OSError) -> Exception:
    """An error of the operating system as an error with a remedy: a full disk, or a path that cannot be used."""
    import errno

    from headstart.heads.errors import HeadstartError, StorageError
    from headstart.heads.files import explain_disk, short_path

    if error.filename is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
        # whether the file was read or written is not known here
        cause = error.strerror or error
        return StorageError(f"{short_path(error.filename)}: {cause}: check the path, and who may read and write there")
    try:
        with explain_disk(Path(str(error.filename or "the disk"))):
            raise error
    except HeadstartError as explained:
        return explained
    except OSError as same:
        return same


def say_verdict(verdict: dict[str, Any] | None, console: Console) -> None:
    """End a command with the verdict, which a report from before verdicts has not."""
    from headstart.eval.measuring.verdict import lines_of

    if verdict is not None:
        console.result(None, lambda: "\n" + "\n".join(lines_of(verdict)))
