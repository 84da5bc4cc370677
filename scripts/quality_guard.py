"""The guard of a tuned target's quality: what was measured, in a sentence, and whether the target may be exported.

Two texts are measured: held-out answers, and the prompts of the same conversations. The larger rise of the perplexity
decides. A measurement of an older version has the answers alone, and is judged by them.
"""

from __future__ import annotations

import math
from typing import Any

from headstart.heads.errors import TargetError

#: prompts with fewer tokens than this are reported, and not judged: one word more or less would decide
FEWEST_TOKENS = 200
ANSWERS, PROMPTS = "held-out answers", "the prompts of the held-out conversations"
#: what helps where the perplexity on a text rose too much
REMEDIES = {
    ANSWERS: (
        "Answers of the target itself as data with joint.loss=kl, a lower train.lr or joint.rank, or a smaller "
        "joint.weight keep it closer to the original"
    ),
    PROMPTS: (
        "The target got worse at text other than answers. joint.loss=kl, which keeps the original's whole "
        "distribution, more varied data, or a lower train.lr keeps it closer to the original"
    ),
}


def judged(measured: dict[str, Any], most: float) -> dict[str, Any]:
    """The measurement (`Quality.to_json`) with the threshold, and whether it passed.

    Args: most: joint.max_perplexity_rise.
    """
    result = {**measured, "max_perplexity_rise": most}
    if prompts := measured.get("on_prompts"):
        result["on_prompts"] = {**prompts, "judged": prompts["tokens"] >= FEWEST_TOKENS}
    return {**result, "passed": not _failed(result)}


def _failed(quality: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The texts on which the perplexity rose too much, the largest rise first, with their numbers."""
    texts = {ANSWERS: quality}
    if (prompts := quality.get("on_prompts")) and prompts["judged"]:
        texts[PROMPTS] = prompts
    # a rise that is no number is the largest
    rises = {text: rise if math.isfinite(rise := numbers["rise"]) else math.inf for text, numbers in texts.items()}
    order = sorted(texts, key=lambda text: -rises[text])
    return {text: texts[text] for text in order if rises[text] > quality["max_perplexity_rise"]}


def summary(quality: dict[str, Any]) -> str:
    """The numbers in a sentence."""
    said = (
        f"the tuned target's perplexity on {quality['tokens']} tokens of held-out answers is {_numbers(quality)}; "
        f"{_on_prompts(quality)}"
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


def _on_prompts(quality: dict[str, Any]) -> str:
    prompts = quality.get("on_prompts")
    if not prompts:
        return "their prompts have no text to measure" if "on_prompts" in quality else "their prompts were not measured"
    few = "" if prompts["judged"] else f", too few to judge (fewer than {FEWEST_TOKENS}),"
    return f"on {prompts['tokens']} tokens of their prompts{few} it is {_numbers(prompts)}"


def _numbers(text: dict[str, Any]) -> str:
    return (
        f"{text['perplexity_tuned']:.4g}, the original's {text['perplexity_original']:.4g} "
        f"({100 * text['rise']:+.2f} %)"
    )


def consequence(quality: dict[str, Any]) -> str:
    """What follows from the numbers, to stand behind `summary`."""
    allowed = f"joint.max_perplexity_rise allows {100 * quality['max_perplexity_rise']:+g} %"
    if quality["passed"]:
        return f" ({allowed})"
    return f": it will not be exported, because of {' and '.join(_failed(quality))} ({allowed})"


def require_quality(quality: dict[str, Any] | None, force: bool) -> None:
    """Refuse to export a head whose tuned target lost too much, or was not measured.

    Args: force: `export.force`. It lets an unmeasured one pass, never one that is beyond the threshold: whoever means
        that raises the threshold.
    Raises: TargetError naming the text whose perplexity rose, the numbers and the remedies.
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
        raise TargetError(_refusal(quality))


def _refusal(quality: dict[str, Any]) -> str:
    failed = _failed(quality) or {ANSWERS: quality}
    text, numbers = next(iter(failed.items()))
    before, after, rise = numbers["perplexity_original"], numbers["perplexity_tuned"], numbers["rise"]
    needed = math.ceil(rise * 1000) / 1000 if math.isfinite(rise) else "…"
    said = (
        f"joint.max_perplexity_rise: found a perplexity of {after:.6g} for the tuned target on {numbers['tokens']} "
        f"tokens of {text}, {100 * rise:.2f} % above the original's {before:.6g}, expected at most "
        f"{100 * quality['max_perplexity_rise']:g} %. "
    )
    if text == PROMPTS:
        said += f"On {quality['tokens']} tokens of {ANSWERS} it is {_numbers(quality)}. "
    elif quality.get("on_prompts"):
        said += f"{(other := _on_prompts(quality))[0].upper()}{other[1:]}. "
    remedies = ". ".join(REMEDIES[text] for text in failed)
    return f"{said}{remedies}; joint.max_perplexity_rise={needed} exports it knowingly (export.force does not)"
