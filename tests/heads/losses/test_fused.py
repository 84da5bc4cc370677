"""The fused output losses against the readable ones, and those against the formula."""

from __future__ import annotations

import math
import os

import pytest
import torch
from reference.documents import mixed, soft_cross_entropy
from torch import Tensor

from headstart.heads.kernels import losses as kernels
from headstart.heads.losses import eager, fused

ROWS, HIDDEN, TOKENS, TEACHERS = 13, 16, 61, 7
interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 (and Triton)"
)
#: name → kind, and the weights of LK and L1 beside it
MIXES = {"kl, lk and l1": ("kl", (0.3, 0.7)), "soft_ce and lk": ("soft_ce", (0.5, 0.0))}
KINDS = ["soft_ce", "kl", "lk", "hard_ce", *MIXES]


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(ROWS, HIDDEN, generator=noise).to(dtype).requires_grad_(True),
        "weight": torch.randn(TOKENS, HIDDEN, generator=noise).to(dtype).requires_grad_(True),
        "teacher": (3 * torch.randn(TEACHERS, TOKENS, generator=noise)).to(dtype),
        "row": torch.randint(0, TEACHERS, (ROWS,), generator=noise),
        "label": torch.randint(0, TOKENS, (ROWS,), generator=noise),
        "row_weight": torch.rand(ROWS, generator=noise) * (torch.arange(ROWS) % 3 > 0),
    }


def run(module, kind: str, x: dict[str, Tensor], factor: float = 1.7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, argmax, gradient of hidden, gradient of weight) with an outer factor on the loss."""
    if kind == "hard_ce":
        loss, argmax = module.hard_ce(x["hidden"], x["weight"], x["label"], x["row_weight"])
    else:
        kind, mix = MIXES.get(kind, (kind, (0.0, 0.0)))
        loss, argmax = module.soft_loss(
            x["hidden"], x["weight"], x["teacher"], x["row"], x["row_weight"], kind, mix=mix
        )
    return loss, argmax, *torch.autograd.grad(loss * factor, [x["hidden"], x["weight"]])


@pytest.mark.parametrize("kind", KINDS)
def test_eager_is_the_formula(kind: str):
    x = inputs()
    loss, argmax, _, _ = run(eager, kind, x)
    expected, best = 0.0, []
    for a in range(ROWS):
        logits = x["weight"] @ x["hidden"][a]
        if kind == "hard_ce":
            value = soft_cross_entropy(torch.nn.functional.one_hot(x["label"][a], TOKENS).double(), logits)
        else:
            named, mix = MIXES.get(kind, (kind, (0.0, 0.0)))
            value = mixed(named, torch.softmax(x["teacher"][x["row"][a]], dim=0), logits, *mix)
        expected += float((x["row_weight"][a] * value).detach())
        best.append(int(logits.argmax()))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert argmax.tolist() == best


# float64 differs by the order of sums; float32 by a few roundings of values near 30; bfloat16 logits carry 8 bits
@pytest.mark.parametrize(
    ("dtype", "relative"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("chunk_rows", [1, 5, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_is_eager(
    kind: str, chunk_rows: int, dtype: torch.dtype, relative: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", chunk_rows * TOKENS)
    names = ("loss", "argmax", "gradient of hidden", "gradient of weight")
    for name, expected, found in zip(
        names, run(eager, kind, inputs(dtype)), run(fused, kind, inputs(dtype)), strict=True
    ):
        assert found.dtype == expected.dtype and found.shape == expected.shape, name
        error = (found.double() - expected.double()).abs().max()
        assert error <= relative * expected.double().abs().max(), f"{name}: {error}"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_weight_zero_leave_no_trace(kind: str):
    x = inputs()
    keep = x["row_weight"] > 0
    part = {**x, **{k: x[k][keep].detach() for k in ("hidden", "row", "label", "row_weight")}}
    part["hidden"].requires_grad_(True)
    loss, _, hidden, weight = run(fused, kind, x)
    loss_part, _, hidden_part, weight_part = run(fused, kind, part)
    torch.testing.assert_close(loss, loss_part, rtol=1e-12, atol=0)
    torch.testing.assert_close(hidden[keep], hidden_part)
    assert not hidden[~keep].any()
    torch.testing.assert_close(weight, weight_part, rtol=1e-12, atol=1e-14)


def test_frozen_output_matrix_needs_no_gradient():
    x = inputs()
    frozen = x["weight"].detach()
    loss, _ = fused.soft_loss(x["hidden"], frozen, x["teacher"], x["row"], x["row_weight"])
    (hidden,) = torch.autograd.grad(loss * 1.7, [x["hidden"]])
    torch.testing.assert_close(hidden, run(eager, "soft_ce", inputs())[2], rtol=1e-6, atol=1e-12)


def test_no_rows():
    x = inputs()
    empty = x["row"][:0]
    for module in (eager, fused):
        for kind in KINDS[:3]:
            loss, argmax = module.soft_loss(
                x["hidden"][:0], x["weight"], x["teacher"], empty, x["row_weight"][:0], kind
            )
            assert loss.item() == 0 and argmax.shape == (0,)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_the_teacher_itself_is_the_minimum(kind: str):
    """Cross-entropy is the teacher's entropy there, KL and -log(acceptance rate) are 0, and every gradient is."""
    x = inputs()
    identity = torch.eye(TOKENS, dtype=torch.float64, requires_grad=True)
    hidden = x["teacher"].clone().requires_grad_(True)
    loss, _ = fused.soft_loss(hidden, identity, x["teacher"], torch.arange(TEACHERS), torch.ones(TEACHERS), kind)
    (gradient,) = torch.autograd.grad(loss, [hidden])
    assert gradient.abs().max() < 1e-14
    p = x["teacher"].softmax(-1)
    entropy = -(p * p.log()).sum()
    torch.testing.assert_close(loss, entropy if kind == "soft_ce" else 0 * entropy, rtol=1e-12, atol=1e-13)


