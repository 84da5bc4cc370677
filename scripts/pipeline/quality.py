"""The step `quality`: what the adapter cost the target, measured on held-out conversations before any export.

The perplexity of both targets is measured on two texts: the answers of these conversations, and their prompts. Answers
alone are not enough: they often are the target's own, which training makes surer, and hide what it costs elsewhere.

A run without an adapter of its own has no such step. Its numbers stand in quality.json, and as `quality` in the head's
headstart.json, from where reports, exports and model cards take them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from headstart import identity
from headstart.data.prompt_tokens import prompt_tokens
from headstart.data.samples import Sample
from headstart.eval.measuring.quality import Scored, measure_quality
from headstart.heads.errors import DataError
from headstart.heads.files import write_json
from headstart.heads.formats.sidecar import annotate, notes
from headstart.heads.targets.target import Target
from headstart.heads.targets.tuned import Adapter, adapter_of_head, merged_for_now, read_adapter
from headstart.pipeline.data import first_prompt, held_out_prompts, prepare
from headstart.pipeline.markers import Begin
from headstart.pipeline.run import Run
from headstart.quality_guard import consequence, judged, summary

#: most held-out tokens that are read; the first conversations are taken
MOST_TOKENS = 1 << 19


def quality(run: Run) -> dict[str, Any] | None:
    """Measure the tuned target against the original; None for a run whose target has no adapter of its own.

    A rise of the perplexity beyond the threshold is said here; `export` refuses it. A measurement that is there is not
    repeated, also where an older version made it on the answers alone.
    """
    place = adapter_of_head(run.head_dir)
    if place is None:
        return None
    joint, adapter = run.recipe.joint, read_adapter(place)
    inputs = {
        "head": identity.of_saved_head(run.head_dir),
        "adapter": adapter.digest[:16],
        "target": identity.of_target(run.recipe.target),
        "data": run.inputs.data,
        "guard": {name: getattr(joint, name) for name in ("guard_prompts", "guard_tokens")},
    }
    measured = run.markers.do("quality", inputs, [run.quality_path], lambda begin: _measure(run, adapter, begin))
    result = judged(measured, joint.max_perplexity_rise)
    if notes(run.head_dir).get("quality") != result:  # the threshold may change without measuring anew
        annotate(run.head_dir, {"quality": result})
        write_json(run.quality_path, result)
    run.console.say(f"quality: {summary(result)}{consequence(result)}")
    return result


def _measure(run: Run, adapter: Adapter, begin: Begin) -> dict[str, Any]:
    data, joint = prepare(run), run.recipe.joint
    if not data.held_out:
        raise DataError(
            "quality: no conversation is held out, and what the adapter cost the target is measured on such: set "
            "data.held_out_fraction=0.05, or data.held_out"
        )
    prompts = [first_prompt(sample) for sample in held_out_prompts(data)][: joint.guard_prompts]
    original = run.target

    @contextmanager
    def tuned() -> Iterator[Target]:
        with merged_for_now(original.model, adapter):
            # another Target: what the original has measured of its model does not hold now
            yield Target(original.model, original.tokenizer, original.config, original.revision)

    samples = first_samples(data.held_out)
    found = measure_quality(
        original, tuned, answer_texts(samples), prompts, joint.guard_tokens, run.console.say, prompt_texts(samples)
    )
    begin()
    write_json(run.quality_path, values := found.to_json())
    return values


def first_samples(samples: list[Sample]) -> list[Sample]:
    """The first samples, as many as MOST_TOKENS allow, one at least."""
    fitting = sum(total <= MOST_TOKENS for total in accumulate(map(len, samples)))
    return samples[: max(fitting, 1)]


def answer_texts(samples: list[Sample]) -> list[Scored]:
    """The samples with their supervised tokens scored."""
    return [(sample.token_ids.tolist(), (sample.turn_ids >= 0).tolist()) for sample in samples]


def prompt_texts(samples: list[Sample]) -> list[Scored]:
    """The samples with the text of their prompts scored (see prompt_tokens)."""
    masks = prompt_tokens(samples)
    return [(sample.token_ids.tolist(), mask_T.tolist()) for sample, mask_T in zip(samples, masks, strict=True)]
