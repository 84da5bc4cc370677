"""Norms and rotation of queries and keys: against the modules with autograd, the kernels against the twin."""

from __future__ import annotations

import os

import pytest
import torch

from headstart.heads.kernels import head_norms
from headstart.heads.kernels.elementwise import rms_norm_eager, rotate_eager
from headstart.heads.kernels.head_norms import HeadNorms, norm_rotate, norm_rotate_backward

interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 (and Triton)"
)
EPS = 1e-3


def case(layers: int, queries: int, keys: int, more: int, width: int, rotary: int, dtype: torch.dtype):
    """(x [5, L, H, D] whose rows are wider than their heads, norms, cos, sin, gradient of the result)."""
    noise = torch.Generator().manual_seed(0)
    packed = torch.randn(5, layers * (queries + keys + more) * width + 8, generator=noise).to(dtype)
    x = packed[:, :-8].unflatten(1, (layers, -1, width))
    weight = 1 + torch.randn(layers, 2, width, generator=noise).to(dtype) / 4
    angle = torch.randn(5, rotary // 2, generator=noise).repeat(1, 2).to(dtype)
    grad = torch.randn(5, layers, queries + keys, width, generator=noise).to(dtype)
    return x, HeadNorms(weight, queries, keys, EPS), angle.cos(), angle.sin(), grad


SHAPES = [(1, 4, 2, 2, 16, 16), (3, 0, 2, 2, 24, 8), (2, 9, 3, 0, 8, 8), (1, 2, 1, 1, 2048, 2048)]


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_norm_rotate_is_norm_then_rotation(shape):
    x, norms, cos, sin, grad = case(*shape, dtype=torch.float64)
    leaf, weight = x.clone().requires_grad_(), norms.weight_L2D.clone().requires_grad_()
    layers, queries, keys = shape[:3]
    parts = []
    for layer in range(layers):
        for kind, heads in ((0, slice(0, queries)), (1, slice(queries, queries + keys))):
            parts.append(rotate_eager(rms_norm_eager(leaf[:, layer, heads], weight[layer, kind], EPS), cos, sin))
    expected = torch.cat(parts, 1).unflatten(1, (layers, -1))
    torch.testing.assert_close(norm_rotate(x, norms, cos, sin), expected)
    d_x, d_weight = torch.autograd.grad(expected, (leaf, weight), grad)
    out = torch.full_like(x, 7.0)
    torch.testing.assert_close(norm_rotate_backward(grad, x, norms, cos, sin, out), d_weight)
    torch.testing.assert_close(out[:, :, : queries + keys], d_x[:, :, : queries + keys])
    assert (out[:, :, queries + keys :] == 7).all()


@interpreter
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("partials", [6, 528])
def test_the_kernels_interpreted_are_the_twin(shape, partials, monkeypatch):
    """Heads that fill programs or leave the last one partly empty; programs that take several rows."""
    pytest.importorskip("triton")
    x, norms, cos, sin, grad = case(*shape, dtype=torch.float32)
    twin = torch.full_like(x, 7.0)
    expected = (norm_rotate(x, norms, cos, sin), norm_rotate_backward(grad, x, norms, cos, sin, twin), twin)
    monkeypatch.setattr(head_norms, "wants_kernel", lambda x: True)
    monkeypatch.setattr(head_norms, "PARTIALS", partials)
    out = torch.full_like(x, 7.0)
    found = (norm_rotate(x, norms, cos, sin), norm_rotate_backward(grad, x, norms, cos, sin, out), out)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
