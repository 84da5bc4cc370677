"""The flag that is shown beside τ and speed-up if a report's verification was not lossless."""

from __future__ import annotations

from typing import Any

LOSSY, SYNTHETIC = "LOSSY", "SYNTHETIC"
#: values of a report's `verification` that two reports of drawn chains may differ in
LOSSLESS_RULES = ("block", "token")
#: flag → the words of a title
TITLES = {LOSSY: "LOSSY (typical acceptance)", SYNTHETIC: "SYNTHETIC acceptance"}
#: flag → what it means
MEANINGS = {
    LOSSY: "LOSSY: typical acceptance, the output distribution is not the target's",
    SYNTHETIC: "SYNTHETIC: acceptance was asked for, τ is not the head's and the text is not the target's",
}


def flag_of(report: dict[str, Any]) -> str | None:
    """LOSSY, SYNTHETIC, or None if the output is the target's own.

    Args:
        report: report.json as parsed.
    """
    if report.get("synthetic") is not None:
        return SYNTHETIC
    return None if report.get("lossless", True) else LOSSY
