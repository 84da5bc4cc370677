"""Two head families that exist for a test, and the house with them in it.

`add_families` makes the house as docs/adding-a-family.md says: new files at their places, and `EDITS` in
three files that exist. Everything else is a link to the real house. To look at it:

    python tests/throwaway/edits.py DIR && cd DIR && PYTHONPATH=. pytest tests/eval/test_contract.py

    miniblock  drafts blocks: two loss terms with normalisers of their own, blocks chosen per step, two decoder layers.
    minimodel  a whole draft model, which holds a module of the target; its drafter owns an engine.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

#: new file → where it stands today
NEW_FILES = {
    **{
        f"heads/families/{name}/{file}": HERE / name / file
        for name in ("miniblock", "minimodel")
        for file in ("__init__.py", "head.py", "files.py")
    },
    "eval/drafters/miniblock.py": HERE / "miniblock/drafter.py",
    "eval/drafters/minimodel.py": ROOT / "tests/eval/model_drafter.py",
    "tests/reference/miniblock.py": HERE / "miniblock/twin.py",
    "tests/reference/minimodel.py": HERE / "minimodel/twin.py",
    "tests/scripts/test_throwaway.py": HERE / "commands.py",
    "tests/train/test_throwaway.py": HERE / "ranks.py",
}

#: family → existing file → the imports it gets, the line that opens the dict, the entry it gets
EDITS: dict[str, dict[str, tuple[str, str, str]]] = {
    "miniblock": {
        "heads/families/__init__.py": (
            "from headstart.heads.families.miniblock.files import PAPER as MINIBLOCK\n"
            "from headstart.heads.families.miniblock.files import MiniBlockFiles\n"
            "from headstart.heads.families.miniblock.head import MiniBlockConfig, MiniBlockHead\n",
            "FAMILIES: dict[str, Family] = {\n",
            '    "miniblock": Family("miniblock", MINIBLOCK, MiniBlockConfig, MiniBlockHead, MiniBlockFiles()),\n',
        ),
        "eval/drafters/__init__.py": (
            "from headstart.eval.drafters.miniblock import MiniBlockDrafter, miniblock_everywhere\n",
            "DRAFTERS: dict[str, Drafting] = {\n",
            """    "miniblock": Drafting(
        ("chain",),
        lambda head, config: MiniBlockDrafter(head, config.tree, Sampling.from_config(config)),
        miniblock_everywhere,
    ),
""",
        ),
        "tests/reference/families.py": (
            "from headstart.heads.families.miniblock.head import MiniBlockConfig\n"
            "from reference.miniblock import miniblock_loss\n",
            "REFERENCES: dict[str, Reference] = {\n",
            """    "miniblock": Reference(
        twin=miniblock_loss,
        examples={
            "two layers": Example(MiniBlockConfig()),
            "one layer, odd output head": Example(MiniBlockConfig(num_layers=1), ends=ODD_ENDS),
        },
        random=MiniBlockConfig(block_fraction=0.5),
        small=lambda vocab: MiniBlockConfig(),
        steps=20,
    ),
""",
        ),
    },
    "minimodel": {
        "heads/families/__init__.py": (
            "from headstart.heads.families.minimodel.files import PAPER as MINIMODEL\n"
            "from headstart.heads.families.minimodel.files import MiniModelFiles\n"
            "from headstart.heads.families.minimodel.head import MiniModelConfig, MiniModelHead\n",
            "FAMILIES: dict[str, Family] = {\n",
            '    "minimodel": Family("minimodel", MINIMODEL, MiniModelConfig, MiniModelHead, MiniModelFiles()),\n',
        ),
        "eval/drafters/__init__.py": (
            "from headstart.eval.drafters.minimodel import ModelDrafter\n",
            "DRAFTERS: dict[str, Drafting] = {\n",
            """    "minimodel": Drafting(
        ("chain",),
        lambda head, config: ModelDrafter(
            head.model, config.tree.depth, Sampling.from_config(config), config.tree.sample
        ),
    ),
""",
        ),
        "tests/reference/families.py": (
            "from headstart.heads.families.minimodel.head import MiniModelConfig\n"
            "from reference.minimodel import minimodel_loss\n",
            "REFERENCES: dict[str, Reference] = {\n",
            """    "minimodel": Reference(
        twin=minimodel_loss,
        examples={"two layers": Example(MiniModelConfig()), "one layer": Example(MiniModelConfig(num_layers=1))},
        random=MiniModelConfig(),
        small=lambda vocab: MiniModelConfig(),
        steps=12,
    ),
""",
        ),
    },
}
FUTURE = "from __future__ import annotations\n"


def edited(file: str) -> str:
    """The text of an existing file with the lines of both families."""
    text = (ROOT / file).read_text(encoding="utf-8")
    for files in EDITS.values():
        imports, opening, entry = files[file]
        assert text.count(FUTURE) == text.count(opening) == 1
        text = text.replace(FUTURE, FUTURE + imports).replace(opening, opening + entry)
    return text


def add_families(house: Path) -> None:
    """Make the house: `house/headstart` is the package, `house/tests` its tests."""
    written = {file: edited(file) for files in EDITS.values() for file in files}
    # it says where it stands by its own path
    written["tests/conftest.py"] = (ROOT / "tests/conftest.py").read_text(encoding="utf-8")
    places = [*written, *NEW_FILES]
    for folder in ("scripts", "heads", "data", "eval", "train", "recipes"):
        link(folder, house / ("headstart" if folder == "scripts" else f"headstart/{folder}"), places)
    link("tests", house / "tests", places)
    shutil.copy(ROOT / "pyproject.toml", house)
    for file, text in written.items():
        place_of(house, file).write_text(text, encoding="utf-8")
    for file, source in NEW_FILES.items():
        place_of(house, file).symlink_to(source)


def link(folder: str, into: Path, places: list[str]) -> None:
    """Link what a folder holds. An inner folder in which something is added or edited is made, and filled likewise."""
    into.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(ROOT / folder) if (ROOT / folder).is_dir() else []:
        inner = f"{folder}/{name}"
        if any(place.startswith(f"{inner}/") for place in places):
            link(inner, into / name, places)
        elif name != "__pycache__" and inner not in places:
            (into / name).symlink_to(ROOT / inner)


def place_of(house: Path, file: str) -> Path:
    """Where a file of the repository stands in the house, its folder made."""
    place = house / file if file.startswith("tests/") else house / "headstart" / file
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


if __name__ == "__main__":
    add_families(Path(sys.argv[1]))
