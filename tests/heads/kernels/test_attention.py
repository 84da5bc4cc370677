"""Attention of training-time test against one softmax per row and head, over an explicit list of keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from reference.families import PATTERNS
from reference.tiny import assert_near, turns_of
from torch import Tensor

from headstart.heads.batch import FeatureBatch
from headstart.heads.kernels.attention import TrainAttention

FAMILIES, GROUPS, WIDTH = 4, 2, 8


def pack(depth: int, pad_to: int = 50) -> FeatureBatch:
    documents = [
        (torch.zeros(len(p), dtype=torch.int64), torch.tensor(turns_of(p), dtype=torch.int64)) for p in PATTERNS
    ]
    return FeatureBatch.pack(documents, depth, pad_to)


def tensors(batch: FeatureBatch, step: int, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and step - 1 own keys, then as many own values; all leaves."""
    noise = torch.Generator().manual_seed(step)
    count, rows = batch.anchors.count_K[step - 1], batch.tokens_R.shape[0]
    shapes = [(count, FAMILIES, width), (rows, GROUPS, width), (rows, GROUPS, width)]
    # own keys were made at earlier, wider steps: more rows than this step's
    shapes += [(batch.anchors.count_K[i], GROUPS, width) for i in range(1, step)] * 2
    return [torch.randn(s, generator=noise, dtype=torch.float64).to(dtype).requires_grad_(True) for s in shapes]


def naive(
    batch: FeatureBatch, q: Tensor, k: Tensor, v: Tensor, own_k: Sequence[Tensor], own_v: Sequence[Tensor]
) -> Tensor:
    """Row p sees step-1 rows of its document at positions ≤ p, and its own later keys."""
    out = []
    for a in range(q.shape[0]):
        row = int(batch.anchors.row_A[a])
        seen = [r for r in range(row + 1) if batch.doc_R[r] == batch.doc_R[row]]
        heads = []
        for h in range(FAMILIES):
            g = h // (FAMILIES // GROUPS)
            keys = [k[r, g] for r in seen] + [own[a, g] for own in own_k]
            values = [v[r, g] for r in seen] + [own[a, g] for own in own_v]
            p = torch.softmax(torch.stack([q[a, h] @ key for key in keys]) / math.sqrt(q.shape[-1]), dim=0)
            heads.append(torch.einsum("j,jd->d", p, torch.stack(values)))
        out.append(torch.stack(heads))
    return torch.stack(out)


def split(x: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    own = (len(x) - 3) // 2
    return x[0], x[1], x[2], x[3 : 3 + own], x[3 + own :]


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_eager_and_its_gradients(step: int):
    batch = pack(4)
    x = tensors(batch, step)
    found = TrainAttention(batch, "eager").attend(*split(x))
    expected = naive(batch, *split(x))
    assert_near(found, expected, "context", 1e-12)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for i, (a, b) in enumerate(
        zip(torch.autograd.grad(found, x, upstream), torch.autograd.grad(expected, x, upstream), strict=True)
    ):
        assert_near(a, b, f"gradient of input {i}", 1e-12)


def test_eager_in_fixed_shapes():
    batch = pack(3, pad_to=0)
    x = tensors(batch, 1)
    expected = naive(batch, *split(x))
    fixed = replace(batch).padded(rows=60, anchors=40, documents=9)
    grow = lambda t, n: torch.cat((t.detach(), torch.full((n - t.shape[0], *t.shape[1:]), 7.0, dtype=t.dtype)))  # noqa: E731
    found = TrainAttention(fixed, "eager").attend(grow(x[0], 40), grow(x[1], 60), grow(x[2], 60))
    assert found.shape[0] == 40
    assert_near(found[: len(batch.anchors)], expected, "context", 1e-12)
