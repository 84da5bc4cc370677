"""Decoding kernels against their eager twins: on a GPU, or through Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch
from eval_help import DEVICE, needs_kernels

from headstart.eval.kernels.attention import Ahead, AttendShape, Visibility, attend_eager, attend_kernel
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
from headstart.eval.kernels.pointwise import (
    DraftInput,
    NormWeights,
    RopeStore,
    draft_input_eager,
    draft_input_kernel,
    move_slots_eager,
    move_slots_kernel,
    pick_eager,
    pick_kernel,
    rms_norm_eager,
    rms_norm_kernel,
    rope_store_eager,
    rope_store_kernel,
    take_rows_eager,
    take_rows_kernel,
)

pytest.importorskip("triton")
pytestmark = needs_kernels
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
PARENT = [-1, 0, 0, 1, 1, 3, 2]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    distance = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert torch.isfinite(actual).all() and float(distance) < tolerance


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=noise).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, norm = random(5, 72, dtype=dtype), NormWeights(random(72, seed=1), 1e-5)
    close(rms_norm_kernel(x, norm), rms_norm_eager(x, norm))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (9, 3), (3, 1)])
@pytest.mark.parametrize(("width", "rotary", "norm"), [(16, 16, False), (24, 8, True), (64, 64, True)])
def test_rope_store(width: int, rotary: int, norm: bool, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Heads that fill programs or leave the last one half empty; nothing beside the buffers is written."""
    slots, write = 9, torch.tensor([[0, 3, 8], [1, 2, 5]], device=DEVICE)
    norms = [NormWeights(random(width, seed=n).abs() + 0.5, eps) if norm else None for n, eps in ((1, 1e-5), (2, 0.5))]
    shape = RopeStore(heads, kv_heads, width, *norms)
    qkv = random(6, (heads + 2 * kv_heads) * width, dtype=dtype)
    cos, sin = (torch.cat([random(6, rotary // 2, dtype=dtype, seed=n)] * 2, 1) for n in (3, 4))
    wholes = [torch.full((2, kv_heads + 2, slots, width), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    found = [whole[:, 1:-1] for whole in wholes]
    expected = [torch.full_like(part, 7.0) for part in found]
    close(
        rope_store_kernel(qkv, cos, sin, shape, *found, write), rope_store_eager(qkv, cos, sin, shape, *expected, write)
    )
    close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert all((whole[:, [0, -1]] == 7).all() for whole in wholes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_store_by_position(dtype: torch.dtype) -> None:
    """Every row takes its own angles from the table of all positions; padding the first."""
    write, position = (torch.tensor(x, device=DEVICE) for x in ([[0, 3, 8], [1, 2, 5]], [[4, 11, -1], [0, 1, 4]]))
    shape, qkv = RopeStore(4, 2, 16), random(6, 8 * 16, dtype=dtype)
    cos, sin = (torch.cat([random(12, 8, dtype=dtype, seed=n)] * 2, 1) for n in (3, 4))
    found = [torch.zeros(2, 2, 9, 16, dtype=dtype, device=DEVICE) for _ in range(2)]
    expected = [torch.zeros_like(part) for part in found]
    close(
        rope_store_kernel(qkv, cos, sin, shape, *found, write, position),
        rope_store_eager(qkv, cos, sin, shape, *expected, write, position),
    )
    close(found[0], expected[0])
    rows = [4, 11, 0, 0, 1, 4]
    close(found[0], rope_keys(qkv, cos[rows], sin[rows], shape, write))


def rope_keys(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shape: RopeStore, write: torch.Tensor):
    keys, values = (torch.zeros(2, 2, 9, 16, dtype=qkv.dtype, device=DEVICE) for _ in range(2))
    rope_store_eager(qkv, cos, sin, shape, keys, values, write)
    return keys


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "normed"), [(72, True), (64, False), (600, True)])
def test_draft_input(width: int, normed: bool, dtype: torch.dtype) -> None:
    tokens = torch.tensor([[3, 0, 10], [3, 7, 1]], device=DEVICE)
    under = torch.tensor([[1, 0, 1], [1, 1, 0]], device=DEVICE)
    norms = (NormWeights(random(width, seed=1), 1e-5), NormWeights(random(width, seed=2), 1e-3)) if normed else None
    for table in (random(11, width, dtype=dtype, seed=3), random(11, width, seed=3)):
        for rows, of in ((3, None), (2, under)):
            source, g = DraftInput(table, norms), random(2, rows, width, dtype=dtype, seed=4)
            found, expected = draft_input_kernel(tokens, g, source, of), draft_input_eager(tokens, g, source, of)
            assert found[0].dtype == dtype and found[0].shape == (6, 2 * width)
            for half in (slice(None, width), slice(width, None)):
                close(found[0][:, half], expected[0][:, half])
            assert torch.equal(found[1], expected[1])
            assert torch.equal(found[1].view(2, 3, width)[1, 2], g[1, 2 if of is None else 0])
    with pytest.raises(ValueError, match="3 tokens and 2 features per sequence"):
        draft_input_kernel(tokens, g, source)


@pytest.mark.parametrize("dtype", [torch.bool, *DTYPES])
@pytest.mark.parametrize("width", [72, 2050])
def test_take_rows(width: int, dtype: torch.dtype) -> None:
    x = (random(2, 5, width) * 4).to(dtype)
    row = torch.tensor([[4, 0, 4], [2, 3, 0]], device=DEVICE)
    found = take_rows_kernel(x, row)
    assert found.dtype == dtype and torch.equal(found, take_rows_eager(x, row))
    assert torch.equal(found[1, 0], x[1, 2]) and torch.equal(found[0, 2], x[0, 4])
    # rows of any shape, as a target's streams are
    assert torch.equal(take_rows_kernel(x.unflatten(2, (2, -1)), row), found.unflatten(2, (2, -1)))


@pytest.mark.parametrize("dtype", DTYPES)
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


def test_rope_store_at_slots_that_rows_share() -> None:
    """One row of slots expanded over the batch: a row's slots lie beyond the tensor's memory."""
    width, batch, tokens = 16, 2, 12
    shape, write = RopeStore(4, 2, width), torch.arange(tokens, device=DEVICE).expand(batch, tokens)
    qkv = random(batch * tokens, 8 * width)
    cos, sin = (torch.cat([random(batch * tokens, width // 2, seed=n)] * 2, 1) for n in (3, 4))
    found = [torch.zeros(batch, 2, tokens + 1, width, device=DEVICE) for _ in range(2)]
    expected = [torch.zeros_like(part) for part in found]
    close(
        rope_store_kernel(qkv, cos, sin, shape, *found, write), rope_store_eager(qkv, cos, sin, shape, *expected, write)
    )
    close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def tree_visibility(base: list[int]) -> Visibility:
    """Row b: a tree of seven tokens after base[b] committed slots."""
    count = len(PARENT)
    mask, depth = torch.eye(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int64)
    for node, parent in enumerate(PARENT):
        if parent >= 0:
            mask[node] |= mask[parent]
            depth[node] = depth[parent] + 1
    base_B = torch.tensor(base)
    tree = mask.expand(len(base), count, count).contiguous()
    slots = base_B[:, None] + torch.arange(count)
    return Visibility(*(x.to(DEVICE) for x in (base_B[:, None] + depth, slots, base_B, tree)))


def causal_visibility(base: list[int]) -> Visibility:
    """A chain; the last row starts with two tokens of padding."""
    base_B = torch.tensor(base)
    position = base_B[:, None] + torch.arange(len(PARENT))
    position[-1, :2] = -1
    return Visibility(position.to(DEVICE), position.to(DEVICE), base_B.to(DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("base", "slots", "splits"),
    # parts of several blocks, of one block each; one block in all
    [([150, 3], 200, 1), ([150, 3], 200, 3), ([150, 3], 200, None), ([30, 3], 50, 1)],
)
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(None, None, False), (6, None, True), (3, 5.0, False)])
@pytest.mark.parametrize("tree", [False, True])
def test_attention(
    tree: bool, window: int, softcap: float, sinks: bool, base: list[int], slots: int, splits: int, dtype: torch.dtype
) -> None:
    visibility = (tree_visibility if tree else causal_visibility)(base)
    heads, kv_heads, width = 4, 2, 24
    q = random(2 * len(PARENT), heads, width, dtype=dtype)
    keys, values = (random(2, kv_heads, slots, width, dtype=dtype, seed=n) for n in (1, 2))
    shape = AttendShape(0.3, window, softcap, random(heads, seed=3) if sinks else None)
    expected = attend_eager(q, keys, values, visibility, shape)
    for row, length in enumerate(base):
        # left there by an earlier text
        for buffer in (keys, values):
            buffer[row, :, length + len(PARENT) :] = torch.nan
    close(attend_kernel(q, keys, values, visibility, shape, splits), expected)


def test_weights_to_fetch_meanwhile_are_whole_lines_of_every_row() -> None:
    matrix = torch.zeros((64, 512), dtype=torch.bfloat16)
    assert Ahead(matrix, 0).lines() == (0, 64)
    assert Ahead(matrix, 64 * 128 * 3 + 100).lines() == (3, 64)
    assert Ahead(matrix, 1 << 30).lines() == (512 * 2 // 128, 64)
    assert Ahead(matrix.float(), 64 * 128).lines() == (1, 32)


@pytest.mark.parametrize("splits", [1, 3, None])
def test_attention_to_nodes_of_earlier_forwards(splits: int) -> None:
    """Three tokens of a tree whose 20 slots were written in several forwards, some of them not yet."""
    base = torch.tensor([130, 5], device=DEVICE)
    noise = torch.Generator().manual_seed(4)
    mask = (torch.rand((2, 3, 20), generator=noise) < 0.4).to(DEVICE)
    position = base[:, None] + torch.tensor([2, 2, 2], device=DEVICE)
    visibility = Visibility(position, base[:, None] + torch.arange(8, 11, device=DEVICE), base, mask)
    q = random(6, 4, 16)
    keys, values = (random(2, 2, 160, 16, seed=n) for n in (1, 2))
    expected = attend_eager(q, keys, values, visibility, AttendShape(0.3))
    close(attend_kernel(q, keys, values, visibility, AttendShape(0.3), splits), expected)
    with pytest.raises(ValueError, match="square tree mask"):
        attend_kernel(q, keys, values, visibility, AttendShape(0.3, window=4), splits)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_attention_at_real_sizes(tokens: int, width: int) -> None:
    base = torch.tensor([700, 1900], device=DEVICE)
    position = base[:, None] + torch.arange(tokens, device=DEVICE)
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=DEVICE).tril()
    q = random(2 * tokens, 32, width, dtype=torch.bfloat16)
    keys, values = (random(2, 8, 2048, width, dtype=torch.bfloat16, seed=n) for n in (1, 2))
    for tree in (None, mask.expand(2, -1, -1).contiguous()):
        visibility, shape = Visibility(position, position, base, tree), AttendShape(width**-0.5)
        close(attend_kernel(q, keys, values, visibility, shape), attend_eager(q, keys, values, visibility, shape))


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
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
        close(normed, rms_norm_eager(found, norm))
        for mine, other in zip(with_norm(x, linear, residual, norm, tiles), (found, normed), strict=True):
            assert torch.equal(mine, other)
    linear = Linear(random(outputs, 192, dtype=dtype))
    x = random(rows, 192, dtype=dtype)
    assert not splittable(linear, Tiles(32, 128, 4, 2, splits=2))
    with pytest.raises(ValueError, match="cannot be cut"):
        split_kernel(x, linear, Tiles(32, 128, 4, 2, splits=2))
