"""Rope and the store into the buffers against the eager twin: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from eval_help import DEVICE, KERNEL_DTYPES, close, needs_kernels, random

from headstart.eval.kernels.norm import NormWeights
from headstart.eval.kernels.rope_store import RopeStore, rope_store_eager, rope_store_kernel

pytest.importorskip("triton")
pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (9, 3), (3, 1)])
@pytest.mark.parametrize(("width", "rotary", "norm"), [(16, 16, False), (24, 8, True), (64, 64, True)])
def test_rope_store(width: int, rotary: int, norm: bool, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Heads that fill programs or leave the last one half empty; nothing beside the buffers is written."""
    slots, write = 9, torch.tensor([[0, 3, 8], [1, 2, 5]], device=DEVICE)
    q_norm, k_norm = (NormWeights(random(width, seed=n).abs() + 0.5, eps) for n, eps in ((1, 1e-5), (2, 0.5)))
    shape = RopeStore(heads, kv_heads, width, (q_norm, k_norm) if norm else None)
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


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
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
