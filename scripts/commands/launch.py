"""headstart launch [NAME]: accelerate configurations and launch scripts by name, wherever Headstart is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headstart.commands.common import Json, about, command_body, wrapped, write_new


def command(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A file of the list, such as ddp-2.")] = None,
    show: Annotated[bool, typer.Option("--print", help="Print the file, not where it is.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the file there.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a FILE that holds something else.")] = False,
    json: Json = False,
) -> None:
    """List the launch files, say where one is, print it or write it.

    accelerate launch --config_file $(headstart launch ddp-2) -m headstart.train RECIPE

    The shell scripts call each other and need their folder: `headstart scripts DIR` writes all of them.
    """
    with command_body(json) as console:
        from headstart.heads.errors import ConfigError
        from headstart.heads.files import umask

        files = launch_files()
        if name is None:
            if show or out is not None:
                raise ConfigError(f"--print and --out need the name of a file: {', '.join(files)}")
            rows = [{"name": each, "path": str(path), "about": about(path)} for each, path in files.items()]
            console.result(rows, "\n".join(wrapped(f"{row['name']:<12}{row['about']}", 12) for row in rows))
            return
        path = find(name, files)
        text = path.read_text(encoding="utf-8")
        if out is not None:
            write_new(out, text, force)
            if path.suffix == ".sh":
                out.chmod(0o777 & ~umask())
        value = {"name": path.stem, "path": str(path), "text": text, "written": None if out is None else str(out)}
        console.result(value, text.removesuffix("\n") if show else str(out or path))


def launch_files() -> dict[str, Path]:
    """Name → path in this installation of every accelerate configuration and launch script."""
    from headstart.commands.scripts import shipped_files

    return {path.stem: path for path in shipped_files().values()}


def find(name: str, files: dict[str, Path]) -> Path:
    """The launch file of this name, with or without its ending. Raises: ConfigError with the nearest names."""
    import difflib

    from headstart.heads.errors import ConfigError

    named = {key: path for key, path in files.items() if name in (key, path.name)}
    if not named:
        near = difflib.get_close_matches(name, files, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"launch {name!r}: no such file; {hint}There are {', '.join(files)}")
    return next(iter(named.values()))
