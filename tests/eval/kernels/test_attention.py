"""Decoding's attention against its eager twin: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eval_help import DEVICE, KERNEL_DTYPES, close, memory_of_nan, needs_kernels, random

from headstart.eval.kernels.attention import Ahead, AttendShape, Visibility, attend_eager, attend_kernel
from headstart.eval.kernels.flat import flatten

pytest.importorskip("triton")
pytestmark = needs_kernels
PARENT = [-1, 0, 0, 1, 1, 3, 2]


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


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
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


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("rows", [2, 6, 9, 14, 17])
@pytest.mark.parametrize(("window", "sinks", "tree"), [(None, True, True), (3, False, True), (None, True, False)])
def test_attention_of_flat_rows(
    window: int, sinks: bool, tree: bool, rows: int, splits: int, dtype: torch.dtype
) -> None:
    """Kept places get what they get among all places; rows that are left over are 0, and nothing else is written."""
    # three nodes are missing in one sequence, one in the other: 10 places at most
    valid = torch.tensor([[1, 0, 1, 0, 0, 1], [1, 1, 1, 1, 1, 0]], dtype=torch.bool, device=DEVICE)
    flat = flatten(valid, rows)
    given = tree_visibility([150, 3])
    if not tree:
        given = Visibility(given.write_BM, given.write_BM, given.base_B)
    visibility = replace(given, position_BM=torch.where(flat.kept_BM, given.position_BM, -1))
    heads, kv_heads, width = 4, 2, 24
    q_Rhd = random(2 * len(PARENT), heads, width, dtype=dtype)
    keys, values = (random(2, kv_heads, 200, width, dtype=dtype, seed=n) for n in (1, 2))
    shape = AttendShape(0.3, window, None, random(heads, seed=3) if sinks else None)
    whole = attend_eager(q_Rhd, keys, values, visibility, shape)
    expected = attend_eager(flat.gather(q_Rhd), keys, values, visibility, shape, flat)
    with memory_of_nan():
        found = attend_kernel(flat.gather(q_Rhd), keys, values, visibility, shape, splits, flat=flat)
    close(found, expected)
    used_F = torch.arange(rows, device=DEVICE) < min(rows, 10)
    close(found[used_F], whole[flat.place_F[used_F]])
    assert not found[~used_F].any() and not expected[~used_F].any()
    of_places = attend_kernel(q_Rhd, keys, values, visibility, shape, splits)
    assert torch.equal(found[used_F], of_places[flat.place_F[used_F]])


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
