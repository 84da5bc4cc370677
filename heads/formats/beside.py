"""JSON files beside an exported head that engines read: tables and temperatures that `headstart tune` measured.

They are made from headstart.json, so that they can be written again and compared with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headstart.heads.files import delete, write_json
from headstart.heads.formats.engines import FORMATS

#: names of all such files, of all engines
NAMES = tuple(name for engine in FORMATS.values() for name in engine.beside)


def files_beside(side: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name → content, for all engines. Raises: FormatError as `Format.files_beside`."""
    return {name: content for engine in FORMATS.values() for name, content in engine.files_beside(side).items()}


def write_beside(directory: Path, side: dict[str, Any]) -> None:
    """Write the files of a head, and remove those that an earlier export has left.

    Args: side: headstart.json. Raises: FormatError as `Format.files_beside`, before anything is written.
    """
    made = files_beside(side)
    for name in NAMES:
        if name in made:
            write_json(directory / name, made[name])
        else:
            delete(directory / name)
