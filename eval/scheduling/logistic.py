"""Two parameters turn the probability of a draft into that of its acceptance: p_k = σ(slope · l + bias_k).

l is what the draft says (heads/formats/calibration.py). One slope serves all positions; every position has a bias. A
draft is observed where all drafts before it were accepted: what stands behind the first rejection, the target never
judged. The fit is Newton's method with a prior: a Gaussian whose precision has the form of the Hessian, an arrow (the
slope's row and column, and a diagonal for the biases). So a step solves in closed form, with fixed shapes.
Shape legend: B rows, K positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SLOPE, BIAS = 0.5, -0.2
#: precision of the prior: a position without observations keeps the start values
RIDGE = 1.0
#: most that a parameter moves in one step of the fit on the device, which does not look at the loss
LARGEST_STEP = 1.0
#: Newton steps of an update on the device
UPDATE_STEPS = 3


@dataclass(frozen=True)
class Arrow:
    """A symmetric matrix over (slope, biases): corner [], edge_K (slope with bias k), diagonal_K. The rest is 0."""

    corner: Tensor
    edge_K: Tensor
    diagonal_K: Tensor

    def plus(self, other: Arrow, share: float = 1.0) -> Arrow:
        """self + share · other."""
        return Arrow(
            self.corner + share * other.corner,
            self.edge_K + share * other.edge_K,
            self.diagonal_K + share * other.diagonal_K,
        )

    def times(self, slope: Tensor, bias_K: Tensor) -> tuple[Tensor, Tensor]:
        return self.corner * slope + (self.edge_K * bias_K).sum(), self.edge_K * slope + self.diagonal_K * bias_K

    def solve(self, slope: Tensor, bias_K: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse times a vector; the matrix must be positive definite."""
        ratio_K = self.edge_K / self.diagonal_K
        found = (slope - (ratio_K * bias_K).sum()) / (self.corner - (ratio_K * self.edge_K).sum())
        return found, bias_K / self.diagonal_K - ratio_K * found


def diagonal(value: float, like_K: Tensor) -> Arrow:
    """value · identity."""
    return Arrow(like_K.new_tensor(value), torch.zeros_like(like_K), torch.full_like(like_K, value))


@dataclass(frozen=True)
class Logistic:
    """The parameters and what is known of them: a Gaussian around (slope [], bias_K) with a precision."""

    slope: Tensor
    bias_K: Tensor
    precision: Arrow

    def probability(self, logit_BK: Tensor) -> Tensor:
        """p of every draft, given that all before it are accepted."""
        return torch.sigmoid(self.slope * logit_BK + self.bias_K)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [self.slope, self.bias_K, self.precision.corner, self.precision.edge_K, self.precision.diagonal_K]


