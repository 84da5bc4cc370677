"""Kernels that grow trees against their eager twins: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import copy
from dataclasses import fields, replace

import pytest
import torch
from eval_help import CONTEXTS, DEVICE, Trained, needs_kernels, run
from torch import Tensor

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.drafters.autoregressive import AutoregressiveDrafter
from headstart.eval.kernels import candidates
from headstart.eval.kernels.candidates import (
    Frontier,
    Growth,
    Stored,
    best_kernel,
    grow_eager,
    grow_kernel,
    select_eager,
    select_kernel,
)
from headstart.eval.tree import Tree
from headstart.heads.targets.target import Target

pytest.importorskip("triton")
pytestmark = needs_kernels
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [61, 1000, 32000, 49153]
#: the interpreter takes its time
LONG = 32000 if DEVICE == "cuda" else 1100


def noise(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (4 * torch.randn(shape, generator=noise(seed))).to(DEVICE, dtype)


def distinct(*shape: int, seed: int = 0) -> Tensor:
    """Rows of 0, -128, -256 … in random order: one way to rank a row, log Σ exp exactly 0, and many tied scores."""
    order = torch.rand(shape, generator=noise(seed)).argsort(-1)
    return (-128.0 * order).to(DEVICE)


def check_best(logits: Tensor, k: int) -> None:
    values, ids, total = best_kernel(logits, k)
    expected = logits.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :k])
    assert torch.equal(ids, expected.indices[:, :k])
    torch.testing.assert_close(total, logits.float().logsumexp(-1), rtol=1e-6, atol=2e-6)


def rows_of(size: int) -> int:
    return 3 if DEVICE == "cuda" or size < 2000 else 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_best_of_rows(size: int, dtype: torch.dtype) -> None:
    """16-bit rows of this length hold ties of their own."""
    check_best(random(rows_of(size), size, dtype=dtype), 10)


@pytest.mark.parametrize("size", [*SIZES, 262144])
def test_best_of_rows_that_tie(size: int) -> None:
    few = torch.randint(-1, 3, (rows_of(size), size), generator=noise(1)).to(DEVICE, torch.bfloat16)
    for k in (1, 7, 16) if rows_of(size) > 1 else (16,):
        check_best(few, k)
    check_best(torch.zeros(1, min(size, LONG), device=DEVICE), 10)


def test_best_of_rows_with_few_finite_values() -> None:
    logits = torch.full((3, 1500), -torch.inf, device=DEVICE)
    logits[0, 1400], logits[1, [3, 700, 701]] = -5.0, torch.tensor([2.0, 2.0, 3.0], device=DEVICE)
    logits[2, :5] = torch.tensor([-0.0, 0.0, -0.0, 1e-30, -1e-30], device=DEVICE)
    check_best(logits, 10)


def test_best_of_strided_rows() -> None:
    wide = random(4, 700)
    check_best(wide[:, 100:161], 10)
    check_best(wide.t()[:60], 4)
    check_best(random(2, 5), 5)


def test_rows_that_are_not_numbers_stay_within_bounds() -> None:
    logits = random(2, 600)
    logits[0], logits[1, ::2] = torch.nan, torch.nan
    values, ids, _ = best_kernel(logits, 10)
    assert ids[0].tolist() == list(range(10))
    assert torch.equal(values[1], logits[1, 1::2].topk(10).values)
    growth = Growth.start(torch.zeros(2, dtype=torch.int64, device=DEVICE), 10, 1, logits[:, None])
    grow_kernel(growth, logits[:, None])
    assert select_kernel(growth.stored, 4, 1, None).valid_BN.tolist() == [[False] * 4, [True] * 4]


def same(found: Frontier | Stored | Tree, expected: Frontier | Stored | Tree) -> None:
    for field in fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other), field.name
        else:
            assert one == other, field.name


def grown(growth: Growth, logits_by_level: list[Tensor], kernels: bool) -> list[Frontier]:
    """Frontiers of all levels. The logits of a node are those of its draft token: they follow from the tree alone."""
    frontiers: list[Frontier] = []
    for logits_BVU in logits_by_level:
        if growth.frontier is None:
            logits_BfU = logits_BVU[:, :1]
        else:
            token_Bk = growth.stored.token_BS.gather(1, growth.frontier.index_Bk)
            logits_BfU = logits_BVU.gather(1, token_Bk[:, :, None].expand(-1, -1, logits_BVU.shape[2]))
        frontiers.append((grow_kernel if kernels else grow_eager)(growth, logits_BfU))
        children = logits_BfU.shape[1] * min(growth.k, logits_BfU.shape[2])
        growth = replace(growth, number=growth.number + 1, filled=growth.filled + children, frontier=frontiers[-1])
    assert growth.filled == growth.stored.score_BS.shape[1]
    return frontiers


@pytest.mark.parametrize(
    ("batch", "k", "size", "levels", "nodes"),
    [(1, 10, 61, 8, 59), (3, 10, 4, 4, 30), (1, 16, 40, 3, 900), (3, 3, 9, 5, 8), (3, 1, 5, 4, 3)],
)
@pytest.mark.parametrize(("ties", "mapped"), [(False, True), (True, False)])
def test_whole_trees(batch: int, k: int, size: int, levels: int, nodes: int, ties: bool, mapped: bool) -> None:
    """The same to the last index: frontiers, what is stored, and what is kept."""
    make = distinct if ties else random
    logits = [make(batch, size, size, seed=level) for level in range(levels)]
    length = torch.tensor([5, 0, 17], device=DEVICE)[:batch]
    ids = (torch.randperm(4 * size, generator=noise(9))[:size].sort().values.to(DEVICE)) if mapped else None
    found, expected = (Growth.start(length, k, levels, logits[0][:, :1], ids) for _ in range(2))
    pairs = zip(grown(found, logits, True), grown(expected, logits, False), strict=True)
    if ties:
        for one, other in pairs:
            same(one, other)
        same(found.stored, expected.stored)
        score = expected.stored.score_BS
        assert k == 1 or all(len(set(row.tolist())) < row.numel() / 2 for row in score)
    else:
        for one, other in pairs:
            torch.testing.assert_close(one.score_Bk, other.score_Bk)
            same(replace(one, score_Bk=other.score_Bk), other)
        torch.testing.assert_close(found.stored.score_BS, expected.stored.score_BS)
        same(replace(found.stored, score_BS=expected.stored.score_BS), expected.stored)
    tree = select_eager(found.stored, nodes, levels, ids)
    same(select_kernel(found.stored, nodes, levels, ids), tree)
    assert tree.nodes == min(nodes, found.stored.score_BS.shape[1])
    same(replace(tree, score_BN=None), replace(select_eager(expected.stored, nodes, levels, ids), score_BN=None))


@pytest.mark.parametrize("frontier", [1, 10])
@pytest.mark.parametrize("dtype", DTYPES if DEVICE == "cuda" else [torch.bfloat16])
def test_a_level_of_a_long_vocabulary(frontier: int, dtype: torch.dtype) -> None:
    """Ties within rows may be broken otherwise by topk: rows here have none at their top."""
    batch, k, size = 3, 10, LONG
    logits = random(batch, frontier, size, dtype=torch.float32).clamp(max=0).to(dtype)
    top = torch.rand((batch, frontier, size), generator=noise(2)).argsort(-1)[:, :, :k].to(DEVICE)
    logits.scatter_(2, top, (1.0 + torch.arange(k, device=DEVICE)).to(dtype).expand_as(top))
    start = Growth.start(torch.tensor([3, 4, 5], device=DEVICE), k, 3, logits)
    results = []
    for grow in (grow_kernel, grow_eager):
        growth = replace(
            start, stored=Stored(*(torch.zeros_like(getattr(start.stored, f.name)) for f in fields(Stored)))
        )
        if frontier > 1:
            growth = replace(growth, number=1, filled=k, frontier=grow_eager(growth, logits[:, :1]))
        results.append((grow(growth, logits), growth.stored))
    (one, found), (other, expected) = results
    torch.testing.assert_close(one.score_Bk, other.score_Bk)
    torch.testing.assert_close(found.score_BS, expected.score_BS)
    same(replace(one, score_Bk=other.score_Bk), other)
    same(replace(found, score_BS=expected.score_BS), expected)


@pytest.mark.parametrize(("total", "nodes"), [(710, 59), (1024, 1024), (33, 5), (7, 59)])
def test_what_is_kept_among_ties(total: int, nodes: int) -> None:
    """Any forest whose scores take few values, never above the parent's; some rows end in -inf."""
    generator, batch = noise(total), 3
    parent = torch.stack(
        [(torch.rand(total, generator=generator) * torch.arange(total)).long() - 1 for _ in range(batch)]
    )
    score, depth = torch.zeros(batch, total), torch.ones(batch, total, dtype=torch.int64)
    for n in range(total):
        step = -torch.randint(0, 3, (batch,), generator=generator).float()
        for row in range(batch):
            up = int(parent[row, n])
            score[row, n] = step[row] + (score[row, up] if up >= 0 else 0.0)
            depth[row, n] = depth[row, up] + 1 if up >= 0 else 1
    score[1, score[1] < -3] = -torch.inf
    token = torch.randint(0, 50, (batch, total), generator=generator)
    stored = Stored(*(part.to(DEVICE) for part in (score, token, parent, depth)))
    ids = torch.arange(50, device=DEVICE) * 7 + 1
    for table in (None, ids):
        expected = select_eager(stored, nodes, int(depth.max()), table)
        same(select_kernel(stored, nodes, int(depth.max()), table), expected)
        assert nodes < total / 2 or not expected.valid_BN.all()


