"""Row subsampling: depths train on a random part of their rows, and losses are weighted so that sums stay unbiased.

Rows that are supervised at equally many depths are a group. Of a group of s rows, ceil(keep_d · s) run at depth d,
chosen at random, and each of them stands for s / ceil(keep_d · s) rows. So a sum over a depth keeps its expectation,
its weights always add up to the number of rows, and how many rows run is known without looking at the draw: shapes
depend on nothing random. A row that is dropped at one depth is dropped at all later ones: they need its output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.heads.errors import ConfigError
from headstart.heads.transfer import to_device


@dataclass(frozen=True)
class Draw:
    """Which rows run how deep.

    Attributes:
        order_A: int64 [A], the anchors' new order, as indices into the old one; depths descending.
        depths_A: int64 [A], depths that run, in the new order.
        weight_AK: float32 [A, K], what a row that runs at depth d stands for, in the new order.
        count_K: rows that run at depth 1 … K.
        keep_K: the fractions asked for.
    """

    order_A: Tensor
    depths_A: Tensor
    weight_AK: Tensor
    count_K: tuple[int, ...]
    keep_K: tuple[float, ...]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Draw:
        tensors = {name: getattr(self, name) for name in ("order_A", "depths_A", "weight_AK")}
        return replace(self, **{name: to_device(x, device, non_blocking) for name, x in tensors.items()})


def keep_fractions(depth: int, fraction: float, least: float) -> tuple[float, ...] | None:
    """Fraction of rows that run at depth 1 … K: max(fraction^(d-1), least); None when all do.

    Raises: ConfigError naming the recipe's field.
    """
    for name, value in (("row_fraction", fraction), ("row_fraction_min", least)):
        if not 0 < value <= 1:
            raise ConfigError(f"head.{name}: found {value}, expected a fraction above 0, at most 1")
    if fraction == 1 or depth == 1:
        return None
    return tuple(max(fraction**d, least) for d in range(depth))


def group_sizes(count_K: Sequence[int]) -> list[int]:
    """Rows supervised at exactly K, K - 1, … 1 depths, from the rows supervised at 1 … K or more."""
    at_least = list(reversed(count_K))
    return [count - deeper for count, deeper in zip(at_least, [0, *at_least], strict=False)]


def draw_rows(count_K: Sequence[int], keep_K: Sequence[float], generator: torch.Generator) -> Draw:
    """A random draw for anchors ordered by supervised depths, deepest first (find_anchors).

    Args:
        count_K: rows supervised at depth 1 … K.
        keep_K: fraction of the rows kept at depth 1 … K, not increasing. Below 1 at depth 1, whole anchors are dropped.
        generator: of the host; it alone decides.
    """
    return draw_ranked(keep_K, [torch.randperm(size, generator=generator) for size in group_sizes(count_K)])


def draw_ranked(keep_K: Sequence[float], ranks: list[Tensor]) -> Draw:
    """The draw that keeps each group's rows of lowest rank; `ranks[i]` are 0 … s-1 in any order for K - i depths."""
    depth = len(keep_K)
    depths, weights = [], []
    for deepest, rank in zip(range(depth, 0, -1), ranks, strict=True):
        size = len(rank)
        kept = torch.tensor([min(size, math.ceil(keep * size - 1e-9)) for keep in keep_K[:deepest]])
        depths.append((rank[:, None] < kept).sum(1))
        importance = [size / max(count, 1) for count in kept.tolist()] + [0.0] * (depth - deepest)
        weights.append(torch.tensor(importance, dtype=torch.float32).expand(size, depth))
    depths_A, weight_AK = torch.cat(depths), torch.cat(weights)
    order_A = torch.argsort(depths_A, descending=True, stable=True)
    runs_K = torch.bincount(depths_A, minlength=depth + 1)[1:]
    counts = tuple(runs_K.flip(0).cumsum(0).flip(0).tolist())
    return Draw(order_A, depths_A[order_A], weight_AK[order_A], counts, tuple(keep_K))
