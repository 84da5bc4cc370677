"""Hand-written backward passes of a draft layer's row-wise steps against autograd, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from headstart.heads.kernels import rows
from headstart.heads.kernels.elementwise import rotate_eager


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_rms_norm_backward(residual, accumulate):
    x, weight, grad = random(7, 12).requires_grad_(), random(12).requires_grad_(), random(7, 12)
    expected_x, expected_weight = torch.autograd.grad(F.rms_norm(x, (12,), weight, 1e-5), (x, weight), grad)
    extra, before = random(7, 12), random(7, 12)
    out = before.clone()
    found = rows.rms_norm_backward(
        grad, x.detach(), weight.detach(), 1e-5, out, extra if residual else None, accumulate
    )
    torch.testing.assert_close(out, expected_x + (extra if residual else 0) + (before if accumulate else 0))
    torch.testing.assert_close(found, expected_weight)


@pytest.mark.parametrize("act", [None, F.gelu])
def test_gated(act):
    packed, grad = random(5, 16).requires_grad_(), random(5, 8)
    expected = (act or F.silu)(packed[:, :8]) * packed[:, 8:]
    (gradient,) = torch.autograd.grad(expected, packed, grad)
    out, in_place = random(5, 8), packed.detach().clone()
    rows.gated(in_place, out, act)
    torch.testing.assert_close(out, expected)
    rows.gated_backward(in_place, grad, act)
    torch.testing.assert_close(in_place, gradient)


def test_rotate_heads_and_its_transpose():
    """Heads past `turned` and channels past the rotary width pass through; -sin gives the gradient."""
    x, angle = random(6, 5 * 8).requires_grad_(), random(6, 3).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    expected = torch.cat((rotate_eager(x.unflatten(1, (5, 8))[:, :3], cos, sin).flatten(1), x[:, 24:]), dim=1)
    wider = random(6, 50)
    found = rows.rotate_heads(x.detach(), cos, sin, 3, 8, wider[:, :40])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(wider[:, :40], expected)
    grad = random(6, 40)
    (gradient,) = torch.autograd.grad(expected, x, grad)
    torch.testing.assert_close(rows.rotate_heads(grad, cos, -sin, 3, 8), gradient)


def test_collect_steps_by_hand():
    """Anchors at rows 1 and 3 of 6, two steps that start one row ahead; the second step has the first anchor alone."""
    grad = torch.tensor([[1.0], [10.0], [100.0]])
    found = rows.collect_steps(grad, torch.tensor([1, 3]), (2, 1), 6, first=1)
    assert found.flatten().tolist() == [0, 0, 1, 100, 10, 0]


def test_put_and_add_rows():
    into = torch.zeros(4, 3)
    rows.put_rows(into, torch.tensor([2, 0]), torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
    rows.add_rows(into, torch.tensor([2]), torch.tensor([[1.0, 1, 1]]))
    assert into.tolist() == [[4, 5, 6], [0, 0, 0], [2, 3, 4], [0, 0, 0]]
