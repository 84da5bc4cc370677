"""What an installed Headstart holds: every subpackage, the recipes and the workloads, importable from anywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS: dict[str, str] = SETTINGS["tool"]["setuptools"]["package-dir"]


def packages_on_disk() -> set[str]:
    """Import names of every folder that holds an __init__.py below a mapped folder."""
    found = set()
    for package, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *inner)))
    return found


def modules_on_disk() -> set[str]:
    """Archive names that the wheel must hold: every module of every package."""
    found = set()
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            if (path.parent / "__init__.py").exists():
                found.add("/".join((*package.split("."), *path.relative_to(ROOT / folder).parts)))
    return found


def test_every_subpackage_is_declared() -> None:
    # one that is not declared works in an editable install and is missing from the wheel
    assert set(SETTINGS["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_ruff_bans_bare_imports_of_every_folder() -> None:
    banned = set(SETTINGS["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"])
    assert banned == set(FOLDERS.values()) - {"scripts"}


def test_continuous_integration_runs_the_documented_command() -> None:
    command = "bash scripts/test.sh"
    assert f"{command} " in (ROOT / "README.md").read_text()
    assert command in (ROOT / ".ci/run").read_text().splitlines()


@pytest.mark.parametrize(
    "name", [".ci/run", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "scripts").rglob("*.sh")))]
)
def test_shell_scripts_parse(name: str) -> None:
    assert subprocess.run(["bash", "-n", str(ROOT / name)]).returncode == 0


def test_constraints_pin_every_dependency() -> None:
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    needed = {re.split(r"[<>=~ ]", text)[0].lower() for text in SETTINGS["project"]["dependencies"]}
    assert needed - {name.replace("_", "-") for name in pinned} - pinned == set()
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(folder)]
    pytest.importorskip("setuptools")
    # a copy, so that setuptools' build folder does not land in the working tree
    source = tmp_path_factory.mktemp("source")
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    names = [n for n in files.stdout.split("\0") if n] or [
        str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()
    ]
    for name in names:
        path = ROOT / name
        if path.is_file() and not name.startswith(("tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(path.read_bytes())
    done = subprocess.run([*build, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("headstart-*.whl"))


def test_wheel_holds_every_module_recipe_and_workload(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert modules_on_disk() - names == set()
    recipes = {f"headstart/recipes/{p.relative_to(ROOT / 'recipes')}" for p in (ROOT / "recipes").rglob("*.yaml")}
    workloads = {f"headstart/data/workloads/{p.name}" for p in (ROOT / "data/workloads").iterdir() if p.is_file()}
    assert recipes | workloads <= names and len(recipes) > 10
    launch = {f"headstart/launch/{p.name}" for p in (ROOT / "scripts/launch").iterdir()}
    assert launch <= names and len(launch) == 3
    assert any(name.endswith("licenses/LICENSE") for name in names)
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"headstart"}


def test_wheel_works_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    script = tmp_path / "smoke.py"
    script.write_text(
        "import importlib, pkgutil, sys\n"
        f"sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        # an editable install's finder would answer first
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
        "import headstart\n"
        f"assert headstart.__file__.startswith({str(tmp_path / 'site')!r}), headstart.__file__\n"
        "names = [m.name for m in pkgutil.walk_packages(headstart.__path__, 'headstart.')]\n"
        "for name in names:\n"
        "    if name.endswith('__main__') or '.workloads' in name: continue\n"
        "    try: importlib.import_module(name)\n"
        # modules of nothing but Triton kernels; their users import them where Triton is
        "    except ModuleNotFoundError as error:\n"
        "        if error.name != 'triton' or not name.endswith('_kernels'): raise\n"
        "from headstart.recipes.load import load_recipe\n"
        "from headstart.data.sources.sources import load_conversations\n"
        "recipe = load_recipe('quickstart')\n"
        "from headstart.commands.scripts import write_scripts\n"
        f"write_scripts(__import__('pathlib').Path({str(tmp_path / 'cluster')!r}))\n"
        "from headstart.cli import main\n"
        "assert main(['launch', '--out', 'ddp-2.yaml', 'ddp-2']) == main(['recipe', '--keys', 'head.']) == 0\n"
        "print(len(names), sum(1 for _ in load_conversations(recipe.data.sources)))\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for folder in ("scripts/launch", "recipes/accelerate"):
        for path in (ROOT / folder).iterdir():
            written = tmp_path / "cluster" / folder / path.name
            assert written.read_bytes() == path.read_bytes()
            assert os.access(written, os.X_OK) == (path.suffix == ".sh")
    assert (tmp_path / "ddp-2.yaml").read_bytes() == (ROOT / "recipes/accelerate/ddp-2.yaml").read_bytes()
    assert "\nhead.depth: 7  [eagle3]\n" in done.stdout, "the sources, which explain the keys, are there"
    modules, conversations = map(int, done.stdout.splitlines()[-1].split())
    assert modules >= len(packages_on_disk()) + 30 and conversations >= 200
