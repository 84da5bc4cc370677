"""What model cards say about a tuned target: in the head's card, and in the card of the target itself.

Text of others (names) is escaped.
"""

from __future__ import annotations

from typing import Any

import yaml

from headstart.heads.escape import code, markdown, table
from headstart.heads.formats.sidecar import hub_name, served_name
from headstart.heads.targets.tuned import is_tuned


def trained_together(side: dict[str, Any]) -> bool:
    """Whether the adapter was trained together with the head. Args: side: headstart.json of the head."""
    joint = (side.get("recipe") or {}).get("joint")
    return isinstance(joint, dict) and joint.get("enabled") is True


def tuned_target_section(side: dict[str, Any]) -> str:
    """Markdown for the head's card; "" for a head of a target as its makers published it."""
    target = side.get("target") or {}
    if not is_tuned(target):
        return ""
    base = markdown(hub_name(target) or target.get("name", "the base"))
    served = served_name(target) if target.get("served_as") else None
    where = f"the whole model {code(served)}" if served else "the adapter in the folder `adapter`"
    together = " The adapter was trained together with the head." if trained_together(side) else ""
    said = (
        f"This head drafts for a **tuned target**: {base} with a LoRA adapter, published as {where}.{together} "
        "Verification is lossless relative to the *tuned* target: the output is what the tuned target would have said "
        f"by itself, which is not always what {base} would have said. With {base} itself the head drafts worse."
    )
    return "\n\n".join(["## The tuned target", said, quality_text(side.get("quality"))])


def quality_text(quality: dict[str, Any] | None) -> str:
    """What the adapter cost the target, as a table and sentences."""
    if not quality:
        return "What the adapter changed was not measured."
    before, after = f"{quality['perplexity_original']:.4g}", f"{quality['perplexity_tuned']:.4g}"
    rows = [("perplexity on held-out answers", before, after)]
    prompts = quality.get("on_prompts")
    if prompts:
        numbers = (f"{prompts['perplexity_original']:.4g}", f"{prompts['perplexity_tuned']:.4g}")
        rows.append(("perplexity on their prompts", *numbers))
    answers = quality.get("answers")
    if answers:
        lengths = (f"{answers['length_original']:.1f}", f"{answers['length_tuned']:.1f}")
        rows.append(("mean length of greedy answers (tokens)", *lengths))
        rows.append(
            ("the original's perplexity over these answers", f"{answers['perplexity_own']:.4g}",
             f"{answers['perplexity_tuned']:.4g}")
        )  # fmt: skip
    said = (
        f"Measured in {quality['dtype']}. On {quality['tokens']:,} tokens of held-out answers the perplexity changed "
        f"by {100 * quality['rise']:+.2f} %{_on_prompts(quality)}; the recipe allows "
        f"{100 * quality['max_perplexity_rise']:+g} %."
    )
    if answers:
        said += (
            f" {answers['identical']} of {answers['prompts']} greedy answers are the same; on average the first "
            f"{answers['common_prefix']:.1f} tokens agree."
        )
    return "\n".join(table(("", "original", "tuned"), rows)) + f"\n\n{said}"


def _on_prompts(quality: dict[str, Any]) -> str:
    """How the perplexity on prompts changed, to stand behind the change on answers."""
    prompts = quality.get("on_prompts")
    if not prompts:
        return ", their prompts were not measured"
    few = "" if prompts["judged"] else " (too few to judge)"
    return f", on {prompts['tokens']:,} tokens of their prompts{few} by {100 * prompts['rise']:+.2f} %"


def target_card(repository: str, head: str, side: dict[str, Any], license_id: str | None) -> str:
    """README.md of the repository of a merged target.

    Args:
        repository: its name. head: repository of the head that drafts for it.
        side: headstart.json of the head. license_id: of the base, as the Hub names it; None points to the base's own.
    """
    target = side.get("target") or {}
    base = hub_name(target)
    values: dict[str, Any] = {"base_model": [base], "base_model_relation": "finetune"} if base else {}
    values |= {"license": license_id} if license_id else {"license": "other", "license_name": "as-the-base-model"}
    if not license_id and base:
        values["license_link"] = f"https://huggingface.co/{base}"
    values |= {"pipeline_tag": "text-generation", "tags": ["speculative-decoding", "headstart"]}
    front = f"---\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)}---"
    shown = markdown(base or target.get("name", "its base"))
    drafter = f"the draft head [{markdown(head)}](https://huggingface.co/{head})"
    why = f"{drafter} was trained for it: serve both together"
    if trained_together(side):
        why = f"it was tuned so that {drafter} predicts it better, and is meant to be served with that head"
    said = f"{shown} with a LoRA adapter merged; {why}."
    licence = f"## Licence\n\nIt is derived from {shown}: that model's licence applies."
    parts = [front, f"# {markdown(repository.split('/')[-1])}", said, quality_text(side.get("quality")), licence]
    return "\n\n".join(parts) + "\n"
