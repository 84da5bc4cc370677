"""Near copies by hand: sets of runs of words as text, every pair compared."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any


def runs(messages: Sequence[dict[str, Any]], size: int = 3) -> set[tuple[str, ...]]:
    """The runs of `size` words of what is said, system prompts left out; of less text, the one run of its words."""
    said = [str(m.get("content") or "") for m in messages if m["role"] not in ("system", "developer")]
    words: list[str] = []
    for text in said:
        word = ""
        for letter in text.lower() + " ":
            han = "CJK UNIFIED" in unicodedata.name(letter, "") or "HIRAGANA" in unicodedata.name(letter, "")
            if (letter.isalnum() or letter == "_") and not han:
                word += letter
                continue
            words += [word] if word else []
            words += [letter] if han else []
            word = ""
    if len(words) < size:
        return {tuple(words)} if words else set()
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def jaccard(one: set[Any], other: set[Any]) -> float:
    return len(one & other) / len(one | other) if one | other else 0.0


def near_duplicates(sets: Sequence[set[Any]], threshold: float) -> dict[int, int]:
    """Number of each set that leaves → the first of those staying before it that it is a near copy of."""
    staying: list[int] = []
    copies: dict[int, int] = {}
    for number, each in enumerate(sets):
        like = [other for other in staying if jaccard(each, sets[other]) >= threshold]
        if like:
            copies[number] = like[0]
        else:
            staying.append(number)
    return copies
