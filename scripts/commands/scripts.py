"""headstart scripts [DIR]: the launch scripts and accelerate configurations, for an installation without a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headstart.commands.common import Json, command_body

#: package → (its folder in a checkout, pattern of the files in it that a launch needs)
SHIPPED = {"headstart": ("scripts", "launch/*.sh"), "headstart.recipes": ("recipes", "accelerate/*.yaml")}


def shipped_files() -> dict[str, Path]:
    """For each shipped file, its path in a checkout → its path in the installation."""
    from importlib import resources

    files: dict[str, Path] = {}
    for package, (folder, pattern) in SHIPPED.items():
        root = Path(str(resources.files(package)))
        files |= {f"{folder}/{path.relative_to(root)}": path for path in sorted(root.glob(pattern))}
    return files


def write_scripts(directory: Path) -> list[Path]:
    """Write the files into `directory`, in the folders that they have in a checkout; returns their paths.

    Raises: StorageError where a file of that name holds something else, before anything is written.
    """
    from headstart.heads.errors import StorageError
    from headstart.heads.files import explain_disk, umask, write_text

    texts = {directory / name: path.read_text(encoding="utf-8") for name, path in shipped_files().items()}
    with explain_disk(directory, "headstart scripts DIR"):
        for path, text in texts.items():
            if path.exists() and path.read_bytes() != text.encode():
                raise StorageError(f"{path}: exists and holds something else: move it away, or give another folder")
        for path in texts:
            path.parent.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_text(path, text)
        if path.suffix == ".sh":
            path.chmod(0o777 & ~umask())
    return list(texts)


def command(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to write them.")] = Path("."),
    json: Json = False,
) -> None:
    """Write the launch scripts into a folder.

    DIR gets scripts/launch/*.sh (one machine, Slurm, ssh) and recipes/accelerate/*.yaml, as a checkout has them. Launch
    from DIR: recipes and run directories are relative to it. All machines must share the storage that DIR is on.
    """
    with command_body(json) as console:
        written = write_scripts(directory)
        console.result({"written": [str(path) for path in written]}, "\n".join(map(str, written)))
