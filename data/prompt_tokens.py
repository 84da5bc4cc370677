"""Which tokens of conversations are the text of their prompts: what somebody else than the assistant wrote."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np

from headstart.data.samples import Sample


def prompt_tokens(samples: Sequence[Sample]) -> list[np.ndarray]:
    """The tokens of prompts and system texts, one mask (bool [T]) for each sample.

    Unsupervised tokens count, except:
    - A beginning that a sample shares with an earlier one counts once, because what the target says about the same
      tokens after the same tokens is the same. So a chat template's own system text, and a prompt with several
      answers, do not outweigh the rest.
    - What all prompts end with, and what all later questions begin with, does not count: these are marks of the chat
      template, such as `<|im_end|>\\n<|im_start|>assistant\\n`. They are known by standing everywhere, so two different
      prompts are needed. Marks that stand in some prompts only do count: the data does not tell them from text.
    - What follows the last answer does not count: it is the template's.

    An answer that does not train, as under `data.turns=last`, is unsupervised and counts as text of the prompt.
    """
    ids = [sample.token_ids.tolist() for sample in samples]
    runs = [(number, *run) for number, sample in enumerate(samples) for run in _unsupervised(sample.turn_ids)]
    # the last run of a sample without any answer is its first
    runs = [(number, start, stop) for number, start, stop in runs if start == 0 or stop < len(ids[number])]
    begin = _shared(ids[number][start:stop] for number, start, stop in runs if start > 0)
    end = _shared(ids[number][start:stop][::-1] for number, start, stop in runs if stop < len(ids[number]))
    masks = [np.zeros(len(sample), bool) for sample in samples]
    for number, start, stop in runs:
        first = start + (begin if start > 0 else 0)
        last = stop - (end if stop < len(ids[number]) else 0)
        masks[number][first : max(first, last)] = True
    order = sorted(range(len(ids)), key=ids.__getitem__)
    for one, other in zip(order, order[1:], strict=False):
        # sorted, a sample shares no longer beginning with any earlier one than with the one right before it
        masks[other][: len(os.path.commonprefix([ids[one], ids[other]]))] = False
    return masks


def _unsupervised(turn_T: np.ndarray) -> list[tuple[int, int]]:
    """(First token, token after the last) of every run of unsupervised tokens."""
    edges = np.flatnonzero(np.diff(turn_T == -1, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _shared(runs: Iterable[list[int]]) -> int:
    """How many first tokens all runs share; 0 where fewer than two of them differ."""
    different = {tuple(run) for run in runs}
    return len(os.path.commonprefix(list(different))) if len(different) > 1 else 0
