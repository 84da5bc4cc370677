"""One weight gradient for all depths equals depth-by-depth losses, for the combination the scale promises."""

from __future__ import annotations

import pytest
import torch

from headstart.heads.losses import eager, fused


@pytest.mark.parametrize("chunk", [1 << 28, 40])
@pytest.mark.parametrize("kind", ["soft_ce", "kl", "lk"])
@pytest.mark.parametrize("counts", [(9, 6, 2), (5, 0, 0), (1,)])
def test_equals_depth_by_depth(counts, kind, chunk, monkeypatch):
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", chunk)  # 40 elements: two rows at a time
    torch.manual_seed(0)
    weight = torch.randn(17, 8, dtype=torch.float64, requires_grad=True)
    hidden = [torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in counts]
    teacher = torch.randn(7, 17, dtype=torch.float64) * 2
    rows = [torch.randint(0, 7, (n,)) for n in counts]
    row_weight = [(torch.rand(n, dtype=torch.float64) > 0.3).double() for n in counts]
    scale_K = torch.rand(len(counts), dtype=torch.float64)
    pairs = [eager.soft_loss(h, weight, teacher, r, w, kind) for h, r, w in zip(hidden, rows, row_weight, strict=True)]
    expected = sum(scale * loss for scale, (loss, _) in zip(scale_K, pairs, strict=True)) * 3
    loss_K, argmax = fused.soft_loss_depths(torch.cat(hidden), weight, teacher, rows, row_weight, scale_K, kind)
    torch.testing.assert_close(loss_K, torch.stack([loss for loss, _ in pairs]))
    assert all(torch.equal(a, b) for a, (_, b) in zip(argmax, pairs, strict=True))
    inputs = [weight, *hidden]
    reference = torch.autograd.grad(expected, inputs)
    for found, wanted in zip(torch.autograd.grad((loss_K * scale_K).sum() * 3, inputs), reference, strict=True):
        torch.testing.assert_close(found, wanted)
