"""Modules that take positions from the cache's length run row by row, and a model is afterwards as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.eval.decoding.cache import SlotLayer, Slots
from headstart.eval.decoding.generic.by_row import ByRow
from headstart.eval.decoding.generic.intercept import replaced_forwards
from headstart.eval.decoding.generic.recurrent import WatchedKV


class Positions(nn.Module):
    """Gives the positions that the cache tells, and what it was fed."""

    def __init__(self, slots: Slots):
        super().__init__()
        self.slots, self.widths = slots, []

    def forward(self, x_BMD: Tensor, table_1M: Tensor, per_batch: Any = None, fails: bool = False) -> Any:
        if fails:
            raise RuntimeError("no kernel")
        self.widths.append(len(x_BMD))
        assert self.slots.rows == slice(self.slots.row, self.slots.row + 1)
        assert per_batch is None or len(per_batch) == 3  # one number each, not one row each
        return self.slots.past_M + torch.arange(x_BMD.shape[1]), [x_BMD, table_1M], "name"


def test_rows_get_their_own_positions() -> None:
    slots = Slots(3, 9, "cpu")
    module, position_BM = Positions(slots), torch.tensor([[4, 5], [0, 0], [7, 8]])
    x_BMD, table_1M = torch.arange(6.0).view(3, 2, 1), torch.zeros(1, 2)
    with ByRow([module], slots).running(position_BM):
        positions, (fed, table), name = module(x_BMD, table_1M=table_1M, per_batch=torch.arange(3))
    assert positions.tolist() == [4, 5, 0, 0, 7, 8] and torch.equal(fed, x_BMD) and name == "name"
    assert table.shape == (3, 2) and module.widths == [1, 1, 1]  # what has no rows goes to each of them


def test_a_failure_leaves_everything_as_it_was() -> None:
    slots = Slots(2, 9, "cpu")
    module = Positions(slots)
    with pytest.raises(RuntimeError, match="no kernel"), ByRow([module], slots).running(torch.zeros(2, 2).long()):
        module(torch.zeros(2, 2, 1), torch.zeros(1, 2), fails=True)
    assert slots.row is None and slots.past_M is None and slots.rows == slice(None)
    assert "forward" not in module.__dict__


def test_a_forward_that_was_replaced_before_comes_back() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    own = second.forward = lambda x: x  # type: ignore[assignment]

    def ways() -> Any:
        yield first, lambda forward, x: forward(x) + 1
        yield second, lambda forward, x: forward(x) + 2
        yield second, lambda forward, x: forward(x) * 3

    x = torch.ones(1, 2)
    plain = first(x)
    with replaced_forwards(ways()):
        assert torch.equal(first(x), plain + 1) and torch.equal(second(x), 3 * (x + 2))
    assert torch.equal(first(x), plain) and "forward" not in first.__dict__ and second.forward is own

    def fails() -> Any:
        yield first, lambda forward, x: x
        raise LookupError("second")

    with pytest.raises(LookupError), replaced_forwards(fails()):
        pass
    assert "forward" not in first.__dict__


def test_a_module_that_asks_twice_runs_once_per_row() -> None:
    slots, module, other = Slots(2, 4, "cpu"), nn.Linear(1, 1), nn.Linear(1, 1)
    running: list[nn.Module] = []
    kv = WatchedKV(slots, [SlotLayer(slots), SlotLayer(slots)], running)
    kv.get_seq_length(0)
    kv.get_seq_length()
    for asks in (module, module, other, module):
        running[:] = [other, asks]
        kv.get_seq_length(1)
    kv.get_seq_length()
    assert kv.length_readers == [module, other]
