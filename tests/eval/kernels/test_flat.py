"""Which nodes take the flat rows, against a loop; the kernels against their eager twins."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from eval_help import DEVICE, needs_kernels
from torch import Tensor

from headstart.eval.kernels import flat
from headstart.eval.kernels.capture import capture
from headstart.eval.kernels.flat import (
    MOST_NODES,
    FlatRows,
    cut,
    cut_eager,
    cut_kernel,
    flatten,
    flatten_eager,
    flatten_kernel,
)

CUTS = [cut_eager, pytest.param(cut_kernel, marks=needs_kernels)]
FLATTENS = [flatten_eager, pytest.param(flatten_kernel, marks=needs_kernels)]
#: (sequences, nodes); the interpreter takes its time
SIZES = [(64, 7), (3, 700), (64, 63), (64, 256)] if DEVICE == "cuda" else [(33, 7), (2, 600)]
Cut = Callable[[Tensor, Tensor, int], FlatRows]


def drafted(batch: int, nodes: int, seed: int, ties: bool, chains: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(parents, log-reach, valid) of random trees. With ties, many terms are 0. Sequence 1 is idle."""
    noise = torch.Generator().manual_seed(seed)
    parent = torch.stack([torch.randint(-1, n, (batch,), generator=noise) for n in range(nodes)], 1)
    parent = torch.arange(-1, nodes - 1).expand(batch, nodes) if chains else parent
    term = torch.rand((batch, nodes), generator=noise).log()
    term = torch.where(torch.rand((batch, nodes), generator=noise) < (0.6 if ties else 0.0), 0.0, term)
    valid = torch.rand((batch, nodes), generator=noise) < 0.85
    valid[1:2] = False
    reach = term.clone()
    for n in range(nodes):
        for b in range(batch):
            if (above := int(parent[b, n])) >= 0:
                reach[b, n] = term[b, n] + reach[b, above]
                valid[b, n] &= valid[b, above]
    return parent, torch.where(valid, reach, -torch.inf).to(DEVICE), valid.to(DEVICE)


def likeliest(reach_BN: Tensor, valid_BN: Tensor, budget: int) -> list[tuple[int, int]]:
    """The kept nodes (sequence, node), in their order: the likeliest one is taken again and again."""
    reach, valid = reach_BN.tolist(), valid_BN.tolist()
    left = [(b, n) for b, line in enumerate(valid) for n, on in enumerate(line) if on]
    taken = []
    while left and len(taken) < budget:
        best = left[0]
        for b, n in left:
            if reach[b][n] > reach[best[0]][best[1]]:
                best = (b, n)
        taken.append(best)
        left.remove(best)
    return sorted(taken)


def laid_out(found: FlatRows, kept: list[tuple[int, int]], batch: int, nodes: int, rows: int) -> None:
    count = nodes + 1
    places = [b * count for b in range(batch)] + [b * count + 1 + n for b, n in kept]
    assert found.place_F.tolist() == places + [0] * (rows - len(places))
    rows_of = {place: row for row, place in enumerate(places)}
    assert found.row_R.tolist() == [rows_of.get(place, 0) for place in range(batch * count)]
    assert found.kept_BM.tolist() == [[b * count + m in rows_of for m in range(count)] for b in range(batch)]
    for x, dtype in ((found.place_F, torch.int64), (found.row_R, torch.int64), (found.kept_BM, torch.bool)):
        assert x.dtype == dtype


