"""Products for a handful of rows against the library's: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eval_help import KERNEL_DTYPES, close, needs_kernels, random

from headstart.eval.kernels import linear as linear_module
from headstart.eval.kernels.linear import (
    ACTIVATIONS,
    DEFAULT,
    PLAIN,
    Ending,
    Linear,
    Parts,
    Tiles,
    end_eager,
    join_kernel,
    linear_by,
    linear_eager,
    linear_kernel,
    row_bucket,
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
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "gelu_quick", "relu", "relu2"])
def test_other_activations(activation: str, alone: bool, rows: int, dtype: torch.dtype) -> None:
    """With and without a gate."""
    inputs, outputs = 72, 50
    weight = random(outputs * (1 if alone else 2), inputs, dtype=dtype) / inputs**0.5
    linear = Linear(weight, random(weight.shape[0], dtype=dtype, seed=1), activation, alone=alone)
    assert linear.outputs == outputs
    x = random(rows, inputs, dtype=dtype, seed=2)
    expected = linear_eager(x, linear)
    close(linear_kernel(x, linear, None, Tiles(32, 32, 4, 2)), expected)
    close(linear_kernel(x, linear, None, Tiles(32, 0, 4, 1, whole=True)), expected)
    if rows == 1:
        close(linear_kernel(x, linear, None, Tiles(8, 32, 4, 1, vector=True)), expected)


ENDINGS = {
    "norm": (Ending(NormWeights(random(50, seed=4), 1e-5)), NormWeights(random(50, seed=5), 1e-5)),
    "scale": (Ending(scale=0.3), NormWeights(random(50, seed=5), 1e-5)),
    "norm alone": (Ending(NormWeights(random(50, seed=4), 1e-5)), None),
    "layer norms": (
        Ending(NormWeights(random(50, seed=4), 0.1, random(50, seed=6), True), 0.5),
        NormWeights(random(50, seed=5), 0.1, random(50, seed=7), True),
    ),
    "plain": (PLAIN, NormWeights(random(50, seed=5), 0.1, None, True)),
    "nothing": (PLAIN, None),
}


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_end_of_a_sublayer(ending: str, splits: int, dtype: torch.dtype) -> None:
    """What comes after the product: a norm or a factor, the residual, the next norm; against separate steps."""
    after, norm = ENDINGS[ending]
    weight, bias = random(50, 96, dtype=dtype) / 96**0.5, random(50, dtype=dtype, seed=1)
    linear, tiles = Linear(weight, bias), Tiles(32, 32, 4, 2, splits=splits)
    x, residual = random(20, 96, dtype=dtype, seed=2), random(20, 50, dtype=dtype, seed=3)
    y = torch.nn.functional.linear(x, weight, bias)
    if after.norm is not None:
        y = norm_eager(y, after.norm)
    expected = residual + y * after.scale
    if splits > 1:
        parts = split_kernel(x, linear, tiles)
        found, normed = join_kernel(parts, bias, residual, norm, after)
    else:
        product = linear_kernel(x, linear, None, tiles)
        found, normed = join_kernel(Parts(product[None], product.dtype), None, residual, norm, after)
    close(found, expected)
    if norm is not None:
        close(normed, norm_eager(expected, norm))
    # as layers call it; on a CPU this is the eager twin
    whole, of_whole = linear.end(x, residual, after, norm)
    close(whole, expected)
    assert (of_whole is None) == (norm is None)
    if norm is not None:
        close(of_whole, norm_eager(expected, norm))


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


MANY_ROWS = (65, 96, 130, 257, 512)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("rows", MANY_ROWS)
@pytest.mark.parametrize("activation", [None, "silu", "relu alone"])
@pytest.mark.parametrize("bias", [False, True])
def test_several_tiles_of_rows(rows: int, activation: str | None, bias: bool, dtype: torch.dtype) -> None:
    """Rows beyond one tile: the last tile is full or not, outputs and inputs are whole tiles or not."""
    act, alone = activation and activation.split()[0], activation == "relu alone"
    for inputs, outputs in ((96, 64), (72, 50)):
        weight = random(outputs * (2 if act and not alone else 1), inputs, dtype=dtype) / inputs**0.5
        linear = Linear(weight, random(weight.shape[0], dtype=dtype, seed=1) if bias else None, act, alone=alone)
        x, residual = random(rows, inputs, dtype=dtype, seed=2), random(rows, outputs, dtype=dtype, seed=3)
        for added in (None, residual):
            expected = linear_eager(x, linear, added)
            for tiles in (Tiles(32, 32, 4, 2), Tiles(32, 0, 4, 1, whole=True)):
                found = linear_kernel(x, linear, added, tiles)
                close(found, expected)
                # an error in the last rows or outputs would be a small part of all
                close(found[64:], expected[64:])
                close(found[-1], expected[-1])
                close(found[:, -1], expected[:, -1])


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("rows", MANY_ROWS)
@pytest.mark.parametrize("whole", [False, True])
def test_several_tiles_of_rows_in_parts(rows: int, whole: bool, dtype: torch.dtype) -> None:
    """Every part has a place for all rows; what comes after the sum is as with few rows."""
    outputs, splits, norm = 50, 3, NormWeights(random(50, seed=4).float(), 1e-5)
    tiles = Tiles(32, 0 if whole else 32, 4, 1 if whole else 2, splits=splits, whole=whole)
    weight, bias = random(outputs, 192, dtype=dtype) / 192**0.5, random(outputs, dtype=dtype, seed=1)
    linear = Linear(weight, bias)
    x, residual = random(rows, 192, dtype=dtype, seed=2), random(rows, outputs, dtype=dtype, seed=3)
    parts = split_kernel(x, linear, tiles).sums_SRN
    assert parts.shape == (splits, rows, outputs)
    for n, part in enumerate(parts):
        cut = slice(64 * n, 64 * (n + 1))
        close(part, x[:, cut].float() @ weight[:, cut].float().T)
    expected = linear_eager(x, linear, residual)
    found, normed = with_norm(x, linear, residual, norm, tiles)
    close(found, expected)
    close(found[64:], expected[64:])
    close(normed, norm_eager(expected, norm))
    ending = Ending(NormWeights(random(50, seed=5), 1e-5), 0.5)
    found, _ = join_kernel(split_kernel(x, linear, tiles), bias, residual, norm, ending)
    close(found, end_eager(linear_eager(x, linear), residual, ending, None)[0])


def test_how_many_rows_run_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond one tile of rows only what was measured, for the bucket of the rows; beyond all buckets cuBLAS."""
    monkeypatch.setattr(linear_module, "wants_kernel", lambda x: True)
    ways: list[Tiles | None] = []
    monkeypatch.setattr(linear_module, "linear_by", lambda tiles, *given: ways.append(tiles))
    chosen = Tiles(128, 64, 4, 5)
    linear = Linear(torch.zeros(50, 72, dtype=torch.bfloat16), tiles={128: chosen, 512: chosen, 32: None})
    for rows in (1, 16, 17, 33, 64, 65, 128, 129, 256, 257, 512, 513):
        linear(torch.zeros(rows, 72, dtype=torch.bfloat16))
    assert ways == [DEFAULT, DEFAULT, None, DEFAULT, DEFAULT, chosen, chosen, None, None, chosen, chosen, None]
    assert [row_bucket(rows) for rows in (1, 2, 64, 65, 129, 512)] == [1, 16, 64, 128, 256, 512]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that products launch; on a CPU, too, they take the way of a GPU."""
    names: list[str] = []

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        names.append(kernel.__name__ if hasattr(kernel, "__name__") else kernel.fn.__name__)
        kernel[grid](*arguments, **options)

    monkeypatch.setattr(linear_module, "launch", launch)
    monkeypatch.setattr(linear_module, "wants_kernel", lambda x: True)
    return names


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("rows", [1, 65, 130])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_library_and_an_activation(
    activation: str, alone: bool, rows: int, dtype: torch.dtype, launches: list[str]
) -> None:
    """One launch behind cuBLAS's product, of any number of rows, also where a row is more than a block."""
    for outputs, bias in ((50, True), (1100, False)):
        weight = random(outputs * (1 if alone else 2), 72, dtype=dtype) / 72**0.5
        linear = Linear(weight, random(weight.shape[0], dtype=dtype, seed=1) if bias else None, activation, alone=alone)
        x = random(rows, 72, dtype=dtype, seed=2)
        close(linear_by(None, x, linear), linear_eager(x, linear))
        assert launches == ["activate_rows"]
        launches.clear()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_the_library_with_residual_and_norm(
    activation: str | None, rows: int, dtype: torch.dtype, launches: list[str]
) -> None:
    """The residual is added to the rounded product, bit by bit as a separate addition does, and the norm is made in the
    same launch."""
    weight, bias = random(50, 72, dtype=dtype) / 72**0.5, random(50, dtype=dtype, seed=1)
    linear, norm = Linear(weight, bias, activation, alone=True), NormWeights(random(50, seed=4), 1e-5)
    x, residual = random(rows, 72, dtype=dtype, seed=2), random(rows, 100, dtype=dtype, seed=3)[:, ::2]
    before = ["activate_rows"] if activation else []
    expected = linear_eager(x, linear, residual)
    assert torch.equal(linear_by(None, x, linear, residual), expected)
    assert launches == [*before, "add_parts"]
    launches.clear()
    found, normed = with_norm(x, linear, residual, norm, None)
    assert torch.equal(found, expected) and launches == [*before, "add_parts"]
    close(normed, norm_eager(expected, norm))
    launches.clear()
    linear.tiles = {16: None, 1: None}
    found, normed = linear.end(x, residual, PLAIN, norm)
    assert torch.equal(found, expected) and launches == [*before, "add_parts"]
    close(normed, norm_eager(expected, norm))
    # there is nothing to add: the norm is a launch of its own
    found, normed = with_norm(x, linear, None, norm, None)
    assert torch.equal(found, linear_eager(x, linear))
    close(normed, norm_eager(found, norm))
