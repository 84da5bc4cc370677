"""The rows that a draft takes over against the eager twin: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from eval_help import DEVICE, needs_kernels

from headstart.eval.kernels.line_up import line_up_eager, line_up_kernel

pytest.importorskip("triton")
pytestmark = needs_kernels


@pytest.mark.parametrize(("width", "levels"), [(1, 1), (4, 3), (9, 8), (5, 1)])
def test_line_up(width: int, levels: int) -> None:
    tokens = torch.randint(7, (3, width), generator=torch.Generator().manual_seed(width)).to(DEVICE)
    length, roots = torch.tensor([5, 900, 17], device=DEVICE), torch.tensor([3, 0, 6], device=DEVICE)
    for count in ([width, 1, 0], [max(width - 1, 1), 0, width]):
        arguments = (tokens, torch.tensor(count, device=DEVICE), roots, length, 1000, levels)
        found, expected = line_up_kernel(*arguments), line_up_eager(*arguments)
        for field in fields(expected):
            a, b = getattr(found, field.name), getattr(expected, field.name)
            if field.name == "tokens_BW":  # beyond the count stands what nobody reads
                for row, number in enumerate(count):
                    assert torch.equal(a[row, : max(number, 1)], b[row, : max(number, 1)])
            else:
                assert torch.equal(a, b), field.name
