"""Two families, made as docs/adding-a-family.md says: few files change, and every contract suite holds for them."""

from __future__ import annotations

import os
import subprocess
import sys
from difflib import ndiff
from pathlib import Path

import pytest

from throwaway.edits import EDITS, NEW_FILES, ROOT, add_families, edited

SUITES = ("heads/families/test_contract.py", "heads/formats/test_contract.py", "eval/test_contract.py",
          "train/test_contract.py")  # fmt: skip
#: what else they go through
OWN = ("scripts/test_throwaway.py", "train/test_throwaway.py")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("house")
    add_families(place)
    return place


def test_a_family_changes_three_files_that_exist(house: Path) -> None:
    assert all(not (ROOT / file).exists() and source.exists() for file, source in NEW_FILES.items())
    for files in EDITS.values():
        assert len(files) <= 3
        for file in files:
            changed = {line[0] for line in ndiff((ROOT / file).read_text().splitlines(), edited(file).splitlines())}
            assert changed == {" ", "+"}, f"{file}: lines are added, and none is changed or lost"
    real = {str(path.relative_to(house)) for path in house.rglob("*") if path.is_file() and not path.is_symlink()}
    named = {file if file.startswith("tests/") else f"headstart/{file}" for files in EDITS.values() for file in files}
    assert real == named | {"pyproject.toml", "tests/conftest.py"}  # these two are copies


@pytest.mark.slow
def test_every_contract_suite_holds_for_them(house: Path) -> None:
    """In a process of its own: here, the two families do not exist."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "mini or every_family"]
    command += [f"tests/{file}" for file in (*SUITES, *OWN)]
    done = subprocess.run(
        command, cwd=house, env={**os.environ, "PYTHONPATH": str(house)}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    # of each family about 30 tests of heads, 8 of files, 8 of decoding, and one of resuming
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 90, done.stdout[-500:]