def same(found: FlatRows, expected: FlatRows) -> None:
    for name in ("place_F", "row_R", "kept_BM"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("run", CUTS)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_likeliest_nodes_take_the_rows_with_their_ancestors(run: Cut, ties: bool, chains: bool, seed: int) -> None:
    batch, nodes = (1, 6) if seed == 3 else (2 + seed, 5 + seed)
    parent, reach, valid = drafted(batch, nodes, seed, ties, chains)
    for rows in sorted({batch, batch + 1, batch + 4, batch + int(valid.sum()), batch * (nodes + 1)}):
        found = run(reach, valid, rows)
        kept = likeliest(reach, valid, rows - batch)
        assert len(kept) == min(int(valid.sum()), rows - batch)
        laid_out(found, kept, batch, nodes, rows)
        assert all(int(parent[b, n]) < 0 or found.kept_BM[b, 1 + int(parent[b, n])] for b, n in kept)


@pytest.mark.parametrize("run", CUTS)
def test_a_node_of_reach_zero_goes_before_no_node(run: Cut) -> None:
    """Valid nodes may have -inf or NaN; what is not valid takes no row, whatever its number."""
    reach = torch.tensor([[-math.inf, 0.0, -1.0], [9.0, math.nan, -2.0]], device=DEVICE)
    valid = torch.tensor([[True, False, True], [False, True, True]], device=DEVICE)
    # best first: (0, 2), (1, 2), then in order those of reach 0: (0, 0), (1, 1)
    order = [(0, 2), (1, 2), (0, 0), (1, 1)]
    for count in range(5):
        laid_out(run(reach, valid, 2 + count), sorted(order[:count]), 2, 3, 2 + count)
    laid_out(run(reach, valid, 8), sorted(order), 2, 3, 8)


@pytest.mark.parametrize("run", CUTS)
def test_both_zeros_tie(run: Cut) -> None:
    reach, valid = torch.tensor([[-0.0, 0.0, -0.0, 0.0]], device=DEVICE), torch.ones((1, 4), dtype=torch.bool)
    for count in range(5):
        laid_out(run(reach, valid.to(DEVICE), 1 + count), [(0, n) for n in range(count)], 1, 4, 1 + count)


@pytest.mark.parametrize("run", FLATTENS)
@pytest.mark.parametrize("rows", [3, 4, 7, 10, 15, 20])
def test_rows_in_order(run: Callable[[Tensor, int], FlatRows], rows: int) -> None:
    noise = torch.Generator().manual_seed(rows)
    for _ in range(10):
        valid = torch.rand((3, 4), generator=noise) < 0.6
        kept = [(b, n) for b in range(3) for n in range(4) if valid[b, n]][: rows - 3]
        laid_out(run(valid.to(DEVICE), rows), kept, 3, 4, rows)


@pytest.mark.parametrize("run", CUTS)
def test_plain_decoding_has_roots_alone(run: Cut) -> None:
    reach = torch.zeros((3, 0), device=DEVICE)
    laid_out(run(reach, reach.bool(), 3), [], 3, 0, 3)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="found 2 for 3 sequences"):
        cut(torch.zeros((3, 4)), torch.ones((3, 4), dtype=torch.bool), 2)
    with pytest.raises(ValueError, match="found 2 for 3 sequences"):
        flatten(torch.ones((3, 4), dtype=torch.bool), 2)


def test_larger_batches_go_to_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are asked for what they take, and for no more."""
    asked: list[int] = []
    monkeypatch.setattr(flat, "wants_kernel", lambda _: True)
    monkeypatch.setattr(flat, "cut_kernel", lambda reach, *_: asked.append(reach.numel()))
    monkeypatch.setattr(flat, "flatten_kernel", lambda valid, _: asked.append(valid.numel()))
    for nodes in (MOST_NODES // 64, MOST_NODES // 64 + 1):
        valid = torch.ones((64, nodes), dtype=torch.bool)
        for made in (cut(torch.zeros((64, nodes)), valid, 100), flatten(valid, 100)):
            assert made is None or int(made.kept_BM.sum()) == 100
    assert asked == [MOST_NODES] * 2


@needs_kernels
@pytest.mark.parametrize(("batch", "nodes"), SIZES)
def test_the_kernels_on_sizes_that_are_used(batch: int, nodes: int) -> None:
    """Several blocks and programs; ties cross their borders."""
    noise = torch.Generator().manual_seed(batch)
    reach = -torch.randint(0, 40, (batch, nodes), generator=noise).float().to(DEVICE)
    valid = (torch.rand((batch, nodes), generator=noise) < 0.7).to(DEVICE)
    for rows in (batch, batch + 133, batch * (nodes + 1)):
        same(cut_kernel(reach, valid, rows), cut_eager(reach, valid, rows))
        same(flatten_kernel(valid, rows), flatten_eager(valid, rows))
        # inputs of any strides
        same(cut_kernel(reach.T.contiguous().T, valid.T.contiguous().T, rows), cut_eager(reach, valid, rows))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("batch", "nodes"), [(1, 7), (8, 63), (64, 256), (64, 257)])
def test_captured_cuts(batch: int, nodes: int) -> None:
    """Replays follow new drafts, also where the eager twins are captured."""
    drafts = [drafted(batch, nodes, seed, ties=seed % 2 == 0)[1:] for seed in range(3)]
    reach, valid = (x.clone() for x in drafts[0])
    rows = batch + batch * nodes // 3
    graph, made = capture(lambda: (cut(reach, valid, rows), flatten(valid, rows)))
    for new_reach, new_valid in drafts[1:]:
        reach.copy_(new_reach)
        valid.copy_(new_valid)
        graph.replay()
        same(made[0], cut_eager(reach, valid, rows))
        same(made[1], flatten_eager(valid, rows))
