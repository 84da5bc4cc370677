"""The written-out layers of block heads against the modules with autograd: values, every gradient, and what padding,
parts and recomputation must not change."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from reference.families import DIMS, PARTIAL_ROPE
from torch import Tensor

from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.families import build_head
from headstart.heads.families.block import head as block_head
from headstart.heads.families.block import stack
from headstart.heads.families.dflash.head import DFlashConfig
from headstart.heads.gradients import adding_gradients
from headstart.heads.kernels import block_attention as attention
from headstart.heads.kernels import block_attention_kernels, elementwise, head_norms, rows
from headstart.heads.kernels.block_attention import block_attention_eager

interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 (and Triton)"
)


ODD_DIMS = replace(DIMS, num_heads=6, num_kv_heads=2, head_dim=8, rope_parameters=PARTIAL_ROPE)


def make(dtype: torch.dtype = torch.float64, dims: HeadDims = DIMS, causal: bool = False, **fields):
    """A head with random weights and a pack of two documents; 11 anchors of different depths."""
    torch.manual_seed(0)
    head = build_head(DFlashConfig(**{"depth": 3, "mask_token_id": 5, "layers": 3, **fields}), dims)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 + (parameter.ndim < 2))
    head = head.to(dtype)
    head.causal = causal
    width, vocab = dims.hidden_size, dims.vocab_size
    weight = torch.randn(vocab, width, dtype=dtype)
    head.bind(TargetEnds(torch.randn(vocab, width, dtype=dtype), Teacher(weight)))
    documents = [(torch.randint(0, vocab, (n,)), torch.tensor([-1] * 3 + [0] * (n - 3))) for n in (9, 11)]
    batch = FeatureBatch.pack(documents, head.depth, pad_to=23)
    batch.streams_RkD = torch.randn(23, len(head.spec.layer_ids), width, dtype=dtype)
    batch.hidden_RD = torch.randn(23, width, dtype=dtype)
    return head, batch


def slow(head, batch: FeatureBatch) -> Tensor:
    """`slots`, one module after the other."""
    row_A, size = batch.anchors.row_A, head.block_size
    c_RD = head.context(batch.streams_RkD)
    z_MD = head.embed(head.block_tokens(batch.tokens_R[(row_A + 1).clamp(max=len(batch.tokens_R) - 1)])).flatten(0, 1)
    cos, sin = head.rope((batch.position_R[row_A][:, None] + 1 + torch.arange(size)).flatten())
    cos_R, sin_R = head.rope(batch.position_R)
    for layer in head.layers:
        projections, u_MD = layer.self_attn, layer.input_layernorm(z_MD)
        q, (own_k, own_v) = projections.queries(u_MD, cos, sin), projections.keys_values(u_MD, cos, sin)
        k, v = projections.keys_values(c_RD, cos_R, sin_R)
        z_MD = layer.finish(block_attention_eager(q, k, v, own_k, own_v, head.blocks(batch)), z_MD)
    return head.norm(z_MD).unflatten(0, (-1, size))[:, size - head.depth :]


def run(slots, head, batch: FeatureBatch) -> list[Tensor]:
    """The slots' outputs, then the gradient of every parameter that they depend on."""
    for parameter in head.parameters():
        parameter.grad = None
    found = slots(head, batch)
    noise = torch.Generator().manual_seed(3)
    (found * torch.randn(found.shape, generator=noise).to(found.dtype)).sum().backward()
    return [found.detach(), *(p.grad.clone() for p in head.parameters() if p.requires_grad)]


def fast(head, batch: FeatureBatch) -> Tensor:
    return head.slots(batch)


CASES = {
    "fill in": {},
    "anchor first": {"sample_from_anchor": True},
    "causal": {"causal": True},
    "odd heads, partial rope": {"dims": ODD_DIMS, "layers": 1},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-4)], ids=str)
def test_it_computes_what_the_modules_do(case, dtype, tolerance):
    head, batch = make(dtype, **case)
    check(run(fast, head, batch), run(slow, head, batch), tolerance)


def check(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a - b).abs().max() <= tolerance * b.abs().max(), number


