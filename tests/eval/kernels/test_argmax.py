"""The most likely token's kernel against its eager twin: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from eval_help import DEVICE, needs_kernels

from headstart.eval.kernels.argmax import argmax_eager, argmax_kernel

pytest.importorskip("triton")
pytestmark = needs_kernels


@pytest.mark.parametrize("size", [1, 61, 4096, 4097, 12345])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_takes_the_first_of_equals(size: int, dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(size)
    logits = torch.randint(4, (6, size), generator=noise).to(DEVICE, dtype)
    logits[1] = -torch.inf
    logits[2, size // 2] = 9.0
    logits[3, size - 1] = torch.nan
    ids = torch.arange(size, device=DEVICE) * 3 + 1
    for rows in (logits, torch.cat([logits, logits], 1)[:, :size]):
        assert torch.equal(argmax_kernel(rows), argmax_eager(rows))
        assert torch.equal(argmax_kernel(rows, ids), argmax_eager(rows, ids))
