"""How many supervised rows carry a loss under a draft vocabulary.

A row carries a loss only if the right token is in the vocabulary: the target's choice, or the data's token for a head
that learns that. The vocabulary holds what the target chooses most often, so rows of rare choices are lost; of a head
that learns the data's tokens, the more the less the data looks like the target's own answers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headstart.data.features import FeatureSource
from headstart.data.own_choice import OwnChoice, own_choice
from headstart.heads.base import Head
from headstart.heads.ends import Teacher
from headstart.heads.errors import TrainingError

#: tokens of the samples that are checked before training: it takes a second or two with a small target on two CPU cores
SAMPLE_TOKENS = 1024
#: rows whose logits are made at once
MASS_ROWS = 256
#: if none of so many supervised rows carries a loss, the others are expected to carry none either
ENOUGH_ROWS = 256


class Coverage(NamedTuple):
    """What a look at a few training samples shows.

    Attributes:
        inside: rows that carry a loss. rows: rows supervised at depth 1.
        own: whose text the answers are.
        mass: probability that the target gives to the draft vocabulary, summed over these rows; 0 where it was not
            measured.
    """

    inside: int
    rows: int
    own: OwnChoice
    mass: float = 0.0


def measure_coverage(
    head: Head, source: FeatureSource, seed: int, teacher: Teacher | None = None, first: int | None = None
) -> Coverage:
    """Look at a few random training samples.

    Args:
        source: of features. If it makes them live, the target runs.
        teacher: measures `mass` of a head with a draft vocabulary; None leaves it out.
        first: number of samples to choose from, the first ones: originals without resampled copies. None = all samples.
    Raises: TrainingError if none of ENOUGH_ROWS rows, or none at all, carries a loss.
    """
    order = np.random.default_rng(seed).permutation(len(source.lengths) if first is None else first).tolist()
    tokens = inside = rows = 0
    own, mass = OwnChoice(), 0.0
    while order and tokens < SAMPLE_TOKENS:
        batch = source.get([order.pop()])
        tokens += sum(batch.doc_lengths)
        rows += batch.anchors.count_K[0]
        inside += int(head.covered_rows(batch))
        own += own_choice(batch)
        if teacher is not None and head.draft_ids_U is not None and batch.hidden_RD is not None:
            mass += kept_mass(batch.teacher_hidden(), teacher, head.draft_ids_U)
    if rows and not inside and (rows >= ENOUGH_ROWS or not order):
        raise untrained(head, rows)
    return Coverage(inside, rows, own, mass)


@torch.no_grad()
def kept_mass(hidden_AD: Tensor, teacher: Teacher, draft_ids_U: Tensor) -> float:
    """Sum over A rows of the probability that the target gives to the draft vocabulary's tokens.

    Args: hidden_AD: post-norm hidden states.
    """
    total = 0.0
    for part_AD in hidden_AD.split(MASS_ROWS):
        logits_AV = teacher.logits(part_AD, dtype=torch.float32)
        total += float((logits_AV[:, draft_ids_U].logsumexp(-1) - logits_AV.logsumexp(-1)).exp().sum())
    return total


def untrained(head: Head, rows: int) -> TrainingError:
    """The error for `rows` supervised rows none of which carries a loss."""
    return TrainingError(
        f"none of {rows} supervised rows trains: the right tokens there are not in the draft vocabulary. Raise "
        "head.draft_vocab_size "
        f"(found {head.draft_vocab_size}; 0 = all of the target's tokens), or let the target answer the prompts itself "
        "(data.distill.prompts)"
    )
