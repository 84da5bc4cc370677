"""What the guard says of measured numbers, and what it refuses. The larger rise of two texts decides."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headstart.heads.errors import TargetError
from headstart.quality_guard import consequence, judged, require_quality, summary


def measured(answers: float, prompts: float | None, tokens: int = 500) -> dict[str, Any]:
    """A measurement with these rises, from perplexities 2 and 20; without prompts, as an older version made it."""
    found: dict[str, Any] = {
        "tokens": 1000, "conversations": 9, "perplexity_original": 2.0, "perplexity_tuned": 2 * (1 + answers),
        "rise": answers, "dtype": "float32", "answers": None,
    }  # fmt: skip
    if prompts is not None:
        found["on_prompts"] = {
            "tokens": tokens, "perplexity_original": 20.0, "perplexity_tuned": 20 * (1 + prompts), "rise": prompts,
        }  # fmt: skip
    return found


def refusal(quality: dict[str, Any]) -> str:
    with pytest.raises(TargetError) as refused:
        require_quality(quality, force=True)
    return str(refused.value)


@pytest.mark.parametrize(
    ("answers", "prompts", "passed"),
    [
        (0.01, 0.01, True),
        (-0.127, 0.668, False),
        (0.011, -0.5, False),
        (0.0, math.nan, False),
        (math.inf, 0.0, False),
        (0.01, None, True),
        (0.011, None, False),
    ],
)
def test_the_larger_rise_decides(answers: float, prompts: float | None, passed: bool) -> None:
    quality = judged(measured(answers, prompts), 0.01)
    assert quality["passed"] is passed and quality["max_perplexity_rise"] == 0.01 and quality["tokens"] == 1000
    if passed:
        require_quality(quality, force=False)
    else:
        refusal(quality)


def test_a_rise_on_prompts_is_told_with_both_numbers_and_what_helps() -> None:
    quality = judged(measured(-0.127, 0.668), 0.01)
    assert refusal(quality) == (
        "joint.max_perplexity_rise: found a perplexity of 33.36 for the tuned target on 500 tokens of the prompts of "
        "the held-out conversations, 66.80 % above the original's 20, expected at most 1 %. On 1000 tokens of held-out "
        "answers it is 1.746, the original's 2 (-12.70 %). The target got worse at text other than answers. "
        "joint.loss=kl, which keeps the original's whole distribution, more varied data, or a lower train.lr keeps it "
        "closer to the original; joint.max_perplexity_rise=0.668 exports it knowingly (export.force does not)"
    )
    assert summary(quality) == (
        "the tuned target's perplexity on 1000 tokens of held-out answers is 1.746, the original's 2 (-12.70 %); on "
        "500 tokens of their prompts it is 33.36, the original's 20 (+66.80 %)"
    )
    assert "because of the prompts of the held-out conversations (joint.max" in consequence(quality)
    assert judged(quality, 0.668)["passed"]  # the threshold that the refusal names


def test_a_rise_on_answers_is_told_with_what_helps_there() -> None:
    said = refusal(judged(measured(0.05, 0.002), 0.01))
    assert (
        "on 1000 tokens of held-out answers, 5.00 % above the original's 2, expected at most 1 %. On 500 tokens of"
        in said
    )
    assert "their prompts it is 20.04, the original's 20 (+0.20 %). Answers of the target itself as data with" in said
    assert "got worse at text other than answers" not in said and "joint.max_perplexity_rise=0.05 exports" in said


def test_where_both_rose_the_larger_comes_first_and_is_the_threshold_that_is_needed() -> None:
    for answers, prompts in ((0.05, 0.02), (0.02, 0.05)):
        quality = judged(measured(answers, prompts), 0.01)
        said = refusal(quality)
        assert "5.00 % above" in said and "(+2.00 %)" in said and "joint.max_perplexity_rise=0.05 exports" in said
        first, second = said.index("Answers of the target itself"), said.index("The target got worse at text")
        assert (first < second) is (answers > prompts) and " and " in consequence(quality)
        assert judged(quality, 0.05)["passed"]


def test_few_tokens_of_prompts_are_told_and_not_judged() -> None:
    few, enough = (judged(measured(0.0, 0.5, tokens), 0.01) for tokens in (199, 200))
    assert few["passed"] and not few["on_prompts"]["judged"] and not enough["passed"]
    said = "on 199 tokens of their prompts, too few to judge (fewer than 200), it is 30, the original's 20 (+50.00 %)"
    assert said in summary(few) and "too few" not in summary(enough)
    refused = judged(measured(0.03, 0.5, 199), 0.01)
    assert "On 199 tokens of their prompts, too few to judge" in refusal(refused)


def test_a_measurement_of_an_older_version_is_judged_by_the_answers() -> None:
    quality = judged(measured(0.05, None), 0.01)
    assert "on_prompts" not in quality and "their prompts were not measured" in summary(quality)
    assert refusal(quality).startswith(
        "joint.max_perplexity_rise: found a perplexity of 2.1 for the tuned target on 1000 tokens of held-out answers, "
        "5.00 % above the original's 2, expected at most 1 %. Answers of the target itself"
    )
    # saved as it was judged then
    old = {**measured(0.0, None), "max_perplexity_rise": 0.01, "passed": True}
    require_quality(old, force=False)
    assert summary(old).endswith("(+0.00 %); their prompts were not measured")


def test_conversations_without_the_text_of_a_prompt_are_judged_by_all_they_have() -> None:
    everything = {**measured(0.0, None), "on_prompts": None}
    quality = judged(everything, 0.01)
    assert quality["passed"] and summary(quality).endswith("their prompts have no text to measure")
    assert not judged({**measured(0.02, None), "on_prompts": None}, 0.01)["passed"]