def test_recomputed_activations_give_the_same_gradients():
    head, batch = make()
    expected = run(fast, head, batch)
    head.recompute_activations()
    check(run(fast, head, batch), expected, 1e-12)


def test_gradients_are_added_where_the_step_allows_it():
    """On top of what is there; autograd gets nothing more to add."""
    head, batch = make()
    expected = run(fast, head, batch)[1:]
    trained = [p for p in head.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    places = [p.grad.data_ptr() for p in trained]
    with adding_gradients(head):
        found = head.slots(batch)
    noise = torch.Generator().manual_seed(3)
    (found * torch.randn(found.shape, generator=noise).to(found.dtype)).sum().backward()
    check([p.grad - 1 for p in trained], expected, 1e-9)
    assert [p.grad.data_ptr() for p in trained] == places


@pytest.mark.parametrize("adds", [False, True])
def test_large_matrices_get_their_gradients_one_by_one(adds, monkeypatch):
    head, batch = make()
    expected = run(fast, head, batch)
    monkeypatch.setattr(stack, "ONE_PRODUCT", 0)
    if not adds:
        return check(run(fast, head, batch), expected, 1e-9)
    for parameter in head.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with adding_gradients(head):
        found = head.slots(batch)
    noise = torch.Generator().manual_seed(3)
    (found * torch.randn(found.shape, generator=noise).to(found.dtype)).sum().backward()
    check([p.grad for p in head.parameters() if p.requires_grad], expected[1:], 1e-9)


def test_a_frozen_parameter_gets_no_gradient():
    head, batch = make()
    head.layers[1].mlp.up_proj.requires_grad_(False)
    head.slots(batch).sum().backward()
    assert head.layers[1].mlp.up_proj.weight.grad is None and head.fc.weight.grad is not None


def test_padding_changes_nothing():
    """Rows and anchors of a captured shape: neither the slots nor any gradient move."""
    head, batch = make()
    expected, count = run(fast, head, batch), len(batch.anchors)
    padded = batch.padded(40, count + 6, 4)
    found = run(lambda head, batch: head.slots(batch)[:count], head, padded)
    check(found, expected, 1e-9)
    assert head.slots(padded).isfinite().all()


def test_parts_without_gradients_give_the_same_slots(monkeypatch):
    """Three anchors at a time, the last part smaller; the anchors' order is not that of their rows."""
    head, batch = make()
    expected = head.slots(batch).detach()
    monkeypatch.setattr(block_head, "SLOTS_AT_ONCE", 3 * head.block_size)
    with torch.no_grad():
        torch.testing.assert_close(head.slots(batch), expected)
    assert batch.anchors.row_A.tolist() != sorted(batch.anchors.row_A.tolist())


def test_under_autocast_parts_compute_in_its_dtype_too():
    head, batch = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        trained = head.slots(batch).detach()
        with torch.no_grad():
            found = head.slots(batch)
    assert found.dtype == trained.dtype == torch.bfloat16
    torch.testing.assert_close(found, trained, rtol=0.02, atol=0.02)


def test_a_pack_without_anchors_has_no_slots():
    head, batch = make()
    empty = batch.drawn(torch.tensor([], dtype=torch.int64))
    assert head.slots(empty).shape == (0, head.depth, DIMS.hidden_size)
    with torch.no_grad():
        assert head.slots(empty).shape == (0, head.depth, DIMS.hidden_size)


@interpreter
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_computes_the_same_with_the_kernels_interpreted(case, monkeypatch):
    pytest.importorskip("triton")
    head, batch = make(torch.float32, **case)
    expected = run(slow, head, batch)
    for module in (attention, elementwise, head_norms, rows):
        monkeypatch.setattr(module, "wants_kernel", lambda x: True)
    tiles = {"D": 16, "BM": 32, "BN": 16, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(block_attention_kernels, "_tiles", lambda x, keys=False: tiles)
    count = len(batch.anchors)
    found = run(lambda head, batch: head.slots(batch)[:count], head, batch.padded(40, count + 3, 4))
    check(found, expected, 2e-4)
