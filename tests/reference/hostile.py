"""Values that nobody expects, and texts with a few characters changed."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 1.5, -0.5, 1e308, float("nan"), float("inf"), 2**63, -(2**63) - 1, 10**30, "", " ",
    "x", "..", "/", "a/b", "\x00", "\x1b[31m", "\u202e", "\U0001f600", "null", "NaN", "1e5", "${seed}", "${nope}", "${",
    "???", "x" * 3000, [], {}, [None], [[]], [[[]]], [1, "a", None], {"a": 1}, {"": {}}, {"path": 5}, [{"path": None}],
    {"type": "eagle"}, {"role": "user"}, [{"role": "user", "content": None}],
)  # fmt: skip
CHARACTERS = "\x00\t\n\r\x1b\"'\\{}[]()<>:,;.&*!|>%@`#$~-=+/?é\u202e\ufeff\ud800\udc80\U0001f600 0159eEaxn"


def mutated(text: str, dice: random.Random) -> str:
    """`text` with one to four characters inserted, replaced or removed, or a part of it repeated."""
    letters = list(text)
    for _ in range(dice.randint(1, 4)):
        place = dice.randrange(len(letters) + 1)
        what = dice.randrange(4)
        if what == 0 or not letters:
            letters.insert(place, dice.choice(CHARACTERS))
        elif what == 1:
            letters[min(place, len(letters) - 1)] = dice.choice(CHARACTERS)
        elif what == 2:
            del letters[min(place, len(letters) - 1)]
        else:
            letters[place:place] = letters[place : place + dice.randint(1, 40)] * dice.randint(1, 3)
    return "".join(letters)


@contextmanager
def within_seconds(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what takes longer: a hang fails its test instead of all of them."""

    def late(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
