"""One pack's loss and backward in fixed shapes, captured once as a CUDA graph and replayed: no host work per operation.

A head's step launches some thousand small kernels; issued from Python one by one they cost more than they compute.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from headstart.heads.base import FeatureBatch


@dataclass(frozen=True)
class PackShape:
    """Fixed sizes every pack is padded to (FeatureBatch.padded)."""

    rows: int
    anchors: int
    documents: int
    longest: int

    @classmethod
    def covering(cls, batches: list[FeatureBatch], multiple: int = 128) -> PackShape:
        """Smallest shape (in multiples) that holds every batch, with one padding row to spare."""

        def up(value: int) -> int:
            return -(-value // multiple) * multiple

        return cls(
            rows=up(max(sum(b.doc_lengths) for b in batches) + 1),
            anchors=up(max(len(b.anchors) for b in batches)),
            documents=max(len(b.doc_lengths) for b in batches),
            longest=up(max(b.longest for b in batches)),
        )


def tensors_of(batch: FeatureBatch) -> list[Tensor]:
    """Every tensor of a batch, anchors included, in a fixed order."""
    found: list[Tensor] = []
    for owner in (batch, batch.anchors):
        for f in fields(owner):
            value = getattr(owner, f.name)
            if isinstance(value, Tensor):
                found.append(value)
    return found


def pinned_lengths(batch: FeatureBatch, shape: PackShape) -> FeatureBatch:
    """`batch` padded to `shape`, with `longest` the same for every pack (kernels bake it into the graph)."""
    padded = batch.padded(shape.rows, shape.anchors, shape.documents, shape.longest)
    padded.longest = max(shape.longest, shape.rows)
    return padded


class CapturedBackward:
    """`backward(batch, scale_K)` adds the gradient of Σ_d scale_d · S_d to `.grad` and returns the loss sums.

    Args:
        module: maps a FeatureBatch to (loss_K, count_K, correct_K, total_K, prefix_K); its parameters need gradients.
        example: any batch with features, on the GPU.
        shape: what every later batch is padded to.
    """

    def __init__(self, module: nn.Module, example: FeatureBatch, shape: PackShape, depth: int):
        self.shape = shape
        self._batch = pinned_lengths(example, shape)
        self._scale_K = torch.zeros(depth, device=example.tokens_R.device)
        parameters = [p for p in module.parameters() if p.requires_grad]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # lazy handles and Triton compilation must not fall into the capture
                self._run(module)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._sums = self._run(module)
        for parameter in parameters:
            parameter.grad.zero_()

    def _run(self, module: nn.Module) -> tuple[Tensor, ...]:
        sums = module(self._batch)
        (sums[0] * self._scale_K).sum().backward()
        return tuple(part.detach() for part in sums)

    def backward(self, batch: FeatureBatch, scale_K: Tensor) -> tuple[Tensor, ...]:
        """Replay on `batch` (padded here). The returned tensors are fresh copies."""
        for into, source in zip(tensors_of(self._batch), tensors_of(pinned_lengths(batch, self.shape)), strict=True):
            into.copy_(source, non_blocking=True)
        self._scale_K.copy_(scale_K, non_blocking=True)
        self._graph.replay()
        return tuple(part.clone() for part in self._sums)


