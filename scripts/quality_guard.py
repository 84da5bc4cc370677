"""The guard of a tuned target's quality: what was measured, in a sentence, and whether the target may be exported."""

from __future__ import annotations

import math
from typing import Any

from headstart.heads.errors import TargetError

REMEDIES = (
    "Answers of the target itself as data with joint.loss=kl, a lower train.lr or joint.rank, or a smaller "
    "joint.weight keep it closer to the original"
)


def judged(measured: dict[str, Any], most: float) -> dict[str, Any]:
    """The measurement (`Quality.to_json`) with the threshold, and whether it passed.

    Args: most: joint.max_perplexity_rise.
    """
    rise = measured["rise"]
    return {**measured, "max_perplexity_rise": most, "passed": math.isfinite(rise) and rise <= most}


def summary(quality: dict[str, Any]) -> str:
    """The numbers in a sentence."""
    said = (
        f"the tuned target's perplexity on {quality['tokens']} held-out tokens is {quality['perplexity_tuned']:.4g}, "
        f"the original's {quality['perplexity_original']:.4g} ({100 * quality['rise']:+.2f} %)"
    )
    answers = quality.get("answers")
    if not answers:
        return said
    return (
        f"{said}; {answers['identical']} of {answers['prompts']} greedy answers are the same, on average "
        f"{answers['common_prefix']:.1f} of {answers['length_original']:.1f} tokens agree from the start; the "
        f"original's perplexity over the tuned target's answers is {answers['perplexity_tuned']:.4g}, over its own "
        f"{answers['perplexity_own']:.4g}"
    )


def consequence(quality: dict[str, Any]) -> str:
    """What follows from the numbers, to stand behind `summary`."""
    allowed = f"joint.max_perplexity_rise allows {100 * quality['max_perplexity_rise']:+g} %"
    return f" ({allowed})" if quality["passed"] else f": it will not be exported ({allowed})"


def require_quality(quality: dict[str, Any] | None, force: bool) -> None:
    """Refuse to export a head whose tuned target lost too much, or was not measured.

    Args: force: `export.force`. It lets an unmeasured one pass, never one that is beyond the threshold: whoever means
        that raises the threshold.
    Raises: TargetError naming the numbers and the remedies.
    """
    if quality is None:
        if force:
            return
        raise TargetError(
            "export: the head drafts for a tuned target, and what the adapter cost it was not measured: run `headstart "
            "export RECIPE` with the recipe that trained it, which measures it; or set export.force=true to export it "
            "unmeasured"
        )
    if not quality["passed"]:
        before, after, rise = quality["perplexity_original"], quality["perplexity_tuned"], quality["rise"]
        needed = math.ceil(rise * 1000) / 1000 if math.isfinite(rise) else "…"
        raise TargetError(
            f"joint.max_perplexity_rise: found a perplexity of {after:.6g} for the tuned target on {quality['tokens']} "
            f"held-out tokens, {100 * rise:.2f} % above the original's {before:.6g}, expected at most "
            f"{100 * quality['max_perplexity_rise']:g} %. {REMEDIES}; joint.max_perplexity_rise={needed} exports it "
            "knowingly (export.force does not)"
        )
