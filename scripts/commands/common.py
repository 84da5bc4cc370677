"""What every command shares: arguments, and errors turned into messages and exit codes.

Importing a command imports neither torch nor transformers: help, the version and wrong usage are answered at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from headstart.console import Console
from headstart.startup import StartupStop

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the recipe, e.g. train.lr=1e-4")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON value on stdout.")]


def split_recipe(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """(RECIPE or None, overrides) of a command line on which the recipe may be left out."""
    words = list(arguments or [])
    return (words.pop(0) if words and "=" not in words[0] else None), words


def folder_name(head: str) -> str:
    """A head's part of a folder's name. `head`: a directory, or user/name[@revision]."""
    place = Path(head)
    return (place.resolve().name if place.is_dir() else head.rstrip("/").split("/")[-1]) or "head"


def keep_earlier(place: Path, step: str, names: Sequence[str], console: Console) -> None:
    """Move away what an earlier command wrote where this one is about to write; says where it is now."""
    from headstart.heads.files import set_aside

    kept = set_aside(place, step, [place / name for name in names])
    if kept is not None:
        console.say(f"what an earlier command had written to {place} is kept in {kept}")


@contextmanager
def command_body(as_json: bool, alone: str | None = None) -> Iterator[Console]:
    """The body of a command runs inside: it gets a Console, and an error becomes one message and the right exit code.

    Args: alone: the command's name, given where several ranks of a launch must not run the command at once.
    """
    startup = StartupStop()
    from headstart.heads.errors import HeadstartError, Terminated, explain_memory
    from headstart.signals import terminable

    console = Console(as_json)
    try:
        with terminable(), console.stdout_guard():
            startup.over()
            if alone is not None:
                from headstart.train.launching.rendezvous import refuse_ranks

                refuse_ranks(alone)
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


def _explained(error: OSError) -> Exception:
    """An error of the operating system that no one has explained yet: a full disk, or a path that cannot be used."""
    import errno

    from headstart.heads.errors import HeadstartError, StorageError
    from headstart.heads.files import explain_disk, short_path

    if error.filename is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
        # this place does not know whether the file was read or written
        cause = error.strerror or error
        return StorageError(f"{short_path(error.filename)}: {cause}: check the path, and who may read and write there")
    try:
        with explain_disk(Path(str(error.filename or "the disk"))):
            raise error
    except HeadstartError as explained:
        return explained
    except OSError as same:
        return same
