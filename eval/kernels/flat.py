"""Flat rows: the roots and nodes that a forward verifies, one behind the other, without those that are cut.

A forward over a batch of trees has a place for every node, [B, M]. Flat rows hold the kept places only: all roots, then
the kept nodes by sequence and node. Their number is fixed, so that a captured cycle can run on them.
Shape legend: B batch, N nodes, M = N + 1, R = B · M places, F flat rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.eval.kernels.rows import take_rows
from headstart.heads.kernels.device import wants_kernel

#: nodes of a batch, B · N, that the kernels take; larger batches go to the eager twins
MOST_NODES = 16_384
#: nodes that a program ranks
RANKED = 8


@dataclass(frozen=True)
class FlatRows:
    """Which place each flat row stands for.

    Attributes:
        place_F: int64, b · M + m. The first B are the roots'. Rows that are left over repeat place 0; nothing reads
            their results, which must be numbers all the same.
        row_R: int64, the flat row of each place; of a cut place row 0, whose result is not to be read. So row f stands
            for a place if `row_R[place_F[f]] == f`, and is left over otherwise.
        kept_BM: bool, places that have a row.
    """

    place_F: Tensor
    row_R: Tensor
    kept_BM: Tensor

    def gather(self, x_R: Tensor) -> Tensor:
        """Values of all places [R, …] → those of the flat rows [F, …]."""
        return take_rows(x_R[None], self.place_F[None])[0]

    def spread(self, x_F: Tensor) -> Tensor:
        """Values of the flat rows [F, …] → [R, …]; cut places get those of row 0."""
        return take_rows(x_F[None], self.row_R[None])[0]

    def places(self, x_F: Tensor) -> Tensor:
        """As `spread`, [B, M, …]."""
        return self.spread(x_F).unflatten(0, self.kept_BM.shape)

    def columns(self, x_F: Tensor, column_BJ: Tensor) -> Tensor:
        """Values of the flat rows [F, …] at some columns of each sequence: [B, J, …]."""
        row_BJ = self.row_R.view(self.kept_BM.shape).gather(1, column_BJ)
        return take_rows(x_F[None], row_BJ.view(1, -1))[0].unflatten(0, row_BJ.shape)

    def source_F(self) -> Tensor:
        """int64, each row itself; of a row that is left over the row of place 0, which it repeats."""
        return self.row_R[self.place_F]

    def used_F(self) -> Tensor:
        """bool, rows that stand for a place."""
        return self.source_F() == torch.arange(len(self.place_F), device=self.place_F.device)


def cut(log_reach_BN: Tensor, valid_BN: Tensor, rows: int) -> FlatRows:
    """Lay out all roots and the valid nodes that are most likely reached, as far as there are rows.

    min(valid nodes, rows - B) nodes are kept. Of equal ones, those of earlier sequences come first, then those of lower
    index. A parent has a lower index and no lower reach than its children, so no kept node loses its parent.

    Args:
        log_reach_BN: float, see reach.py; NaN counts as -inf.
        rows: F, at least one per sequence.
    Raises: ValueError for fewer rows.
    """
    _check(len(valid_BN), rows)
    run = cut_kernel if wants_kernel(log_reach_BN) and valid_BN.numel() <= MOST_NODES else cut_eager
    return run(log_reach_BN, valid_BN, rows)


def flatten(valid_BN: Tensor, rows: int) -> FlatRows:
    """Lay out all roots and the valid nodes, as far as there are rows.

    Nodes beyond the last row are cut. A parent stands before its children, so no kept node loses its parent.

    Args: rows: F, at least one per sequence.
    Raises: ValueError for fewer rows.
    """
    _check(len(valid_BN), rows)
    run = flatten_kernel if wants_kernel(valid_BN) and valid_BN.numel() <= MOST_NODES else flatten_eager
    return run(valid_BN, rows)


def _check(batch: int, rows: int) -> None:
    if rows < batch:
        raise ValueError(f"flat rows: found {rows} for {batch} sequences, expected one for each root at least")


def cut_eager(log_reach_BN: Tensor, valid_BN: Tensor, rows: int) -> FlatRows:
    reach_F = torch.where(log_reach_BN.isnan(), -torch.inf, log_reach_BN).flatten()
    # two stable sorts: by reach, then valid nodes before the others
    order_F = reach_F.argsort(descending=True, stable=True)
    order_F = order_F[valid_BN.flatten()[order_F].to(torch.uint8).argsort(descending=True, stable=True)]
    rank_F = torch.empty_like(order_F).scatter(0, order_F, torch.arange(len(order_F), device=order_F.device))
    return flatten_eager(valid_BN & (rank_F < rows - len(valid_BN)).view_as(valid_BN), rows)


def flatten_eager(valid_BN: Tensor, rows: int) -> FlatRows:
    batch, nodes = valid_BN.shape
    device = valid_BN.device
    # in the order of the rows: all roots, then the nodes
    wanted_R = torch.cat([torch.ones(batch, dtype=torch.bool, device=device), valid_BN.flatten()])
    sequence_B1 = torch.arange(batch, device=device)[:, None]
    node_BN = sequence_B1 * (nodes + 1) + torch.arange(1, nodes + 1, device=device)
    place_R = torch.cat([sequence_B1[:, 0] * (nodes + 1), node_BN.flatten()])
    row_R = wanted_R.cumsum(0) - 1
    kept_R = wanted_R & (row_R < rows)
    # one row more takes what is cut
    place_F = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    place_F = place_F.scatter(0, torch.where(kept_R, row_R, rows), place_R)[:rows]
    kept_BM = torch.zeros_like(kept_R).scatter(0, place_R, kept_R)
    row_R = torch.zeros_like(row_R).scatter(0, place_R, torch.where(kept_R, row_R, 0))
    return FlatRows(place_F, row_R, kept_BM.view(batch, nodes + 1))


def cut_kernel(log_reach_BN: Tensor, valid_BN: Tensor, rows: int) -> FlatRows:
    """As cut_eager, in two launches."""
    batch, count = len(valid_BN), valid_BN.numel()
    kept_BN = torch.empty(valid_BN.shape, dtype=torch.bool, device=valid_BN.device)
    if count:
        launch(_keep_kernel, (triton.cdiv(count, RANKED),),
            log_reach_BN.contiguous(), valid_BN.contiguous().view(torch.uint8), kept_BN.view(torch.uint8),
            count, rows - batch, OWN=RANKED, BLOCK=min(1024, triton.next_power_of_2(count)), num_warps=4,
            **launch_options(valid_BN.device),
        )  # fmt: skip
    return flatten_kernel(kept_BN, rows)


def flatten_kernel(valid_BN: Tensor, rows: int) -> FlatRows:
    """As flatten_eager, in one launch."""
    (batch, nodes), count = valid_BN.shape, valid_BN.numel()
    place_F, row_R = (torch.empty(n, dtype=torch.int64, device=valid_BN.device) for n in (rows, count + batch))
    kept_BM = torch.empty((batch, nodes + 1), dtype=torch.bool, device=valid_BN.device)
    launch(_flatten_kernel, (batch,),
        valid_BN.contiguous().view(torch.uint8), place_F, row_R, kept_BM.view(torch.uint8), batch, nodes, rows,
        BF=triton.next_power_of_2(max(count, 1)), BN=triton.next_power_of_2(max(nodes, 1)),
        BR=triton.next_power_of_2(triton.cdiv(rows, batch)), num_warps=4 if count <= 4096 else 8,
        **launch_options(valid_BN.device),
    )  # fmt: skip
    return FlatRows(place_F, row_R, kept_BM)


if triton is not None:

    @triton.jit(do_not_specialize=["count", "budget"])
    def _keep_kernel(reach, valid, kept, count, budget, OWN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
        """Each program counts, for OWN nodes, the valid nodes that go before: those that come first are kept."""
        await_previous(OVERLAP)
        own = tl.program_id(0) * OWN + tl.arange(0, OWN)
        there = tl.load(valid + own, mask=own < count, other=0) != 0
        value = tl.load(reach + own, mask=own < count, other=0.0)
        value = tl.where(value == value, value, float("-inf"))
        before = tl.zeros((OWN,), tl.int32)
        for start in range(0, count, BLOCK):
            other = start + tl.arange(0, BLOCK)
            counts = tl.load(valid + other, mask=other < count, other=0) != 0
            against = tl.load(reach + other, mask=other < count, other=0.0)
            against = tl.where(against == against, against, float("-inf"))[None, :]
            first = (against == value[:, None]) & (other[None, :] < own[:, None])
            ahead = counts[None, :] & ((against > value[:, None]) | first)
            before += tl.sum(ahead.to(tl.int32), 1)
        tl.store(kept + own, (there & (before < budget)).to(tl.uint8), mask=own < count)

    @triton.jit(do_not_specialize=["batch", "nodes", "rows"])
    def _flatten_kernel(
        valid, place_out, row_out, kept_out, batch, nodes, rows,
        BF: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One program per sequence. It counts the nodes of all sequences itself, so that no other launch has to."""
        await_previous(OVERLAP)
        sequence = tl.program_id(0)
        index = tl.arange(0, BF)
        every = (tl.load(valid + index, mask=index < batch * nodes, other=0) != 0).to(tl.int32)
        before = batch + tl.sum(tl.where(index < sequence * nodes, every, 0), 0)
        used = batch + tl.sum(every, 0)
        node = tl.arange(0, BN)
        own = tl.load(valid + sequence * nodes + node, mask=node < nodes, other=0) != 0
        row = before + tl.cumsum(own.to(tl.int32), 0) - 1
        kept = own & (row < rows)
        root = sequence * (nodes + 1)
        place = root + 1 + node
        tl.store(kept_out + place, kept.to(tl.uint8), mask=node < nodes)
        tl.store(row_out + place, tl.where(kept, row, 0).to(tl.int64), mask=node < nodes)
        tl.store(place_out + row, place.to(tl.int64), mask=kept)
        tl.store(kept_out + root, 1)
        tl.store(row_out + root, sequence.to(tl.int64))
        tl.store(place_out + sequence, root.to(tl.int64))
        # the programs share the rows that are left over
        share = tl.cdiv(rows, batch)
        part = tl.arange(0, BR)
        left = sequence * share + part
        tl.store(place_out + left, tl.zeros((BR,), tl.int64), mask=(part < share) & (left < rows) & (left >= used))