def test_lk_counts_the_share_of_drafts_that_are_accepted():
    """p = (½, ½, 0, 0), q = ¼ each: half of q's drafts pass. A draft that shares nothing costs a finite loss."""
    teacher = torch.tensor([[0.0, 0.0, -200.0, -200.0]], dtype=torch.float64)
    for module in (eager, fused):
        logits = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
        one = torch.ones(1, dtype=torch.float64)
        loss, _ = module.soft_loss(logits, torch.eye(4).double(), teacher, torch.tensor([0]), one, "lk")
        assert loss.item() == pytest.approx(-math.log(0.5), rel=1e-12)
        (gradient,) = torch.autograd.grad(loss, [logits])
        # α = q0 + q1, so d(-log α)/dz = q - q·[kept] / α
        assert gradient[0].tolist() == pytest.approx([-0.25, -0.25, 0.25, 0.25])
        apart = torch.tensor([[-400.0, -400.0, 0.0, 0.0]], requires_grad=True)
        loss, _ = module.soft_loss(apart, torch.eye(4), teacher.float(), torch.tensor([0]), one.float(), "lk")
        (gradient,) = torch.autograd.grad(loss, [apart])
        assert 60 < loss.item() < 70 and gradient.isfinite().all()


def test_autocast_runs_in_its_dtype_and_returns_gradients_in_the_parameters():
    x = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _, hidden, weight = run(fused, "soft_ce", x)
    expected, _, hidden32, weight32 = run(eager, "soft_ce", inputs(torch.float32))
    assert hidden.dtype == weight.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=2e-2)
    for found, wanted in ((hidden, hidden32), (weight, weight32)):
        assert (found - wanted).abs().max() <= 5e-2 * wanted.abs().max()


def test_huge_logits_stay_finite():
    x = inputs(torch.float32)
    with torch.no_grad():
        x["weight"].mul_(1e3)
    for kind in KINDS:
        loss, _, hidden, weight = run(fused, kind, x)
        assert loss.isfinite() and hidden.isfinite().all() and weight.isfinite().all()


@interpreter
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [16, 64])
def test_the_kernel_interpreted_is_eager(
    kind: str, dtype: torch.dtype, relative: float, block: int, monkeypatch: pytest.MonkeyPatch
):
    """61 tokens in blocks of 16 (several, the last one partial) and in one block that is larger than the row."""
    pytest.importorskip("triton")
    expected = run(eager, kind, inputs(dtype))
    monkeypatch.setattr(fused, "wants_kernel", lambda x: True)
    monkeypatch.setattr(kernels, "BLOCK", block)
    found = run(fused, kind, inputs(dtype))
    for name, a, b in zip(("loss", "argmax", "gradient of hidden", "gradient of weight"), expected, found, strict=True):
        error = (b.double() - a.double()).abs().max()
        assert error <= relative * a.double().abs().max(), f"{name}: {error}"


