"""What drafters with a KV cache of their head's layers share: buffers that fit a batch, passes over its context.

Shape legend: B batch.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from typing import Protocol, Self

import torch
from torch import Tensor

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.cache import Buffers
from headstart.eval.decoding.drafter import Drafter
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters.layer import LayerPass, all_start_widths, start_widths
from headstart.eval.drafters.sized import Sized
from headstart.eval.kernels.launch import compile_ahead, synchronize
from headstart.heads.base import Head
from headstart.heads.batch import FeatureSpec


class Step(Protocol):
    """A copy of a head's weights. Attributes: tables: rotary tables, as long as its longest context."""

    dtype: torch.dtype
    tables: tuple[Tensor, Tensor]
    layers: list[LayerPass]


class CachedDrafter(Sized, ABC):
    """A drafter whose head has layers with a KV cache. The first `start` copies the head's weights.

    A subclass declares the types of `head` and `step`.

    Attributes:
        kv: keys and values of the committed rows, and scratch behind them.
        length_B: int64, rows that the cache holds.
    """

    captures = True
    kv: Buffers
    length_B: Tensor

    def __init__(self, head: Head, tree: TreeConfig, sampling: Sampling):
        self.head, self.tree, self.sampling = head, tree, sampling
        self.name = head.family
        self.spec: FeatureSpec | None = head.spec
        self.says_confidence = False
        self.prepare_s = 0.0
        self.step: Step
        self._made = False
        self._aside: Self | None = None

    @property
    def _sampled(self) -> bool:
        """Whether drafts are drawn from the head's distribution."""
        return self.tree.sample and not self.sampling.greedy

    def aside(self) -> Self:
        if self._aside is None or self._aside.step is not self.step:
            self._aside = copy.copy(self)
            self._aside._aside = None
        return self._aside

    @torch.inference_mode()
    def take_row(self, row: int, aside: Drafter, slots: int) -> None:
        assert isinstance(aside, CachedDrafter)
        self.kv.take_row(row, aside.kv, slots)

    @abstractmethod
    def _make_step(self, slots: int) -> Step:
        """Copy the head's weights. Args: slots: of the buffers."""

    @abstractmethod
    def _place(self, batch: int, device: torch.device) -> None:
        """Make what captured cycles read besides buffers, which must stay where it is."""

    @abstractmethod
    def _append(self, rows: Rows, columns: slice, count_B: Tensor) -> None:
        """Append the first `count_B` of these columns of each sequence to the cache."""

    def _read_context(self, rows: Rows, count_B: Tensor) -> None:
        """Append the first `count_B` rows of each sequence, in passes of few different widths."""
        widths = start_widths(rows.tokens_BJ.shape[1])
        rows, begin = rows.padded(sum(widths)), 0
        for width in widths:
            self._append(rows, slice(begin, begin + width), (count_B - begin).clamp(0, width))
            begin += width

    def _compile_start(self, like: Rows) -> None:
        """Run a pass of every width that `start` may need, to compile its kernels."""
        for columns in all_start_widths():
            self._read_context(like.zeros(columns), torch.zeros_like(like.count_B))

    def _prepare(self, context: Rows, slots: int) -> None:
        """Make weights and buffers, unless those of an earlier batch fit."""
        batch, device = context.tokens_BJ.shape[0], context.tokens_BJ.device
        ready = self._made and self.step.tables[0].shape[0] >= slots
        placed = self._made and self.kv.keys[0].shape[0] == batch and self.kv.capacity == slots
        if ready and placed:
            return
        synchronize(device)  # do not count the target's prefill, which may still run
        began = time.perf_counter()
        if not ready:
            self.step = self._make_step(slots)
        if not placed:
            dims = self.head.dims
            shapes = [(dims.num_kv_heads, dims.head_dim)] * len(self.step.layers)
            self.kv = Buffers(shapes, batch, slots, self.step.dtype, device)
            self._place(batch, device)
            self.length_B = torch.zeros_like(context.count_B)
            compile_ahead(lambda: self._compile_start(context))
        self._made = True
        self.prepare_s += time.perf_counter() - began
