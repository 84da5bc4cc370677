"""Copies of training samples in which the target redraws some tokens of the answers.

The teacher of a draft head is the target's own distribution, which exists for any text. So a copy whose text differs in
some places is a further sample: its hidden states and its teacher's distributions are those of the changed text. A
token of a copy is drawn from the target's distribution (temperature 1) after the original text before it. So one
forward over the original serves all its copies.

Only plain tokens of answers change. The text of prompts is not told from that of the chat template, so it stays.

Letters: S samples of a forward, R their rows, N places of tokens that may change, C copies, B rows of a chunk of
logits, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.data.features import Progress, silent
from headstart.data.row_random import draws_at, uniforms
from headstart.data.samples import Sample, check_vocabulary
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.counting import counted
from headstart.heads.losses.fused import chunk_elements
from headstart.heads.sampling import distribution
from headstart.heads.targets.target import Target, length_groups
from headstart.heads.transfer import to_device

#: most logits of a chunk. With what is computed of them, each takes about 30 bytes while tokens are drawn
CHUNK_LOGITS = 3 << 25


@dataclass(frozen=True)
class Resampled:
    """Training samples with their copies.

    Attributes:
        samples: the originals, then the first copy of each in the same order, then the second of each …
        copies: of every sample.
        tokens: tokens of all copies that could have been redrawn.
        redrawn: tokens that were redrawn. changed: those of them that now differ from the original.
    """

    samples: list[Sample]
    copies: int
    tokens: int
    redrawn: int
    changed: int

    def line(self) -> str:
        """What was made, in words."""
        originals = len(self.samples) // (self.copies + 1)
        share = self.changed / self.tokens if self.tokens else 0.0
        return (
            f"{counted(originals * self.copies, 'resampled copies', ',')}, {self.copies} of each training sample: "
            f"{counted(self.redrawn, 'tokens', ',')} redrawn, {self.changed:,} of them differ from the original "
            f"({share:.1%} of the copies' answer tokens)"
        )


@torch.no_grad()
def resampled(
    samples: Sequence[Sample], target: Target, copies: int, share: float, seed: int,
    progress: Progress = silent, kept: Iterable[int] = (),
) -> Resampled:  # fmt: skip
    """The samples and `copies` copies of each. A copy differs from its sample in `id` and `token_ids` alone.

    Which tokens are redrawn, and the random number of each, depend on seed, sample id, number of the copy and position
    alone, not on which samples share a forward. Copies of a sample that repeats (`data.most_repeats`) count on, so that
    each repeat has other copies.

    Args:
        copies: of every sample. share: in (0, 1], the expected share of the tokens that may change to be redrawn.
        progress: counts the tokens of originals.
        kept: further token ids that never change and that no copy gets.
    Raises: DataError when a sample holds token ids that the target does not have.
    """
    size = target.dims.vocab_size
    check_vocabulary(samples, size)
    if not copies:
        return Resampled(list(samples), 0, 0, 0, 0)
    plain_V = _plain(target, kept)
    free_V = to_device(torch.from_numpy(plain_V), target.device)
    made: list[list[Sample | None]] = [[None] * len(samples) for _ in range(copies)]
    counts = torch.zeros(2, dtype=torch.int64, device=target.device)
    first_numbers = _first_numbers(samples, copies)
    done, places, whole = 0, 0, sum(map(len, samples))
    progress(0, whole, "")
    for group in length_groups(tuple(map(len, samples)), target.max_forward_tokens):
        originals, firsts = [samples[i] for i in group], [first_numbers[i] for i in group]
        token_R = np.concatenate([sample.token_ids for sample in originals])
        place_N = np.flatnonzero(_may_change(originals, token_R, plain_V))
        places += len(place_N)
        new_CN = _drawn(target, originals, place_N, _seeds(originals, firsts, copies, seed), share, free_V, counts)
        ends = np.cumsum([len(sample) for sample in originals])[:-1]
        turns = [(sample.turn_ids, sample.answer_ids) for sample in originals]  # read once, shared by the copies
        for number in range(copies):
            copy_R = token_R.copy()
            copy_R[place_N] = new_CN[number]
            texts = zip(group, originals, np.split(copy_R, ends), turns, strict=True)
            for index, sample, token_ids, (turn_ids, answer_ids) in texts:
                name = _name(sample, first_numbers[index] + number)
                made[number][index] = Sample(name, token_ids, turn_ids, sample.finish_reason, sample.meta, answer_ids)
        done += len(token_R)
        progress(done, whole, "")
    redrawn, changed = counts.tolist()
    all_copies = [sample for copy in made for sample in copy if sample is not None]
    return Resampled([*samples, *all_copies], copies, places * copies, redrawn, changed)


def _plain(target: Target, kept: Iterable[int]) -> np.ndarray:
    """Tokens of plain text: bool [V]. Special tokens, the tokenizer's added ones, with which chat templates mark turns
    and thoughts, ids that have no token, and what ends an answer are none."""
    size, tokenizer = target.dims.vocab_size, target.tokenizer
    plain_V = np.ones(size, dtype=bool)
    marks = {*target.stop_token_ids, *kept}
    if tokenizer is not None:
        known = np.fromiter(tokenizer.get_vocab().values(), dtype=np.int64)
        plain_V[:] = False
        plain_V[known[known < size]] = True
        marks.update(tokenizer.all_special_ids, getattr(tokenizer, "added_tokens_decoder", ()))
    plain_V[[token for token in marks if 0 <= token < size]] = False
    return plain_V


def _may_change(samples: Sequence[Sample], token_R: np.ndarray, plain_V: np.ndarray) -> np.ndarray:
    """Plain tokens of answers, but no sample's first token, which nothing precedes: bool [R]."""
    turns = [sample.turn_ids if sample.answer_ids is None else sample.answer_ids for sample in samples]
    may_R = (np.concatenate(turns) >= 0) & plain_V[token_R]
    first = np.cumsum([0, *(len(sample) for sample in samples[:-1])])
    may_R[first] = False
    return may_R


