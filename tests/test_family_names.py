"""What a head family is stands in its own places: no other module imports it, names it or asks for its type.

The places: heads/families, eval/drafters, heads/formats (what each engine serves), recipes/*.yaml and the tests.

- Elsewhere nothing is imported from `headstart.heads.families` but the package itself.
- There is no `isinstance` or `issubclass` on a head or a family's config, and no `getattr` or `hasattr` that asks a
  head for what only some families have.
- No family's name stands in the text as a word of its own, comments included, and no name in the code holds one.

Prose may name a published method: EAGLE-2 trees, Medusa's typical acceptance. ALLOWED lists the exceptions.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from headstart.heads.base import Head, HeadConfig
from headstart.heads.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("heads", "data", "eval", "train", "recipes", "scripts")
THEIR_PLACES = ("heads/families/", "eval/drafters/", "heads/formats/")
#: file → words that it may hold, and why
ALLOWED: dict[str, tuple[set[str], str]] = {
    "heads/layers.py": ({"medusa"}, "the remedy of an error names a family without a draft layer"),
    "scripts/bench/presets.py": ({"eagle3", "medusa", "dflash", "dspark"}, "the heads that are benchmarked"),
    "scripts/bench/train.py": ({"eagle3"}, "the name of a shipped recipe, in help"),
    "scripts/parity/llama_cpp.py": ({"eagle3"}, "the one family that llama.cpp drafts with"),
    "scripts/parity/engine.py": ({"dflash", "DFlashQwen3Model"}, "vLLM's names of what is repaired there"),
    "scripts/parity/heads.py": ({"medusa", "eagle", "eagle3", "peagle", "dflash"}, "recipes of the parity gates"),
    "scripts/saved_heads.py": ({"eagle3"}, "what drafts with synthetic acceptance where no head is named"),
}
NAME = re.compile(rf"\b(?:{'|'.join(map(re.escape, FAMILIES))})\b")
IN_NAME = re.compile("|".join(map(re.escape, FAMILIES)), re.IGNORECASE)
#: classes of the families and what they are built on
CLASSES = {
    cls.__name__
    for family in FAMILIES.values()
    for made in (family.head, family.config)
    for cls in made.__mro__
    if issubclass(cls, Head | HeadConfig)
}


def sources() -> list[Path]:
    found = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return [path for path in found if not str(path.relative_to(ROOT)).startswith(THEIR_PLACES)]


def imports(tree: ast.AST) -> list[str]:
    """Modules below `headstart.heads.families` that are imported, in functions and under TYPE_CHECKING too."""
    modules = {path.stem for path in (ROOT / "heads/families").iterdir()}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "headstart.heads.families":
            found += [f"{node.module}.{name.name}" for name in node.names if name.name in modules]
        elif isinstance(node, ast.ImportFrom):
            found.append(str(node.module))
    return [name for name in found if name.startswith("headstart.heads.families.")]


def questions(tree: ast.AST) -> list[str]:
    """Questions what a head is, instead of questions to the head."""
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= 2):
            continue
        asked, subject = node.func.id, ast.unparse(node.args[0])
        if asked in ("isinstance", "issubclass"):
            names = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
            names |= {part.attr for part in ast.walk(node.args[1]) if isinstance(part, ast.Attribute)}
            found += [ast.unparse(node)] if names & CLASSES else []
        elif asked in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant):
            found += [ast.unparse(node)] if re.fullmatch(r"(\w+\.)*head(\.config)?", subject) else []
    return found


def words(text: str, tree: ast.AST) -> set[str]:
    """Family names in the text, and names of the code that hold one."""
    found = set(NAME.findall(text))
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str) and IN_NAME.search(value) and "." not in value:
                found.add(value)
    return found


def test_a_family_is_asked_and_not_named():
    faults = {}
    for path in sources():
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        allowed, _ = ALLOWED.get(name, (set(), ""))
        if found := [*imports(tree), *questions(tree), *sorted(words(text, tree) - allowed)]:
            faults[name] = found
    assert faults == {}, "ask the head (heads/base.py), or say it in the family's folder, drafter or engines' tables"


def test_no_script_or_launch_configuration_names_a_family():
    paths = [*(ROOT / "scripts").rglob("*.sh"), *(ROOT / "recipes/accelerate").glob("*.yaml")]
    assert len(paths) > 10
    assert [str(path.relative_to(ROOT)) for path in paths if NAME.search(path.read_text(encoding="utf-8"))] == []


def test_what_is_allowed_is_there():
    for name, (allowed, _) in ALLOWED.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert words(text, ast.parse(text)) == allowed, f"{name}: shorten ALLOWED"


@pytest.mark.parametrize(
    ("code", "imported", "asked", "named"),
    [
        ("from headstart.heads.families.eagle3.head import Eagle3Head", 1, 0, {"eagle3", "Eagle3Head"}),
        ("def f():\n    from headstart.heads.families import autoregressive", 1, 0, set()),
        ("from headstart.heads.families import FAMILIES, build_head", 0, 0, set()),
        ("import headstart.heads.families.medusa", 1, 0, {"medusa"}),
        ("isinstance(head, a.Eagle3Head | B)", 0, 1, {"Eagle3Head"}),
        ("isinstance(head, AutoregressiveHead)", 0, 1, set()),
        ("isinstance(x, (int, Head))", 0, 1, set()),
        ("hasattr(self.head, 'lm_head') or getattr(head.config, 'rank', 1)", 0, 2, set()),
        ("getattr(head, name)", 0, 0, set()),
        ("head.family == 'medusa'", 0, 0, {"medusa"}),
        ("x = 1  # only for head.type=eagle", 0, 0, {"eagle"}),
        ("'''EAGLE-2 trees, Medusa's tree'''", 0, 0, set()),
        ("eagle_like = f(medusa=1)", 0, 0, {"eagle_like", "medusa"}),
        ("config['eagle_topk']", 0, 0, set()),
    ],
)
def test_the_rules_by_example(code: str, imported: int, asked: int, named: set[str]):
    tree = ast.parse(code)
    assert len(imports(tree)) == imported and len(questions(tree)) == asked
    assert words(code, tree) == named
