"""Prompts and patience of the tests of servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headstart.data.prompts import Prompt
from headstart.data.serving.pool import Patience

#: no test waits long
FAST = Patience(timeout_s=1.0, tries=4, first_s=0.01, longest_s=0.05, aside_s=0.1, longest_aside_s=0.3, give_up_s=1.0)


def digits(number: int) -> str:
    """The question of a number: a text that the readable tokenizer holds.

    >>> digits(42)
    'Question-4-2'
    """
    return "Question" + "".join(f"-{digit}" for digit in str(number))


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt.ask(f"p{number}", digits(number)) for number in range(count)]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
