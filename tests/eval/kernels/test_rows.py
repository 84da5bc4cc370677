"""Rows and slots taken, moved and picked, against the eager twins: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from eval_help import DEVICE, KERNEL_DTYPES, needs_kernels, random

from headstart.eval.kernels.rows import (
    move_slots_eager,
    move_slots_kernel,
    pick_eager,
    pick_kernel,
    take_rows_eager,
    take_rows_kernel,
)

pytest.importorskip("triton")
pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", [torch.bool, *KERNEL_DTYPES])
@pytest.mark.parametrize("width", [72, 2050])
def test_take_rows(width: int, dtype: torch.dtype) -> None:
    x = (random(2, 5, width) * 4).to(dtype)
    row = torch.tensor([[4, 0, 4], [2, 3, 0]], device=DEVICE)
    found = take_rows_kernel(x, row)
    assert found.dtype == dtype and torch.equal(found, take_rows_eager(x, row))
    assert torch.equal(found[1, 0], x[1, 2]) and torch.equal(found[0, 2], x[0, 4])
    # rows of any shape, as a target's streams are
    assert torch.equal(take_rows_kernel(x.unflatten(2, (2, -1)), row), found.unflatten(2, (2, -1)))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("width", [24, 64])
def test_move_slots(width: int, dtype: torch.dtype) -> None:
    """Slots that are both read and written, in both orders; the last one is the bin."""
    found = random(3, 2, 2, 3, 9, width, dtype=dtype)
    before, expected = found.clone(), found.clone()
    source = torch.tensor([[2, 3, 5, 8, 8], [4, 1, 2, 8, 8]], device=DEVICE)
    target = torch.tensor([[1, 2, 3, 8, 8], [1, 2, 4, 8, 8]], device=DEVICE)
    move_slots_kernel(found, source, target)
    move_slots_eager(expected, source, target)
    assert torch.equal(found, expected)
    assert torch.equal(found[:, :, 1, :, 4], before[:, :, 1, :, 2])
    assert torch.equal(found[:, :, 0, :, :4], before[:, :, 0][:, :, :, [0, 2, 3, 5]])


@pytest.mark.parametrize(("inner", "width"), [(24, 72), (2050, 600)])
def test_pick(inner: int, width: int) -> None:
    arguments = [random(6, inner), random(6, width, seed=1)]
    arguments += [torch.arange(6, device=DEVICE).view(2, 3) * n for n in (7, 11)]
    arguments.append(torch.tensor([[2], [0]], device=DEVICE))
    found, expected = pick_kernel(*arguments), pick_eager(*arguments)
    assert torch.equal(expected.q_BC, arguments[0][[2, 3]]) and expected.position_B1.tolist() == [[14], [21]]
    for name in ("q_BC", "residual_BD", "position_B1", "write_B1"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
