"""Numbers about a set of samples: lengths, what is supervised and drafted, copies, languages by script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.data.samples import Sample
from headstart.heads.positions import drafted_depths

#: answer tokens of the samples whose scripts are counted: less than a second
SCRIPT_TOKENS = 1 << 16
#: samples that are counted at once
BLOCK = 512
#: scripts of Unicode that say nothing about the language: shared, inherited and unknown characters
NO_SCRIPT = ("Zyyy", "Zinh", "Zzzz")


def summarise(samples: Sequence[Sample]) -> dict[str, Any]:
    """Counts and lengths (tokens) of a set of samples.

    Returns: samples, tokens, supervised_tokens, turns, tasks {task: samples}, open_ended (no end of turn),
        length {min, p5, median, p95, max}, answer {the same} per assistant turn.
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
    names, shares = ("min", "p5", "median", "p95", "max"), (0, 5, 50, 95, 100)
    if not values:
        return dict.fromkeys(names, 0)
    at = np.percentile(np.asarray(values), shares, method="inverted_cdf")
    return dict(zip(names, map(int, at), strict=True))


def label_tokens(samples: Sequence[Sample], draftable_V: Tensor | None = None) -> tuple[int, int]:
    """(tokens that are a label at some depth, those of them in the draft vocabulary).

    A label of any depth is one at depth 1 as well, of a later row.
    Args: draftable_V: bool [V], the draft vocabulary; None = all tokens.
    """
    rest, labels, inside = iter(samples), 0, 0
    while block := list(islice(rest, BLOCK)):
        token_R, turn_R = (torch.cat(parts) for parts in zip(*(sample.tensors() for sample in block), strict=True))
        doc_R = torch.repeat_interleave(torch.arange(len(block)), torch.tensor([len(sample) for sample in block]))
        label_R = drafted_depths(turn_R, doc_R, 1) > 0
        labels += int(label_R.sum())
        inside += 0 if draftable_V is None else int(draftable_V[token_R[label_R]].sum())
    return labels, labels if draftable_V is None else inside


def exact_copies(samples: Sequence[Sample]) -> int:
    """How many samples are the same, token by token, as one of another conversation before them.

    What a weight repeats is of one conversation, and does not count.
    """
    found = {(sample.digest(), str(sample.meta.get("conversation", sample.id))) for sample in samples}
    return len(found) - len({digest for digest, _ in found})


def scripts(samples: Sequence[Sample], tokenizer: Any, seed: int, limit: int = SCRIPT_TOKENS) -> dict[str, Any]:
    """The scripts of Unicode that answers are written in, of random samples of `limit` answer tokens together.

    Returns: samples (that were looked at), letters, shares {script: share of the letters}, the largest first. Digits,
        punctuation and other characters that all scripts share are not counted.
    """
    letters: Counter[str] = Counter()
    seen = 0
    for text in _answers(samples, tokenizer, seed, limit):
        seen += 1
        letters.update(text)
    counts: Counter[str] = Counter()
    for character, count in letters.items():
        if (script := _script(character)) is not None:
            counts[script] += count
    total = counts.total()
    return {"samples": seen, "letters": total, "shares": {name: n / total for name, n in counts.most_common()}}


def _answers(samples: Sequence[Sample], tokenizer: Any, seed: int, limit: int) -> Iterator[str]:
    for index in np.random.default_rng(seed).permutation(len(samples)).tolist():
        if limit <= 0:
            return
        turns = samples[index].turn_ids if samples[index].answer_ids is None else samples[index].answer_ids
        ids = samples[index].token_ids[turns >= 0].tolist()
        limit -= len(ids)
        yield tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@lru_cache(maxsize=1 << 16)
def _script(character: str) -> str | None:
    """Name of the character's script, None where it belongs to no one script."""
    from fontTools import unicodedata

    code = unicodedata.script(character)
    return None if code in NO_SCRIPT else unicodedata.script_name(code).replace("_", " ")
