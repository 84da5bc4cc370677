"""Hidden states of the whole training set: computed once, held on the device, used in every epoch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from headstart.data.features import FeatureSource, Progress, argmax_rows, extract, silent, store_bytes
from headstart.data.samples import Sample, answer_turns
from headstart.data.store import index_of
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.errors import StorageError
from headstart.heads.host_memory import free_bytes
from headstart.heads.targets.target import Target, length_groups
from headstart.heads.transfer import to_device

#: part of the free device memory that features may take; head, optimiser and activations need the rest
MEMORY_SHARE = 0.8


class MemoryFeatures(FeatureSource):
    """Runs the target once over all samples; `get` gathers rows of what it computed.

    Args:
        target, samples, spec, max_depth: as OnlineFeatures.
    Raises: StorageError before any work when the features cannot fit, with the size they need.
    """

    def __init__(
        self,
        target: Target,
        samples: Sequence[Sample],
        spec: FeatureSpec,
        max_depth: int,
        progress: Progress = silent,
    ):
        self.spec, self.max_depth, self.device = spec, max_depth, target.device
        self.lengths = [len(sample) for sample in samples]
        self.sample_ids = [sample.id for sample in samples]
        self._starts = [0, *accumulate(self.lengths)]
        rows, width = self._starts[-1], target.dims.hidden_size
        require_memory(store_bytes(rows, width, len(spec.layer_ids), target.dtype), target.device)
        self._hidden_RD = torch.empty(rows, width, dtype=target.dtype, device=self.device)
        self._streams_RkD: Tensor | None = None
        if spec.layer_ids:
            self._streams_RkD = self._hidden_RD.new_empty(rows, len(spec.layer_ids), width)
        self._samples = samples
        self._documents = [sample.tensors() for sample in samples]
        self._argmax_R = torch.empty(rows, dtype=torch.int32, device=self.device)
        done = 0
        progress(done, rows, "")
        # documents of similar length from the whole set: one pass of the target a group, with little padding
        for group in length_groups(tuple(self.lengths), target.max_forward_tokens):
            batch = extract(target, [samples[i] for i in group], spec)
            row_R = torch.cat([torch.arange(self._starts[i], self._starts[i + 1]) for i in group])
            row_R = to_device(row_R, self.device, non_blocking=True)
            self._hidden_RD[row_R] = batch.hidden_RD
            if self._streams_RkD is not None:
                self._streams_RkD[row_R] = batch.streams_RkD
            self._argmax_R[row_R] = argmax_rows(batch).to(torch.int32)
            done += len(row_R)
            progress(done, rows, "")

    def again(self, samples: Sequence[Sample], max_depth: int) -> MemoryFeatures:
        """The same hidden states for another head. Args: samples: of the same tokens and turns."""
        other = copy.copy(self)
        other._samples, other.max_depth = samples, max_depth
        return other

    def choices(self) -> Tensor:
        return self._argmax_R.cpu()

    def get(self, pack: Sequence[int]) -> FeatureBatch:
        ids = tuple(self.sample_ids[i] for i in pack)
        answers = answer_turns([self._samples[i] for i in pack])
        batch = FeatureBatch.pack([self._documents[i] for i in pack], self.max_depth, sample_ids=ids, answers=answers)
        first_R = torch.tensor([self._starts[i] for i in pack])[batch.doc_R]
        row_R = first_R + batch.position_R
        batch, row_R = batch.to(self.device, non_blocking=True), to_device(row_R, self.device, non_blocking=True)
        return replace(
            batch,
            hidden_RD=self._hidden_RD[row_R],
            streams_RkD=None if self._streams_RkD is None else self._streams_RkD[row_R],
            teacher_argmax_A=self._argmax_R[row_R[batch.anchors.row_A + 1]].long(),
        )


class SharedFeatures:
    """Features for several runs of one process: runs that read the same layers over the same samples get the same ones.

    Those of the last training set are held, and those of the last held-out set.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[object, MemoryFeatures]] = {}

    def give(
        self,
        name: str,
        target: Target,
        samples: Sequence[Sample],
        spec: FeatureSpec,
        max_depth: int,
        progress: Progress = silent,
    ) -> MemoryFeatures:
        """Args: name: of the set; a set replaces an earlier one of its name. The others: as MemoryFeatures."""
        made_of = target.fingerprint(), spec, index_of(samples)
        if name in self._held and self._held[name][0] == made_of:
            return self._held[name][1].again(samples, max_depth)
        self._held.pop(name, None)  # its memory is free before the new ones take theirs
        made = MemoryFeatures(target, samples, spec, max_depth, progress=progress)
        self._held[name] = made_of, made
        return made

    def clear(self) -> None:
        self._held.clear()


def require_memory(needed_bytes: int, device: torch.device) -> None:
    """Raise StorageError when `needed_bytes` of features would not leave room on the device."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = free_bytes()
    if needed_bytes > MEMORY_SHARE * free:
        raise StorageError(
            f"data.features=memory: the hidden states need {needed_bytes / 2**30:.1f} GiB, expected at most "
            f"{MEMORY_SHARE:.0%} of the {free / 2**30:.1f} GiB free on {device}; set data.features=stored or online"
        )
