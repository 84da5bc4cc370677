"""Attention inside the documents of a pack, against explicit scores and a mask over all rows."""

from __future__ import annotations

import pytest
import torch

from headstart.heads.batch import FeatureBatch
from headstart.heads.kernels.packed import PackRows, packed_attention


def naive(q, k, v, doc_R, scale):
    """Every row attends to earlier rows of its own document, written with one mask over all pairs of rows."""
    share, rows = q.shape[1] // k.shape[1], torch.arange(len(q))
    seen = (doc_R[:, None] == doc_R[None, :]) & (rows[:, None] >= rows[None, :])
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("rhd,shd->hrs", q, k) * scale
    return torch.einsum("hrs,shd->rhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("lengths", [(5, 1, 9), (7,), (2, 2, 2)])
@pytest.mark.parametrize("padding", [0, 4])
def test_values_and_gradients(lengths, padding):
    noise = torch.Generator().manual_seed(0)
    documents = [(torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)) for n in lengths]
    batch = FeatureBatch.pack(documents, 1, pad_to=sum(lengths) + padding)
    used, rows = sum(lengths), len(batch.tokens_R)

    def inputs():
        noise.manual_seed(1)
        return [torch.randn(rows, h, 8, generator=noise, dtype=torch.float64).requires_grad_() for h in (4, 2, 2)]

    found_inputs, wanted_inputs = inputs(), inputs()
    found = packed_attention(*found_inputs, PackRows.of(batch), 0.3)
    wanted = naive(*(x[:used] for x in wanted_inputs), batch.doc_R[:used], 0.3)
    assert found.shape == (rows, 4, 8) and torch.isfinite(found).all()
    torch.testing.assert_close(found[:used], wanted)
    upstream = torch.randn(wanted.shape, generator=noise, dtype=torch.float64)
    (found[:used] * upstream).sum().backward()
    (wanted * upstream).sum().backward()
    for x, y in zip(found_inputs, wanted_inputs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