def start(positions: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Logistic:
    """Slope 0.5 and biases -0.2, weakly held."""
    bias_K = torch.full((positions,), BIAS, device=device, dtype=dtype)
    return Logistic(bias_K.new_tensor(SLOPE), bias_K, diagonal(RIDGE, bias_K))


def observations(accepted_B: Tensor, judged_B: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    """(is accepted, is observed), bool [B, K].

    Args: accepted_B: accepted drafts. judged_B: drafts whose fate is known (0 in rows that drafted nothing).
    """
    index_K = torch.arange(positions, device=accepted_B.device)
    return index_K < accepted_B[:, None], (index_K <= accepted_B[:, None]) & (index_K < judged_B[:, None])


def loss(at: Logistic, prior: Logistic, logit_BK: Tensor, hit_BK: Tensor, seen_BK: Tensor) -> Tensor:
    """What the fit minimises: -log p of all observations, and ½ of the distance from the prior, by its precision."""
    z_BK = at.slope * logit_BK + at.bias_K
    nll_BK = torch.nn.functional.softplus(torch.where(hit_BK, -z_BK, z_BK))
    slope, bias_K = at.slope - prior.slope, at.bias_K - prior.bias_K
    pull, pull_K = prior.precision.times(slope, bias_K)
    return torch.where(seen_BK, nll_BK, 0.0).sum() + 0.5 * (slope * pull + (bias_K * pull_K).sum())


def curvature(at: Logistic, logit_BK: Tensor, seen_BK: Tensor) -> Arrow:
    """The Hessian of -log p of the observations."""
    p_BK = at.probability(logit_BK)
    weight_BK = torch.where(seen_BK, p_BK * (1 - p_BK), 0.0)
    return Arrow((weight_BK * logit_BK * logit_BK).sum(), (weight_BK * logit_BK).sum(0), weight_BK.sum(0))


def direction(
    at: Logistic, prior: Logistic, logit_BK: Tensor, hit_BK: Tensor, seen_BK: Tensor
) -> tuple[Tensor, Tensor]:
    """Newton's step of `loss`: what to add to the slope and the biases."""
    error_BK = torch.where(seen_BK, at.probability(logit_BK) - hit_BK.to(logit_BK.dtype), 0.0)
    pull, pull_K = prior.precision.times(at.slope - prior.slope, at.bias_K - prior.bias_K)
    hessian = curvature(at, logit_BK, seen_BK).plus(prior.precision)
    return hessian.solve(-(error_BK * logit_BK).sum() - pull, -error_BK.sum(0) - pull_K)


def moved(at: Logistic, step: tuple[Tensor, Tensor], share: float | Tensor = 1.0) -> Logistic:
    return Logistic(at.slope + share * step[0], at.bias_K + share * step[1], at.precision)


def fit(logit_BK: Tensor, accepted_B: Tensor, judged_B: Tensor, most_steps: int = 100) -> Logistic:
    """The minimum of `loss` around the start values, in float64. Every step is halved until the loss falls.

    Its precision is the curvature there, with the prior's: what `update` goes on from.
    """
    hit_BK, seen_BK = observations(accepted_B, judged_B, logit_BK.shape[1])
    prior = at = start(logit_BK.shape[1], logit_BK.device, torch.float64)
    # a draft that nobody judged may hold anything, NaN included
    given = torch.where(seen_BK, logit_BK.double(), 0.0), hit_BK, seen_BK
    best = float(loss(at, prior, *given))
    for _ in range(most_steps):
        step = direction(at, prior, *given)
        tried = ((moved(at, step, 0.5**halvings)) for halvings in range(30))
        found = next(((new, value) for new in tried if (value := float(loss(new, prior, *given))) < best), None)
        if found is None:
            break
        at, best = found
    return Logistic(at.slope, at.bias_K, curvature(at, *given[::2]).plus(prior.precision))


def update(state: Logistic, logit_BK: Tensor, accepted_B: Tensor, judged_B: Tensor, keep: float = 1.0) -> Logistic:
    """The parameters after one more cycle of a batch: a few Newton steps around the last ones.

    Fixed shapes, no question to the host: a captured cycle can hold it. Rows with judged_B = 0 change nothing.

    Args: keep: how much of its weight the past keeps, 0 … 1. Below 1 the parameters follow drift: about
        1 / (1 - keep) cycles count. The precision stays at or above the start's.
    """
    hit_BK, seen_BK = observations(accepted_B, judged_B, logit_BK.shape[1])
    logit_BK = torch.where(seen_BK, logit_BK.to(state.bias_K.dtype), 0.0)
    past = Arrow(*(keep * part for part in state.tensors[2:])).plus(diagonal(RIDGE, state.bias_K), 1.0 - keep)
    prior = at = Logistic(state.slope, state.bias_K, past)
    for _ in range(UPDATE_STEPS):
        step = direction(at, prior, logit_BK, hit_BK, seen_BK)
        largest = torch.maximum(step[0].abs(), step[1].abs().amax())
        at = moved(at, step, LARGEST_STEP / largest.clamp(min=LARGEST_STEP))
    return Logistic(at.slope, at.bias_K, past.plus(curvature(at, logit_BK, seen_BK)))
