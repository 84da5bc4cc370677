"""What import-linter does not tell: whether it saw every module, and circles through a package's own __init__.py."""

from __future__ import annotations

import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]

folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
expected = sum((path.parent / "__init__.py").is_file() for folder in folders for path in (ROOT / folder).rglob("*.py"))
graph = grimp.build_graph("headstart", cache_dir=None)
if len(graph.modules) != expected:
    sys.exit(
        f"imports: found {len(graph.modules)} modules, expected the {expected} of {', '.join(folders)}: install again "
        "with --config-settings editable_mode=strict"
    )
try:
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()
except CycleError as error:
    sys.exit(f"imports: {' ← '.join(error.args[1])} is a circle; move what both need to a module of its own")
print(f"imports: {expected} modules, no circle")
