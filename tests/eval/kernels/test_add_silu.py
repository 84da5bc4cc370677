"""The end of a residual block against its eager twin: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from eval_help import KERNEL_DTYPES, close, needs_kernels, random

from headstart.eval.kernels.add_silu import add_silu_eager, add_silu_kernel

pytest.importorskip("triton")
pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 72), (3, 1500)])
def test_add_silu(rows: int, width: int, dtype: torch.dtype) -> None:
    x, y = random(rows, width, dtype=dtype, seed=1), random(rows, width, dtype=dtype, seed=2)
    close(add_silu_kernel(x, y), add_silu_eager(x, y))
    # halves of one product
    both = torch.cat((x, y), 1)
    assert torch.equal(add_silu_kernel(*both.chunk(2, 1)), add_silu_kernel(x, y))
