"""The loss of drafted blocks on CUDA: its kernel against tensor operations, at real sizes (`pytest -m gpu`)."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from headstart.heads.dims import HeadDims
from headstart.heads.ends import Teacher
from headstart.heads.families.dspark.head import MARKOV_HEADS, DSparkConfig, DSparkHead
from headstart.heads.kernels.device import eager_twins
from headstart.heads.losses import block, block_eager, fused
from headstart.heads.losses.block import KINDS, BlockLabels, BlockLosses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIXES = [kinds for size in (1, 2, 4) for kinds in combinations(KINDS, size)]


class Case:
    """Blocks of `depth` slots, of which some end early, and a teacher that the drafts resemble."""

    def __init__(self, blocks: int, depth: int, hidden: int, rank: int, tokens: int, rows: int, dtype: torch.dtype):
        torch.manual_seed(0)
        randn = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype)  # noqa: E731
        self.output = randn(tokens, hidden) * (3 / hidden**0.5)
        self.hidden = randn(blocks, depth, hidden).requires_grad_(True)
        self.low = randn(blocks, depth, rank).requires_grad_(True) if rank else None
        self.up = (torch.randn(tokens, rank, device="cuda") / 16).requires_grad_(True) if rank else None
        self.teacher, self.rows = Teacher(self.output), randn(rows, hidden)
        depth_A = torch.randint(0, depth + 1, (blocks,), device="cuda")
        supervised = depth_A[:, None] > torch.arange(depth, device="cuda")
        active = supervised & (torch.rand(blocks, depth, device="cuda") > 0.05).cumprod(1).bool()
        label = torch.where(active, torch.randint(0, tokens, (blocks, depth), device="cuda"), 0)
        row = torch.randint(0, rows, (blocks, depth), device="cuda")
        with torch.no_grad():  # half of the drafts resemble their teacher
            self.hidden[::2].lerp_(self.rows[row[::2]], 0.8)
        self.labels = BlockLabels(
            label, active, active * 0.78 ** torch.arange(depth, device="cuda").float(), row, supervised
        )

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.low, self.up) if x is not None]

    def run(self, module: object, kinds: tuple[str, ...], **options: object) -> BlockLosses:
        args = (self.hidden, self.output, self.low, self.up, self.labels, self.rows, self.teacher, None)
        return module.block_loss(*args, kinds, **options)  # type: ignore[attr-defined]

    def gradients(self, module: object, kinds: tuple[str, ...], **options: object) -> tuple[BlockLosses, list[Tensor]]:
        scale_T = torch.tensor([0.1 + 0.4 * i for i in range(len(kinds))], device="cuda") / 1000
        found = self.run(module, kinds, scale_T=scale_T, **options)
        return found, list(torch.autograd.grad((found.sum_T * scale_T).sum(), self.leaves))


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-20))


def check(case: Case, wanted: tuple[BlockLosses, list[Tensor]], found: tuple[BlockLosses, list[Tensor]], tol: float):
    (a, grad_a), (b, grad_b) = wanted, found
    assert relative(b.sum_T, a.sum_T) < tol
    for name, x, y in zip(("hidden", "low", "up"), grad_a, grad_b, strict=False):
        assert y.dtype == x.dtype and relative(y, x) < tol, f"gradient of {name}: {relative(y, x)}"
    assert not grad_b[0][~case.labels.active_AK].any()
    if a.overlap_AK is not None:
        assert relative(b.overlap_AK, a.overlap_AK) < tol


@pytest.mark.parametrize("dpace", [False, True], ids=["decay", "dpace"])
@pytest.mark.parametrize("kinds", MIXES, ids="+".join)
def test_the_kernel_is_the_tensor_operations(
    kinds: tuple[str, ...], dpace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, on a vocabulary that no block of columns divides, in several chunks."""
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 20 * 7 * 10007)
    case = Case(50, 7, 64, 16, 10007, 90, torch.float32)
    with eager_twins():
        twin = case.gradients(block, kinds, dpace=dpace)
    found = case.gradients(block, kinds, dpace=dpace)
    check(case, twin, found, 1e-4)
    check(case, case.gradients(block_eager, kinds, dpace=dpace), found, 1e-4)
    with torch.no_grad():
        assert relative(case.run(block, kinds, dpace=dpace).sum_T, found[0].sum_T) < 1e-5


