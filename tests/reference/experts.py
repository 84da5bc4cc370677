"""A mixture of experts, one row, one expert and one number at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

Matrix = list[list[float]]


def product(matrix: Matrix, vector: list[float], bias: list[float] | None) -> list[float]:
    added = bias or [0.0] * len(matrix)
    return [sum(w * v for w, v in zip(row, vector, strict=True)) + b for row, b in zip(matrix, added, strict=True)]


def swiglu(gate: float, up: float) -> float:
    return gate / (1 + math.exp(-gate)) * up


def clamped_swiglu(gate: float, up: float, slope: float = 1.702, limit: float = 7.0) -> float:
    """gpt-oss's: gate at most the limit, up within ± the limit, (up + 1) · gate · σ(slope · gate)."""
    gate, up = min(gate, limit), max(min(up, limit), -limit)
    return (up + 1) * gate / (1 + math.exp(-slope * gate))


def mixture(
    x: Matrix,
    chosen: list[list[int]],
    weights: Matrix,
    first: list[Matrix],
    second: list[Matrix],
    first_bias: Matrix | None = None,
    second_bias: Matrix | None = None,
    gate: Callable[[float, float], float] = swiglu,
    interleaved: bool = False,
) -> Matrix:
    """Σ weight · second(gate(first(x))) of each row's chosen experts; an expert that does not exist adds nothing."""
    mixed = []
    for row, experts, shares in zip(x, chosen, weights, strict=True):
        total = [0.0] * len(second[0])
        for expert, share in zip(experts, shares, strict=True):
            if not 0 <= expert < len(first):
                continue
            both = product(first[expert], row, first_bias[expert] if first_bias else None)
            half = len(both) // 2
            gates, ups = (both[::2], both[1::2]) if interleaved else (both[:half], both[half:])
            hidden = [gate(g, u) for g, u in zip(gates, ups, strict=True)]
            result = product(second[expert], hidden, second_bias[expert] if second_bias else None)
            total = [t + share * r for t, r in zip(total, result, strict=True)]
        mixed.append(total)
    return mixed
