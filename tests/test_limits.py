"""Sizes that a reader can hold in mind: no class above 250 lines, no function above 12 parameters."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("train", "heads", "data", "recipes", "eval", "scripts")
CLASS_LINES, PARAMETERS = 250, 12
#: a backward pass written out: its forward takes every tensor that the backward needs as an argument of its own
WRITTEN_OUT = {("heads/families/eagle3/ttt.py", "forward")}


@cache
def definitions() -> list[tuple[str, ast.AST]]:
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    assert len(paths) > 150
    return [  # of all rooms, read once
        (str(path.relative_to(ROOT)), node) for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8")))
    ]


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles the function: its arguments are pointers, strides and sizes."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_no_class_is_longer_than_a_few_screens() -> None:
    found = [
        (path, node.name, node.end_lineno - node.lineno + 1)
        for path, node in definitions()
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None
    ]
    assert len(found) > 200
    assert [each for each in found if each[2] > CLASS_LINES] == []


def test_no_function_has_more_parameters_than_a_reader_can_hold() -> None:
    found = []
    for path, node in definitions():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
            arguments = node.args
            names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            found.append((path, node.name, len([name for name in names if name not in ("self", "cls", "ctx")])))
    assert len(found) > 1500
    long = [each for each in found if each[2] > PARAMETERS]
    assert [each for each in long if each[:2] not in WRITTEN_OUT] == []
