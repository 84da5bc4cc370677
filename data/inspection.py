"""What `headstart inspect` shows: counts over samples, and samples as text with the supervised tokens marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from headstart.data.samples import Sample


def summarise(samples: Sequence[Sample]) -> dict[str, Any]:
    """Counts and lengths (tokens) of a set of samples.

    Returns: samples, tokens, supervised_tokens, turns, tasks {task: samples}, open_ended (no end of turn),
        length {min, median, p95, max}, answer {min, median, p95, max} per assistant turn.
    """
    answers: list[int] = []
    for sample in samples:
        answers += np.unique(sample.turn_ids[sample.turn_ids >= 0], return_counts=True)[1].tolist()
    return {
        "samples": len(samples),
        "tokens": sum(map(len, samples)),
        "supervised_tokens": sum(answers),
        "turns": len(answers),
        "tasks": dict(sorted(Counter(str(s.meta.get("task") or "-") for s in samples).items())),
        "open_ended": sum(s.finish_reason == "length" for s in samples),
        "length": _quantiles([len(s) for s in samples]),
        "answer": _quantiles(answers),
    }


def _quantiles(values: Sequence[int]) -> dict[str, int]:
    if not values:
        return {"min": 0, "median": 0, "p95": 0, "max": 0}
    at = np.percentile(np.asarray(values), [0, 50, 95, 100], method="inverted_cdf")
    return dict(zip(("min", "median", "p95", "max"), map(int, at), strict=True))


def render_sample(sample: Sample, tokenizer: Any) -> list[tuple[str, bool]]:
    """Consecutive `(text, supervised)` pieces; a new piece also starts where one assistant turn follows another.

    Special tokens are shown. A piece is decoded as a whole, because a character may be made of several tokens.
    """
    pieces: list[tuple[str, bool]] = []
    start = 0
    for stop in range(1, len(sample) + 1):
        if stop == len(sample) or sample.turn_ids[stop] != sample.turn_ids[start]:
            ids = sample.token_ids[start:stop].tolist()
            pieces.append(
                (tokenizer.decode(ids, clean_up_tokenization_spaces=False), bool(sample.turn_ids[start] >= 0))
            )
            start = stop
    return pieces


def render_tokens(sample: Sample, tokenizer: Any) -> list[tuple[str, int]]:
    """`(text of one token, its turn)` per token, -1 = unsupervised: for checking a mask token by token."""
    return [(tokenizer.decode([int(i)]), int(t)) for i, t in zip(sample.token_ids, sample.turn_ids, strict=True)]
