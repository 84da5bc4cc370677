"""The rows that a draft takes over against the eager twin: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from eval_help import DEVICE, needs_kernels

from headstart.eval.kernels.line_up import hold, hold_eager, hold_kernel, line_up_eager, line_up_kernel

pytest.importorskip("triton")
pytestmark = needs_kernels


@pytest.mark.parametrize(("width", "levels"), [(1, 1), (4, 3), (9, 8), (5, 1)])
def test_line_up(width: int, levels: int) -> None:
    tokens = torch.randint(7, (3, width), generator=torch.Generator().manual_seed(width)).to(DEVICE)
    length, roots = torch.tensor([5, 900, 17], device=DEVICE), torch.tensor([3, 0, 6], device=DEVICE)
    for count in ([width, 1, 0], [max(width - 1, 1), 0, width]):
        arguments = (tokens, torch.tensor(count, device=DEVICE), roots, length, 1000, levels)
        # the first columns of a wider tensor, too, which are read where they stand
        wider = torch.cat((tokens, tokens), 1)[:, :width]
        found, expected = line_up_kernel(*arguments), line_up_eager(*arguments)
        for field in fields(expected):
            assert torch.equal(getattr(line_up_kernel(wider, *arguments[1:]), field.name), getattr(found, field.name))
        for field in fields(expected):
            a, b = getattr(found, field.name), getattr(expected, field.name)
            if field.name == "tokens_BW":  # beyond the count stands what nobody reads
                for row, number in enumerate(count):
                    assert torch.equal(a[row, : max(number, 1)], b[row, : max(number, 1)])
            else:
                assert torch.equal(a, b), field.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "width", "hidden"), [(1, 4, 8), (2, 8, 40), (3, 4, 2000), (5, 6, 1024)])
def test_hold(count: int, width: int, hidden: int, dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(count)
    tokens = torch.randint(99, (3, count), generator=noise).to(DEVICE)
    g = torch.randn(3, count, hidden, generator=noise).to(DEVICE, dtype)
    found, expected = hold_kernel(tokens, g, width), hold_eager(tokens, g, width)
    assert found[0].shape == (3, width) and found[1].shape == (3, width, hidden)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert torch.equal(found[0][:, :count], tokens) and torch.equal(found[1][:, :count], g)
    same = hold(tokens, g, count)
    assert same[0] is tokens and same[1] is g
