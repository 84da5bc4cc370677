"""Inputs that grow along a path against their eager twin: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from eval_help import DEVICE, KERNEL_DTYPES, needs_kernels, random

from headstart.eval.kernels.extend_input import extend_input_eager, extend_input_kernel

pytest.importorskip("triton")
pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("width", "levels"), [(72, 1), (64, 3), (600, 2)])
def test_extend_input(width: int, levels: int, dtype: torch.dtype) -> None:
    tokens = torch.tensor([[3, 0, 10], [3, 7, 1]], device=DEVICE)
    under = torch.tensor([[1, 0, 1], [1, 1, 0]], device=DEVICE)
    for table in (random(11, width, dtype=dtype, seed=3), random(11, width, seed=3)):
        for rows, of in ((3, None), (2, under)):
            x = random(2, rows, levels * width, dtype=dtype, seed=4)
            found = extend_input_kernel(x, tokens, table, of)
            assert torch.equal(found, extend_input_eager(x, tokens, table, of))
            assert found.dtype == dtype and found.shape == (2, 3, (levels + 1) * width)
            assert torch.equal(found[1, 2, : levels * width], x[1, 2 if of is None else 0])
            assert torch.equal(found[0, 2, levels * width :], table[10].to(dtype))
    with pytest.raises(ValueError, match="3 tokens and 2 inputs per sequence"):
        extend_input_kernel(x, tokens, table)
