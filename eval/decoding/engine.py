"""The target as a decode engine: static KV, tree attention, features. It knows nothing about drafters.

`Engine.forward` alone calls the model. Any transformers causal LM runs unchanged (generic/). A FusedModel runs on
explicit buffers and needs nothing from the host, so that whole cycles can be captured as CUDA graphs.
Shape legend: B batch, M tokens of a forward (root + N nodes), S slots read, J tokens committed, K levels, V vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headstart.eval.decoding.cache import Buffers, StaticKV
from headstart.eval.decoding.fused.errors import Unfusable
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.generic.model import GenericModel
from headstart.eval.decoding.memory import TREES_REFUSED, layer_kinds, memory_of
from headstart.eval.decoding.prefill import Prefill
from headstart.eval.decoding.rows import Rows, Step
from headstart.eval.kernels.attention import Visibility
from headstart.eval.kernels.bookkeeping import Taken, lay_out, take_path
from headstart.eval.kernels.choices import Choices
from headstart.eval.kernels.flat import FlatRows
from headstart.eval.tree import Tree
from headstart.heads.batch import FeatureSpec
from headstart.heads.errors import TargetError


def attention_windows(config: Any) -> dict[str, int | None]:
    """Attention kinds of a config → window (None = full), as fused layers take them.

    Raises: Unfusable for a target with layers that are neither full nor sliding attention.
    """
    config = config.get_text_config()
    unknown = sorted({kind for kind in layer_kinds(config)} - {"full_attention", "sliding_attention"})
    if unknown:
        raise Unfusable(f"its layers of kind {unknown} have no fused form")
    return {kind: span.window for kind, span in memory_of(config).spans.items()}


class Engine:
    """KV state of a batch of contexts under one target.

    Args:
        model: a transformers causal LM in eval mode.
        batch: rows decoded together.
        capacity: slots per row: longest context + new tokens + tree nodes + 1.
        bucket: without `fused`, attention reads a multiple of this many slots.
        prefill_chunk: most prompt tokens per row of one forward.
        fused: the fused form of the model, which runs instead of it; None = the model itself runs.
    Attributes:
        capturable: without `fused`, whether cycles may be captured: the model must lie on one GPU as a whole.
        uncaptured: why such a cycle could not be captured; None while all could.
    Raises: TargetError for a model that takes no tree mask.
    """

    capturable = False
    uncaptured: str | None = None

    def __init__(
        self,
        model: Any,
        batch: int,
        capacity: int,
        bucket: int = 128,
        prefill_chunk: int = 512,
        fused: FusedModel | None = None,
    ):
        self.model, self.batch, self.capacity = model, batch, capacity
        self.bucket, self.prefill_chunk, self.fused = bucket, prefill_chunk, fused
        self._asides: dict[int, Engine] = {}
        self.device, self.dtype = model.device, model.dtype
        self.kv: StaticKV | Buffers
        self.generic: GenericModel | None = None
        if fused is not None:
            self.kv = fused.buffers(batch, capacity)
        else:
            self.generic = GenericModel(model, batch, capacity)
            self.kv = self.generic.kv
            prefill_chunk = prefill_chunk if self.generic.chunks else capacity
        self.length_B = torch.zeros(batch, dtype=torch.int64, device=self.device)
        # a captured chunk of transformers' own forward would read as many slots for ever as at its capture
        captures = fused is not None and self.captures
        self.prompts = Prefill(batch, prefill_chunk, self.kv.bin, self.device, captures)

    @property
    def captures(self) -> bool:
        """Whether cycles may be captured as CUDA graphs: nothing in them waits for the host."""
        if self.device.type != "cuda":
            return False
        if self.fused is not None:
            return self.fused.uncaptured is None
        # recurrent states reach their modules as Python objects, which change from cycle to cycle
        return self.capturable and self.uncaptured is None and not self.chains_only

    def give_up_captures(self, reason: str) -> None:
        """From now on forwards run operation by operation: one could not be captured."""
        if self.fused is not None:
            self.fused.uncaptured = reason
        else:
            self.uncaptured = reason
        self.prompts.captures = False
        for aside in self._asides.values():
            aside.prompts.captures = False

    @property
    def choices(self) -> Choices | None:
        """The fastest kernels of matrix products on this card; None without a fused model, or where none are kept."""
        return None if self.fused is None else self.fused.choices

    @property
    def state(self) -> list[tuple[object, str]]:
        """(object, attribute) of every tensor that a cycle replaces, KV apart."""
        return [(self, "length_B")]

    @property
    def chains_only(self) -> bool:
        """Whether the target has recurrent states, so that it verifies chains and no trees."""
        return self.generic is not None and self.generic.memory.chains_only

    @torch.inference_mode()
    def forward(
        self,
        tokens_BM: Tensor,
        visibility: Visibility,
        reach: int,
        spec: FeatureSpec | None = None,
        last_only: bool = False,
        flat: FlatRows | None = None,
    ) -> Step:
        """One pass over M tokens: writes their KV and attends as `visibility` says.

        Args:
            reach: host int, upper bound of the slots that any token sees.
            spec: features to return; None = none.
            last_only: make logits of the last column only.
            flat: places that have a row, where the others need no results. Without a fused model all are computed.
        """
        layer_ids = None if spec is None else spec.layer_ids
        if self.generic is None:
            assert self.fused is not None and isinstance(self.kv, Buffers)
            if flat is not None:
                # a cut place is padding
                position_BM = torch.where(flat.kept_BM, visibility.position_BM, -1)
                visibility = replace(visibility, position_BM=position_BM)
            given = tokens_BM, visibility, self.kv, layer_ids or (), last_only, flat
            logits, hidden, streams = self.fused.forward(*given)
            return Step(logits, hidden, streams, flat)
        extent = min(-(-reach // self.bucket) * self.bucket, self.capacity)
        return self.generic.forward(tokens_BM, visibility, extent, layer_ids, last_only)

    @torch.inference_mode()
    def prefill(self, contexts: list[list[int]], spec: FeatureSpec | None = None) -> tuple[Tensor, Rows]:
        """Fill the KV with whole contexts, one per row of the batch.

        Args:
            spec: features of the contexts' tokens; None = none (plain decoding).
        Returns: logits_BV after each context, and the contexts with their features.
        """
        lengths = [len(context) for context in contexts]
        if len(contexts) != self.batch or min(lengths) < 1:
            raise ValueError(f"prefill: found contexts of lengths {lengths}, expected {self.batch} non-empty ones")
        if max(lengths) >= self.capacity:
            raise ValueError(f"prefill: context of {max(lengths)} tokens, the KV buffers hold {self.capacity}")
        forward = partial(self.forward, spec=spec, last_only=True)
        with nullcontext() if self.generic is None else self.generic.prefilling(lengths):
            logits_BV, rows = self.prompts.run(forward, contexts, spec)
        self.length_B = rows.count_B.clone()
        return logits_BV, rows

    def aside(self, rows: int = 1) -> Engine:
        """An engine of a few rows, as long as this one's. It reads contexts that `take_rows` then moves here."""
        if rows not in self._asides:
            given = self.capacity, self.bucket, self.prefill_chunk, self.fused
            self._asides[rows] = Engine(self.model, rows, *given)
        return self._asides[rows]

    @torch.inference_mode()
    def take_rows(self, rows: list[int], aside: Engine, slots: int) -> None:
        """Copy the contexts of `aside`'s first rows into these rows, all but their lengths (`state`).

        Args: slots: tokens of the longest one.
        """
        if self.generic is None:
            assert isinstance(self.kv, Buffers) and isinstance(aside.kv, Buffers)
            if len(rows) == 1:
                Buffers.take_row(self.kv, rows[0], aside.kv, slots)
            else:
                Buffers.take_rows(self.kv, torch.tensor(rows, device=self.device), aside.kv, slots)
        else:
            assert aside.generic is not None
            for source, row in enumerate(rows):
                self.generic.take_row(row, aside.generic, slots, source)
        self.prompts.uncaptured = self.prompts.uncaptured or aside.prompts.uncaptured

    @torch.inference_mode()
    def verify(
        self,
        roots_B: Tensor,
        tree: Tree,
        spec: FeatureSpec | None = None,
        longest: int | None = None,
        flat: FlatRows | None = None,
    ) -> Step:
        """One forward over root and nodes: the root at slot (and position) `length`, node n at slot length + 1 + n.

        Args:
            spec: features to return; None = none.
            longest: host int, upper bound of the contexts' lengths; None = unknown: all KV slots are read.
            flat: the tree's valid nodes as flat rows (`flatten`), which alone are computed then; None = all nodes are.
        Raises: TargetError for a tree that is no chain, where the target has recurrent states.
        """
        if self.chains_only and not tree.linear:
            raise TargetError(TREES_REFUSED)
        # a captured cycle serves contexts of any length
        reach = self.capacity if longest is None or self.captures else longest + tree.nodes + 1
        layout = lay_out(tree, roots_B, self.length_B)
        visibility = Visibility(layout.position_BM, layout.write_BM, self.length_B, layout.mask_BMM)
        return self.forward(layout.tokens_BM, visibility, reach, spec, flat=flat)

    @torch.inference_mode()
    def commit(self, roots_B: Tensor, tree: Tree, step: Step, path_BK: Tensor, active_B: Tensor) -> Rows:
        """Append the root and the accepted path to the contexts: move their KV to its place and advance `length_B`.

        Returns: the committed tokens (root, then accepted drafts) with their features; idle rows have count 0.
        """
        taken = take_path(tree, roots_B, path_BK, active_B, self.length_B, self.kv.bin)
        return self.take(tree, step, taken)

    @torch.inference_mode()
    def take(self, tree: Tree, step: Step, taken: Taken) -> Rows:
        """As `commit`, for a path that take_path has laid out."""
        if taken.source_BK.shape[1] and not tree.linear:
            self.kv.move(taken.source_BK, taken.target_BK)
        if self.generic is not None:
            self.generic.take(taken.count_B)
        self.length_B = taken.length_B
        return step.rows(taken.tokens_BJ, taken.count_B, taken.column_BJ)
