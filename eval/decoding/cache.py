"""Static key/value buffers that are written at explicit slots: `Buffers` for the fused kernels, and `StaticKV`, which
transformers' models use through its public Cache interface.

Shape legend: B batch, g kv heads, S slots, d head dim, M tokens of one forward, J rows moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from headstart.eval.kernels.rows import move_slots


class Slots:
    """Where the next forward writes, and how much of the buffers it reads. Shared by all layers.

    Attributes:
        row: the one row that a module runs on alone; None = all.
        past_M: what such a module adds to the index of each token to get its position.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device | str):
        self.batch, self.capacity = batch, capacity
        self.rows_B1 = torch.arange(batch, device=device)[:, None]
        self.write_BM = torch.zeros((batch, 0), dtype=torch.int64, device=device)
        self.extent = 0
        self.row: int | None = None
        self.past_M: Tensor | None = None

    @property
    def rows(self) -> slice:
        """Rows that the running module reads and writes."""
        return slice(None) if self.row is None else slice(self.row, self.row + 1)


class SlotLayer(CacheLayerMixin):
    """One layer's buffers [B, g, S + 1, d], allocated at the first update (dtype and head sizes are the model's)."""

    is_sliding = False

    def __init__(self, slots: Slots):
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._allocate(key_states, value_states)

    def _allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, length = self.slots.batch, self.slots.capacity + 1
        # zeros: a masked slot has weight 0, and 0 × garbage must not be NaN
        self.keys, self.values = (
            x.new_zeros((batch, x.shape[1], length, x.shape[3])) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store k, v [B, g, M, d] at the slots set by `StaticKV.aim`; return views of the first `extent` slots."""
        if not self.is_initialized:
            self._allocate(key_states, value_states)
        assert self.keys is not None and self.values is not None
        slots, rows = self.slots, self.slots.rows
        rows_B1, write_BM = slots.rows_B1[rows], slots.write_BM[rows]
        self.keys[rows_B1, :, write_BM] = key_states.transpose(1, 2)
        self.values[rows_B1, :, write_BM] = value_states.transpose(1, 2)
        return self.keys[rows, :, : slots.extent], self.values[rows, :, : slots.extent]

    def move(self, source_BJ: Tensor, target_BJ: Tensor) -> None:
        if self.keys is None or self.values is None:
            return
        rows_B1 = self.slots.rows_B1
        # the gather makes a copy first, so source and target may overlap
        self.keys[rows_B1, :, target_BJ] = self.keys[rows_B1, :, source_BJ]
        self.values[rows_B1, :, target_BJ] = self.values[rows_B1, :, source_BJ]

    def take_row(self, row: int, other: SlotLayer, slots: int, source: int) -> None:
        if self.keys is None or self.values is None or other.keys is None or other.values is None:
            return
        self.keys[row, :, :slots] = other.keys[source, :, :slots]
        self.values[row, :, :slots] = other.values[source, :, :slots]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.extent, 0

    def get_seq_length(self) -> Any:
        return self.slots.extent if self.slots.past_M is None else self.slots.past_M

    def get_max_length(self) -> int:
        return self.slots.capacity

    #: the name before transformers 5.24
    get_max_cache_shape = get_max_length


class StaticKV(Cache):
    """Key/value buffers of a whole model: slot s of row b holds position s of that row's context, then the tree.

    Sliding-window layers keep every slot as well: their window is in the mask.

    Args:
        slots: what all layers share.
        layers: one per layer of the model; those without attention hold no slots.
    Attributes:
        bin: the slot after the last one. Padding is written there, and nothing reads it.
        asked: whether a layer has asked for the cache's length, to take positions from it (generic/by_row.py).
    """

    def __init__(self, slots: Slots, layers: Sequence[Any]):
        self.bin, self.slots = slots.capacity, slots
        self.slot_layers = [layer for layer in layers if isinstance(layer, SlotLayer)]
        self.asked = False
        super().__init__(layers=list(layers))

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        # models ask without a layer; only where they were given no positions
        self.asked |= layer_idx is not None
        return super().get_seq_length(layer_idx or 0)

    def aim(self, write_BM: Tensor, extent: int) -> None:
        """Set the slots that the next forward writes, and the number of slots it attends to."""
        self.slots.write_BM, self.slots.extent = write_BM, extent

    def move(self, source_BJ: Tensor, target_BJ: Tensor) -> None:
        """As Buffers.move."""
        for layer in self.slot_layers:
            layer.move(source_BJ, target_BJ)

    def take_row(self, row: int, other: StaticKV, slots: int, source: int = 0) -> None:
        """Copy the first `slots` slots of another's row `source` into a row of these, in every layer."""
        for layer, given in zip(self.slot_layers, other.slot_layers, strict=True):
            layer.take_row(row, given, slots, source)


class Buffers:
    """Key and value buffers of all layers, [B, g, S + 1, d] each.

    They start as zeros: a masked slot has weight 0, and 0 × garbage must not be NaN.

    Args: shapes: (kv heads, head dim) of every layer; layers of one shape share one allocation.
    Attributes:
        bin: slot S. Padding is written there, and nothing reads it.
    """

    def __init__(
        self, shapes: list[tuple[int, int]], batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ):
        self.capacity = self.bin = capacity
        self._wholes = {
            (g, d): torch.zeros((count, 2, batch, g, capacity + 1, d), dtype=dtype, device=device)
            for (g, d), count in Counter(shapes).items()
        }
        rest = {shape: iter(whole) for shape, whole in self._wholes.items()}
        pairs = [next(rest[shape]) for shape in shapes]
        self.keys, self.values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    @property
    def whole(self) -> Tensor:
        """All keys and values, [layers, 2, B, g, S + 1, d]. Raises: ValueError where layers differ in shape."""
        (whole,) = self._wholes.values()
        return whole

    def move(self, source_BJ: Tensor, target_BJ: Tensor) -> None:
        """Copy slots `source` onto `target` in every layer. What is not wanted is copied to the bin."""
        for whole in self._wholes.values():
            move_slots(whole, source_BJ, target_BJ)

    def take_row(self, row: int, other: Buffers, slots: int) -> None:
        """Copy the first `slots` slots of another's only row into a row of these, in every layer."""
        for shape, whole in self._wholes.items():
            whole[:, :, row, :, :slots] = other._wholes[shape][:, :, 0, :, :slots]

    def take_rows(self, row_n: Tensor, other: Buffers, slots: int) -> None:
        """As `take_row`, of another's first n rows into these n, at once."""
        for shape, whole in self._wholes.items():
            given = other._wholes[shape][:, :, : len(row_n), :, :slots]
            whole[:, :, :, :, :slots].index_copy_(2, row_n, given)
