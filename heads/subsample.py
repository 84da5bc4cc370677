"""Row subsampling: depths train on a random part of their rows, and weights keep the sums of losses unbiased.

Rows that are supervised at equally many depths form a group. Of a group of s rows, ceil(keep_d · s) rows, chosen at
random, run at depth d, each with the weight s / ceil(keep_d · s). So the expectation of a sum over a depth is the sum
over all its rows, the weights add up to the number of rows, and no shape depends on the draw. A row that is dropped at
one depth is dropped at all later ones, as they would need its output.
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
        weight_AK: float32 [A, K], weight of each row at each depth, if it runs there; in the new order.
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


def keep_fractions(depth: int, fraction: float, least: float, first: float = 1.0) -> tuple[float, ...] | None:
    """Fraction of rows that run at depths 1 … K: first · max(fraction^(d-1), least) at depth d; None where all run.

    Raises: ConfigError naming the recipe's field.
    """
    for name, value in (("row_fraction_first", first), ("row_fraction", fraction), ("row_fraction_min", least)):
        if not 0 < value <= 1:
            raise ConfigError(f"head.{name}: found {value}, expected a fraction above 0, at most 1")
    if first == 1 and (fraction == 1 or depth == 1):
        return None
    return tuple(first * max(fraction**d, least) for d in range(depth))


def group_sizes(count_K: Sequence[int]) -> list[int]:
    """Numbers of rows supervised at exactly K, K - 1, …, 1 depths, from those supervised at 1, …, K depths or more."""
    at_least = list(reversed(count_K))
    return [count - deeper for count, deeper in zip(at_least, [0, *at_least], strict=False)]


def draw_rows(count_K: Sequence[int], keep_K: Sequence[float], generator: torch.Generator) -> Draw:
    """A random draw for anchors ordered by supervised depths, deepest first (find_anchors).

    Args:
        count_K: rows supervised at depths 1 … K.
        keep_K: fraction of the rows kept at depths 1 … K, not increasing. Below 1 at depth 1, whole anchors go.
        generator: on the host.
    """
    return draw_ranked(keep_K, [torch.randperm(size, generator=generator) for size in group_sizes(count_K)])


def draw_ranked(keep_K: Sequence[float], ranks: list[Tensor]) -> Draw:
    """The draw that keeps the rows of lowest rank. `ranks[i]`: 0 … s-1 in any order, for the group of K - i depths."""
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
