"""Checks of what a server says before it is used, and of its text before it is shown in a terminal."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from headstart.heads.errors import ServerError

#: whole numbers beyond this are not exact in the floats that metrics are printed from
LARGEST = 1 << 53

T = TypeVar("T")


def one_line(text: str, most: int = 300) -> str:
    """`text` on one line, without control characters, lone surrogates or direction marks, `most` characters at most.

    >>> one_line("one\\n two\\x1b[31m\\u202e", 40)
    'one two?[31m?'
    """
    # a huge text is cut first: the rest would not be shown
    line = " ".join(text[: 8 * most].split())
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= most else line[: most - 1] + "…"


def found(value: Any) -> str:
    """How a message names a value: scalars as they are, objects and lists by their kind (they may be huge)."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return one_line(repr(value), 80)


def whole(value: Any, name: str, low: int = 0, high: int = LARGEST) -> int:
    """`value`, a whole number from `low` to `high`. Raises: ServerError naming `name` and what was found."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ServerError(f"{name}: found {found(value)}, expected a whole number from {low} to {high}")
    return value


def optional(value: Any, kind: type[T], name: str) -> T | None:
    """`value`, which is of `kind` or None. Raises: ServerError naming `name` and what was found."""
    if value is None or isinstance(value, kind):
        return value
    expected: dict[type, str] = {dict: "an object", list: "a list", str: "text"}
    raise ServerError(f"{name}: found {found(value)}, expected {expected[kind]}")


def parsed(content: bytes, where: str) -> Any:
    """The server's JSON. Raises: ServerError for anything else, NaN and infinity and too deep nesting included."""
    try:
        return json.loads(content.decode(), parse_constant=_no_constant)
    except RecursionError:
        cause = "nested too deeply"
    except ValueError as error:
        cause = one_line(str(error), 100)
    raise ServerError(f"{where}: the answer is not JSON ({cause}); is this an OpenAI-compatible server?")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def error_text(error: Any) -> str:
    """The message of an error object."""
    message = error.get("message", error.get("type")) if isinstance(error, dict) else error
    return one_line(message) if isinstance(message, str) else found(message)
