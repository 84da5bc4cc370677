"""Hidden states of the target for training and validation: what every source of them answers, and the live one.

All sources answer `get(pack)` with the same FeatureBatch: live (here), from memory (memory.py), from disk (store.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from headstart.data.samples import Sample, answer_turns, check_vocabulary
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.targets.locate import text_decoder
from headstart.heads.targets.sharded import ShardedTarget
from headstart.heads.targets.sizes import active_parameters, experts_per_token
from headstart.heads.targets.target import Target

#: progress(done, total, message): what is done (rows, answers, measurements), in all, and a line to show or ""
Progress = Callable[[int, int, str], None]


def silent(done: int, total: int, message: str) -> None:
    """The Progress of a caller who wants none."""


class FeatureSource(ABC):
    """What training and validation read: live from the target, from memory, or from a store.

    Attributes:
        lengths, sample_ids: of the samples.
    """

    lengths: Sequence[int] = ()
    sample_ids: Sequence[str] = ()

    @abstractmethod
    def get(self, pack: Sequence[int]) -> FeatureBatch:
        """The documents of `pack` with hidden_RD, streams_RkD and teacher_argmax_A, on the source's device."""

    def choices(self) -> Tensor | None:
        """int32 [rows of all samples, in order], on the host: the target's greedy next token at every row that a
        teacher needs, -1 elsewhere. None where `get` alone tells."""
        return None

    @property
    def target_parameters(self) -> int:
        """Parameters of the target that every row passes through when it is read; 0 where features are kept."""
        return 0

    @property
    def lockstep(self) -> bool:
        """Whether all ranks must read together, by `get_together`: the target is sharded over them."""
        return False

    def get_together(self, packs: Sequence[Sequence[int]], rank: int) -> FeatureBatch | None:
        """Of `packs`, one per rank, this rank's; None if there are fewer. All ranks call it together."""
        return self.get(packs[rank]) if rank < len(packs) else None


class OnlineFeatures(FeatureSource):
    """Runs the target on every pack when it is asked for.

    Args:
        target: the frozen model.
        samples: documents; a pack lists indices into them.
        spec: which layers to read.
        max_depth: the head's K, for the anchors.
    Raises: DataError when a sample holds token ids that the target does not have.
    """

    def __init__(self, target: Target, samples: Sequence[Sample], spec: FeatureSpec, max_depth: int):
        check_vocabulary(samples, target.dims.vocab_size)
        self.target, self.samples, self.spec, self.max_depth = target, samples, spec, max_depth
        self.lengths = [len(sample) for sample in samples]
        self.sample_ids = [sample.id for sample in samples]

    @property
    def target_parameters(self) -> int:
        return 0 if self.spec.tokens_alone else parameters_per_row(self.target)

    @property
    def lockstep(self) -> bool:
        return self.target.lockstep

    def get_together(self, packs: Sequence[Sequence[int]], rank: int) -> FeatureBatch | None:
        target = self.target
        assert isinstance(target, ShardedTarget)
        passes = max(target.passes(tuple(self.lengths[i] for i in pack)) for pack in packs)
        if rank >= len(packs):
            target.idle(passes)
            return None
        with target.in_step(passes):
            return self.get(packs[rank])

    def get(self, pack: Sequence[int]) -> FeatureBatch:
        return extract(self.target, [self.samples[i] for i in pack], self.spec, self.max_depth)


def extract(target: Target, samples: Sequence[Sample], spec: FeatureSpec, max_depth: int = 1) -> FeatureBatch:
    """Run the target over one pack of samples, unless the head will do it itself.

    The anchors of depth 1 already hold the teacher's rows of any depth.
    """
    ids, documents = tuple(s.id for s in samples), [s.tensors() for s in samples]
    batch = FeatureBatch.pack(documents, max_depth, sample_ids=ids, answers=answer_turns(samples))
    if spec.tokens_alone:
        return batch
    return target.extract(batch, spec)


def groups_within(lengths: Sequence[int], budget: int) -> Iterator[range]:
    """Consecutive documents in groups of at most `budget` tokens; a longer document is a group of its own."""
    first = tokens = 0
    for index, length in enumerate(lengths):
        if index > first and tokens + length > budget:
            yield range(first, index)
            first, tokens = index, 0
        tokens += length
    if first < len(lengths):
        yield range(first, len(lengths))


def parameters_per_row(target: Target) -> int:
    """Parameters of the target that every row passes through: those of its text decoder without the embeddings, and of
    a mixture's experts those that compute a token."""
    return active_parameters(text_decoder(target.model), experts_per_token(target.model))


def store_bytes(rows: int, hidden_size: int, layers: int, dtype: torch.dtype) -> int:
    """Size of the features of so many rows: (1 + k) · D numbers and three int32 per row."""
    return rows * ((1 + layers) * hidden_size * dtype.itemsize + 3 * 4)


def argmax_rows(batch: FeatureBatch) -> Tensor:
    """int64 [R]: the target's greedy next token at the rows that any teacher needs, -1 elsewhere."""
    argmax_R = torch.full_like(batch.tokens_R, -1)
    if batch.teacher_argmax_A is not None:
        argmax_R[batch.anchors.row_A + 1] = batch.teacher_argmax_A
    return argmax_R
