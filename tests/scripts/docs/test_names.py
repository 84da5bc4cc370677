"""What pages name exists: functions behind links to the code, settings, and files."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from doc_blocks import ROOT, pages

from headstart.recipes.documented import all_settings

#: [`name`](../path.py)
NAMED = re.compile(r"\[`(\w+)`\]\((?:\.\./)*([\w/]+\.py)\)")
#: a key in backticks, of a part of a recipe
KEY = re.compile(r"`((?:target|data|head|train|joint|eval|tune|export)\.[a-z_0-9.\[\]]+?)(?:=[^`]*)?`")


@cache
def defined(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("page", pages())
def test_functions_that_pages_link_to_exist(page: str) -> None:
    for name, path in NAMED.findall((ROOT / page).read_text(encoding="utf-8")):
        assert name in defined(path), f"{page}: {path} defines no {name}"


def test_every_formula_names_its_function() -> None:
    """Each section of docs/maths.md with a formula links to the code that computes it."""
    text = (ROOT / "docs/maths.md").read_text(encoding="utf-8")
    sections = [part for part in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:] if "$$" in part]
    assert len(sections) >= 8
    for part in sections:
        assert NAMED.search(part), part.splitlines()[0]
    assert len(set(NAMED.findall(text))) >= 40
    # GitHub takes a backslash before punctuation away before it reads a formula
    formulas = re.findall(r"\$\$.*?\$\$|\$[^$\n]+\$", text, re.DOTALL)
    assert len(formulas) > 40 and not [each for each in formulas if re.search(r"\\[^A-Za-z]", each)]


@pytest.mark.parametrize("page", [page for page in pages() if page != "docs/results/README.md"])
def test_settings_that_pages_name_exist(page: str) -> None:
    known = {setting.key.replace("[]", "") for setting in all_settings()}
    parts = {".".join(key.split(".")[:n]) for key in known for n in range(1, key.count(".") + 1)}
    for key in KEY.findall((ROOT / page).read_text(encoding="utf-8")):
        plain = re.sub(r"\[\d*\]", "", key).rstrip(".")
        if plain.endswith((".py", ".yaml", ".json", ".jsonl", ".md")) or Path(plain).suffix in (".npy",):
            continue
        assert plain in known | parts, f"{page}: no recipe has the key {key}"


def said_by_the_code() -> str:
    """All texts of the code, what varies written as …"""
    texts = []

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        return "".join(text(part) for part in node.values) if isinstance(node, ast.JoinedStr) else "…"

    for folder in ("heads", "data", "eval", "train", "recipes", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            texts += [text(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)]
    return "\n".join(texts)


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    messages = [line[2:].strip("` ") for line in page.splitlines() if line.startswith("> `")]
    assert len(messages) >= 30 and page.count("\n### ") >= 40
    code = said_by_the_code()
    for message in messages:
        parts = [part.strip() for part in message.split("…") if len(part.strip()) >= 8]
        assert parts, message
        assert all(part in code for part in parts), [part for part in parts if part not in code]
