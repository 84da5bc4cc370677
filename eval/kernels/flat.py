"""Flat rows: the roots and nodes that a forward verifies, one behind the other, without those that are cut.

A forward over a batch of trees has a place for every node, [B, M]. Flat rows hold the kept places only: all roots, then
the kept nodes by sequence and node. Their number is fixed, so that a captured cycle can run on them.
Shape legend: B batch, N nodes, M = N + 1, R = B · M places, F flat rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.eval.kernels.attention import Visibility
from headstart.eval.kernels.rows import take_rows


@dataclass(frozen=True)
class FlatRows:
    """Which place each flat row stands for.

    Attributes:
        place_F: int64, b · M + m. Rows that are left over repeat place 0, and nothing reads their results.
        row_R: int64, the flat row of each place; of a cut place row 0, whose result is not to be read.
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

    def visible(self, visibility: Visibility, bin: int) -> Visibility:
        """Cut places become padding: they see nothing, and are written to the bin."""
        return replace(
            visibility,
            position_BM=torch.where(self.kept_BM, visibility.position_BM, -1),
            write_BM=torch.where(self.kept_BM, visibility.write_BM, bin),
        )


def flatten(valid_BN: Tensor, rows: int) -> FlatRows:
    """Lay out all roots and the valid nodes, as far as there are rows.

    Nodes beyond the last row are cut. A parent stands before its children, so no kept node loses its parent.

    Args: rows: F, at least one per sequence.
    Raises: ValueError for fewer rows.
    """
    batch, nodes = valid_BN.shape
    if rows < batch:
        raise ValueError(f"flat rows: found {rows} for {batch} sequences, expected one for each root at least")
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
