"""The fused loss of drafted blocks against the readable one, and that one against the worked example."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from itertools import combinations
from types import ModuleType

import pytest
import torch
from torch import Tensor

from headstart.heads.ends import Teacher
from headstart.heads.kernels import block_losses as kernels
from headstart.heads.losses import block, block_eager, fused
from headstart.heads.losses.block import KINDS, BlockLabels, BlockLosses, chunk_blocks, dpace_weights

BLOCKS, DEPTH, HIDDEN, RANK, TOKENS, ROWS = 7, 3, 12, 5, 61, 16
interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 (and Triton)"
)
MIXES = [kinds for size in (1, 2, 3, 4) for kinds in combinations(KINDS, size)]


@dataclass
class Case:
    """Arguments of `block_loss`."""

    hidden: Tensor
    output: Tensor
    low: Tensor | None
    up: Tensor | None
    labels: BlockLabels
    rows: Tensor
    teacher: Teacher
    draft_ids: Tensor | None = None

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.low, self.up) if x is not None]

    def run(self, module: ModuleType, kinds: tuple[str, ...], **options: object) -> BlockLosses:
        args = (self.hidden, self.output, self.low, self.up, self.labels, self.rows, self.teacher, self.draft_ids)
        return module.block_loss(*args, kinds, **options)


def case(
    dtype: torch.dtype = torch.float64, corrected: bool = True, reduced: bool = False, rows: int = ROWS, **ends: float
) -> Case:
    """Blocks of three slots; every block ends early somewhere, block 2 is padding, block 4 has a label outside."""
    noise = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=noise, dtype=torch.float64).to(dtype)  # noqa: E731
    vocab = 80 if reduced else TOKENS
    depth_A = torch.tensor([3, 2, 0, 1, 3, 3, 3])
    supervised = depth_A[:, None] > torch.arange(DEPTH)
    active = supervised.clone()
    active[4, 1:] = False
    weight = (active * 0.8 ** torch.arange(DEPTH)).float()
    label = torch.where(active, torch.randint(0, TOKENS, (BLOCKS, DEPTH), generator=noise), 0)
    row = torch.randint(0, rows, (BLOCKS, DEPTH), generator=noise)
    bias = randn(vocab) if ends.pop("bias", 0) else None
    return Case(
        randn(BLOCKS, DEPTH, HIDDEN).requires_grad_(True),
        randn(TOKENS, HIDDEN) / 2,
        randn(BLOCKS, DEPTH, RANK).requires_grad_(True) if corrected else None,
        (randn(TOKENS, RANK) / 2).requires_grad_(True) if corrected else None,
        BlockLabels(label, active, weight, row, supervised),
        randn(rows, HIDDEN),
        Teacher(randn(vocab, HIDDEN) / 2, bias, **ends),  # type: ignore[arg-type]
        torch.randperm(vocab, generator=noise)[:TOKENS].sort().values if reduced else None,
    )


def compare(expected: BlockLosses, found: BlockLosses, tolerance: float) -> None:
    torch.testing.assert_close(found.sum_T.double(), expected.sum_T.double(), rtol=tolerance, atol=tolerance)
    assert torch.equal(found.argmax_AK, expected.argmax_AK)
    assert (found.overlap_AK is None) == (expected.overlap_AK is None)
    if expected.overlap_AK is not None:
        torch.testing.assert_close(found.overlap_AK, expected.overlap_AK, rtol=tolerance, atol=tolerance)


def compare_gradients(x: Case, expected: Tensor, found: Tensor, tolerance: float) -> None:
    wanted, got = torch.autograd.grad(expected, x.leaves), torch.autograd.grad(found, x.leaves)
    for name, a, b in zip(("hidden", "low", "up"), wanted, got, strict=False):
        assert a.dtype == b.dtype and a.abs().max() > 0
        error = (a.double() - b.double()).abs().max()
        assert error <= tolerance * a.double().abs().max(), f"gradient of {name}: {error}"
    assert not got[0][~x.labels.active_AK].any(), "slots without a loss have no gradient at all"


def scales(kinds: tuple[str, ...]) -> Tensor:
    return torch.tensor([0.3 + 0.5 * i for i in range(len(kinds))])


def test_the_worked_example() -> None:
    log = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    target = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()
    eye, yes = torch.eye(3, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    labels = BlockLabels(zero, yes, yes.double(), zero, yes)
    for module in (block_eager, block):
        found = module.block_loss(log[None, None], eye, None, None, labels, target[None], Teacher(eye), None, KINDS)
        wanted = [math.log(2), 0.4, 0.7 * math.log(1.4) + 0.2 * math.log(2 / 3) + 0.1 * math.log(0.5), -math.log(0.8)]
        assert found.sum_T.tolist() == pytest.approx(wanted, rel=1e-9)
        assert float(found.overlap_AK) == pytest.approx(0.8)


@pytest.mark.parametrize("dpace", [False, True], ids=["decay", "dpace"])
@pytest.mark.parametrize("kinds", MIXES, ids="+".join)
def test_every_mix_of_terms(kinds: tuple[str, ...], dpace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums, overlaps, argmax, and gradients of any combination, and of the one that the scale promises."""
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 2 * DEPTH * TOKENS)  # two blocks at a time
    x = case()
    expected = x.run(block_eager, kinds, dpace=dpace)
    found = x.run(block, kinds, dpace=dpace)
    compare(expected, found, 1e-12)
    odd = torch.tensor([1.3, -0.4, 0.9, 2.0][: len(kinds)], dtype=torch.float64)
    compare_gradients(x, (expected.sum_T * odd).sum(), (found.sum_T * odd).sum(), 1e-12)
    scale_T = scales(kinds)
    expected, found = x.run(block_eager, kinds, dpace=dpace), x.run(block, kinds, dpace=dpace, scale_T=scale_T)
    compare(expected, found, 1e-12)
    compare_gradients(x, 3 * (expected.sum_T * scale_T).sum(), 3 * (found.sum_T * scale_T).sum(), 1e-7)


