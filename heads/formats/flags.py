"""The flag beside τ and speed-up of a report that do not come from lossless verification."""

from __future__ import annotations

from typing import Any

LOSSY, SYNTHETIC = "LOSSY", "SYNTHETIC"
#: flag → the words of a title
TITLES = {LOSSY: "LOSSY (typical acceptance)", SYNTHETIC: "SYNTHETIC acceptance"}
#: flag → what it means
MEANINGS = {
    LOSSY: "LOSSY: typical acceptance, the output distribution is not the target's",
    SYNTHETIC: "SYNTHETIC: acceptance was asked for, τ is not the head's and the text is not the target's",
}


def flag_of(report: dict[str, Any]) -> str | None:
    """LOSSY, SYNTHETIC, or None where the output is the target's own.

    Args:
        report: report.json as parsed.
    """
    if report.get("synthetic") is not None:
        return SYNTHETIC
    return None if report.get("lossless", True) else LOSSY
