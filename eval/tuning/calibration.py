"""Fits calibrations on recorded cycles (arXiv 2607.05147, sequential temperature scaling), and measures their errors.

The event at position k is "the first k drafts are all accepted", and its probability is p_1 · … · p_k: that is what a
scheduler needs, because the target's work on a draft is wasted unless all drafts before it are accepted.
Shape legend: S cycles, K positions, G temperatures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.eval.scheduling.logistic import fit
from headstart.heads.errors import DataError
from headstart.heads.formats.calibration import Calibration, mean_error

#: bins of an error that is reported: of equal width, as many as SGLang's own fit has
BINS = 15
#: temperatures of the first search, and the widest and narrowest of them
GRID, COLDEST, HOTTEST = 241, 0.05, 20.0
#: searches between the neighbours of the best temperature, with this many points each
REFINEMENTS, REFINED = 2, 21


@dataclass(frozen=True)
class Outcomes:
    """Recorded cycles of chains.

    Attributes:
        logit_SK: what each draft says of itself (heads/formats/calibration.py).
        accepted_S: int64, accepted drafts.
        judged_S: int64, drafts whose fate is known. It is below the number of drafts in cycles that drafted less, or
            whose answer ended among the accepted drafts.
    """

    logit_SK: Tensor
    accepted_S: Tensor
    judged_S: Tensor

    def __post_init__(self) -> None:
        samples, positions = self.logit_SK.shape
        for name in ("accepted_S", "judged_S"):
            value = getattr(self, name)
            if value.shape != (samples,):
                raise DataError(f"{name}: found shape {tuple(value.shape)}, expected ({samples},), one per cycle")
        if samples and not (
            bool((self.accepted_S >= 0).all())
            and bool((self.accepted_S <= self.judged_S).all())
            and bool((self.judged_S <= positions).all())
        ):
            raise DataError(f"recorded cycles: expected 0 ≤ accepted ≤ judged ≤ {positions} drafts in each")
        if not bool(torch.isfinite(self.logit_SK[self.known_SK]).all()):
            raise DataError("logit_SK: found a logit that is not finite: the head's weights may hold NaN")

    @property
    def positions(self) -> int:
        return self.logit_SK.shape[1]

    @property
    def known_SK(self) -> Tensor:
        """bool: whether it is known that the first k drafts are all accepted, or that they are not."""
        return torch.arange(self.positions, device=self.judged_S.device) < self.judged_S[:, None]

    @property
    def hit_SK(self) -> Tensor:
        """bool: whether the first k drafts are all accepted."""
        return torch.arange(self.positions, device=self.accepted_S.device) < self.accepted_S[:, None]

    def part(self, which: Tensor | slice) -> Outcomes:
        """Some of the cycles."""
        return Outcomes(self.logit_SK[which], self.accepted_S[which], self.judged_S[which])


def reliability(p_N: Tensor, hit_N: Tensor, bins: int = BINS, equal_mass: bool = False) -> list[list[float]]:
    """[mean of p, share of hits, count] of every bin that is not empty, in order of p.

    Args: equal_mass: bins that hold equally many samples (in order of p), not bins of equal width.
    """
    p_N, hit_N = p_N.double(), hit_N.double()
    if equal_mass:
        order = torch.argsort(p_N, stable=True)
        p_N, hit_N = p_N[order], hit_N[order]
        bin_N = torch.arange(len(p_N), device=p_N.device) * bins // max(len(p_N), 1)
    else:
        bin_N = (p_N * bins).long().clamp(0, bins - 1)
    count, said, was = (torch.bincount(bin_N, x, bins) for x in (torch.ones_like(p_N), p_N, hit_N))
    return [[float(s / n), float(w / n), int(n)] for s, w, n in zip(said, was, count, strict=True) if n > 0]


def ece(p_N: Tensor, hit_N: Tensor, bins: int = BINS, equal_mass: bool = False) -> float:
    """Expected calibration error: the mean over samples of |mean of p - share of hits| of their bin. NaN if empty."""
    return mean_error(reliability(p_N, hit_N, bins, equal_mass))


def errors(outcomes: Outcomes, p_SK: Tensor, bins: int = BINS, equal_mass: bool = False) -> list[float]:
    """ECE of p_1 · … · p_k at every k. Args: p_SK: of each draft. Raises: DataError where a k has no cycle."""
    reach_SK, known_SK, hit_SK = p_SK.double().cumprod(1), outcomes.known_SK, outcomes.hit_SK
    found = []
    for k, known_S in enumerate(known_SK.unbind(1)):
        if not bool(known_S.any()):
            raise DataError(
                f"recorded cycles: none tells the fate of draft {k + 1}. Decode more prompts, or draft fewer tokens"
            )
        found.append(ece(reach_SK[known_S, k], hit_SK[known_S, k], bins, equal_mass))
    return found


def fit_temperatures(outcomes: Outcomes, bins: int = BINS) -> list[float]:
    """Sequential temperature scaling: for k = 1 … K, T_k minimises the ECE at k, with T_1 … T_{k-1} as found.

    A grid, then finer ones around its best. Of equal errors, the temperature nearest 1 wins, so the fit is
    deterministic. Without a cycle that tells the fate of draft k, T_k is 1.
    """
    before_S, found = torch.ones(len(outcomes.accepted_S), dtype=torch.float64), []
    before_S = before_S.to(outcomes.logit_SK.device)
    known_SK, hit_SK = outcomes.known_SK, outcomes.hit_SK
    for k, logit_S in enumerate(outcomes.logit_SK.double().unbind(1)):
        known_S = known_SK[:, k]
        temperature = 1.0
        if bool(known_S.any()):
            temperature = _best_temperature(before_S[known_S], logit_S[known_S], hit_SK[known_S, k], bins)
        found.append(temperature)
        before_S = before_S * torch.sigmoid(logit_S / temperature)
    return found


def _best_temperature(before_N: Tensor, logit_N: Tensor, hit_N: Tensor, bins: int) -> float:
    def error(log: float) -> tuple[float, float, float]:
        p_N = before_N * torch.sigmoid(logit_N / math.exp(log))
        return ece(p_N, hit_N, bins), abs(log), log

    low, high, points = math.log(COLDEST), math.log(HOTTEST), GRID
    best = error(0.0)
    for _ in range(1 + REFINEMENTS):
        width = (high - low) / (points - 1)
        best = min(best, *(error(low + n * width) for n in range(points)))
        low, high, points = best[2] - width, best[2] + width, REFINED
    return math.exp(best[2])


def calibrate(
    fitted_on: Outcomes,
    measured_on: Outcomes,
    kind: str,
    source: str,
    dataset: str,
    bins: int = BINS,
) -> Calibration:
    """Fit a calibration on some cycles and measure its errors on others.

    Args:
        kind, source: see Calibration. A logistic of a confidence head gets temperatures beside it.
        measured_on: cycles of other prompts: errors on the fit's own cycles come out too small.
        dataset: name of what was decoded.
    Raises: DataError without cycles, or for a position whose fate no cycle tells.
    """
    if not len(fitted_on.accepted_S) or fitted_on.positions != measured_on.positions:
        raise DataError(
            f"recorded cycles: found {len(fitted_on.accepted_S)} of {fitted_on.positions} drafts to fit on and "
            f"{len(measured_on.accepted_S)} of {measured_on.positions} drafts to measure on; expected at least one of "
            "each, with equally many drafts"
        )
    temperatures = fit_temperatures(fitted_on, bins) if kind == "temperature" or source == "confidence" else []
    scaled = Calibration("temperature", source, temperatures=temperatures)
    found, beside = scaled, list[float]()
    if kind != "temperature":
        logistic = fit(fitted_on.logit_SK, fitted_on.accepted_S, fitted_on.judged_S)
        found = Calibration(kind, source, temperatures, float(logistic.slope), logistic.bias_K.tolist())
        if temperatures:
            beside = errors(measured_on, scaled.probability(measured_on.logit_SK), bins)
    known_SK, hit_SK = measured_on.known_SK, measured_on.hit_SK
    measures = []
    for p_SK in (torch.sigmoid(measured_on.logit_SK.float()), found.probability(measured_on.logit_SK)):
        reach_N = p_SK.double().cumprod(1)[known_SK]
        measures.append((errors(measured_on, p_SK, bins), reliability(reach_N, hit_SK[known_SK], bins)))
    (ece_before, before), (ece_after, after) = measures
    return replace(
        found, dataset=dataset, num_samples=len(measured_on.accepted_S), ece_before=ece_before, ece_after=ece_after,
        reliability_before=before, reliability_after=after, ece_of_temperatures=beside,
    )  # fmt: skip
