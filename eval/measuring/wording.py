"""How numbers of a report are written, in the terminal, in Markdown and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TAU_NOTE = "τ, the accepted length = tokens committed per target forward after prefill (plain decoding = 1)"


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{suffix}"


def rates_text(values: list[float] | list[float | None]) -> str:
    return " ".join("–" if v is None else f"{v:.3f}".replace("0.", ".", 1) for v in values) or "–"


def interval_text(interval: list[float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}"


def speedup_text(speedup: float | None, interval: list[float] | None) -> str:
    """`1.80×`, with its interval where there is one: `1.80× (1.72–1.88)`."""
    return number(speedup, 2, "×") + ("" if interval is None else f" ({interval_text(interval)})")


def identical_text(identity: dict[str, Any] | None) -> str:
    return "–" if identity is None else f"{identity['identical']}/{identity['sequences']}"


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