@pytest.mark.parametrize("interpreted", [False, pytest.param(True, marks=interpreter)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_pass_adds_the_scaled_gradient(kind: str, interpreted: bool, monkeypatch: pytest.MonkeyPatch):
    """In chunks, on top of what is there, and scaled by the caller's factor; the input's gradient carries it too."""
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 5 * TOKENS)
    if interpreted:
        pytest.importorskip("triton")
        monkeypatch.setattr(fused, "wants_kernel", lambda x: True)
        monkeypatch.setattr(kernels, "BLOCK", 16)
    dtype = torch.float32
    total, argmax, grad_hidden, grad_weight = run(eager, kind, inputs(dtype), factor=0.3)
    x, scale = inputs(dtype), torch.tensor(0.3)
    start = torch.randn_like(x["weight"])
    x["weight"].grad = start.clone()
    if kind == "hard_ce":
        loss, found = fused.hard_ce(x["hidden"], x["weight"], x["label"], x["row_weight"], adds_scale=scale)
    else:
        named, mix = MIXES.get(kind, (kind, (0.0, 0.0)))
        teacher = x["teacher"], x["row"], x["row_weight"], named
        loss, found = fused.soft_loss(x["hidden"], x["weight"], *teacher, adds_scale=scale, mix=mix)
    (loss * scale).backward()
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-6)
    assert torch.equal(found, argmax)
    torch.testing.assert_close(x["hidden"].grad, grad_hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x["weight"].grad, start + grad_weight, rtol=1e-4, atol=1e-5)


def test_chunks_are_few_and_even():
    # 7 depths of 8,192 rows and 32,000 tokens: 20,971 rows fit
    assert fused.chunk_rows(57344, 32000) == 19200
    assert [fused.chunk_rows(rows, 32000) for rows in (0, 1, 300, 20971)] == [1, 1, 300, 20971]
    for rows in (20972, 41943, 100001):
        chunk = fused.chunk_rows(rows, 32000)
        assert chunk % 128 == 0 and chunk * 32000 <= fused.CHUNK_ELEMENTS
        assert -(-rows // chunk) == -(-rows // 20971)
    host = torch.device("cpu")
    assert fused.chunk_rows(57344, 32000, host) * 32000 <= fused.HOST_CHUNK_ELEMENTS < fused.CHUNK_ELEMENTS
    assert fused.chunk_rows(300, 32000, host) == 300


def test_a_loss_on_a_cpu_makes_no_tensor_above_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that a loss is asked for at a time are counted."""
    monkeypatch.setattr(fused, "HOST_CHUNK_ELEMENTS", 3 * TOKENS)
    x, asked = inputs(), []
    linear = fused.F.linear

    def counted(*args):
        made = linear(*args)
        asked.append(made.numel())
        return made

    monkeypatch.setattr(fused.F, "linear", counted)
    small, _ = fused.soft_loss(x["hidden"], x["weight"], x["teacher"], x["row"], x["row_weight"])
    assert max(asked) == 3 * TOKENS and len(asked) == -(-len(x["hidden"]) // 3)
    monkeypatch.undo()
    whole, _ = fused.soft_loss(x["hidden"], x["weight"], x["teacher"], x["row"], x["row_weight"])
    torch.testing.assert_close(small, whole)


def test_gradients_are_formed_once():
    x = inputs()
    loss, _ = fused.soft_loss(x["hidden"], x["weight"], x["teacher"], x["row"], x["row_weight"])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        loss.backward()


@pytest.mark.parametrize("kind", KINDS)
def test_validation_forms_no_gradient(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Two of the three products are those of the gradients."""
    x = inputs()
    expected = run(fused, kind, x)[:2]
    taken = []
    monkeypatch.setattr(fused, "weight_grad", lambda *arguments: taken.append(arguments))
    monkeypatch.setattr(torch, "mm", lambda *arguments, **options: taken.append(arguments))
    with torch.no_grad():
        if kind == "hard_ce":
            found = fused.hard_ce(x["hidden"], x["weight"], x["label"], x["row_weight"])
        else:
            named, mix = MIXES.get(kind, (kind, (0.0, 0.0)))
            rows = x["row"], x["row_weight"], named
            found = fused.soft_loss(x["hidden"], x["weight"], x["teacher"], *rows, mix=mix)
            depths = [x["row"]], [x["row_weight"]], torch.ones(1, dtype=torch.float64), named, mix
            loss_K, _ = fused.soft_loss_depths(x["hidden"], x["weight"], x["teacher"], *depths)
            assert torch.allclose(loss_K[0], expected[0])
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]) and not taken