@pytest.mark.parametrize("elements", [1, 2 * DEPTH * TOKENS, 1 << 28])
@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize("reduced", [False, True], ids=["all tokens", "draft vocabulary"])
@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("kept", [True, False], ids=["teacher kept", "teacher by chunks"])
def test_every_layout(
    elements: int, corrected: bool, reduced: bool, rows: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, with and without a correction, fewer and more rows than slots, a teacher with all it may have."""
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(block, "TEACHER_ELEMENTS", 1 << 30 if kept else 0)
    kinds = ("ce", "l1", "kl")
    for ends in ({}, {"bias": 1, "softcap": 3.0, "scale": 0.7}):
        x = case(corrected=corrected, reduced=reduced, rows=rows, **ends)
        scale_T = scales(kinds)
        expected, found = x.run(block_eager, kinds), x.run(block, kinds, scale_T=scale_T)
        compare(expected, found, 1e-12)
        compare_gradients(x, (expected.sum_T * scale_T).sum(), (found.sum_T * scale_T).sum(), 1e-7)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("dpace", [False, True], ids=["decay", "dpace"])
@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=interpreter)], ids=["tensors", "kernel"])
@pytest.mark.parametrize("kinds", [("ce",), ("ce", "l1"), ("lk",), ("ce", "l1", "kl", "lk")], ids="+".join)
def test_narrow_numbers(
    kinds: tuple[str, ...], kernel: bool, dpace: bool, dtype: torch.dtype, tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Against the readable loss in the same dtype; 61 tokens in blocks of 16, the last one partial."""
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 3 * DEPTH * TOKENS)
    if kernel:
        pytest.importorskip("triton")
        for module in (block, fused):
            monkeypatch.setattr(module, "wants_kernel", lambda x: True)
        monkeypatch.setattr(kernels, "BLOCK", 16)
    x, scale_T = case(dtype), scales(kinds)
    expected, found = x.run(block_eager, kinds, dpace=dpace), x.run(block, kinds, dpace=dpace, scale_T=scale_T)
    if dtype == torch.float32:
        compare(expected, found, tolerance)
    torch.testing.assert_close(found.sum_T, expected.sum_T, rtol=tolerance, atol=tolerance)
    compare_gradients(x, 3 * (expected.sum_T * scale_T).sum(), 3 * (found.sum_T * scale_T).sum(), tolerance)


@interpreter
def test_the_kernel_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    x = case(torch.float32)
    expected = x.run(block_eager, KINDS)
    for module in (block, fused):
        monkeypatch.setattr(module, "wants_kernel", lambda x: True)
    with torch.no_grad():
        compare(expected, x.run(block, KINDS), 2e-5)


