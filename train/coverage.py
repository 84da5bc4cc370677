"""How many supervised rows carry a loss under a draft vocabulary.

A row carries a loss only if the right token is in the vocabulary: the target's choice, or the data's token for a head
that learns that. The vocabulary holds the most frequent tokens of the data, and the target may choose others: the less
the data looks like the target's own answers, the more rows are lost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headstart.data.features import FeatureSource
from headstart.data.own_choice import OwnChoice, own_choice
from headstart.heads.base import Head
from headstart.heads.errors import TrainingError

#: tokens of the samples that are checked before training: it takes a second or two with a small target on two CPU cores
SAMPLE_TOKENS = 1024
#: if none of so many supervised rows carries a loss, the others are expected to carry none either
ENOUGH_ROWS = 256


class Coverage(NamedTuple):
    """What a look at a few training samples shows.

    Attributes:
        inside: rows that carry a loss. rows: rows supervised at depth 1.
        own: whose text the answers are.
    """

    inside: int
    rows: int
    own: OwnChoice


def measure_coverage(head: Head, source: FeatureSource, seed: int) -> Coverage:
    """Look at a few random training samples.

    Args: source: of features. If it makes them live, the target runs.
    Raises: TrainingError if none of ENOUGH_ROWS rows, or none at all, carries a loss.
    """
    order = np.random.default_rng(seed).permutation(len(source.lengths)).tolist()
    tokens = inside = rows = 0
    own = OwnChoice()
    while order and tokens < SAMPLE_TOKENS:
        batch = source.get([order.pop()])
        tokens += sum(batch.doc_lengths)
        rows += batch.anchors.count_K[0]
        inside += int(head.covered_rows(batch))
        own += own_choice(batch)
    if rows and not inside and (rows >= ENOUGH_ROWS or not order):
        raise untrained(head, rows)
    return Coverage(inside, rows, own)


def untrained(head: Head, rows: int) -> TrainingError:
    """The error for `rows` supervised rows none of which carries a loss."""
    return TrainingError(
        f"none of {rows} supervised rows trains: the right tokens there are not in the draft vocabulary, which "
        "holds the most frequent tokens of the data. Raise head.draft_vocab_size "
        f"(found {head.draft_vocab_size}; 0 = all of the target's tokens), or let the target answer the prompts itself "
        "(data.distill.prompts)"
    )