@pytest.mark.parametrize(("family", "penalty"), [("eagle3", 1.3), ("eagle", 1.0)])
def test_drafters_with_and_without_kernels(
    target: Target, family: str, penalty: float, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: Trained = request.getfixturevalue(family)
    there = Target.from_model(copy.deepcopy(target.model).to(DEVICE))
    head = copy.deepcopy(trained.head).to(DEVICE)
    head.bind(there.ends)
    config, sampling = TreeConfig("dynamic", 3, 3, 10), Sampling(repetition_penalty=penalty)
    answers = []
    for kernels in (False, True):
        trees: list[Tree] = []

        class Recorded(AutoregressiveDrafter):
            def propose(
                self, roots_B: Tensor, generator: torch.Generator | None = None, trees: list[Tree] = trees
            ) -> Tree:
                trees.append(super().propose(roots_B, generator))
                return trees[-1]

        monkeypatch.setattr(candidates, "wants_kernel", lambda x, kernels=kernels: kernels)
        drafter = Recorded(head, config, sampling)  # type: ignore[arg-type]
        answers.append((run(there, drafter, CONTEXTS, 9, sampling=sampling), trees))
    (eager, expected), (kernel, found) = answers
    assert [answer.tokens for answer in kernel] == [answer.tokens for answer in eager]
    assert len(found) == len(expected) > 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.score_BN, other.score_BN)
        same(replace(one, score_BN=None), replace(other, score_BN=None))
