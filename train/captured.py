"""One pack's loss and backward in fixed shapes, captured once as CUDA graphs and replayed.

A step launches some thousand small kernels: to launch them from Python one by one takes longer than they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from headstart.heads.batch import FeatureBatch
from headstart.heads.gradients import adding_gradients
from headstart.heads.kernels.attention import same_length


@dataclass(frozen=True)
class PackShape:
    """The sizes that packs are padded to (FeatureBatch.padded)."""

    rows: int
    anchors: int
    documents: int

    @classmethod
    def covering(cls, batch: FeatureBatch) -> PackShape:
        """Smallest shape that holds the batch: rows and anchors are multiples of 128, documents a power of two."""
        rows, anchors = (-(-size // 128) * 128 for size in (sum(batch.doc_lengths), len(batch.anchors)))
        return cls(rows, anchors, 1 << (len(batch.doc_lengths) - 1).bit_length())

    def pad(self, batch: FeatureBatch) -> FeatureBatch:
        return batch.padded(self.rows, self.anchors, self.documents)

    def holds(self, other: PackShape) -> bool:
        """Whether rows and documents of the other shape fit. CapturedPacks chooses the anchors itself."""
        return self.rows >= other.rows and self.documents >= other.documents

    def union(self, other: PackShape) -> PackShape:
        return PackShape(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


def tensors_of(batch: FeatureBatch) -> list[Tensor]:
    """Every tensor of a batch, anchors included, in a fixed order."""
    values = [getattr(owner, f.name) for owner in (batch, batch.anchors) for f in fields(owner)]
    return [value for value in values if isinstance(value, Tensor)]


class CapturedBackward:
    """`backward(batch, scale_T)` adds the gradient of Σ_t scale_t · S_t to `.grad` and returns the sums of LossModule.

    Args:
        module: maps (FeatureBatch, scale_T) to LossModule's (sum_T, sums_S); its parameters need gradients. Heads may
            add some of them to `.grad` in the forward pass already (heads/gradients.py).
        example: any batch with features, on the GPU, that fits `shape`.
        shape: what every later batch is padded to.
        terms: T, of the loss.
        pool: memory pool of another capture, to share: the two never run at the same time.
    """

    def __init__(
        self,
        module: nn.Module,
        example: FeatureBatch,
        shape: PackShape,
        terms: int,
        pool: tuple[int, int] | None = None,
    ):
        self.shape = shape
        self._batch = shape.pad(example).map(torch.clone)
        self._scale_T = torch.zeros(terms, device=example.tokens_R.device)
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # lazy handles and Triton's compilation must not fall into the capture; with scale 0 the gradient is 0
            for _ in range(2):
                self._backward(self._forward(module))
        torch.cuda.current_stream().wait_stream(stream)
        self._forward_graph, self._backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog and threads that prefetch or save may call the GPU meanwhile
        with torch.cuda.graph(self._forward_graph, pool=pool, capture_error_mode="thread_local"):
            sums = self._forward(module)
        pool = self._forward_graph.pool()
        with torch.cuda.graph(self._backward_graph, pool=pool, capture_error_mode="thread_local"):
            self._backward(sums)
        self._sums = (sums[0].detach(), sums[1])

    @property
    def pool(self) -> tuple[int, int]:
        return self._forward_graph.pool()

    def _forward(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        with adding_gradients(module):  # each forward pass is followed by `_backward`
            sums: tuple[Tensor, Tensor] = module(self._batch, self._scale_T)
        return sums

    def _backward(self, sums: tuple[Tensor, Tensor]) -> None:
        (sums[0] * self._scale_T).sum().backward()

    def backward(
        self, batch: FeatureBatch, scale_T: Tensor, between: Callable[[], None] = lambda: None
    ) -> tuple[Tensor, Tensor]:
        """Pad `batch` and replay. `between` is called after the forward. Returns: copies of LossModule's sums."""
        for into, source in zip(tensors_of(self._batch), tensors_of(self.shape.pad(batch)), strict=True):
            into.copy_(source, non_blocking=True)
        self._scale_T.copy_(scale_T, non_blocking=True)
        self._forward_graph.replay()
        between()
        self._backward_graph.replay()
        return self._sums[0].clone(), self._sums[1].clone()


class CapturedPacks:
    """Graphs for packs of varying size.

    All graphs have the rows and documents of the largest pack so far. They differ in their anchors, which are rounded
    up to a multiple of a sixteenth of the rows. When a larger pack comes, all graphs are captured anew. That is rare,
    and a capture takes a fraction of a second.

    Attributes:
        captures: graphs captured so far, replaced ones included.
        seconds: host time spent on capturing, with the compilation of kernels.
        during: what a capture is done inside.
    """

    def __init__(self, module: nn.Module, terms: int):
        self._module, self._terms = module, terms
        self._graphs: dict[tuple[int, int, int | None], CapturedBackward] = {}
        self._shape = PackShape(0, 0, 0)
        self.captures, self.seconds = 0, 0.0
        self.during: Callable[[], AbstractContextManager[object]] = nullcontext

    def drop(self) -> None:
        """Forget all graphs: the module computes something else from now on."""
        self._graphs.clear()

    def backward(self, batch: FeatureBatch, scale_T: Tensor) -> tuple[Tensor, Tensor]:
        """As CapturedBackward.backward."""
        needed = PackShape.covering(batch)
        if not self._shape.holds(needed):
            self._graphs.clear()
            self._shape = self._shape.union(needed)
        step = max(128, -(-self._shape.rows // 16 // 128) * 128)
        anchors = max(step, -(-needed.anchors // step) * step)
        # documents of equal length run another attention kernel (heads/kernels/attention.py)
        length = same_length(batch)
        key = (anchors, 0 if length is None else len(batch.doc_lengths), length)
        if key not in self._graphs:
            started = time.perf_counter()
            shape = replace(self._shape, anchors=anchors)
            pool = next(iter(self._graphs.values())).pool if self._graphs else None
            drawn = torch.cuda.get_rng_state()  # capturing draws numbers; what this pack draws must not depend on it
            with self.during():
                self._graphs[key] = CapturedBackward(self._module, batch, shape, self._terms, pool)
            torch.cuda.set_rng_state(drawn)
            self.captures += 1
            self.seconds += time.perf_counter() - started
        return self._graphs[key].backward(batch, scale_T)
