"""Keys and values of all layers, stored by one kernel or its eager twin, against the layer's own modules."""

from __future__ import annotations

import pytest
import torch
from eval_help import DEVICE, KERNEL_DTYPES, close, needs_kernels, random

from headstart.eval.drafters.layer import rope_tables
from headstart.eval.kernels.context_store import ContextStore, context_store_eager, context_store_kernel
from headstart.heads.dims import HeadDims
from headstart.heads.layers import LaterLayer, Rope

LAYERS, BATCH, COLUMNS, SLOTS = 3, 3, 4, 20
COUNTS, LENGTHS = [4, 0, 2], [0, 5, 15]


def dims_of(width: int, kv_heads: int, partial: float) -> HeadDims:
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": partial}
    return HeadDims(32, 97, 8, 2 * kv_heads, kv_heads, width, 48, rms_norm_eps=1e-2, rope_parameters=rope)


def example(dims: HeadDims, dtype: torch.dtype) -> tuple[list[torch.Tensor], ContextStore]:
    """(kv, count, length), store."""
    g, d = dims.num_kv_heads, dims.head_dim
    tables = rope_tables(Rope(dims).to(DEVICE), SLOTS, torch.device(DEVICE))
    store = ContextStore(random(LAYERS, d, seed=3).abs() + 0.5, dims.rms_norm_eps, *tables)
    kv = random(BATCH * COLUMNS, LAYERS * 2 * g * d, dtype=dtype)
    return [kv, *(torch.tensor(x, device=DEVICE) for x in (COUNTS, LENGTHS))], store


def buffers(dims: HeadDims, dtype: torch.dtype) -> torch.Tensor:
    shape = (LAYERS, 2, BATCH, dims.num_kv_heads, SLOTS + 1, dims.head_dim)
    return torch.full(shape, 7.0, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_each_layer_stores_what_its_own_modules_make(partial: float) -> None:
    dims = dims_of(8, 2, partial)
    rows, store = example(dims, torch.float32)
    whole = buffers(dims, torch.float32)
    after = context_store_eager(*rows, store, whole)
    assert after.tolist() == [4, 5, 17]
    kv, rope = rows[0].view(BATCH, COLUMNS, LAYERS, 2, 2, 8), Rope(dims).to(DEVICE)
    expected = buffers(dims, torch.float32)
    for n in range(LAYERS):
        attention = LaterLayer(32, 48, dims, "silu", True).self_attn.to(DEVICE)
        with torch.no_grad():
            attention.k_norm.weight.copy_(store.factor_nd[n])
            for b, (count, length) in enumerate(zip(COUNTS, LENGTHS, strict=True)):
                for j in range(count):
                    cos, sin = rope(torch.tensor([length + j], device=DEVICE))
                    expected[n, 0, b, :, length + j] = attention.rotated_keys(kv[b, j, n, 0][None], cos, sin)[0]
                    expected[n, 1, b, :, length + j] = kv[b, j, n, 1]
    torch.testing.assert_close(whole[..., :-1, :], expected[..., :-1, :])


@needs_kernels
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("width", "kv_heads", "partial"), [(16, 2, 1.0), (24, 1, 0.5), (64, 3, 1.0)])
def test_the_kernel_stores_the_same(width: int, kv_heads: int, partial: float, dtype: torch.dtype) -> None:
    dims = dims_of(width, kv_heads, partial)
    rows, store = example(dims, dtype)
    found, expected = buffers(dims, dtype), buffers(dims, dtype)
    assert torch.equal(context_store_kernel(*rows, store, found), context_store_eager(*rows, store, expected))
    close(found[:, 0, ..., :-1, :], expected[:, 0, ..., :-1, :])
    assert torch.equal(found[:, 1, ..., :-1, :], expected[:, 1, ..., :-1, :])
