"""Attention of drafted blocks: the eager twin against a naive loop, the kernels against the twin with autograd."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from headstart.heads.kernels import block_attention as attention
from headstart.heads.kernels import block_attention_kernels as kernels
from headstart.heads.kernels.block_attention import BlockRows, block_attention, block_attention_eager

interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 (and Triton)"
)
#: three documents of 40, 3 and 30 rows; the last row is padding
ROWS, STARTS = 74, (0, 40, 43)


def blocks_of(size: int, device: str = "cpu", causal: bool = False) -> BlockRows:
    """Blocks in ascending order; the last two are padding, which sees no context."""
    seen = [(0, 1), (0, 2), (0, 17), (0, 33), (0, 34), (0, 39), (40, 41), (40, 43), (43, 44), (43, 60), (43, 73)]
    start, stop = zip(*seen, (74, 74), (74, 74), strict=True)
    return BlockRows(torch.tensor(start, device=device), torch.tensor(stop, device=device), size, causal)


def inputs(blocks: BlockRows, heads: int, groups: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    noise = torch.Generator().manual_seed(0)
    slots = len(blocks.start_A) * blocks.size
    shapes = [(slots, heads), (ROWS, groups), (ROWS, groups), (slots, groups), (slots, groups)]
    return [torch.randn(*shape, width, generator=noise).to(dtype) for shape in shapes]


def gradients(attend, tensors: list[Tensor], blocks: BlockRows) -> list[Tensor]:
    """Context, then the gradients of q, k, v, own_k, own_v."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    context = attend(*leaves, blocks)
    grad = torch.randn(context.shape, generator=torch.Generator().manual_seed(1)).to(context.dtype)
    return [context.detach(), *torch.autograd.grad(context, leaves, grad)]


@pytest.mark.parametrize("causal", [False, True])
def test_the_twin_is_a_loop_over_slots(causal):
    blocks = blocks_of(3, causal=causal)
    q, k, v, own_k, own_v = inputs(blocks, 4, 2, 8, torch.float64)
    found = block_attention_eager(q, k, v, own_k, own_v, blocks)
    for slot in range(q.shape[0]):
        block = slot // 3
        rows = slice(int(blocks.start_A[block]), int(blocks.stop_A[block]))
        own = slice(block * 3, slot + 1 if causal else block * 3 + 3)
        for head in range(4):
            keys = torch.cat((k[rows, head // 2], own_k[own, head // 2]))
            values = torch.cat((v[rows, head // 2], own_v[own, head // 2]))
            weights = (keys @ q[slot, head] * 8**-0.5).softmax(0)
            torch.testing.assert_close(found[slot, head], weights @ values)


def test_as_one_operation_it_is_the_twin():
    blocks = blocks_of(4, causal=True)
    tensors = inputs(blocks, 4, 2, 8, torch.float64)
    expected, found = (gradients(f, tensors, blocks) for f in (block_attention_eager, block_attention))
    torch.testing.assert_close(found, expected)


def test_blocks_are_put_in_the_order_of_their_rows():
    blocks = blocks_of(2)
    mixed = torch.randperm(len(blocks.start_A), generator=torch.Generator().manual_seed(0))
    found, order = BlockRows(blocks.start_A[mixed], blocks.stop_A[mixed], 2, True).ascending()
    assert found.causal and found.part(0, 1).causal
    assert torch.equal(found.start_A, blocks.start_A) and torch.equal(found.stop_A, blocks.stop_A)
    assert torch.equal(blocks.stop_A[mixed][order], blocks.stop_A)


def test_the_blocks_that_see_a_row():
    """Row 41 lies in the second document: of the blocks that end behind it, one begins at or before it."""
    blocks = blocks_of(1)
    readers = kernels.KeyReaders.of(blocks.start_A, blocks.stop_A, 1, ROWS)
    for row in range(ROWS):
        seen = ((blocks.start_A <= row) & (row < blocks.stop_A)).nonzero()[:, 0].tolist()
        within = range(int(readers.first_R[row]), int(readers.after_E[row + 1]))
        assert set(seen) <= set(within)
        assert seen == list(within) or not seen


@interpreter
@pytest.mark.parametrize(
    ("heads", "groups", "width", "size", "causal"),
    [
        (4, 1, 16, 7, False), (4, 2, 24, 16, False), (3, 1, 64, 8, False), (2, 2, 16, 1, False), (6, 2, 16, 5, False),
        (4, 2, 16, 7, True), (3, 1, 24, 16, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.float16, 5e-3)], ids=str)
def test_the_kernels_interpreted_are_the_twin(heads, groups, width, size, causal, dtype, relative, monkeypatch):
    """Tiles that cross documents and blocks, the last ones partial, widths that fill no power of two."""
    pytest.importorskip("triton")
    blocks = blocks_of(size, causal=causal)
    tensors = inputs(blocks, heads, groups, width, dtype)
    expected = gradients(block_attention_eager, tensors, blocks)
    monkeypatch.setattr(attention, "wants_kernel", lambda x: True)
    monkeypatch.setattr(kernels, "_tiles", lambda x, keys=False: tiles_of(width))
    check(gradients(block_attention, tensors, blocks), expected, relative)


def tiles_of(width: int) -> dict[str, int]:
    return {"D": max(16, 1 << (width - 1).bit_length()), "BM": 32, "BN": 16, "num_warps": 4, "num_stages": 1}


def check(found: list[Tensor], expected: list[Tensor], relative: float) -> None:
    names = ("context", "q", "k", "v", "own_k", "own_v")
    for name, a, b in zip(names, expected, found, strict=True):
        error = (b.double() - a.double()).abs().max()
        assert error <= relative * a.double().abs().max(), f"{name}: {error}"


@interpreter
def test_the_kernels_read_and_write_strided_heads(monkeypatch):
    """Queries, keys and values as slices of packed projections, as training lays them out."""
    pytest.importorskip("triton")
    monkeypatch.setattr(attention, "wants_kernel", lambda x: True)
    blocks = blocks_of(4)
    tensors = inputs(blocks, 4, 2, 16, torch.float32)
    expected = gradients(block_attention_eager, tensors, blocks)
    q, k, v, own_k, own_v = tensors
    packed, context = torch.cat((q, own_k, own_v), 1), torch.cat((k, v), 1)
    strided = (*packed.split((4, 2, 2), 1), *context.split((2, 2), 1))
    q, own_k, own_v, k, v = strided
    fused = attention.BlockAttention(blocks, ROWS)
    out, saved = fused.forward(q, k, v, own_k, own_v)
    d_packed, d_context = torch.full_like(packed, torch.nan), torch.full_like(context, torch.nan)
    dq, d_own_k, d_own_v = d_packed.split((4, 2, 2), 1)
    dk, dv = d_context.split((2, 2), 1)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    fused.backward(grad, (q, k, v, own_k, own_v), out, saved, (dq, dk, dv, d_own_k, d_own_v))
    check([out, dq, dk, dv, d_own_k, d_own_v], expected, 1e-5)
