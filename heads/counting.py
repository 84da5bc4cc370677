"""Numbers with their nouns, for messages."""

from __future__ import annotations


def noun_of(number: float, nouns: str) -> str:
    """The noun that goes with a number. Args: nouns: of a regular plural, such as `steps`, `passes` or `queries`.

    >>> noun_of(1, "held-out prompts"), noun_of(0, "passes"), noun_of(1, "passes"), noun_of(1, "copies")
    ('held-out prompt', 'passes', 'pass', 'copy')
    """
    if number != 1:
        return nouns
    if nouns.endswith("ies"):
        return nouns.removesuffix("ies") + "y"
    return nouns.removesuffix("es" if nouns.endswith(("sses", "xes", "ches", "shes")) else "s")


def counted(number: float, nouns: str, form: str = "") -> str:
    """The number and its noun. Args: form: how the number is written, as after the colon of an f-string.

    >>> counted(1, "answers"), counted(1200, "steps", ",")
    ('1 answer', '1,200 steps')
    """
    return f"{number:{form}} {noun_of(number, nouns)}"
