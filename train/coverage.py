"""How many supervised rows train under a draft vocabulary.

A row carries a loss only where the vocabulary holds the target's choice. The vocabulary holds the tokens that are most
frequent in the data, and the target may choose others: the less the data looks like the target's own answers, the more
rows are lost.
"""

from __future__ import annotations

import numpy as np

from headstart.data.features import FeatureSource
from headstart.heads.base import Head
from headstart.heads.errors import TrainingError

#: tokens of the samples that are looked at before training: a second or two for a small target on two CPU cores
SAMPLE_TOKENS = 1024
#: where none of so many supervised rows carries a loss, the others are expected to carry none either
ENOUGH_ROWS = 256


def measure_coverage(head: Head, source: FeatureSource, seed: int) -> tuple[int, int]:
    """(rows that carry the first term's loss, rows supervised at depth 1) of a few training samples, drawn at random.

    Args: source: the target runs where its features are live.
    Raises: TrainingError where none of ENOUGH_ROWS rows, or of all there are, carries a loss.
    """
    order = np.random.default_rng(seed).permutation(len(source.lengths)).tolist()
    tokens = inside = rows = 0
    while order and tokens < SAMPLE_TOKENS:
        batch = source.get([order.pop()])
        tokens += sum(batch.doc_lengths)
        rows += batch.anchors.count_K[0]
        inside += int(head.loss_counts(batch)[0])
    if rows and not inside and (rows >= ENOUGH_ROWS or not order):
        raise untrained(head, rows)
    return inside, rows


def untrained(head: Head, rows: int) -> TrainingError:
    """The error where none of `rows` supervised rows carries a loss."""
    return TrainingError(
        f"none of {rows} supervised rows trains: what the target would say there is not in the draft vocabulary, which "
        "holds the tokens that the data says most. Raise head.draft_vocab_size "
        f"(found {head.draft_vocab_size}; 0 = all of the target's tokens), or let the target answer the prompts itself "
        "(data.distill.prompts)"
    )
