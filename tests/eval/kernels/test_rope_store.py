"""Rope and the store into the buffers against the eager twin: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from eval_help import DEVICE, KERNEL_DTYPES, KERNELS_RUN, close, needs_kernels, random

from headstart.eval.kernels.flat import flatten
from headstart.eval.kernels.norm import NormWeights
from headstart.eval.kernels.rope_store import RopeStore, rope_store_eager, rope_store_kernel

pytest.importorskip("triton")


@needs_kernels
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


@needs_kernels
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


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("rows", [2, 4, 5, 9])
def test_rope_store_of_flat_rows(rows: int, by_position: bool, dtype: torch.dtype) -> None:
    """Kept places are written as among all places, cut ones not at all. Rows that are left over write nothing else."""
    write, position = (torch.tensor(x, device=DEVICE) for x in ([[0, 3, 8], [1, 2, 5]], [[4, 11, 5], [0, 1, 4]]))
    flat = flatten(torch.tensor([[False, True], [True, True]], device=DEVICE), rows)
    kept = min(rows, 5)
    shape, qkv = RopeStore(4, 2, 16), random(6, 8 * 16, dtype=dtype)
    cos, sin = (torch.cat([random(12, 8, dtype=dtype, seed=n)] * 2, 1) for n in (3, 4))
    tables = [cos, sin] if by_position else [table[position.flatten()] for table in (cos, sin)]
    of_rows = tables if by_position else [flat.gather(table) for table in tables]
    at = position if by_position else None
    given = flat.gather(qkv)
    # rows that are left over hold something else than the row of place 0
    given[kept:] += 1
    whole, found, eager = ([torch.full((2, 2, 9, 16), 7.0, dtype=dtype, device=DEVICE) for _ in "kv"] for _ in range(3))
    queries = rope_store_eager(qkv, *tables, shape, *whole, write, at)
    q_eager = rope_store_eager(given, *of_rows, shape, *eager, write, at, flat)
    close(q_eager[:kept], queries[flat.place_F[:kept]])
    for part, expected in zip(eager, whole, strict=True):
        for b, m in flat.kept_BM.nonzero().tolist():
            close(part[b, :, write[b, m]], expected[b, :, write[b, m]])
        assert int((part != 7).any(-1).sum()) == 2 * kept
    if KERNELS_RUN:
        close(rope_store_kernel(given, *of_rows, shape, *found, write, at, flat), q_eager)
        close(found[0], eager[0])
        assert torch.equal(found[1], eager[1])


#: what the layers of architectures do otherwise than Llama's
FORMS = {
    "pairs": {"rotation": "pairs"},
    "pairs by angle": {"rotation": "pairs", "by_angle": True},
    "pairs by angle, partial": {"rotation": "pairs", "by_angle": True, "rotary": 8},
    "halves by angle": {"by_angle": True, "rotary": 16},
    "none": {"rotation": "none"},
    "grouped": {"grouped": True},
    "norm last": {"norm_last": True},
    "norms over all heads": {},
}


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_rotary_embedding(form: str, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    d, write = 16, torch.tensor([[0, 3, 8], [1, 2, 5]], device=DEVICE)
    wide = form == "norms over all heads"
    normed = wide or form == "norm last"
    widths = (heads * d, kv_heads * d) if wide else (d, d)
    q_norm = NormWeights(random(widths[0], seed=1).abs() + 0.5, 1e-5)
    k_norm = NormWeights(random(widths[1], seed=2).abs() + 0.5, 0.5)
    shape = RopeStore(heads, kv_heads, d, (q_norm, k_norm) if normed else None, **FORMS[form])
    qkv = random(6, (heads + 2 * kv_heads) * d, dtype=dtype)
    # halves by angle: tables hold each angle once; partial: half of a table's entries count
    entries = 8 if form in ("halves by angle", "pairs by angle, partial") else 16
    cos, sin = (random(6, entries, dtype=dtype, seed=n) for n in (3, 4))
    found = [torch.zeros(2, kv_heads, 9, d, dtype=dtype, device=DEVICE) for _ in range(2)]
    expected = [torch.zeros_like(part) for part in found]
    queries = rope_store_eager(qkv, cos, sin, shape, *expected, write)
    if KERNELS_RUN:
        close(rope_store_kernel(qkv, cos, sin, shape, *found, write), queries)
        close(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    if dtype == torch.float32:
        naive = naive_rows(qkv.cpu(), cos.cpu(), sin.cpu(), shape)
        at = [(b, int(slot)) for b in range(2) for slot in write[b]]
        close(queries.cpu(), naive[0])
        close(torch.stack([expected[0][b, :, slot] for b, slot in at]).cpu(), naive[1])
        close(torch.stack([expected[1][b, :, slot] for b, slot in at]).cpu(), naive[2])


def naive_rows(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shape: RopeStore
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys, values [R, n, d], one number at a time."""
    h, g, d = shape.heads, shape.kv_heads, shape.head_dim
    made = []
    for row in range(qkv.shape[0]):
        pieces = qkv[row].view(-1, d)
        if shape.grouped:
            per = h // g + 2
            q = [pieces[j * per + i] for j in range(g) for i in range(h // g)]
            k, v = ([pieces[j * per + h // g + i] for j in range(g)] for i in (0, 1))
        else:
            q, k, v = list(pieces[:h]), list(pieces[h : h + g]), list(pieces[h + g :])
        turned = []
        for part, norm in zip((q, k), shape.norms or (None, None), strict=True):
            if norm is not None and norm.factor_D.numel() != d:
                part = list(naive_norm(torch.cat(part), norm).view(-1, d))
            elif norm is not None and not shape.norm_last:
                part = [naive_norm(head, norm) for head in part]
            part = [naive_turn(head, cos[row], sin[row], shape) for head in part]
            if norm is not None and shape.norm_last:
                part = [naive_norm(head, norm) for head in part]
            turned.append(torch.stack(part))
        made.append((*turned, torch.stack(v)))
    q, k, v = (torch.stack(part) for part in zip(*made, strict=True))
    return q, k, v


def naive_norm(x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
    return x / (x.square().mean() + norm.eps).sqrt() * norm.factor_D.cpu()


def naive_turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shape: RopeStore) -> torch.Tensor:
    """Angle n rotates the plane of channels 2n and 2n + 1, or of n and n + W/2."""
    y = x.clone()
    width = 0 if shape.rotation == "none" else shape.rotary or len(cos)
    for n in range(width // 2):
        a, b = (2 * n, 2 * n + 1) if shape.rotation == "pairs" else (n, n + width // 2)
        at_a, at_b = (n, n) if shape.by_angle else (a, b)
        y[a] = x[a] * cos[at_a] - x[b] * sin[at_a]
        y[b] = x[b] * cos[at_b] + x[a] * sin[at_b]
    return y


def rope_keys(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shape: RopeStore, write: torch.Tensor):
    keys, values = (torch.zeros(2, 2, 9, 16, dtype=qkv.dtype, device=DEVICE) for _ in range(2))
    rope_store_eager(qkv, cos, sin, shape, keys, values, write)
    return keys


@needs_kernels
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
