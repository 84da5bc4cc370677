"""How often the target chooses each token on the rows that may train: what a draft vocabulary is chosen from.

Every row of an answer that is supervised at depth 1 has one vote (the first token of an answer is not drafted, so it
has none). The vote goes to the target's greedy choice where the target was asked, and to the data's token elsewhere.

Letters: A anchors (supervised rows), V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from headstart.data.features import FeatureSource, groups_within
from headstart.data.own_choice import answer_choices
from headstart.data.ranks import ALONE, Ranks
from headstart.data.samples import Sample, check_vocabulary
from headstart.heads.batch import FeatureBatch

#: where features are made live, the target is asked about one token in PART, at least about LEAST and at most about
#: MOST tokens: that costs less than a twentieth of an epoch's passes
PART, LEAST, MOST = 20, 4096, 1 << 18
#: rows of a pack that is asked about
PACK_TOKENS = 4096


@dataclass(frozen=True)
class Votes:
    """Attributes:
        count_V: int64 [V], votes for each token.
        rows: votes in all. asked: those of them that are the target's choice.
    """

    count_V: Tensor
    rows: int
    asked: int


def count_votes(
    samples: Sequence[Sample],
    source: FeatureSource | None,
    live: bool,
    vocab_size: int,
    seed: int,
    ranks: Ranks = ALONE,
) -> Votes:
    """Count the votes of all samples.

    Args:
        ranks: processes that count together and share the work; all get the same result.
        source: of these samples' features; None where the target cannot be asked.
        live: the source runs the target, so it is asked about random samples alone, which the seed chooses.
    Raises: DataError when a token id lies outside the vocabulary.
    """
    check_vocabulary(samples, vocab_size)
    chosen = [] if source is None else _chosen([len(sample) for sample in samples], live, seed)
    count_V = torch.zeros(vocab_size, dtype=torch.int64)
    held_R = None if source is None else source.choices()
    if held_R is not None:
        starts = [0, *accumulate(map(len, samples))]
        mine = chosen[ranks.rank :: ranks.size]
        parts = [_held_choices(samples[i], held_R[starts[i] : starts[i + 1]]) for i in mine]
        count_V += torch.bincount(torch.cat([held_R[:0], *parts]), minlength=vocab_size)
        packs: list[list[int]] = []
    else:
        packs = [[chosen[i] for i in group] for group in groups_within([len(samples[i]) for i in chosen], PACK_TOKENS)]
    for first in range(0, len(packs), ranks.size):
        assert source is not None
        batch = _read(source, packs[first : first + ranks.size], ranks.rank)
        if batch is not None:
            count_V += torch.bincount(answer_choices(batch)[1].cpu(), minlength=vocab_size)
    if ranks.size > 1:
        count_V = torch.from_numpy(np.sum(ranks.gather(count_V.numpy()), axis=0))
    asked = int(count_V.sum())
    others = set(range(len(samples))).difference(chosen)
    tokens = [drafted_tokens(samples[i]) for i in sorted(others)]
    if tokens:
        joined = np.concatenate(tokens)
        count_V += torch.from_numpy(np.bincount(joined, minlength=vocab_size))
    return Votes(count_V, int(count_V.sum()), asked)


def _read(source: FeatureSource, packs: Sequence[Sequence[int]], rank: int) -> FeatureBatch | None:
    """Of one pack per rank, this rank's; None if there are fewer."""
    if source.lockstep:
        return source.get_together(packs, rank)
    return source.get(packs[rank]) if rank < len(packs) else None


def _chosen(lengths: Sequence[int], live: bool, seed: int) -> list[int]:
    """Indices of the samples that the target is asked about. Live ones stand by length: a pack is then one forward."""
    if not live:
        return list(range(len(lengths)))
    budget = min(max(sum(lengths) // PART, LEAST), MOST)
    chosen: list[int] = []
    for index in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        if budget <= 0:
            break
        chosen.append(index)
        budget -= lengths[index]
    return sorted(chosen, key=lambda index: (lengths[index], index))


def drafted_tokens(sample: Sample) -> np.ndarray:
    """The tokens of answers that can be drafts, int32: all but the first of every turn."""
    return sample.token_ids[1:][_drafted(sample)]


def _held_choices(sample: Sample, choice_T: Tensor) -> Tensor:
    """What the target chooses in place of `drafted_tokens`, int32: `answer_choices` without a pack.

    A document's second token has no row two before it that drafts it, so no choice is held for it.
    Args: choice_T: of FeatureSource.choices, the sample's rows.
    """
    found = choice_T[:-1][torch.from_numpy(_drafted(sample))]
    return found[found >= 0]


def _drafted(sample: Sample) -> np.ndarray:
    """Which tokens from the second on follow one of their own answer: bool [T - 1]."""
    turns = sample.turn_ids if sample.answer_ids is None else sample.answer_ids
    return (turns[1:] >= 0) & (turns[1:] == turns[:-1])