@pytest.mark.parametrize(
    ("blocks", "depth", "hidden", "rank", "tokens"),
    [(512, 8, 576, 256, 49152), (100, 7, 1024, 256, 128256), (300, 15, 1024, 0, 32000)],
    ids=["smollm2", "llama", "draft vocabulary"],
)
@pytest.mark.parametrize("kinds", [("ce",), ("ce", "l1")], ids="+".join)
def test_bfloat16_at_real_widths(blocks: int, depth: int, hidden: int, rank: int, tokens: int, kinds) -> None:
    """Against float32 throughout, from the same numbers: logits and their gradients are rounded to 8 bits."""
    case = Case(blocks, depth, hidden, rank, tokens, 1024, torch.bfloat16)
    found = case.gradients(block, kinds)
    exact = Case(blocks, depth, hidden, rank, tokens, 1024, torch.bfloat16)
    exact.output, exact.rows = exact.output.float(), exact.rows.float()
    exact.teacher = Teacher(exact.output)
    exact.hidden = case.hidden.detach().float().requires_grad_(True)
    if case.low is not None:
        exact.low, exact.up = case.low.detach().float().requires_grad_(True), case.up
    with eager_twins():
        wanted, gradients = exact.gradients(block, kinds)
    assert relative(found[0].sum_T, wanted.sum_T) < 5e-3
    for x, y in zip(gradients, found[1], strict=True):
        # the gradient of l1 jumps where q = p; there, rounding decides its sign
        assert relative(y, x) < (0.15 if "l1" in kinds else 4e-2)
        assert float((x.double() * y.double()).sum() / x.double().square().sum()) == pytest.approx(1, abs=0.02)
    same = (found[0].argmax_AK == wanted.argmax_AK).float().mean()
    assert same > 0.95, "bfloat16 may swap two tokens that are almost equal, and nothing else"


def test_memory_holds_the_logits_of_a_chunk_and_the_teachers() -> None:
    """SmolLM2, 2,048 blocks of 8: 1.6 GB of teacher logits, 0.8 GB of a chunk's."""
    case = Case(2048, 8, 576, 256, 49152, 16384, torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    case.gradients(block, ("ce", "l1"), overlap=True)
    logits = 2048 * 8 * 49152 * 2
    used = torch.cuda.max_memory_allocated() - before
    assert used < 1.5 * logits + 500e6, f"{used / 1e9:.2f} GB"


@pytest.mark.parametrize("dpace", [False, True], ids=["decay", "dpace"])
def test_it_can_be_captured(dpace: bool) -> None:
    case, kinds = Case(64, 7, 128, 32, 8192, 500, torch.bfloat16), ("ce", "l1")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            expected, gradients = case.gradients(block, kinds, dpace=dpace)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    scale_T = torch.tensor([0.1, 0.5], device="cuda") / 1000
    with torch.cuda.graph(graph):
        found = case.run(block, kinds, dpace=dpace, scale_T=scale_T)
        captured = torch.autograd.grad((found.sum_T * scale_T).sum(), case.leaves)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found.sum_T, expected.sum_T) and torch.equal(found.argmax_AK, expected.argmax_AK)
    for x, y in zip(gradients, captured, strict=True):
        torch.testing.assert_close(y, x)


@pytest.mark.parametrize("kind", MARKOV_HEADS)
def test_markov_heads_can_be_captured(kind: str) -> None:
    """With more tokens than the embedding's gradient is made of without sorting them."""
    torch.manual_seed(0)
    config = DSparkConfig(depth=8, markov_rank=32, markov_head=kind, layers=1, feature_layers=[1])
    dims = HeadDims(64, 5000, 4, 4, 2, 16, 96)
    with torch.device("cuda"):
        head = DSparkHead(config, dims)
    hidden = torch.randn(1024, 8, 64, device="cuda").requires_grad_(True)
    previous = torch.randint(0, 5000, (1024, 8), device="cuda")
    factor = torch.randn(1024, 8, 32, device="cuda")
    leaves = [p for name, p in head.markov_head.named_parameters() if "w2" not in name]
    leaves += [] if kind == "vanilla" else [hidden]

    def run() -> tuple[Tensor, ...]:
        low = head.corrections(hidden, previous)
        return low.detach().clone(), *torch.autograd.grad((low * factor).sum(), leaves)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            expected = run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(y, x)