def _first_numbers(samples: Sequence[Sample], copies: int) -> list[int]:
    """The number of the first copy of each sample, from 1: behind the copies of earlier samples with the same id."""
    seen: Counter[str] = Counter()
    numbers = []
    for sample in samples:
        numbers.append(seen[sample.id] * copies + 1)
        seen[sample.id] += 1
    return numbers


def _name(sample: Sample, number: int) -> str:
    """The id of this copy."""
    return f"{sample.id}/resampled{number}"


def _seeds(samples: Sequence[Sample], firsts: Sequence[int], copies: int, seed: int) -> Tensor:
    """int64 [2, C, S], each 0 … 2^63 - 1: of which tokens are redrawn, and of what is drawn.

    Args: firsts: the number of each sample's first copy.
    """

    def of(sample: Sample, number: int) -> list[int]:
        digest = hashlib.blake2b(f"{seed}/{_name(sample, number)}".encode(), digest_size=16).digest()
        return [int.from_bytes(half, "little") >> 1 for half in (digest[:8], digest[8:])]

    pairs = list(zip(samples, firsts, strict=True))
    return torch.tensor([[of(sample, first + n) for sample, first in pairs] for n in range(copies)]).permute(2, 0, 1)


def _drawn(
    target: Target, samples: Sequence[Sample], place_N: np.ndarray, seed_2CS: Tensor, share: float, free_V: Tensor,
    counts: Tensor,
) -> np.ndarray:  # fmt: skip
    """The tokens of all copies at these places: int32 [C, N].

    Args:
        place_N: of tokens in the samples laid end to end. seed_2CS: of `_seeds`.
        free_V: bool [V], what may be taken. counts: int64 [2], to which redrawn and changed tokens are added.
    """
    copies = seed_2CS.shape[1]
    if not len(place_N):
        return np.zeros((copies, 0), dtype=np.int32)
    place = to_device(torch.from_numpy(place_N), target.device)
    seed_2CS = to_device(seed_2CS, target.device)
    batch = target.extract(FeatureBatch.pack([_unsupervised(sample) for sample in samples], 1), FeatureSpec())
    assert batch.hidden_RD is not None
    old_N, position_N, sample_N = batch.tokens_R[place], batch.position_R[place], batch.doc_R[place]
    asked_CN = uniforms(seed_2CS[0][:, sample_N], position_N) < share
    uniform_CN = uniforms(seed_2CS[1][:, sample_N], position_N)
    drawn_CN = old_N.repeat(copies, 1)
    rows = torch.nonzero(asked_CN.any(0)).squeeze(1)
    for part in rows.split(max(min(CHUNK_LOGITS, chunk_elements(target.device)) // len(free_V), 1)):
        p_BV = distribution(target.teacher.logits(batch.hidden_RD[place[part] - 1]), 1.0)
        drawn_CN[:, part] = draws_at(p_BV, uniform_CN[:, part].T).T
    taken_CN = torch.where(asked_CN & free_V[drawn_CN], drawn_CN, old_N)
    counts += torch.stack([asked_CN.sum(), (taken_CN != old_N).sum()])
    return taken_CN.to(torch.int32).cpu().numpy()


def _unsupervised(sample: Sample) -> tuple[Any, Any]:
    """The sample's tokens for a pack without anchors, for which no teacher's choices are computed."""
    token_T = sample.tensors()[0]
    return token_T, torch.full_like(token_T, -1)
