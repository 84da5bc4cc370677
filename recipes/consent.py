"""Code from elsewhere runs only if the person at this machine says so, never because a recipe's file does.

`target.trust_remote_code=true` lets a model's repository run code here, and an attention implementation with a slash
is fetched from the Hub. Whoever writes that on the command line means it. In a recipe's file somebody else may have
written it, in a file that it inherits or in a run's recipe.yaml too. Then a terminal is asked, and without one it is
refused. Only files that come with the package are trusted. `load_recipe` asks before anything of the
target is opened, so that no command can forget it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from headstart.heads.errors import ConfigError
from headstart.heads.escape import line
from headstart.heads.targets.target import TargetConfig
from headstart.recipes.read import Layer

#: settings by which code from elsewhere runs → whether a value does that
RUNS_CODE: dict[str, Callable[[Any], bool]] = {
    "target.trust_remote_code": lambda value: value is True,
    "target.attn_implementation": lambda value: "/" in value,
}


def require_consent(target: TargetConfig, layers: Sequence[Layer], shipped: Iterable[Path]) -> None:
    """Ask about every setting of a recipe's file by which code from elsewhere would run.

    Args:
        target: the settings that the layers give together.
        layers: files and overrides, later ones win.
        shipped: files that come with the package.
    Raises: ConfigError naming file and line, where the answer is no or nobody can be asked.
    """
    ours = {path.resolve() for path in shipped}
    for key, runs in RUNS_CODE.items():
        value = getattr(target, key.removeprefix("target."))
        if not runs(value) or (found := _foreign(key, layers, ours)) is None:
            continue
        where, does = found
        said = f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        revision = f" (revision: {target.revision or 'whichever is newest'})" if not Path(target.name).is_dir() else ""
        what = f"{where} {does} {said}: code that comes with the target {target.name}{revision}"
        if not _asked(f"{what} would run on this machine, with your rights. Let it run? [y/N] "):
            raise ConfigError(
                f"{what} would run here. It is not run because a recipe's file asks for it: read that code, then give "
                f"{said} on the command line"
            )


def _foreign(key: str, layers: Sequence[Layer], ours: set[Path]) -> tuple[str, str] | None:
    """Where a file that is not the package's gives the setting, and what it does; None where none does.

    A file of the package is trusted for the target that it names itself. A file that changes the target is foreign.
    """

    def source(name: str) -> Layer | None:
        return next((layer for layer in reversed(layers) if layer.gives(name)), None)

    def foreign(layer: Layer | None) -> bool:
        return layer is not None and layer.file is not None and layer.file.resolve() not in ours

    # a value may refer to another key (${…}): whoever wrote that reference gave the setting
    given = source(key)
    if given is None:
        return "the recipe", "sets"
    if foreign(given):
        return given.where(key), "sets"
    if given.file is None:
        return None
    for name in ("target.name", "target.revision"):
        layer = source(name)
        if layer is not None and foreign(layer):
            return layer.where(name), f"changes {name} where {given.where(key)} sets"
    return None


def _asked(question: str) -> bool:
    """Whether a person at the terminal answers yes. False where there is none, or where several ranks would ask."""
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1 or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(line(question), end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
