"""τ and acceptance from cycles, by the one definition of methods §0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from headstart.eval.decode import Cycle


@dataclass(frozen=True)
class Acceptance:
    """What a set of cycles says.

    Attributes:
        tau: tokens committed per target forward after prefill, forwards that drafted nothing included. Tokens cut by a
            stop token or the length limit do not count, so forwards × tau is exactly what was decoded.
        per_position: unconditional: drafts accepted at depth d ÷ number of drafts (cycles that drafted anything).
        per_position_conditional: the same given that all earlier depths were accepted; None where that never happened.
        forwards, tokens, drafts: counts behind them.
    """

    tau: float
    per_position: list[float]
    per_position_conditional: list[float | None]
    forwards: int
    tokens: int
    drafts: int


def acceptance(cycles: Iterable[Cycle]) -> Acceptance:
    """Summarise cycles of any number of rows. Without any forward (one-token answers) τ is 1 by convention."""
    cycles = list(cycles)
    tokens = sum(cycle.committed for cycle in cycles)
    drafts = sum(cycle.drafted > 0 for cycle in cycles)
    deepest = max((cycle.drafted for cycle in cycles), default=0)
    reached = [sum(cycle.accepted >= depth for cycle in cycles if cycle.drafted) for depth in range(deepest + 1)]
    return Acceptance(
        tau=tokens / len(cycles) if cycles else 1.0,
        per_position=[count / drafts for count in reached[1:]],
        per_position_conditional=[
            count / before if before else None for before, count in zip(reached, reached[1:], strict=False)
        ],
        forwards=len(cycles),
        tokens=tokens,
        drafts=drafts,
    )


def bootstrap_tau(per_prompt: Sequence[Sequence[Cycle]], resamples: int, seed: int) -> tuple[float, float] | None:
    """95 % interval of τ over prompts resampled with replacement; None with fewer than two prompts or no resamples."""
    if len(per_prompt) < 2 or resamples < 1:
        return None
    tokens = np.array([sum(c.committed for c in cycles) for cycles in per_prompt], dtype=np.float64)
    forwards = np.array([len(cycles) for cycles in per_prompt], dtype=np.float64)
    chosen = np.random.default_rng(seed).integers(0, len(tokens), (resamples, len(tokens)))
    taus = tokens[chosen].sum(1) / np.maximum(forwards[chosen].sum(1), 1)
    low, high = np.quantile(taus, (0.025, 0.975))
    return float(low), float(high)


def expected_tau(rates: Sequence[float]) -> float:
    """τ = 1 + Σ_d Π_{i ≤ d} rate_i of drafts accepted at level d with probability `rates[d - 1]` given earlier levels.

    Answers' last cycles are cut by a stop token or the length limit, so measured τ lies a little below.
    """
    return 1.0 + float(np.cumprod(np.asarray(rates, dtype=np.float64)).sum())
