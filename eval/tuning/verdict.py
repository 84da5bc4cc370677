"""The verdict on `headstart tune`: at which batch sizes drafting pays, with what, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headstart.eval.measuring.verdict import (
    Verdict,
    draft_text,
    grouped,
    interval_of,
    judge,
    more_prompts,
    range_text,
    title_of,
)


def verdict_of_tuning(tuning: dict[str, Any]) -> Verdict:
    """The verdict on `headstart tune`. Args: tuning: `Tuning.to_json`."""
    choices = tuning["choices"]
    judged = []
    for choice in choices:
        speedup = choice["measured_speedup"]
        interval = interval_of(choice["measured"], speedup)
        judged.append((choice, interval, judge(interval)))
    paying = [(choice, interval) for choice, interval, pays in judged if pays]
    if tuning.get("device_type") == "cpu":
        says = ["The speed-ups on a CPU say nothing about a card that serves; only τ carries over to it."]
        best = max(choices, key=lambda choice: choice["measured_tau"])
        draft = draft_text(best["tree"], best["label"])
        says.append(f"The fastest draft at batch {best['batch']} was {draft}, with τ {best['measured_tau']:.2f}.")
        return Verdict(None, says, ["Tune on the card that will serve."])
    pays = True if paying else None if any(found is None for _, _, found in judged) else False
    by_batch = [(choice["batch"], found) for choice, _, found in judged]
    says = [f"On {tuning['device']}. " + grouped(by_batch)]
    says += [_tuned(choice, interval) for choice, interval, _ in judged]
    measured = paying or [(choice, interval) for choice, interval, _ in judged]
    choice, interval = measured[0] if paying else max(measured, key=lambda pair: pair[0]["measured_speedup"])
    tokens = (choice["launched"] or None) if pays else None
    speedup, title = choice["measured_speedup"], title_of(pays, by_batch)
    return Verdict(pays, says, _tuning_next(judged), tokens, speedup, interval, choice["batch"], title)


def _tuned(choice: dict[str, Any], interval: Sequence[float] | None) -> str:
    launched = choice["launched"]
    engines = f"launch engines with {launched} drafted tokens" if launched else "launch engines without drafting"
    found = f"{choice['measured_speedup']:.2f}×{range_text(interval, carried=True)}"
    return f"Batch {choice['batch']}: {found} with {draft_text(choice['tree'], choice['label'])}; {engines}."


def _tuning_next(judged: list[tuple[dict[str, Any], Any, bool | None]]) -> list[str]:
    advice = []
    for choice, interval, pays in judged:
        scheduled = choice.get("scheduled")
        if scheduled and scheduled["measured_speedup"] > max(1.0, choice["measured_speedup"]):
            gain = scheduled["measured_speedup"]
            advice.append(f"At batch {choice['batch']} eval.scheduler=on is faster: {gain:.2f}×.")
        elif pays is False:
            advice.append(f"Decode plainly at batch {choice['batch']}.")
        elif interval is None:
            batch = choice["batch"]
            advice.append(f"At batch {batch} give more prompts (tune.prompts): an interval needs two or more.")
        elif pays is None:
            prompts = choice["measured"]["prompts"]
            more = more_prompts(prompts, choice["measured_speedup"], interval)
            if more is not None:
                wanted = f"tune.prompts={prompts + more}"
                advice.append(f"At batch {choice['batch']} about {more} more prompts would tell: {wanted}.")
    if not any(pays for _, _, pays in judged):
        advice.append("Train on more conversations like those that you serve, or train a smaller head.")
    return advice
