"""Training of drafted blocks on CUDA: the attention's kernels against their eager twin, and how fast they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headstart.heads.kernels.block_attention import BlockAttention, BlockRows, block_attention, block_attention_eager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_blocks(lengths: list[int], per_document: int, size: int, padding: int = 0) -> BlockRows:
    """Blocks at random rows of documents that lie end to end, then `padding` blocks that see no context."""
    noise, first, start, stop = torch.Generator().manual_seed(0), 0, [], []
    for length in lengths:
        rows = torch.randperm(length, generator=noise)[:per_document].sort().values
        start.append(torch.full((len(rows),), first))
        stop.append(first + rows + 1)
        first += length
    empty = torch.full((padding,), first)
    return BlockRows(torch.cat((*start, empty)).cuda(), torch.cat((*stop, empty)).cuda(), size)


def random_inputs(blocks: BlockRows, rows: int, heads: int, groups: int, width: int, dtype: torch.dtype):
    torch.manual_seed(0)
    slots = len(blocks.start_A) * blocks.size
    shapes = [(slots, heads), (rows, groups), (rows, groups), (slots, groups), (slots, groups)]
    return [torch.randn(*shape, width, device="cuda").to(dtype) for shape in shapes]


def gradients(attend, tensors: list[Tensor], blocks: BlockRows, grad: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    context = attend(*leaves, blocks)
    return [context.detach(), *torch.autograd.grad(context, leaves, grad)]


@pytest.mark.parametrize(
    ("heads", "groups", "width", "size"),
    [(8, 2, 128, 7), (8, 2, 128, 16), (9, 3, 64, 8), (4, 2, 96, 8), (4, 2, 256, 8), (2, 2, 16, 1)],
)
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)], ids=str
)
def test_the_kernels_are_the_twin(heads, groups, width, size, dtype, most):
    lengths = [700, 3, 1000, 41]
    blocks = make_blocks(lengths, 150, size, padding=20)
    tensors = random_inputs(blocks, sum(lengths) + 9, heads, groups, width, dtype)
    grad = torch.randn_like(tensors[0])
    expected = gradients(block_attention_eager, [x.double() for x in tensors], blocks, grad.double())
    found = gradients(block_attention, tensors, blocks, grad)
    for name, a, b in zip(("context", "q", "k", "v", "own_k", "own_v"), expected, found, strict=True):
        error = float((b.double() - a).norm() / a.norm())
        assert error <= most, f"{name}: {error}"


@pytest.mark.parametrize(
    ("lengths", "per_document", "heads", "groups", "width", "size"),
    [([2048] * 4, 512, 32, 8, 128, 7), ([2048] * 4, 512, 32, 8, 128, 16), ([512] * 32, 64, 9, 3, 64, 8)],
    ids=["8b_block_7", "8b_block_16", "smollm2_block_8"],
)
def test_how_fast_the_attention_is(lengths, per_document, heads, groups, width, size):
    """Prints milliseconds and TFLOP/s, of the scores that are not masked; run with -s."""
    blocks = make_blocks(lengths, per_document, size)
    inputs = tuple(random_inputs(blocks, sum(lengths), heads, groups, width, torch.bfloat16))
    attention, into = BlockAttention(blocks, sum(lengths)), tuple(torch.empty_like(x) for x in inputs)
    context, saved = attention.forward(*inputs)
    grad = torch.randn_like(context)
    scores = int((blocks.stop_A - blocks.start_A + size).sum()) * size * heads
    for name, step, products in (
        ("forward", lambda: attention.forward(*inputs), 2),
        ("backward", lambda: attention.backward(grad, inputs, context, saved, into), 5),
    ):
        milliseconds = clock(step)
        rate = 2 * products * scores * width / milliseconds / 1e9
        print(f"{name}: {milliseconds:.3f} ms, {rate:.0f} TFLOP/s")
        assert rate > 20


def clock(step, runs: int = 10) -> float:
    """Milliseconds of one call."""
    for _ in range(3):
        step()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(runs):
        step()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / runs
