"""Products for a handful of rows against the library's: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from eval_help import KERNEL_DTYPES, close, needs_kernels, random

from headstart.eval.kernels.linear import (
    Linear,
    Tiles,
    join_kernel,
    linear_eager,
    linear_kernel,
    split_kernel,
    splittable,
    with_norm,
)
from headstart.eval.kernels.norm import NormWeights, norm_eager

pytest.importorskip("triton")
pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("rows", [1, 20, 64])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(rows: int, activation: str, bias: bool, dtype: torch.dtype) -> None:
    inputs, outputs = 72, 50
    weight = random(outputs * (2 if activation else 1), inputs, dtype=dtype) / inputs**0.5
    linear = Linear(weight, random(weight.shape[0], dtype=dtype, seed=1) if bias else None, activation)
    x, residual = random(rows, inputs, dtype=dtype, seed=2), random(rows, outputs, dtype=dtype, seed=3)
    for added in (None, residual):
        expected = linear_eager(x, linear, added)
        close(linear_kernel(x, linear, added, Tiles(32, 32, 4, 2)), expected)
        close(linear_kernel(x, linear, added, Tiles(32, 0, 4, 1, whole=True)), expected)
        if rows == 1:
            close(linear_kernel(x, linear, added, Tiles(8, 32, 4, 1, vector=True)), expected)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("rows", "splits"), [(1, 2), (20, 3), (64, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_in_parts(rows: int, splits: int, bias: bool, dtype: torch.dtype) -> None:
    """Side by side over the inputs, then added up with bias, residual and norm."""
    outputs, norm = 50, NormWeights(random(50, seed=4).float(), 1e-5)
    # without a loop a part of 96 inputs is 64 and 32, one of 64 a single tile, one of 112 64 and 48 of 64
    for inputs, tiles in (
        (192, Tiles(32, 32, 4, 2, splits=splits)),
        (192, Tiles(32, 0, 4, 1, splits=splits, whole=True)),
        (112 * splits, Tiles(32, 0, 4, 1, splits=splits, whole=True)),
    ):
        weight = random(outputs, inputs, dtype=dtype) / inputs**0.5
        linear = Linear(weight, random(outputs, dtype=dtype, seed=1) if bias else None)
        x, residual = random(rows, inputs, dtype=dtype, seed=2), random(rows, outputs, dtype=dtype, seed=3)
        for added in (None, residual):
            close(linear_kernel(x, linear, added, tiles), linear_eager(x, linear, added))
        found, normed = join_kernel(split_kernel(x, linear, tiles), linear.bias_N, residual, norm)
        close(found, linear_eager(x, linear, residual))
        close(normed, norm_eager(found, norm))
        for mine, other in zip(with_norm(x, linear, residual, norm, tiles), (found, normed), strict=True):
            assert torch.equal(mine, other)
    linear = Linear(random(outputs, 192, dtype=dtype))
    x = random(rows, 192, dtype=dtype)
    assert not splittable(linear, Tiles(32, 128, 4, 2, splits=2))
    with pytest.raises(ValueError, match="cannot be cut"):
        split_kernel(x, linear, Tiles(32, 128, 4, 2, splits=2))
