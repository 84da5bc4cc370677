"""The kernel that makes a block's input against its eager twin: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from eval_help import DEVICE, KERNEL_DTYPES, close, needs_kernels, random

from headstart.eval.kernels.block_input import BlockInput, block_input_eager, block_input_kernel
from headstart.eval.kernels.norm import NormWeights


def source(dtype: torch.dtype, slots: int = 5) -> BlockInput:
    norm = NormWeights(random(24, seed=1).abs() + 0.5, 1e-2)
    return BlockInput(random(40, 24, dtype=dtype), 33, slots, norm, dtype)


def test_the_slots_stand_behind_the_context() -> None:
    roots, length = torch.tensor([3, 38], device=DEVICE), torch.tensor([7, 0], device=DEVICE)
    made, given = block_input_eager(roots, length, source(torch.float32, 3)), source(torch.float32, 3)
    assert torch.equal(made.e_RD, given.embed_VD[[3, 33, 33, 38, 33, 33]])
    assert made.position_BN.tolist() == [[7, 8, 9], [0, 1, 2]]
    assert made.end_BN.tolist() == [[9] * 3, [2] * 3]


@needs_kernels
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("slots", [1, 5])
def test_the_kernel_makes_the_same(slots: int, dtype: torch.dtype) -> None:
    roots, length = torch.tensor([3, 38, 0], device=DEVICE), torch.tensor([7, 0, 11], device=DEVICE)
    found, expected = (make(roots, length, source(dtype, slots)) for make in (block_input_kernel, block_input_eager))
    assert torch.equal(found.e_RD, expected.e_RD)
    close(found.normed_RD, expected.normed_RD)
    assert torch.equal(found.position_BN, expected.position_BN) and torch.equal(found.end_BN, expected.end_BN)