@interpreter
@pytest.mark.parametrize("tokens", [3, 16, 61])
def test_of_equal_tokens_the_kernel_takes_the_first(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "BLOCK", 16)
    first = torch.tensor([0, 1, 2, 7, 8, 15, 16, 33, 60]).clamp(max=tokens - 1)
    logits = torch.full((9, tokens), -3.0)
    logits[torch.arange(tokens) >= first[:, None]] = 2.5
    stats, argmax = torch.zeros(kernels.STATS, 9), torch.zeros(9, dtype=torch.int64)
    kernels.slots(
        logits, None, argmax.clone(), torch.ones(9, dtype=torch.bool), stats, argmax,
        weight_C=None, scale_4=torch.zeros(4), floor=1e-30, measures=True, kl=False,
    )  # fmt: skip
    assert torch.equal(argmax, first)
    torch.testing.assert_close(stats[kernels.LSE], logits.logsumexp(-1))


def test_without_gradients_nothing_but_sums_is_made() -> None:
    x = case()
    with torch.no_grad():
        found = x.run(block, KINDS)
        compare(x.run(block_eager, KINDS), found, 1e-12)
    assert not found.sum_T.requires_grad


def test_the_targets_distribution_is_made_only_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x = case()
    made = []
    logits = Teacher.logits
    monkeypatch.setattr(Teacher, "logits", lambda *args: made.append(1) or logits(*args))
    assert x.run(block, ("ce",)).overlap_AK is None and not made
    assert x.run(block, ("ce",), overlap=True).overlap_AK is not None and len(made) == 1


def test_no_slot_that_is_not_supervised_leaves_a_trace() -> None:
    """Whatever stands there: other labels, other rows, other features."""
    x, scale_T = case(), scales(KINDS)
    off = ~x.labels.supervised_AK
    loud = replace(x, hidden=torch.where(off[..., None], 50.0, x.hidden).detach().requires_grad_(True))
    loud.labels = replace(x.labels, teacher_row_AK=torch.where(off, 1, x.labels.teacher_row_AK))
    for dpace in (False, True):
        a, b = (y.run(block, KINDS, scale_T=scale_T, dpace=dpace) for y in (x, loud))
        assert torch.equal(a.sum_T, b.sum_T) and torch.equal(a.argmax_AK, b.argmax_AK)
        first, second = (torch.autograd.grad(y.sum_T.sum(), z.leaves) for y, z in ((a, x), (b, loud)))
        assert torch.equal(first[0], second[0]) and torch.equal(first[2], second[2])


def test_no_blocks() -> None:
    x = case()
    nothing = BlockLabels(*(getattr(x.labels, name)[:0] for name in x.labels.__dataclass_fields__))
    empty = replace(x, hidden=x.hidden[:0], low=x.low[:0], labels=nothing)
    found = empty.run(block, KINDS, scale_T=scales(KINDS))
    assert found.sum_T.tolist() == [0] * 4
    (gradient,) = torch.autograd.grad(found.sum_T.sum(), [x.up])
    assert gradient.shape == x.up.shape and not gradient.any()


def test_a_second_backward_pass_is_refused() -> None:
    x = case()
    loss = x.run(block, ("ce",)).sum_T.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        loss.backward()


def test_dpace_counts_the_ways_through_a_slot() -> None:
    """q̃ = .5 q + .5; w_j = Σ over active m ≥ j of Π_{i ≤ m} q̃_i, slot by slot."""
    q = torch.tensor([[0.9, 0.1, 0.5], [0.2, 0.4, 0.6]], dtype=torch.float64)
    active = torch.tensor([[True, True, True], [True, False, False]])
    expected = torch.zeros_like(q)
    for a in range(2):
        for j in range(3):
            for m in range(j, 3):
                if active[a, j] and active[a, m]:
                    expected[a, j] += math.prod(0.5 * float(q[a, i]) + 0.5 for i in range(m + 1) if active[a, i])
    torch.testing.assert_close(dpace_weights(-q.log(), active), expected)


def test_chunks_are_whole_blocks_of_about_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chunk_blocks(2048, 8, 49152) == 1024
    assert chunk_blocks(2048, 7, 32000) == 2048
    assert chunk_blocks(2048, 7, 128256) == 704
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 10)
    assert chunk_blocks(5, 7, 100) == 1
