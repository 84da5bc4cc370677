"""A training sample: one token sequence with its assistant turns marked; and counts over many samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.heads.counting import counted
from headstart.heads.errors import DataError

#: value of `turn_ids` for an answer that repeats held-out text, which never trains
COPIED = -2


@dataclass(frozen=True)
class Sample:
    """One document.

    Attributes:
        id: unique within a data set; the conversation's id, with `/turnN` where a conversation became several samples.
        token_ids: int32 [T].
        turn_ids: int32 [T], number of the token's assistant turn, -1 = unsupervised, COPIED = of an answer that must
            not train.
        finish_reason: "stop", or "length" when the last answer has no end (cut by its generator or by `max_length`).
        answer_ids: int32 [T], the answers' turns where turn_ids supervises more than answers; None = turn_ids.
        meta: `conversation` (id), `task` (or None), `prompt_key` (split.py).
    """

    id: str
    token_ids: np.ndarray
    turn_ids: np.ndarray
    finish_reason: str = "stop"
    meta: dict[str, Any] = field(default_factory=dict)
    answer_ids: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def supervised(self) -> int:
        """Number of supervised tokens."""
        return int((self.turn_ids >= 0).sum())

    def tensors(self) -> tuple[Tensor, Tensor]:
        """`(tokens_T, turn_T)`, int64, as FeatureBatch.pack wants them."""
        return torch.from_numpy(self.token_ids.astype(np.int64)), torch.from_numpy(self.turn_ids.astype(np.int64))

    def renamed(self, id: str) -> Sample:
        return replace(self, id=id)

    def with_turns(self, turn_ids: np.ndarray) -> Sample:
        """The sample with other turns, int32 [T], whose answers are its turns."""
        return replace(self, turn_ids=turn_ids)

    def with_all_supervised(self) -> Sample:
        """The sample with all tokens but COPIED ones supervised, as one turn (`data.supervise=all`); `answer_ids`
        remembers the answers."""
        return replace(self, turn_ids=all_as_one_turn(self.turn_ids), answer_ids=self.turn_ids)

    def digest(self) -> str:
        """Hash of tokens and turns: equal digests train equally."""
        content = self.token_ids.astype("<i4").tobytes() + b"|" + self.turn_ids.astype("<i4").tobytes()
        return hashlib.sha256(content).hexdigest()[:16]


def all_as_one_turn(turn_ids: np.ndarray) -> np.ndarray:
    return np.where(turn_ids == COPIED, turn_ids, np.zeros_like(turn_ids))


def answer_turns(samples: Sequence[Sample]) -> list[Tensor] | None:
    """`answers` for FeatureBatch.pack; None where every sample supervises its answers and nothing else."""
    if all(sample.answer_ids is None for sample in samples):
        return None
    answers = [sample.turn_ids if sample.answer_ids is None else sample.answer_ids for sample in samples]
    return [torch.from_numpy(ids.astype(np.int64)) for ids in answers]


def token_counts(samples: Sequence[Sample], vocab_size: int) -> Tensor:
    """How often each token is supervised, int64 [V]: what a draft vocabulary is chosen from (methods §4).

    Raises: DataError when a token id lies outside the vocabulary.
    """
    check_vocabulary(samples, vocab_size)
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        counts_V += np.bincount(sample.token_ids[sample.turn_ids >= 0], minlength=vocab_size)
    return torch.from_numpy(counts_V)


def used_tokens(samples: Iterable[Sample], vocab_size: int) -> Tensor:
    """Which tokens the samples hold, prompts included: bool [V]. Ids outside the vocabulary are left out."""
    used_V = np.zeros(vocab_size, dtype=bool)
    for sample in samples:
        tokens = sample.token_ids
        used_V[tokens[(tokens >= 0) & (tokens < vocab_size)]] = True
    return torch.from_numpy(used_V)


def check_vocabulary(samples: Sequence[Sample], vocab_size: int) -> None:
    """Raises: DataError naming the first sample with a token id outside 0 … V-1."""
    for sample in samples:
        tokens = sample.token_ids
        if len(tokens) and (tokens.max() >= vocab_size or tokens.min() < 0):
            worst = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise DataError(
                f"sample {sample.id}: found token id {worst}, expected 0 … {vocab_size - 1}: "
                "the data was tokenised for another target"
            )


def require_supervised(samples: Sequence[Sample]) -> None:
    """Refuse a set in which no row trains: a head needs two consecutive supervised tokens somewhere.

    Raises: DataError with what was found and the remedy.
    """
    if any(_longest_turn(sample) > 1 for sample in samples):
        return
    supervised = sum(sample.supervised for sample in samples)
    raise DataError(
        f"data: {counted(len(samples), 'samples')} with {counted(supervised, 'supervised tokens')} and no answer of 2 "
        "tokens or more, so nothing would train. Give conversations with assistant answers (data.sources), distil the "
        "prompts first (data.distill.prompts), or raise data.max_length; `headstart inspect` shows what is supervised"
    )


def _longest_turn(sample: Sample) -> int:
    turns = sample.turn_ids[sample.turn_ids >= 0]
    return int(np.unique(turns, return_counts=True)[1].max()) if len(turns) else 0
